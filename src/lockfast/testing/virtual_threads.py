"""Virtual time for the blocking colour: real threads that take turns, and a clock that never makes anyone wait.

Rules kept here:

- One thread at a time runs. The thread that made the agenda drives: when it waits, what is due in the background runs,
  one after the other, and then the clock jumps to the next moment at which something is to happen.
- Time passes only while the driver waits or by `advance`. A wait that nobody will ever end is an error, not a hang.
- Threads that the code under test starts by itself are not put in turns: their waits last until somebody wakes them, or
  until the driver has brought the clock to their end.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from typing import Any

from lockfast.runtime.runner import run
from lockfast.runtime.threads import ThreadRuntime

log = logging.getLogger("lockfast")

START = 1_000_000.0
MOST_JUMPS = 50_000
"""Jumps of the clock by itself after which somebody is taken to wait for ever; with a lease to look after, that is half
a day or more."""


class Stuck(RuntimeError):
    """The code under test waits for something that will not happen.

    >>> raise Stuck("nobody gives it back")
    Traceback (most recent call last):
    lockfast.testing.virtual_threads.Stuck: nobody gives it back
    """


class Clock:
    """Virtual seconds; `_jumps` counts how often they passed because everybody waited."""

    def __init__(self) -> None:
        self._now = START
        self._jumps = 0

    def now(self) -> float:
        return self._now

    def wall_us(self) -> int:
        """What a wall clock would show, for fences."""
        return 1_700_000_000_000_000 + round((self._now - START) * 1e6)

    def jump(self, moment: float) -> None:
        """Everybody waits until `moment`, so it is now."""
        if moment <= self._now:
            return
        self._now = moment
        self._jumps += 1
        if self._jumps > MOST_JUMPS:
            raise Stuck(
                "The code under test waits, and nothing happens that could end it. Give the lock back (Held.release), "
                "or give the wait a timeout."
            )

    def touched(self) -> None:
        """The test did something: the count starts anew."""
        self._jumps = 0


class SandboxWaker:
    """`ports.Waker` on an agenda."""

    def __init__(self, agenda: Agenda) -> None:
        self._agenda = agenda
        self._called = False

    def wake(self) -> None:
        with self._agenda.changed:
            self._called = True
            self._agenda.changed.notify_all()

    @property
    def called(self) -> bool:
        return self._called

    def take(self) -> bool:
        called, self._called = self._called, False
        return called

    async def wait(self, until: float | None) -> bool:
        if self.take():
            return True
        return self._agenda.park(self, until)


class Actor:
    """A thread in the background; it runs between `gate.release()` and its next wait."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.gate = threading.Semaphore(0)
        self.waker: SandboxWaker | None = None
        self.until: float | None = -1.0  # due at once
        self.done = False

    def is_ready(self, now: float) -> bool:
        return (self.waker is not None and self.waker.called) or (self.until is not None and self.until <= now)


class Agenda:
    """Invariant: at most one of the driver and the actors runs."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.changed = threading.Condition()
        self._driver = threading.get_ident()
        self._actors: list[Actor] = []
        self._mine = threading.local()
        self._turn_over = threading.Semaphore(0)

    def add(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        """Run `work` in the background, from the next time that the driver waits."""
        actor = Actor(name)
        self._actors.append(actor)
        threading.Thread(target=self._body, args=(actor, work), name=f"lockfast-{name}", daemon=True).start()

    def _body(self, actor: Actor, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._mine.actor = actor
        actor.gate.acquire()
        try:
            run(work())
        except Exception:
            log.exception("Background work of lockfast failed: %s", actor.name)
        finally:
            actor.done = True
            self._turn_over.release()

    def park(self, waker: SandboxWaker | None, until: float | None) -> bool:
        """Wait for the waker or for the clock; True when it was the waker."""
        actor: Actor | None = getattr(self._mine, "actor", None)
        if actor is not None:
            actor.waker, actor.until = waker, until
            self._turn_over.release()
            actor.gate.acquire()
        elif threading.get_ident() == self._driver:
            self._drive(waker, until)
        else:
            with self.changed:
                self.changed.wait_for(lambda: _is_over(waker, until, self.clock.now()))
        return waker is not None and waker.take()

    def run_due(self) -> None:
        """Let everybody run in the background who can, until all wait."""
        progress = True
        while progress:
            progress = False
            for actor in tuple(self._actors):
                if not actor.done and actor.is_ready(self.clock.now()):
                    actor.gate.release()
                    self._turn_over.acquire()
                    progress = True
            self._actors = [actor for actor in self._actors if not actor.done]

    def _drive(self, waker: SandboxWaker | None, until: float | None) -> None:
        while True:
            self.run_due()
            if _is_over(waker, until, self.clock.now()):
                return
            moments = [actor.until for actor in self._actors if actor.until is not None]
            if until is not None:
                moments.append(until)
            if not moments:
                raise Stuck("The code under test waits without a limit for something that nobody will do.")
            self.clock.jump(min(moments))
            with self.changed:
                self.changed.notify_all()

    def advance(self, seconds: float) -> None:
        end = self.clock.now() + seconds
        while self.clock.now() < end:
            self.clock.touched()
            self.park(None, min(end, self.clock.now() + 1000.0))


def _is_over(waker: SandboxWaker | None, until: float | None, now: float) -> bool:
    return (waker is not None and waker.called) or (until is not None and now >= until)


class SandboxRuntime(ThreadRuntime):
    """`ports.Runtime` for threads, on an agenda."""

    def __init__(self, agenda: Agenda) -> None:
        super().__init__()
        self._agenda = agenda
        self.now = agenda.clock.now
        self.random = lambda: 0.5
        self.mutex: Callable[[], AbstractContextManager[Any]] = threading.Lock
        self.waker: Any = lambda: SandboxWaker(agenda)

    async def sleep(self, seconds: float) -> None:
        self._agenda.park(None, self._agenda.clock.now() + max(0.0, seconds))

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> bool:
        self._agenda.add(work, name)
        return True
