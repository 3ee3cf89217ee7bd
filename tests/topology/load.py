"""A crowd that takes, holds, waits for and gives back locks, and a ledger of all it saw.

What must hold whatever fails meanwhile: fences rise from grant to grant, nobody hangs, and whoever lost a lease was
told.
"""

import threading
import time
from collections import Counter, defaultdict
from typing import Any

from lockfast import State, StoreUnavailable
from tests.contract.driver import Contender, Driver, done

PATIENCE = 25.0
"""Seconds for which a contender waits for a lock: more than any failover here takes."""


class Ledger:
    """Who was granted what, and when."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._fences: dict[str, list[tuple[float, float, int]]] = defaultdict(list)
        self._grants: list[tuple[str, float]] = []
        self.gone: list[str] = []
        self.told: list[str] = []

    def granted(self, lease: Any, sent_at: float) -> None:
        with self._mutex:
            self._fences[lease.name].append((sent_at, time.monotonic(), lease.fence))
            self._grants.append((lease.name, time.monotonic()))

    def lost(self, lease: Any) -> None:
        with self._mutex:
            self.told.append(lease.holder)

    def least(self, names: list[str], since: float) -> int:
        """How often the one of these locks was granted since then that was granted least."""
        with self._mutex:
            counts = Counter(name for name, at in self._grants if at >= since)
        return min(counts[name] for name in names)

    def check_fences(self) -> None:
        """Whoever asked after another had been granted the lock has a greater fence; and no fence was given twice. (An
        old master may grant for a while beside the new one: of such grants neither came first.)"""
        for name, grants in self._fences.items():
            assert len({fence for _, _, fence in grants}) == len(grants), f"a fence of {name} was given twice"
            by_asking = sorted(grants)
            by_granting = sorted(grants, key=lambda grant: grant[1])
            largest, earlier = 0, 0
            for sent_at, _, fence in by_asking:
                while by_granting[earlier][1] < sent_at:
                    largest = max(largest, by_granting[earlier][2])
                    earlier += 1
                assert fence > largest, f"a fence of {name} is {largest - fence} less than one granted before it"


class Crowd:
    """Contenders that pass locks on, and holders that keep theirs."""

    def __init__(self, d: Driver, **options: Any) -> None:
        self.d = d
        self.ledger = Ledger()
        self._options = options
        self._stop = False
        self._names: list[str] = []
        self._contenders: list[Contender] = []
        self.kept: list[Any] = []

    async def contend(self, names: list[str], each: int = 3, clients: int = 2) -> None:
        """`each` contenders for each name on each of some clients."""
        self._names += names
        for _ in range(clients):
            locks = self.d.connect(store_timeout=PATIENCE, **self._options)
            for name in names:
                self._contenders += [self.d.start(self._pass_on, locks, name) for _ in range(each)]

    async def keep(self, names: list[str], ttl: float = 6.0) -> None:
        """Hold these for good, with renewals."""
        locks = self.d.connect(store_timeout=PATIENCE, **self._options)
        for name in names:
            sent_at = time.monotonic()
            lease = await done(locks.lock(name, ttl=ttl, on_lost=self.ledger.lost).acquire(timeout=PATIENCE))
            assert lease is not None
            self.ledger.granted(lease, sent_at)
            self.kept.append(lease)

    async def _pass_on(self, locks: Any, name: str) -> int:
        lock = locks.lock(name, ttl=8, on_lost=self.ledger.lost)
        rounds = 0
        while not self._stop:
            sent_at = time.monotonic()
            lease = await done(lock.acquire(timeout=PATIENCE))
            assert lease is not None, f"nobody passed {name} on for {PATIENCE:g} s"
            self.ledger.granted(lease, sent_at)
            await self.d.pause()
            try:
                if not await done(lease.release()):
                    self.ledger.gone.append(lease.holder)
            except StoreUnavailable:
                self.ledger.gone.append(lease.holder)  # said so: it is given back in the background
            rounds += 1
        return rounds

    async def until_busy(self, grants: int = 10, since: float | None = None) -> None:
        """Return when each lock that is contended for was granted so often since then."""
        start = time.monotonic() if since is None else since
        await self.d.until(lambda: self.ledger.least(self._names, start) >= grants, f"{grants} grants", PATIENCE)

    async def finish(self) -> None:
        """Stop, and see that everybody comes to an end."""
        self._stop = True
        for contender in self._contenders:
            await self.d.until(lambda one=contender: one.ended, "everybody to come to an end", PATIENCE)  # type: ignore[misc]
            await contender.result()
        self.ledger.check_fences()

    async def check_kept(self) -> tuple[int, int]:
        """Every lease that was kept is there, or was reported lost; how many of each."""
        held = lost = 0
        for lease in self.kept:
            if lease.state is State.LOST:
                await self.d.until(lambda one=lease: one.holder in self.ledger.told, "the loss to be told")  # type: ignore[misc]
                lost += 1
            else:
                info = await done(self.d.locks.lock(lease.name).inspect())
                assert info.holder == lease.holder, f"{lease} says held, and the store says {info}"
                held += 1
        return held, lost
