"""Bounded polling, for a state that nobody announces: a process that has gone, a port that answers.

Where something can announce itself, wait on its condition instead.
"""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

LONG = 20.0
"""Seconds for what should happen at once: it costs nothing when it does, and a busy machine may halt for some."""


def until(check: Callable[[], T], what: str, timeout: float = LONG, pause: float = 0.005) -> T:
    """Return the first true answer of `check`; TimeoutError naming `what` when none comes in time."""
    deadline = time.monotonic() + timeout
    while not (answer := check()):
        if time.monotonic() >= deadline:
            raise TimeoutError(f"waited {timeout:g} s for {what}")
        time.sleep(pause)
    return answer
