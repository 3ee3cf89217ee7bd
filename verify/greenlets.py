"""Programs for threads in a virtual process: the blocking colour as it is shipped, the short way included.

A program that blocks can't be suspended as a coroutine can; so it runs in a greenlet, a *strand*, which stands still
where a thread would block. To whoever drives the process a strand is a coroutine like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from types import FrameType
from typing import Any

from lockfast.client.locks import Locks
from lockfast.client.session import everyone
from lockfast.values import Owner
from verify import waits
from verify.process import Process, Program, WatchedStore
from verify.waits import Wait


class Strand(Coroutine[Wait, Any, None]):
    """What a plain function does, step by step. Each step ends where it waits for something."""

    def __init__(self, body: Callable[[], None]) -> None:
        from greenlet import greenlet  # here, so that the models without threads need none

        self._greenlet = greenlet(body)
        self._driver: Any = None

    def send(self, value: Any) -> Wait:
        return self._step(self._greenlet.switch, *((value,) if self._greenlet else ()))  # at first it takes none

    def throw(self, error: Any, *more: Any) -> Wait:
        return self._step(self._greenlet.throw, error)

    def close(self) -> None:
        if self._greenlet:
            try:
                self.throw(GeneratorExit())
            except (GeneratorExit, StopIteration):
                return
            raise RuntimeError("a strand waits for something while it ends")

    def __del__(self) -> None:
        self.close()

    def __await__(self) -> Generator[Any, Any, None]:
        raise TypeError("a strand is driven, not awaited")

    def _step(self, go_on: Callable[..., Any], *given: Any) -> Wait:
        from greenlet import getcurrent

        self._greenlet.parent = self._driver = getcurrent()
        before, waits.block = waits.block, self._block
        try:
            wait = go_on(*given)
        finally:
            waits.block = before
        if self._greenlet.dead:
            raise StopIteration
        return wait  # type: ignore[no-any-return]

    def _block(self, wait: Wait) -> Any:
        return self._driver.switch(wait)

    def frames(self) -> list[FrameType]:
        """Where it stands, innermost first."""
        found, frame = [], self._greenlet.gr_frame
        while frame is not None:
            found.append(frame)
            frame = frame.f_back
        return found


def locks_of(me: Process) -> Locks:
    """The shipped client for threads on this process."""
    store = WatchedStore(me, me)
    store.process = me
    locks = Locks(store, me, owner=Owner(me.name, 1), store_timeout=10.0, address=f"virtual://{me.name}")
    everyone.discard(locks)  # nobody can close it when the program ends: nobody would answer
    return locks


def blocking(body: Callable[[Process], None]) -> Program:
    """A program for threads."""
    return lambda me: Strand(lambda: body(me))
