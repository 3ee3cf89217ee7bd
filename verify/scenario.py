"""The parameters of one simulation, chosen by a seed, and the programs that its clients run."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from random import Random

from lockfast.client.all_of import AsyncLeaseSet
from lockfast.client.lease import AsyncLease
from lockfast.client.lock import AsyncLock
from lockfast.client.locks import AsyncLocks
from lockfast.errors import LeaseLost, StoreError
from verify.process import Process, Program, state_of

FAULT_RATES = {
    # Probability per message; see `world.FAULTS`.
    "lose_request": 0.03,
    "lose_reply": 0.03,
    "lose_silently": 0.01,
    "execute_late": 0.02,
    "lose_notification": 0.1,
    # Per second and client.
    "crash": 0.02,
    "pause": 0.05,
    "cut_inbox": 0.05,
    "cancel": 0.2,
    # Per second.
    "restart": 0.02,
    "failover": 0.05,
}
DOCUMENT, DEVICE = "document", "device"
"""How the names begin of locks that are read and written, and of semaphores; both are also held exclusively."""
SEVERAL_TTL = 2.0
"""The least ttl for several locks: they are acquired one after another, also on the slowest network."""
PER_CLIENT = ("crash", "pause", "cut_inbox", "cancel")
PER_SERVER = ("restart", "failover")


@dataclass(frozen=True)
class Scenario:
    """The parameters of a run; `faults` has the name and rate of each fault that occurs."""

    seed: int
    clients: int
    locks: int
    seconds: float
    ttl: float
    latency: float
    faults: tuple[tuple[str, float], ...]
    drift: bool
    liveness: bool

    @classmethod
    def of_seed(cls, seed: int) -> Scenario:
        rng = random.Random(seed)
        faults = tuple(
            (name, rate * rng.choice((0.3, 1.0, 3.0))) for name, rate in FAULT_RATES.items() if rng.random() < 0.4
        )
        return cls(
            seed=seed,
            clients=rng.choice((5, 5, 6, 7, 8, 10, 20)),
            locks=rng.choice((1, 1, 2, 3)),
            seconds=rng.choice((3.0, 6.0, 12.0)),
            ttl=rng.choice((0.5, 2.0, 5.0)),
            latency=rng.choice((0.0002, 0.002, 0.02, 0.1)),
            faults=faults,
            drift=rng.random() < 0.5,
            liveness=seed % 2 == 1,
        )

    def simpler(self) -> Iterator[Scenario]:
        """Scenarios that are simpler by one step."""
        if self.clients > 1:
            yield replace(self, clients=max(1, self.clients // 2))
            yield replace(self, clients=self.clients - 1)
        for fault in self.faults:
            yield replace(self, faults=tuple(one for one in self.faults if one != fault))
        if self.locks > 1:
            yield replace(self, locks=1)
        if self.drift:
            yield replace(self, drift=False)
        if self.seconds > 0.5:
            yield replace(self, seconds=self.seconds / 2)


@dataclass
class Workload:
    """The parameters that all clients share. `exported` holds leases for other clients to adopt."""

    locks: tuple[str, ...]
    ttl: float
    seconds: float
    liveness: bool
    exported: list[str] = field(default_factory=list)

    def program(self, rng: Random, local: Callable[[float], float]) -> Program:
        """Use locks at random until the time is over; in liveness mode, acquire one more at the end.

        Like a `with` block, it releases its lease however the work ends. Sometimes it drops an unrenewed lease, like a
        program that lost the object.
        """

        async def program(me: Process) -> None:
            locks = me.locks(store_timeout=max(2.0, 2 * self.ttl))
            while me.now() < local(self.seconds):
                await me.sleep(rng.expovariate(1.0))
                me.cancellable = True
                try:
                    await self._use_one_lock(me, locks, rng)
                except (StoreError, LeaseLost, asyncio.CancelledError) as error:
                    me.note(type(error).__name__)
                finally:
                    me.cancellable = False
            if self.liveness:
                await self._acquire_at_the_end(me, locks)

        return program

    async def _use_one_lock(self, me: Process, locks: AsyncLocks, rng: Random) -> None:
        renew = rng.random() < 0.5
        if self.exported and rng.random() < 0.5:
            adopted = await locks.adopt(self.exported.pop(), renew=renew)
            me.record_acquire(adopted)
            await self._use(me, adopted, rng)
            return
        timeout = rng.choice((0.0, 0.3 * self.ttl, 2 * self.ttl, None))
        sent_at, me.was_paused = me.now(), False
        if len(self.locks) > 1 and rng.random() < 0.3:
            known, ttl = len(me.holder_ids), max(self.ttl, SEVERAL_TTL)
            several = locks.all_of(*[self._lock(locks, name, ttl, renew, rng) for name in self.locks])
            leases = await several.acquire(timeout=timeout)
            me.record_acquire_all(leases, known)
            held: AsyncLease | AsyncLeaseSet | None = leases
            requests = len(self.locks) + 2  # for all at once, for each, and to release them
        else:
            lock = self._lock(locks, rng.choice(self.locks), self.ttl, renew, rng)
            held = lease = await lock.acquire(timeout=timeout)
            me.record_acquire(lease)
            requests = 1
        if timeout is not None:
            me.record_wait(sent_at, timeout, requests)
        if held is not None:
            await self._use(me, held, rng)

    def _lock(self, locks: AsyncLocks, name: str, ttl: float, renew: bool, rng: Random) -> AsyncLock:
        """A lock in one of the modes in which this name is used."""
        max_hold = rng.choice((None, None, 0.7 * self.ttl, 3 * self.ttl))
        if rng.random() < 0.4:
            return locks.lock(name, ttl=ttl, renew=renew, max_hold=max_hold)
        if name.startswith(DOCUMENT):
            return locks.rwlock(name, ttl=ttl, renew=renew, max_hold=max_hold).reader
        limit = rng.choice((3, 3, 3, 2))  # a new limit is being rolled out
        permits = rng.choice((1, 1, 2))
        return locks.semaphore(name, limit, permits=permits, ttl=ttl, renew=renew, max_hold=max_hold)

    async def _use(self, me: Process, lease: AsyncLease | AsyncLeaseSet, rng: Random) -> None:
        try:
            await me.sleep(rng.choice((0.0, 0.01, 0.2, 1.2, 3.0)) * self.ttl * rng.random())
            if isinstance(lease, AsyncLease):
                await self._work(lease, rng)
        except GeneratorExit:
            raise  # the run is over: no await is possible any more
        except BaseException:
            await lease.release()
            raise
        if not isinstance(lease, AsyncLease) or _must_release(lease) or rng.random() < 0.9:
            await lease.release()

    async def _work(self, lease: AsyncLease, rng: Random) -> None:
        action = rng.random()
        if action < 0.1:
            self.exported.append(lease.export())
        elif action < 0.2:
            await lease.renew(rng.choice((None, None, 2 * self.ttl)))
        elif action < 0.4 and lease.name.startswith(DOCUMENT) and not state_of(lease).weight:
            await lease.downgrade()

    async def _acquire_at_the_end(self, me: Process, locks: AsyncLocks) -> None:
        """The faults are over, so this must succeed."""
        while True:
            try:
                every = [locks.lock(name, ttl=max(self.ttl, SEVERAL_TTL)) for name in self.locks]
                leases = await locks.all_of(*every).acquire()
                if leases is not None:
                    await leases.release()
                    return
            except (StoreError, LeaseLost) as error:
                me.note(type(error).__name__)


def _must_release(lease: AsyncLease) -> bool:
    """A task that drops a lease of a document could not use it in another mode: it would wait for itself."""
    return state_of(lease).renews or lease.name.startswith(DOCUMENT)
