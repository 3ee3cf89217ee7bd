"""Taking turns, in both colours: whoever has the turn is alone with the connection until it gives it back."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from lockfast.errors import StoreUnavailable
from lockfast.ports import Runtime, Waker


class Turns:
    """Invariant: `_taken` while somebody has the turn; it passes to the first in `_waiting` without becoming free."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.reset()

    def reset(self) -> None:
        """Nobody has the turn and nobody waits, as in a forked child."""
        self._mutex = self._runtime.mutex()
        self._waiting: deque[Waker] = deque()
        self._taken = False

    @asynccontextmanager
    async def turn(self, until: float) -> AsyncIterator[None]:
        """Wait for the turn, and have it while in the block; `StoreUnavailable` if it does not come in time."""
        await self._take(until)
        try:
            yield
        finally:
            self._pass_on()

    async def _take(self, until: float) -> None:
        with self._mutex:
            if not self._taken:
                self._taken = True
                return
            waker = self._runtime.waker()
            self._waiting.append(waker)
        came = False
        try:
            came = await waker.wait(until)
        finally:
            if not came and not self._withdraw(waker):
                self._pass_on()  # it came in the very moment in which we gave up
        if not came:
            raise StoreUnavailable("The connection is busy with other transactions, so nothing was sent. Try again.")

    def _withdraw(self, waker: Waker) -> bool:
        with self._mutex:
            if waker not in self._waiting:
                return False
            self._waiting.remove(waker)
            return True

    def _pass_on(self) -> None:
        with self._mutex:
            following = self._waiting.popleft() if self._waiting else None
            self._taken = following is not None
        if following is not None:
            following.wake()
