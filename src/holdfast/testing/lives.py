"""What the clients of a simulation do with their lives: everything that a lock can be used for, as chance will have it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from holdfast.connection import AsyncLocks
from holdfast.errors import LeaseLost, StoreError
from holdfast.leases import AsyncLease
from holdfast.testing.process import Process, Program


@dataclass
class Shared:
    """What all clients know. `exported` holds leases that wait for somebody who adopts them."""

    locks: tuple[str, ...]
    ttl: float
    seconds: float
    liveness: bool
    exported: list[str] = field(default_factory=list)


def life(shared: Shared, chance: Random, local: Callable[[float], float]) -> Program:
    """Use locks until the time is over; then, if that is asked for, get one once more."""

    async def program(me: Process) -> None:
        locks = me.locks(store_timeout=max(2.0, 2 * shared.ttl))
        while me.now() < local(shared.seconds):
            await me.sleep(chance.expovariate(1.0))
            try:
                await _once(me, locks, shared, chance)
            except (StoreError, LeaseLost, asyncio.CancelledError) as error:
                me.note(type(error).__name__)
        if shared.liveness:
            await _last_time(me, locks, shared)

    return program


async def _once(me: Process, locks: AsyncLocks, shared: Shared, chance: Random) -> None:
    renew = chance.random() < 0.5
    if shared.exported and chance.random() < 0.5:
        lease: AsyncLease | None = await locks.adopt(shared.exported.pop(), renew=renew)
    else:
        lock = locks.lock(chance.choice(shared.locks), ttl=shared.ttl, renew=renew)
        timeout = chance.choice((0.0, 0.3 * shared.ttl, 2 * shared.ttl, None))
        me.cancellable = True
        try:
            lease = await lock.acquire(timeout=timeout)
        finally:
            me.cancellable = False
    me.holds(lease)
    if lease is not None:
        await _use(me, lease, shared, chance, forgetful=not renew)


async def _use(me: Process, lease: AsyncLease, shared: Shared, chance: Random, *, forgetful: bool) -> None:
    await me.sleep(chance.choice((0.0, 0.01, 0.2, 1.2)) * shared.ttl * chance.random())
    what = chance.random()
    if what < 0.1:
        shared.exported.append(lease.export())
        return
    if what < 0.2:
        await lease.renew()
    elif what < 0.25 and forgetful:
        return  # forgotten, as in a program that has lost the lease object: the ttl decides
    await lease.release()


async def _last_time(me: Process, locks: AsyncLocks, shared: Shared) -> None:
    """Everything is well again, so this must succeed."""
    while True:
        try:
            lease = await locks.lock(shared.locks[0], ttl=shared.ttl).acquire()
            me.holds(lease)
            if lease is not None:
                await lease.release()
                return
        except (StoreError, LeaseLost) as error:
            me.note(type(error).__name__)
