"""Virtual time for asyncio: an event loop that jumps to its next timer when nothing else is left to do.

`asyncio.sleep`, `asyncio.timeout` and the lock's own timers all follow it, so a test takes no longer than its code.
"""

from __future__ import annotations

import asyncio
import selectors

from lockfast.runtime.asyncio import AsyncioRuntime
from lockfast.testing.virtual_threads import Clock, Stuck

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


class SandboxAsyncioRuntime(AsyncioRuntime):
    """`ports.Runtime` for asyncio, on a virtual clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.now = clock.now
        self.random = lambda: 0.5
