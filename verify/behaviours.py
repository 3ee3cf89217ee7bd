"""What the clients of a simulation do with their lives: all that a lock can be used for, as chance will have it.

Like a `with` block, a life gives back what it holds however the work under it ended, except where a program would have
lost the lease object altogether.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from lockfast.client.lease import AsyncLease
from lockfast.client.locks import AsyncLocks
from lockfast.errors import LeaseLost, StoreError
from verify.process import Process, Program


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
            me.cancellable = True
            try:
                await _once(me, locks, shared, chance)
            except (StoreError, LeaseLost, asyncio.CancelledError) as error:
                me.note(type(error).__name__)
            finally:
                me.cancellable = False
        if shared.liveness:
            await _last_time(me, locks, shared)

    return program


async def _once(me: Process, locks: AsyncLocks, shared: Shared, chance: Random) -> None:
    renew = chance.random() < 0.5
    if shared.exported and chance.random() < 0.5:
        lease: AsyncLease | None = await locks.adopt(shared.exported.pop(), renew=renew)
    else:
        max_hold = chance.choice((None, None, 0.7 * shared.ttl, 3 * shared.ttl))
        lock = locks.lock(chance.choice(shared.locks), ttl=shared.ttl, renew=renew, max_hold=max_hold)
        timeout = chance.choice((0.0, 0.3 * shared.ttl, 2 * shared.ttl, None))
        sent_at, me.was_stopped = me.now(), False
        lease = await lock.acquire(timeout=timeout)
        if timeout is not None:
            me.waited(sent_at, timeout)
    me.holds(lease)
    if lease is not None:
        await _use(me, lease, shared, chance)


async def _use(me: Process, lease: AsyncLease, shared: Shared, chance: Random) -> None:
    try:
        await _work(me, lease, shared, chance)
    except GeneratorExit:
        raise  # the run is over, and no await is possible any more
    except BaseException:
        await lease.release()
        raise
    if lease._lease_state.renewing or chance.random() < 0.9:  # else forgotten, and the ttl decides
        await lease.release()


async def _work(me: Process, lease: AsyncLease, shared: Shared, chance: Random) -> None:
    await me.sleep(chance.choice((0.0, 0.01, 0.2, 1.2, 3.0)) * shared.ttl * chance.random())
    what = chance.random()
    if what < 0.1:
        shared.exported.append(lease.export())
    elif what < 0.2:
        await lease.renew(chance.choice((None, None, 2 * shared.ttl)))


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
