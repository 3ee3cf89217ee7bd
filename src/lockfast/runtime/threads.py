"""`Runtime` for threads: its coroutines block, and never suspend."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from lockfast.errors import StoreError
from lockfast.ports import CallerState, PendingWait
from lockfast.runtime.clock import now
from lockfast.runtime.randomness import new_holder_id, random
from lockfast.runtime.runner import run

log = logging.getLogger("lockfast")

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


def _go_on(
    number: int,
    work: Coroutine[Any, Any, Any],
    parked: dict[int, tuple[Coroutine[Any, Any, Any], PendingWait]],
    tell: Callable[[int, Any], bool],
) -> bool:
    """Run `work` until it waits or ends; True when `tell` says that it is enough."""
    try:
        parked[number] = work, work.send(None)
        return False
    except StopIteration as stop:
        outcome = stop.value
    except StoreError as error:
        outcome = error
    parked.pop(number, None)
    return tell(number, outcome)


class ThreadRuntime:
    """Time, chance and tasks for the blocking colour."""

    def __init__(self) -> None:
        self.now = now
        self.random = random
        self.new_holder_id = new_holder_id
        self.mutex: Callable[[], AbstractContextManager[Any]] = threading.Lock
        self.waker = ThreadWaker

    def caller(self) -> Hashable:
        # A thread's ident is reused once the thread is gone; an object of its own is not.
        try:
            return _this_thread.token  # type: ignore[no-any-return]
        except AttributeError:
            _this_thread.token = token = object()
            return token

    def caller_state(self, caller: Hashable) -> CallerState:
        return CallerState.RUNNING  # a thread cannot be cancelled

    def attach(self) -> bool:
        return False

    loop_closed = False

    def after_fork(self) -> None:
        return

    async def sleep(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds))  # noqa: ASYNC251 - on threads a port blocks

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> bool:
        def body() -> None:
            try:
                run(work())
            except Exception:
                log.exception("Background work of lockfast failed: %s", name)

        try:
            threading.Thread(target=body, name=f"lockfast-{name}", daemon=True).start()
            return True
        except RuntimeError as error:
            if sys.is_finalizing() or "shutdown" in str(error):
                log.debug("The interpreter is shutting down: %s is not done.", name)
            else:
                log.error("Background work of lockfast could not be started: %s: %s", name, error)
            return False

    async def gather(self, works: Sequence[Coroutine[Any, Any, Any]], on_result: Callable[[int, Any], bool]) -> None:
        """Without a thread for each: every work sends its request before the first waits, and then one
        wait serves them all."""
        parked: dict[int, tuple[Coroutine[Any, Any, Any], PendingWait]] = {}
        enough = False
        try:
            for number, work in enumerate(works):
                enough = _go_on(number, work, parked, on_result) or enough
            while parked and not enough:
                moment = now()  # before: a thread that was stopped finds what came meanwhile, and does not give up
                tokens = [token for _, token in parked.values()]
                tokens[0].wait_any(tokens)
                for number, (work, token) in list(parked.items()):
                    if token.ready or moment >= token.until:
                        enough = _go_on(number, work, parked, on_result) or enough
        finally:
            for work in works:
                work.close()

    async def finish(self, work: Callable[[], Coroutine[Any, Any, None]], name: str, patience: float) -> None:
        await work()  # bounds itself; a thread cannot be cancelled from outside
