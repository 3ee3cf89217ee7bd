"""Virtual time for asyncio: an event loop that jumps to its next timer when nothing else is left to do.

`asyncio.sleep`, `asyncio.timeout` and the lock's own timers all follow it, so a test takes no longer than its code.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from typing import Any

from holdfast.runtime.asyncio import AsyncioRuntime, TaskWaker
from holdfast.testing.agenda import Clock, Stuck

REAL_PATIENCE = 2.0
"""Real seconds in which something from outside (a thread, a socket) may still wake a loop that has no timers."""


class _Selector(selectors.DefaultSelector):
    """Looks at real events without waiting for them; where a real one would wait, the clock jumps."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            found = super().select(REAL_PATIENCE)
            if not found:
                raise Stuck("All tasks wait, without a limit, for something that nobody will do.")
            return found
        found = super().select(0)
        if not found and timeout > 0:
            self._clock.jump(self._clock.now() + timeout)
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on a virtual clock.

    >>> clock = Clock()
    >>> with asyncio.Runner(loop_factory=lambda: VirtualLoop(clock)) as runner:
    ...     before = clock.now()
    ...     runner.run(asyncio.sleep(3600))
    ...     clock.now() - before
    3600.0
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__(_Selector(clock))
        self._clock = clock

    def time(self) -> float:
        return self._clock.now()


class SandboxTaskWaker(TaskWaker):
    """The shipped waker, whose `until` is a moment on the virtual clock."""

    __slots__ = ("_now",)

    def __init__(self, now: Callable[[], float]) -> None:
        super().__init__()
        self._now = now

    async def wait(self, until: float | None) -> bool:
        if self._called:
            self._called = False
            return True
        left = None if until is None else until - self._now()
        if left is not None and left <= 0:
            return False
        self._future = future = self._loop.create_future()
        try:
            async with asyncio.timeout(left):
                woken: bool = await future
                return woken
        except TimeoutError:
            return False
        finally:
            self._future = None


class SandboxAsyncioRuntime(AsyncioRuntime):
    """`ports.Runtime` for asyncio, on a virtual clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.now = clock.now
        self.random = lambda: 0.5
        self.waker: Any = lambda: SandboxTaskWaker(clock.now)
