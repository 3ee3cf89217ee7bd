"""Retry idempotent requests, with growing, jittered pauses between them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from lockfast.errors import StoreUnavailable
from lockfast.ports import Runtime

FIRST_PAUSE = 0.01
LONGEST_PAUSE = 0.5

T = TypeVar("T")


def backoff(failures: int, random: float) -> float:
    """Return the seconds to pause after that many failures in a row; `random` is from 0 up to 1.

    >>> backoff(1, 0.0), backoff(1, 1.0), backoff(50, 1.0)
    (0.005, 0.01, 0.5)
    """
    full = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(failures - 1, 16))
    return full * (0.5 + 0.5 * random)


async def retry(runtime: Runtime, operation: Callable[[float], Awaitable[T]], budget: float) -> T:
    """Call `operation(until)` until it is answered or `budget` seconds have passed; then raise its last error."""
    give_up_at = runtime.now() + budget
    failures = 0
    while True:
        try:
            return await operation(give_up_at)
        except StoreUnavailable:
            failures += 1
            left = give_up_at - runtime.now()
            if left <= 0:
                raise
            await runtime.sleep(min(left, backoff(failures, runtime.random())))
