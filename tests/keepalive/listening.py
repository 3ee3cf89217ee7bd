"""Somebody who listens to the callbacks of leases, and knows when each was called, and where."""

import asyncio
import threading
from typing import Any, NamedTuple

from lockfast.runtime.base import now

BOUND = 20.0
"""Seconds for which a test waits for what should happen at once, however busy the machine is."""
SLACK = 0.15
"""Seconds within which a loss must be told on a busy machine; 50 ms is promised, and what was measured is shown."""


class Call(NamedTuple):
    """One call of a callback."""

    at: float
    what: str
    lease: Any
    thread: int
    task: Any


def running_task() -> Any:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


class Listener:
    """`options` go into `locks.lock()`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.calls: list[Call] = []

    @property
    def options(self) -> dict[str, Any]:
        return {"on_risk": lambda lease: self.hear("risk", lease), "on_lost": lambda lease: self.hear("lost", lease)}

    def hear(self, what: str, lease: Any) -> None:
        call = Call(now(), what, lease, threading.get_ident(), running_task())
        with self._changed:
            self.calls.append(call)
            self._changed.notify_all()

    def words(self, lease: Any = None) -> list[str]:
        with self._changed:
            return [call.what for call in self.calls if lease is None or call.lease is lease]

    def wait_for(self, what: str, count: int = 1, bound: float = BOUND) -> list[Call]:
        """The first `count` calls of that kind, once they have come."""
        with self._changed:
            self._changed.wait_for(lambda: self._count(what) >= count, bound)
            if self._count(what) < count:
                raise TimeoutError(f"waited {bound:g} s for {count} × {what}, and heard {[c.what for c in self.calls]}")
            return [call for call in self.calls if call.what == what][:count]

    def _count(self, what: str) -> int:
        return sum(call.what == what for call in self.calls)
