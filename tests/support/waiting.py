"""Bounded polling for a state that nothing announces: an ended process, a port that answers.

Wait on a condition or an event where there is one.
"""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

LONG = 20.0
"""Seconds to wait for an event that is due at once; long, because a busy machine may stall."""


def until(check: Callable[[], T], what: str, timeout: float = LONG, pause: float = 0.005) -> T:
    """Poll `check` and return its first true result; raise TimeoutError with `what` after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not (answer := check()):
        if time.monotonic() >= deadline:
            raise TimeoutError(f"waited {timeout:g} s for {what}")
        time.sleep(pause)
    return answer
