"""Record the callbacks of leases: when each was called, and in which thread or task."""

import asyncio
import threading
from typing import Any, NamedTuple

from lockfast.runtime.base import now

BOUND = 20.0
"""Seconds to wait for an event that is due at once; long, because the machine may be busy."""
SLACK = 0.15
"""Seconds within which a loss must be reported on a busy machine. 50 ms are promised; the measured time is shown."""


class Call(NamedTuple):
    """One call of a callback."""

    at: float
    kind: str
    lease: Any
    thread: int
    task: Any


def running_task() -> Any:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


class CallbackRecorder:
    """`options` go into `locks.lock()`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.calls: list[Call] = []

    @property
    def options(self) -> dict[str, Any]:
        return {
            "on_risk": lambda lease: self.record("risk", lease),
            "on_lost": lambda lease: self.record("lost", lease),
        }

    def record(self, kind: str, lease: Any) -> None:
        call = Call(now(), kind, lease, threading.get_ident(), running_task())
        with self._changed:
            self.calls.append(call)
            self._changed.notify_all()

    def kinds(self, lease: Any = None) -> list[str]:
        with self._changed:
            return [call.kind for call in self.calls if lease is None or call.lease is lease]

    def wait_for(self, kind: str, count: int = 1, bound: float = BOUND) -> list[Call]:
        """Wait for `count` calls of that kind, and return them."""
        with self._changed:
            self._changed.wait_for(lambda: self._count(kind) >= count, bound)
            if self._count(kind) < count:
                raise TimeoutError(
                    f"waited {bound:g} s for {count} × {kind}, and recorded {[c.kind for c in self.calls]}"
                )
            return [call for call in self.calls if call.kind == kind][:count]

    def _count(self, kind: str) -> int:
        return sum(call.kind == kind for call in self.calls)
