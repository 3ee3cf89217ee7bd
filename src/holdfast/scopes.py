"""The body of an `async with` ends when its lease is lost. Loaded only where asyncio is used."""

from __future__ import annotations

import asyncio

from holdfast.core.holding import ALIVE
from holdfast.leases import AsyncLease


class Scope:
    """Cancels the body of an `async with` when its lease is lost, as `asyncio.timeout` does on time."""

    __slots__ = ("_cancelling", "_fired", "_open", "_task")

    def __init__(self, lease: AsyncLease) -> None:
        caller = lease._holding.caller
        self._task = caller if isinstance(caller, asyncio.Task) else asyncio.current_task()
        self._cancelling = self._task.cancelling() if self._task is not None else 0
        self._open = True
        self._fired = False
        lease._scope = self
        if lease._holding.state not in ALIVE:  # before it had a scope
            self.end_soon()

    def end_soon(self) -> None:
        """The lease is lost."""
        # Never from inside the body itself: a task that cancels itself would meet it in its clean-up. And perhaps from
        # another thread, which looked at the lease for the body.
        try:
            if self._task is not None:
                self._task.get_loop().call_soon_threadsafe(self._fire)
        except RuntimeError:
            pass  # the loop is closed, and with it the body

    def _fire(self) -> None:
        if self._open and not self._fired and self._task is not None:
            self._fired = True
            self._task.cancel("the lease was lost")

    def close(self, error: BaseException | None) -> bool:
        """True when `error` is the cancellation that we asked for, and nobody else did."""
        self._open = False
        if not self._fired or self._task is None:
            return False
        return self._task.uncancel() <= self._cancelling and isinstance(error, asyncio.CancelledError)
