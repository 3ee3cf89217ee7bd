"""`Runtime` for threads: its coroutines block and never suspend."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from lockfast.errors import StoreError
from lockfast.ports import CallerState, PendingWait, Work
from lockfast.runtime.base import current_thread, new_holder_id, now, random, run

log = logging.getLogger("lockfast")


class ThreadWaker:
    """A lock that is held until somebody wakes it."""

    __slots__ = ("_gate",)

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._gate.acquire()

    def wake(self) -> None:
        try:
            self._gate.release()
        except RuntimeError:
            pass  # woken already: one call is enough

    async def wait(self, until: float | None) -> bool:
        return self.wait_blocking(until)

    def wait_blocking(self, until: float | None) -> bool:
        if until is None:
            return self._gate.acquire()
        left = until - now()
        if left <= 0:
            return self._gate.acquire(blocking=False)
        return self._gate.acquire(timeout=left)


def _step(
    number: int,
    work: Coroutine[Any, Any, Any],
    waiting: dict[int, tuple[Coroutine[Any, Any, Any], PendingWait]],
    on_result: Callable[[int, Any], bool],
) -> bool:
    """Run `work` until it waits or ends; True if `on_result` wants no more results."""
    try:
        waiting[number] = work, work.send(None)
        return False
    except StopIteration as stop:
        outcome = stop.value
    except StoreError as error:
        outcome = error
    waiting.pop(number, None)
    return on_result(number, outcome)


def run_logged(work: Work, name: str) -> None:
    """Run a background task to its end; log its error."""
    try:
        run(work())
    except Exception:
        log.exception("A background task of lockfast failed: %s", name)


class ThreadRuntime:
    """Time, randomness and tasks for threads."""

    def __init__(self) -> None:
        self.now = now
        self.random = random
        self.new_holder_id = new_holder_id
        self.caller = current_thread
        self.mutex: Callable[[], AbstractContextManager[Any]] = threading.Lock
        self.waker = ThreadWaker

    def caller_state(self, caller: Hashable) -> CallerState:
        return CallerState.RUNNING  # a thread cannot be cancelled

    def attach(self) -> bool:
        return False

    loop_closed = False

    def after_fork(self) -> None:
        return

    async def sleep(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds))  # noqa: ASYNC251 - on threads a port blocks

    def spawn(self, work: Work, name: str) -> bool:
        try:
            threading.Thread(target=run_logged, args=(work, name), name=f"lockfast-{name}", daemon=True).start()
            return True
        except RuntimeError as error:
            if sys.is_finalizing() or "shutdown" in str(error):
                log.debug("The interpreter is shutting down; skipping the background task %s.", name)
            else:
                log.error("Could not start a background task of lockfast: %s: %s", name, error)
            return False

    async def gather(self, works: Sequence[Coroutine[Any, Any, Any]], on_result: Callable[[int, Any], bool]) -> None:
        """Without a thread for each: all send their requests before the first one waits, and one wait serves all."""
        waiting: dict[int, tuple[Coroutine[Any, Any, Any], PendingWait]] = {}
        enough = False
        try:
            for number, work in enumerate(works):
                enough = _step(number, work, waiting, on_result) or enough
            while waiting and not enough:
                moment = now()  # before the wait: a stopped thread then finds replies that arrived meanwhile
                tokens = [token for _, token in waiting.values()]
                tokens[0].wait_any(tokens)
                for number, (work, token) in list(waiting.items()):
                    if token.ready or moment >= token.until:
                        enough = _step(number, work, waiting, on_result) or enough
        finally:
            for work in works:
                work.close()

    async def finish(self, work: Work, name: str, patience: float) -> None:
        await work()  # limits itself; a thread cannot be cancelled
