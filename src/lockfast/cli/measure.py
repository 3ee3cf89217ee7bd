"""Measurements that `lockfast bench` and `lockfast doctor` share; times in seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import lockfast
from lockfast.errors import LockError

TTL = 10.0
WAIT = 3.0  # seconds that a waiter waits for a hand-off


def timed(operation: Callable[[], object]) -> float:
    started = time.perf_counter()
    operation()
    return time.perf_counter() - started


def acquired(locks: lockfast.Locks, name: str) -> lockfast.Lease:
    """Acquire an unused lock, or raise `LockError`."""
    lease = locks.lock(name, ttl=TTL).acquire(timeout=WAIT)
    if lease is None:
        raise LockError(f"{name} is held by another client; use an unused lock name.")
    return lease


def handoff(locks: lockfast.Locks, other: lockfast.Locks, name: str) -> float:
    """Seconds from the release on one connection until a waiter on another connection holds the lock."""
    acquired_at: list[float] = []

    def wait() -> None:
        try:
            with other.lock(name, ttl=TTL, timeout=2 * WAIT):
                acquired_at.append(time.perf_counter())
        except LockError:
            pass  # reported below

    lease = acquired(locks, name)
    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    give_up_at = time.perf_counter() + WAIT
    while not locks.lock(name).inspect().waiting and time.perf_counter() < give_up_at:
        time.sleep(0.0005)
    released_at = time.perf_counter()
    lease.release()
    waiter.join(3 * WAIT)
    if not acquired_at:
        raise LockError("The waiter did not get the lock: no notification arrived. Allow SUBSCRIBE and PUBLISH.")
    return acquired_at[0] - released_at
