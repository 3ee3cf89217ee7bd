"""What many of these tests do: take the lock and give it back, and look how long that takes."""

import time
from typing import Any

from tests.contract.driver import done

QUICK = 0.15
"""Seconds within which a cycle ends though nodes are away; waiting for one of them would take longer."""


async def cycles(lock: Any, count: int) -> float:
    """Take and give back so many times, fences growing; the time of the cycle in the middle."""
    times, fences = [], []
    for _ in range(count):
        began = time.monotonic()
        lease = await done(lock.acquire(timeout=5))
        fences.append(lease.fence)
        assert await done(lease.release()) is True
        times.append(time.monotonic() - began)
    assert fences == sorted(set(fences))
    return sorted(times)[count // 2]
