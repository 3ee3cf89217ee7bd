"""Threads that run one at a time, so that a test can run every schedule.

At each line of the watched files the scheduler may resume another thread: that is a *switch*. Where a thread waits (for
a lock, a wake-up, bytes) or ends, another one runs; if none can run, the clock advances. A schedule is the list of
choices at all these points. `every_schedule` runs all schedules with at most a given number of switches, depth first:
most errors of concurrent code need no more than two switches. The threads are greenlets, because a switch between them
costs a microsecond; the code that they run does not notice.
"""

import gc
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, NamedTuple

from greenlet import getcurrent, greenlet

from lockfast.runtime.base import run
from lockfast.runtime.threads import ThreadRuntime


class Deadlock(Exception):
    """All threads wait, without a limit."""


class Choice(NamedTuple):
    """One point of a schedule: how many threads could run, which one ran, and whether another one costs a switch."""

    options: int
    chosen: int
    is_switch: bool


class VirtualThread:
    """One thread of the scheduler."""

    body: greenlet

    def __init__(self, name: str) -> None:
        self.name = name
        self.waits_for: Callable[[], bool] | None = None
        self.until: float | None = None
        self.ended = False
        self.error: BaseException | None = None


class Scheduler:
    """One run of one schedule."""

    def __init__(self, watched: Sequence[str], schedule: Sequence[int], switches: int) -> None:
        self.now = 100.0
        self.choices: list[Choice] = []
        self._watched = frozenset(watched)
        self._schedule = schedule
        self._switches = switches
        self._threads: list[VirtualThread] = []
        self._main = getcurrent()
        self._current: VirtualThread | None = None
        self._stuck = False

    def add(self, work: Callable[[], object], name: str) -> None:
        thread = VirtualThread(name)
        thread.body = greenlet(lambda: self._body(thread, work), self._main)
        self._threads.append(thread)

    def run(self) -> list[BaseException]:
        """Run all threads to their end, and return their errors."""
        # Without garbage collection: finalizers of an earlier run would become a part of this one, perhaps while a
        # mutex is held.
        collects = gc.isenabled()
        gc.disable()
        sys.settrace(self._trace)
        try:
            while runnable := self._runnable():
                self._resume(self._choose(runnable, is_switch=False))
        finally:
            sys.settrace(None)
            if collects:
                gc.enable()
        return [thread.error for thread in self._threads if thread.error is not None]

    def _body(self, thread: VirtualThread, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:
            thread.error = error
        thread.ended = True  # then its parent, `run`, continues

    def _resume(self, thread: VirtualThread) -> None:
        self._current = thread
        thread.body.switch()

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename not in self._watched:
            return None
        return self._line

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self.point()
        return self._line

    def _runnable(self) -> list[VirtualThread]:
        """The threads that can run now; if there is none, the clock advances."""
        while True:
            found = [one for one in self._threads if not one.ended and self._is_runnable(one)]
            if found or all(one.ended for one in self._threads):
                return found
            ends = [one.until for one in self._threads if not one.ended and one.until is not None]
            if ends:
                self.now = max(self.now, min(ends))
            else:
                self._stuck = True  # a deadlock: every waiting thread raises it

    def _is_runnable(self, thread: VirtualThread) -> bool:
        if self._stuck or thread.waits_for is None or thread.waits_for():
            return True
        return thread.until is not None and thread.until <= self.now

    def _choose(self, options: list[VirtualThread], *, is_switch: bool) -> VirtualThread:
        if len(options) == 1:
            return options[0]
        at = len(self.choices)
        chosen = self._schedule[at] if at < len(self._schedule) else 0
        self.choices.append(Choice(len(options), chosen, is_switch))
        return options[chosen]

    def point(self) -> None:
        """A thread reached a line: continue, or switch."""
        current = self._current
        if current is None or not self._switches:
            return  # not running yet, or no switch is left
        chosen = self._choose([current, *(one for one in self._runnable() if one is not current)], is_switch=True)
        if chosen is not current:
            self._switches -= 1
            self._resume(chosen)
            self._current = current

    def wait(self, waits_for: Callable[[], bool], until: float | None = None) -> bool:
        """Wait until the condition holds or `until` passes. Return whether it holds."""
        current = self._current
        if current is None:
            raise RuntimeError("a thread can wait only while the scheduler runs")
        current.waits_for, current.until = waits_for, until
        self._main.switch()
        current.waits_for = current.until = None
        if self._stuck:
            raise Deadlock(current.name)
        return waits_for()


class ScheduledLock:
    """`threading.Lock`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._taken = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._taken:
            until = None if timeout < 0 else self._scheduler.now + timeout
            if not blocking or not self._scheduler.wait(lambda: not self._taken, until):
                return False
        self._taken = True
        return True

    def release(self) -> None:
        self._taken = False

    def locked(self) -> bool:
        return self._taken

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class ScheduledWaker:
    """`ports.Waker`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._called = False

    def wake(self) -> None:
        self._called = True

    async def wait(self, until: float | None) -> bool:
        called = self._called or self._scheduler.wait(lambda: self._called, until)
        self._called = False
        return called


class ScheduledRuntime(ThreadRuntime):
    """`ports.Runtime` for the threads of a scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler
        self.now = lambda: scheduler.now
        self.random = lambda: 0.5
        self.mutex: Callable[[], AbstractContextManager[Any]] = lambda: ScheduledLock(scheduler)
        self.waker: Any = lambda: ScheduledWaker(scheduler)

    async def sleep(self, seconds: float) -> None:
        self._scheduler.wait(lambda: False, self._scheduler.now + max(0.0, seconds))

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> bool:
        self._scheduler.add(lambda: run(work()), name)
        return True


def every_schedule(run: Callable[[Sequence[int]], Sequence[Choice]], switches: int) -> Iterator[int]:
    """Run each schedule with at most that many switches, and yield how many have been run."""
    schedule: list[int] | None = []
    count = 0
    while schedule is not None:
        choices = run(schedule)
        count += 1
        yield count
        schedule = _following(choices, switches)


def _following(choices: Sequence[Choice], switches: int) -> list[int] | None:
    """The next schedule, depth first."""
    spent = [0]
    for choice in choices:
        spent.append(spent[-1] + (choice.is_switch and choice.chosen > 0))
    for at in range(len(choices) - 1, -1, -1):
        choice = choices[at]
        if choice.chosen + 1 < choice.options and spent[at] + choice.is_switch <= switches:
            return [one.chosen for one in choices[:at]] + [choice.chosen + 1]
    return None
