"""Acquire and release a lock repeatedly, and measure how long that takes."""

import time
from typing import Any

from tests.contract.driver import done

QUICK = 0.15
"""Seconds within which a cycle ends although servers are down; waiting for one of them would take longer."""


async def cycles(lock: Any, count: int) -> float:
    """Acquire and release `count` times, check that fences grow, and return the median time."""
    times, fences = [], []
    for _ in range(count):
        began = time.monotonic()
        lease = await done(lock.acquire(timeout=5))
        fences.append(lease.fence)
        assert await done(lease.release()) is True
        times.append(time.monotonic() - began)
    assert fences == sorted(set(fences))
    return sorted(times)[count // 2]
