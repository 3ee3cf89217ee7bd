"""A lock workload, and a record of every grant.

Invariants under any failure: fences grow from grant to grant, no client hangs, and every lost lease is reported.
"""

import threading
import time
from collections import Counter, defaultdict
from typing import Any

from lockfast import State, StoreUnavailable
from tests.contract.driver import Contender, Driver, done

PATIENCE = 25.0
"""Seconds that a client waits for a lock: more than any failover here takes."""


class Record:
    """All grants with their times, and the reported losses."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._fences: dict[str, list[tuple[float, float, int]]] = defaultdict(list)
        self._grants: list[tuple[str, float]] = []
        self.not_released: list[str] = []
        self.reported: list[str] = []

    def granted(self, lease: Any, sent_at: float) -> None:
        with self._mutex:
            self._fences[lease.name].append((sent_at, time.monotonic(), lease.fence))
            self._grants.append((lease.name, time.monotonic()))

    def lost(self, lease: Any) -> None:
        with self._mutex:
            self.reported.append(lease.holder)

    def least(self, names: list[str], since: float) -> int:
        """The smallest number of grants since then, over these locks."""
        with self._mutex:
            counts = Counter(name for name, at in self._grants if at >= since)
        return min(counts[name] for name in names)

    def check_fences(self) -> None:
        """No fence was granted twice, and a claim sent after a grant has a greater fence than that grant.

        (For a moment the old and the new master may both grant; such grants overlap and have no order.)"""
        for name, grants in self._fences.items():
            assert len({fence for _, _, fence in grants}) == len(grants), f"a fence of {name} was granted twice"
            by_sending = sorted(grants)
            by_grant = sorted(grants, key=lambda grant: grant[1])
            largest, earlier = 0, 0
            for sent_at, _, fence in by_sending:
                while by_grant[earlier][1] < sent_at:
                    largest = max(largest, by_grant[earlier][2])
                    earlier += 1
                assert fence > largest, f"a fence of {name} is {largest - fence} smaller than an earlier one"


class Workload:
    """Clients that acquire and release in a loop, and holders that keep their leases."""

    def __init__(self, d: Driver, **options: Any) -> None:
        self.d = d
        self.record = Record()
        self._options = options
        self._stop = False
        self._names: list[str] = []
        self._contenders: list[Contender] = []
        self.kept: list[Any] = []

    async def contend(self, names: list[str], each: int = 3, clients: int = 2) -> None:
        """Start `each` loops per name and client."""
        self._names += names
        for _ in range(clients):
            locks = self.d.connect(store_timeout=PATIENCE, **self._options)
            for name in names:
                self._contenders += [self.d.start(self._loop, locks, name) for _ in range(each)]

    async def keep(self, names: list[str], ttl: float = 6.0) -> None:
        """Acquire these locks and keep them renewed."""
        locks = self.d.connect(store_timeout=PATIENCE, **self._options)
        for name in names:
            sent_at = time.monotonic()
            lease = await done(locks.lock(name, ttl=ttl, on_lost=self.record.lost).acquire(timeout=PATIENCE))
            assert lease is not None
            self.record.granted(lease, sent_at)
            self.kept.append(lease)

    async def _loop(self, locks: Any, name: str) -> int:
        lock = locks.lock(name, ttl=8, on_lost=self.record.lost)
        rounds = 0
        while not self._stop:
            sent_at = time.monotonic()
            lease = await done(lock.acquire(timeout=PATIENCE))
            assert lease is not None, f"{name} was not acquired within {PATIENCE:g} s"
            self.record.granted(lease, sent_at)
            await self.d.pause()
            try:
                if not await done(lease.release()):
                    self.record.not_released.append(lease.holder)
            except StoreUnavailable:
                self.record.not_released.append(lease.holder)  # released in the background
            rounds += 1
        return rounds

    async def until_busy(self, grants: int = 10, since: float | None = None) -> None:
        """Return when each contended lock was granted so often since then."""
        start = time.monotonic() if since is None else since
        await self.d.until(lambda: self.record.least(self._names, start) >= grants, f"{grants} grants", PATIENCE)

    async def finish(self) -> None:
        """Stop, wait for all clients, and check the fences."""
        self._stop = True
        for contender in self._contenders:
            await self.d.until(lambda one=contender: one.ended, "all clients to end", PATIENCE)  # type: ignore[misc]
            await contender.result()
        self.record.check_fences()

    async def check_kept(self) -> tuple[int, int]:
        """Each kept lease is held, or was reported lost. Returns both numbers."""
        held = lost = 0
        for lease in self.kept:
            if lease.state is State.LOST:
                await self.d.until(lambda one=lease: one.holder in self.record.reported, "the loss to be reported")  # type: ignore[misc]
                lost += 1
            else:
                info = await done(self.d.locks.lock(lease.name).inspect())
                assert info.holder == lease.holder, f"{lease} is held, but the store has {info}"
                held += 1
        return held, lost
