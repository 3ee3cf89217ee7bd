"""Run a coroutine of the core to its end without an event loop.

On threads every port blocks instead of suspending, so the first `send(None)` already runs to the end. A
coroutine that suspends all the same awaited something that is no port; that is a bug, and it raises.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, computed in this thread.

    >>> async def answer() -> int:
    ...     return 42
    >>> run(answer())
    42
    """
    try:
        work.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    work.close()
    raise RuntimeError("A coroutine of the core suspended on threads: it awaited something that is no port.")
