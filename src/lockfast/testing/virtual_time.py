"""Virtual time for the sandbox: a clock that jumps whenever all threads or tasks wait, so that no test sleeps.

Sync rules:

- One thread runs at a time. The thread that creates the `Scheduler` drives it: while that thread waits, the scheduler
  runs the background actors that are ready, one by one, then advances the clock to the next deadline.
- Time passes only while the driver waits, or in `advance`. A wait that nothing can end raises `Stuck`.
- Threads that the code under test starts itself are not scheduled. Their waits end when another thread wakes them, or
  when the driver moves the clock past their deadline.

Async: `VirtualLoop` is an event loop that advances the clock to its next timer instead of waiting. `asyncio.sleep`,
`asyncio.timeout` and the library's own timers follow it.
"""

from __future__ import annotations

import asyncio
import logging
import selectors
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from typing import Any

from lockfast.runtime.asyncio import AsyncioRuntime
from lockfast.runtime.base import run
from lockfast.runtime.threads import ThreadRuntime

log = logging.getLogger("lockfast")

START = 1_000_000.0
MOST_JUMPS = 50_000  # without an action of the test; then a wait is endless. With a lease to renew: half a day or more
REAL_PATIENCE = 2.0  # real seconds that a loop without timers waits for a thread or a socket to wake it


class Stuck(RuntimeError):
    """The code under test waits for an event that cannot happen.

    >>> raise Stuck("no holder releases the lock")
    Traceback (most recent call last):
    lockfast.testing.virtual_time.Stuck: no holder releases the lock
    """


class Clock:
    """Virtual seconds. `_jumps` counts the jumps since the last action of the test."""

    _now = START
    _jumps = 0

    def now(self) -> float:
        return self._now

    def wall_us(self) -> int:
        """The wall clock in microseconds, for fences."""
        return 1_700_000_000_000_000 + round((self._now - START) * 1e6)

    def jump(self, moment: float) -> None:
        """Advance to `moment`, because all threads or tasks wait until then."""
        if moment <= self._now:
            return
        self._now = moment
        self._jumps += 1
        if self._jumps > MOST_JUMPS:
            raise Stuck(
                "The code under test waits, and nothing can end the wait. Release the lock (Held.release), or give the "
                "wait a timeout."
            )

    def reset_jumps(self) -> None:
        """Count from zero: the test did something."""
        self._jumps = 0


class SandboxWaker:
    """`ports.Waker` on a scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.woken = False

    def wake(self) -> None:
        with self._scheduler.changed:
            self.woken = True
            self._scheduler.changed.notify_all()

    def consume(self) -> bool:
        woken, self.woken = self.woken, False
        return woken

    async def wait(self, until: float | None) -> bool:
        return self.consume() or self._scheduler.park(self, until)


class Actor:
    """A background thread; it runs from `gate.release()` to its next wait."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.gate = threading.Semaphore(0)
        self.waker: SandboxWaker | None = None
        self.until: float | None = -1.0  # ready at once
        self.done = False


class Scheduler:
    """Invariant: at most one of the driver and the actors runs."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.changed = threading.Condition()
        self._driver = threading.get_ident()
        self._actors: list[Actor] = []
        self._local = threading.local()
        self._yielded = threading.Semaphore(0)

    def add(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        """Run `work` in the background, starting at the driver's next wait."""
        actor = Actor(name)
        self._actors.append(actor)
        threading.Thread(target=self._body, args=(actor, work), name=f"lockfast-{name}", daemon=True).start()

    def _body(self, actor: Actor, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._local.actor = actor
        actor.gate.acquire()
        try:
            run(work())
        except Exception:
            log.exception("A background task of lockfast failed: %s", actor.name)
        finally:
            actor.done = True
            self._yielded.release()

    def park(self, waker: SandboxWaker | None, until: float | None) -> bool:
        """Wait for the waker or the deadline; True when woken."""
        actor: Actor | None = getattr(self._local, "actor", None)
        if actor is not None:
            actor.waker, actor.until = waker, until
            self._yielded.release()
            actor.gate.acquire()
        elif threading.get_ident() == self._driver:
            self._drive(waker, until)
        else:
            with self.changed:
                self.changed.wait_for(lambda: self._is_over(waker, until))
        return waker is not None and waker.consume()

    def _is_over(self, waker: SandboxWaker | None, until: float | None) -> bool:
        return (waker is not None and waker.woken) or (until is not None and self.clock.now() >= until)

    def run_due(self) -> None:
        """Run the actors that are ready until all of them wait."""
        progress = True
        while progress:
            progress = False
            for actor in tuple(self._actors):
                if not actor.done and self._is_over(actor.waker, actor.until):
                    actor.gate.release()
                    self._yielded.acquire()
                    progress = True
            self._actors = [actor for actor in self._actors if not actor.done]

    def _drive(self, waker: SandboxWaker | None, until: float | None) -> None:
        while True:
            self.run_due()
            if self._is_over(waker, until):
                return
            deadlines = [actor.until for actor in self._actors if actor.until is not None]
            if until is not None:
                deadlines.append(until)
            if not deadlines:
                raise Stuck("The code under test waits without a timeout, and no thread is left to wake it.")
            self.clock.jump(min(deadlines))
            with self.changed:
                self.changed.notify_all()

    def advance(self, seconds: float) -> None:
        end = self.clock.now() + seconds
        while self.clock.now() < end:
            self.clock.reset_jumps()
            self.park(None, min(end, self.clock.now() + 1000.0))


class SandboxRuntime(ThreadRuntime):
    """`ports.Runtime` for threads, on a scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler
        self.now = scheduler.clock.now
        self.random = lambda: 0.5
        self.mutex: Callable[[], AbstractContextManager[Any]] = threading.Lock
        self.waker: Any = lambda: SandboxWaker(scheduler)

    async def sleep(self, seconds: float) -> None:
        self._scheduler.park(None, self._scheduler.clock.now() + max(0.0, seconds))

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> bool:
        self._scheduler.add(work, name)
        return True


class _Selector(selectors.DefaultSelector):
    """Polls real events without blocking; advances the clock where a real selector would wait."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            found = super().select(REAL_PATIENCE)
            if not found:
                raise Stuck("All tasks wait without a timeout, and no task is left to wake them.")
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
