"""`Runtime` for threads: its coroutines block, and never suspend."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Hashable
from contextlib import AbstractContextManager
from typing import Any

from holdfast.ports import Stage
from holdfast.runtime.chance import new_holder, random
from holdfast.runtime.clock import now
from holdfast.runtime.runner import run

log = logging.getLogger("holdfast")

_this_thread = threading.local()


class ThreadWaker:
    """A lock that is held while nobody has called; waking releases it."""

    __slots__ = ("_gate",)

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._gate.acquire()

    def wake(self) -> None:
        try:
            self._gate.release()
        except RuntimeError:
            pass  # called already, and not yet noticed: one call is enough

    async def wait(self, until: float | None) -> bool:
        return self.wait_blocking(until)

    def wait_blocking(self, until: float | None) -> bool:
        if until is None:
            return self._gate.acquire()
        left = until - now()
        if left <= 0:
            return self._gate.acquire(blocking=False)
        return self._gate.acquire(timeout=left)


class ThreadRuntime:
    """Time, chance and tasks for the blocking colour."""

    def __init__(self) -> None:
        self.now = now
        self.random = random
        self.new_holder = new_holder
        self.mutex: Callable[[], AbstractContextManager[Any]] = threading.Lock
        self.waker = ThreadWaker

    def caller(self) -> Hashable:
        # A thread's ident is reused once the thread is gone; an object of its own is not.
        try:
            return _this_thread.token  # type: ignore[no-any-return]
        except AttributeError:
            _this_thread.token = token = object()
            return token

    def stage(self, caller: Hashable) -> Stage:
        return Stage.RUNS  # nobody tells a thread to end

    async def sleep(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds))  # noqa: ASYNC251 - on threads a port blocks

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> bool:
        def body() -> None:
            try:
                run(work())
            except Exception:
                log.exception("Background work of holdfast failed: %s", name)

        try:
            threading.Thread(target=body, name=f"holdfast-{name}", daemon=True).start()
            return True
        except RuntimeError as error:
            if sys.is_finalizing() or "shutdown" in str(error):
                log.debug("The interpreter is shutting down: %s is not done.", name)
            else:
                log.error("Background work of holdfast could not be started: %s: %s", name, error)
            return False

    async def finish(self, work: Callable[[], Coroutine[Any, Any, None]], name: str, patience: float) -> None:
        await work()  # bounds itself; a thread cannot be cancelled from outside
