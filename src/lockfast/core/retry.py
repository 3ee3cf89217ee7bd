"""Repeat an idempotent operation until it is answered or its budget is spent."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from lockfast.core import backoff
from lockfast.errors import StoreUnavailable
from lockfast.ports import Runtime

T = TypeVar("T")


async def retry(runtime: Runtime, operation: Callable[[float], Awaitable[T]], budget: float) -> T:
    """What `operation(until)` gives, at the first try that gets an answer; the last error when none does."""
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
            await runtime.sleep(min(left, backoff.pause(failures, runtime.random())))
