"""Work that must not delay the caller: a bounded pool of background tasks, and work that runs exactly once."""

from __future__ import annotations

import logging
from collections import deque

from lockfast.ports import Runtime, Waker, Work

log = logging.getLogger("lockfast")


class BackgroundTasks:
    """Runs tasks in the background, at most `workers` at a time.

    Invariant: while a task is in `_pending`, at least one worker runs. If no worker could be started, the next `add()`
    tries again.
    """

    def __init__(self, runtime: Runtime, name: str, workers: int) -> None:
        self._runtime = runtime
        self._name = name
        self._most = workers
        self._mutex = runtime.mutex()
        self._pending: deque[Work] = deque()
        self._workers = 0

    def add(self, task: Work) -> None:
        with self._mutex:
            self._pending.append(task)
            if self._workers >= self._most:
                return
            self._workers += 1
        if not self._runtime.spawn(self._work, self._name):
            with self._mutex:
                self._workers -= 1

    async def _work(self) -> None:
        while True:
            with self._mutex:
                if not self._pending:
                    self._workers -= 1
                    return
                task = self._pending.popleft()
            try:
                await task()
            except Exception:
                log.exception("A background task of lockfast failed: %s", self._name)
            except BaseException:
                with self._mutex:
                    self._workers -= 1  # the event loop or the process is shutting down
                raise


class SingleFlight:
    """Work that runs once to its end, however many callers request it and even if one of them is cancelled.

    Invariant: at most one caller runs the work; the others wait for its end. Interrupted work is started again by the
    next caller.
    """

    def __init__(self, runtime: Runtime, name: str) -> None:
        self._runtime = runtime
        self._name = name
        self._mutex = runtime.mutex()
        self._started = False
        self._running = False
        self._ended = False
        self._waiting: list[Waker] = []

    async def run(self, work: Work, patience: float) -> None:
        """Return when the work has ended or `patience` seconds have passed."""
        waker = None
        with self._mutex:
            if self._started:
                if self._ended:
                    return
                waker = self._runtime.waker()
                self._waiting.append(waker)
            self._started = True
        if waker is None:
            try:
                await self._runtime.finish(lambda: self._run(work), self._name, patience)
            except BaseException:
                if not self._running:
                    self._started = False  # interrupted before the work began
                raise
        else:
            await waker.wait(self._runtime.now() + patience)

    async def _run(self, work: Work) -> None:
        self._running = True
        try:
            await work()
            self._ended = True
        except BaseException:
            self._started = self._running = False
            raise
        finally:
            with self._mutex:
                waiting, self._waiting = self._waiting, []
            for waker in waiting:
                waker.wake()
