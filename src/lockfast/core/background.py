"""Work that must not hold up who causes it: done in the background, in order, by a bounded number of workers."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from lockfast.ports import Runtime

log = logging.getLogger("lockfast")

Errand = Callable[[], Coroutine[Any, Any, None]]


class BackgroundTasks:
    """Invariant: while something waits in `_waiting`, at least one worker is under way; unless none could be started,
    and then the next errand tries again."""

    def __init__(self, runtime: Runtime, name: str, workers: int) -> None:
        self._runtime = runtime
        self._name = name
        self._most = workers
        self._mutex = runtime.mutex()
        self._waiting: deque[Errand] = deque()
        self._workers = 0

    def add(self, errand: Errand) -> None:
        with self._mutex:
            self._waiting.append(errand)
            if self._workers >= self._most:
                return
            self._workers += 1
        self._start()

    def _start(self) -> None:
        if not self._runtime.spawn(self._work, self._name):
            with self._mutex:
                self._workers -= 1  # what waits is done by whoever is started next

    async def _work(self) -> None:
        while True:
            with self._mutex:
                if not self._waiting:
                    self._workers -= 1
                    return
                errand = self._waiting.popleft()
            try:
                await errand()
            except Exception:
                log.exception("Background work of lockfast failed: %s", self._name)
            except BaseException:
                with self._mutex:
                    self._workers -= 1  # this worker's own end: the event loop shuts down, or the process does
                raise
