"""`Runtime` for asyncio, bound to the event loop that first uses it."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Hashable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any

from lockfast.errors import ConfigurationError, StoreError
from lockfast.ports import CallerState, Work
from lockfast.runtime.base import new_holder_id, now, random

log = logging.getLogger("lockfast")
_inherited: list[set[asyncio.Task[None]]] = []


class Timers:
    """Ends the waits of one connection with a single timer of the event loop.

    A thousand tasks that hand a lock to each other start and cancel thousands of timers a second, and nearly none
    fires.

    Invariants: every pending wait is in `_row` or in `_heap`. The row is ordered by end; a wait that ends before the
    last one in the row goes to the heap. `_fires_at` is never after the end of a pending wait. Row and heap together
    have at most `SLACK` entries plus twice the number of waits that were pending at the last sweep.
    """

    SLACK = 64

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float]) -> None:
        self.loop = loop
        self.now = clock
        self._row: deque[tuple[float, asyncio.Future[bool]]] = deque()
        self._heap: list[tuple[float, int, asyncio.Future[bool]]] = []
        self._numbers = count()
        self._fires_at = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0  # when the timer fires, by the loop's clock: not every loop has TimerHandle.when()
        self._sweep_at = self.SLACK

    def __len__(self) -> int:
        return len(self._row) + len(self._heap)

    def set(self, future: asyncio.Future[bool], until: float, left: float) -> None:
        """Set the result of `future` to False at `until`, in `left` seconds, unless it has one by then."""
        row, grows = self._row, True
        if row and until < row[-1][0]:
            heappush(self._heap, (until, next(self._numbers), future))
        else:  # as nearly always: most waits are equally long
            while row and row[0][1].done():
                row.popleft()
                grows = False
            row.append((until, future))
        fires_at = self._fires_at
        if until < fires_at or (fires_at + left < until and self._is_late()):
            self._restart(until - left)
        if grows and len(row) + len(self._heap) > self._sweep_at:
            self._row = deque(wait for wait in self._row if not wait[1].done())
            self._heap = [wait for wait in self._heap if not wait[2].done()]
            heapify(self._heap)
            self._sweep_at = 2 * len(self) + self.SLACK

    def _is_late(self) -> bool:
        """Whether the timer, which is overdue by our clock, is not yet due by the loop's clock.

        The loop's clock stops while the machine is suspended. A timer that is due by the loop's clock fires in this
        iteration anyway; if each iteration restarted it, it would never fire.
        """
        return self._timer is not None and self._due > self.loop.time()

    def _restart(self, moment: float) -> None:
        """Set the timer to the end of the first wait; `moment` is the current time."""
        if self._timer is not None:
            self._timer.cancel()
        self._fires_at = min(waits[0][0] for waits in (self._row, self._heap) if waits)
        self._due = self.loop.time() + max(0.0, self._fires_at - moment)
        self._timer = self.loop.call_at(self._due, self._fire)

    def _fire(self) -> None:
        row, heap, moment = self._row, self._heap, self.now()
        self._timer, self._fires_at = None, math.inf
        while row and (row[0][0] <= moment or row[0][1].done()):
            _end(row.popleft()[1])
        while heap and (heap[0][0] <= moment or heap[0][2].done()):
            _end(heappop(heap)[2])
        if row or heap:
            self._restart(moment)


def _end(future: asyncio.Future[bool]) -> None:
    if not future.done():
        future.set_result(False)


class TaskWaker:
    """A flag and the future of the current wait. Other threads wake it through the event loop."""

    __slots__ = ("_called", "_future", "_thread", "_timers")

    def __init__(self, timers: Timers) -> None:
        self._timers = timers
        self._thread = threading.get_ident()
        self._called = False
        self._future: asyncio.Future[bool] | None = None

    def wake(self, *, in_loop: bool = False) -> None:
        try:
            if in_loop or threading.get_ident() == self._thread:
                future = self._future
                if future is None or future.done():
                    self._called = True
                else:
                    future.set_result(True)
            else:  # `in_loop`, because the loop may run in another thread by now
                self._timers.loop.call_soon_threadsafe(partial(self.wake, in_loop=True))
        except RuntimeError:
            pass  # the loop is closed, and its waits with it

    def wait(self, until: float | None) -> asyncio.Future[bool]:
        future: asyncio.Future[bool] = asyncio.Future(loop=self._timers.loop)
        self._future = future
        if self._called:
            self._called = False
            future.set_result(True)
        elif until is not None:
            left = until - self._timers.now()
            if left > 0:
                self._timers.set(future, until, left)
            else:
                future.set_result(False)
        return future


class AsyncioRuntime:
    """Time, randomness and tasks for asyncio."""

    def __init__(self) -> None:
        self.now = now
        self.random = random
        self.new_holder_id = new_holder_id
        # Worker threads of the loop may check a lease, and detect that it is lost.
        self.mutex: Callable[[], AbstractContextManager[Any]] = threading.Lock
        self._timers: Timers | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def attach(self) -> bool:
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return False
        if self._loop is not None and not self._loop.is_closed():
            raise ConfigurationError(
                "This connection belongs to another event loop, which is still open. Nothing was sent. "
                "Call lockfast.aio.connect() once per event loop."
            )
        self._loop, before = loop, self._loop
        self._tasks.clear()
        return before is not None

    @property
    def loop_closed(self) -> bool:
        return self._loop is not None and self._loop.is_closed()

    def after_fork(self) -> None:
        """In a forked child: the loop and its tasks belong to the parent and do not run here."""
        _inherited.append(self._tasks)  # destroying a pending task would be reported
        self._tasks = set()
        self._loop = None

    def waker(self) -> TaskWaker:
        loop = asyncio.get_running_loop()
        if self._timers is None or self._timers.loop is not loop:
            self._timers = Timers(loop, self.now)
        return TaskWaker(self._timers)

    def caller(self) -> Hashable:
        try:
            return asyncio.current_task()  # of the running loop, which may be another one
        except RuntimeError:
            return None  # no running loop

    def caller_state(self, caller: Hashable) -> CallerState:
        task: Any = caller  # a task factory may use any class
        if task is None or task.done():
            return CallerState.ENDED
        return CallerState.ENDING if task.cancelling() else CallerState.RUNNING

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds))

    def spawn(self, work: Work, name: str) -> bool:
        running: asyncio.AbstractEventLoop | None = None
        try:
            with suppress(RuntimeError):  # called from another thread, or while the loop does not run
                running = asyncio.get_running_loop()
            loop = self._loop or running
            if loop is None:
                raise RuntimeError("no event loop has used this connection yet")
            _ = self._start(work, name) if loop is running else loop.call_soon_threadsafe(self._start, work, name)
        except RuntimeError as error:
            log.debug("Could not start a background task of lockfast: %s: %s", name, error)
            return False
        return True

    def _start(self, work: Work, name: str) -> asyncio.Task[None]:
        begun = False

        async def body() -> None:
            nonlocal begun
            begun = True
            await work()

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and task.exception() is not None:
                log.error("A background task of lockfast failed: %s", task.get_name(), exc_info=task.exception())
            if not begun and not loop.is_closed():
                # Cancelled before its first step: start it again, so that it can handle the cancellation.
                loop.call_soon(self._start(work, name).cancel)

        loop = asyncio.get_running_loop()
        task = loop.create_task(body(), name=f"lockfast-{name}")
        self._tasks.add(task)  # the loop holds only weak references
        task._log_destroy_pending = False  # type: ignore[attr-defined] # a loop that was simply closed is not our fault
        task.add_done_callback(ended)
        return task

    async def gather(self, works: Sequence[Coroutine[Any, Any, Any]], on_result: Callable[[int, Any], bool]) -> None:
        """One task for each."""
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()
        tasks: list[asyncio.Task[Any]] = []
        left = set(range(len(works)))

        def ended(number: int, task: asyncio.Task[Any]) -> None:
            if number not in left:
                return
            left.remove(number)
            if task.cancelled():
                return
            error = task.exception()
            if error is None or isinstance(error, StoreError):
                enough = on_result(number, task.result() if error is None else error) or not left
                if enough and not over.done():
                    over.set_result(None)
            elif not over.done():
                over.set_exception(error)

        for number, work in enumerate(works):
            task = loop.create_task(work)
            task.add_done_callback(partial(ended, number))
            tasks.append(task)
        try:
            if works:
                await over
        finally:
            for number, task in enumerate(tasks):
                if task.done():  # report it now: its own callback would run only after this function has returned
                    ended(number, task)
                else:
                    task.cancel()

    async def finish(self, work: Work, name: str, patience: float) -> None:
        # asyncio.wait neither cancels the task nor raises its error. If this wait is cancelled too, the task continues.
        await asyncio.wait([self._start(work, name)], timeout=patience)
