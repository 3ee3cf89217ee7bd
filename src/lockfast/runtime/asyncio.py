"""`Runtime` for asyncio, bound to the event loop that first uses it."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Hashable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any

from lockfast.errors import ConfigurationError, StoreError
from lockfast.ports import CallerState
from lockfast.runtime.clock import now
from lockfast.runtime.randomness import new_holder_id, random

log = logging.getLogger("lockfast")


_inherited: list[set[asyncio.Task[None]]] = []


class Alarms:
    """Ends waits when their time is up, all those of a connection by one timer of its event loop: a thousand tasks that
    pass a lock around set and cancel thousands of alarms a second, and nearly none ever rings.

    Invariants: every wait that is not over is in `_row`, which is in order of their ends, or in `_heap`, for those that
    end before the last of the row; `_rings_at` is not after the first of them; together they never have more than twice
    as many as ever waited at once, and a few."""

    FEW = 64

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float]) -> None:
        self.loop = loop
        self.now = clock
        self._row: deque[tuple[float, asyncio.Future[bool]]] = deque()
        self._heap: list[tuple[float, int, asyncio.Future[bool]]] = []
        self._numbers = count()
        self._rings_at = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._tidy_at = self.FEW

    def __len__(self) -> int:
        return len(self._row) + len(self._heap)

    def set(self, future: asyncio.Future[bool], until: float, left: float) -> None:
        """Give `future` the result False at `until`, in `left` seconds, unless it has one by then."""
        row, grows = self._row, True
        if row and until < row[-1][0]:
            heappush(self._heap, (until, next(self._numbers), future))
        else:  # as nearly always, since most wait for as long as those before them
            while row and row[0][1].done():
                row.popleft()
                grows = False
            row.append((until, future))
        rings_at = self._rings_at
        if until < rings_at or (rings_at + left < until and self._is_late()):
            first = self._first()
            self._ring_at(first, max(0.0, first - until + left))
        if grows and len(row) + len(self._heap) > self._tidy_at:
            self._tidy()

    def _is_late(self) -> bool:
        """Whether the timer that should have rung is not even due: in a suspended machine the loop's own clock stands
        still. What the loop itself knows to be due rings in this round: put off in each round, it would never ring."""
        return self._timer is not None and self._timer.when() > self.loop.time()

    def _first(self) -> float:
        """When the first of them ends."""
        ends = [alarms[0][0] for alarms in (self._row, self._heap) if alarms]
        return min(ends, default=math.inf)

    def _tidy(self) -> None:
        self._row = deque(alarm for alarm in self._row if not alarm[1].done())
        self._heap = [alarm for alarm in self._heap if not alarm[2].done()]
        heapify(self._heap)
        self._tidy_at = 2 * len(self) + self.FEW

    def _ring_at(self, until: float, left: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._rings_at = until
        self._timer = self.loop.call_later(left, self._ring)

    def _ring(self) -> None:
        row, heap, moment = self._row, self._heap, self.now()
        self._timer, self._rings_at = None, math.inf
        while row and (row[0][0] <= moment or row[0][1].done()):
            _end(row.popleft()[1])
        while heap and (heap[0][0] <= moment or heap[0][2].done()):
            _end(heappop(heap)[2])
        if row or heap:
            first = self._first()
            self._ring_at(first, first - moment)


def _end(future: asyncio.Future[bool]) -> None:
    if not future.done():
        future.set_result(False)


class TaskWaker:
    """A flag, and the future that was last waited for. Other threads wake it through the loop."""

    __slots__ = ("_alarms", "_called", "_future", "_thread")

    def __init__(self, alarms: Alarms) -> None:
        self._alarms = alarms
        self._thread = threading.get_ident()
        self._called = False
        self._future: asyncio.Future[bool] | None = None

    def wake(self, *, in_loop: bool = False) -> None:
        if in_loop or threading.get_ident() == self._thread:
            future = self._future
            if future is None or future.done():
                self._called = True
            else:
                future.set_result(True)
            return
        try:
            # It is told that it is there: the loop may run in another thread by now.
            self._alarms.loop.call_soon_threadsafe(partial(self.wake, in_loop=True))
        except RuntimeError:
            pass  # the loop is closed: nobody waits there any more

    def wait(self, until: float | None) -> asyncio.Future[bool]:
        future: asyncio.Future[bool] = asyncio.Future(loop=self._alarms.loop)
        self._future = future
        if self._called:
            self._called = False
            future.set_result(True)
        elif until is not None:
            left = until - self._alarms.now()
            if left > 0:
                self._alarms.set(future, until, left)
            else:
                future.set_result(False)
        return future


class AsyncioRuntime:
    """Time, chance and tasks for the asyncio colour."""

    def __init__(self) -> None:
        self.now = now
        self.random = random
        self.new_holder_id = new_holder_id
        # A lease may be looked at by worker threads of the loop, and whoever looks may find that it is lost.
        self.mutex: Callable[[], AbstractContextManager[Any]] = threading.Lock
        self._alarms: Alarms | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def attach(self) -> bool:
        """Tie this runtime to the running loop; True when there was another before, which is closed."""
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
        """Whether the loop that this belongs to is closed."""
        return self._loop is not None and self._loop.is_closed()

    def after_fork(self) -> None:
        """In a forked child: the loop and its tasks are the parent's, and do not run here."""
        _inherited.append(self._tasks)  # the end of a task that waits would be reported
        self._tasks = set()
        self._loop = None

    def waker(self) -> TaskWaker:
        loop = asyncio.get_running_loop()
        if self._alarms is None or self._alarms.loop is not loop:
            self._alarms = Alarms(loop, self.now)
        return TaskWaker(self._alarms)

    def caller(self) -> Hashable:
        try:
            return asyncio.current_task()  # of the loop that runs, which may be another than ours
        except RuntimeError:
            return None  # no loop runs here

    def caller_state(self, caller: Hashable) -> CallerState:
        task: Any = caller  # whatever the loop takes for a task
        if task is None or task.done():
            return CallerState.ENDED
        return CallerState.ENDING if task.cancelling() else CallerState.RUNNING

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds))

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> bool:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return self._spawn_from_elsewhere(work, name)
        if self._loop is not None and loop is not self._loop:
            return self._spawn_from_elsewhere(work, name)
        _ = self._start(work, name)
        return True

    def _spawn_from_elsewhere(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> bool:
        """From another thread, or while the loop does not run."""
        try:
            if self._loop is None:
                raise RuntimeError("no event loop has used this connection yet")
            self._loop.call_soon_threadsafe(self._start, work, name)
        except RuntimeError as error:
            log.debug("Background work of lockfast could not be started: %s: %s", name, error)
            return False
        return True

    def spawn_in_loop(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        """The same from any thread, or from nowhere; nothing when the loop has gone, and all that lived in it."""
        if self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(self.spawn, work, name)
            except RuntimeError:
                pass  # it is closed

    def _start(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> asyncio.Task[None]:
        begun = False

        async def body() -> None:
            nonlocal begun
            begun = True
            await work()

        def ended(task: asyncio.Task[None]) -> None:
            self._ended(task)
            if not begun and not loop.is_closed():
                # Cancelled before its first step, so that it does not even know: let it know.
                loop.call_soon(self._start(work, name).cancel)

        loop = asyncio.get_running_loop()
        task = loop.create_task(body(), name=f"lockfast-{name}")
        self._tasks.add(task)  # the loop itself holds tasks only weakly
        task._log_destroy_pending = False  # type: ignore[attr-defined] # a loop closed without a word is no fault of ours
        task.add_done_callback(ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("Background work of lockfast failed: %s", task.get_name(), exc_info=task.exception())

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
                if task.done():  # in time too, so it is told now: its own call would come when nobody expects it
                    ended(number, task)
                else:
                    task.cancel()

    async def finish(self, work: Callable[[], Coroutine[Any, Any, None]], name: str, patience: float) -> None:
        # asyncio.wait neither cancels the task nor passes its error on. If we are cancelled once more
        # while waiting, the task goes on by itself.
        await asyncio.wait([self._start(work, name)], timeout=patience)
