"""The lock that a failover loses: a replica takes over that never heard of it.

Without acknowledgement two hold it, and both know: the second by its grant, the first by being told; and the second has
the greater fence. With acknowledgement the grant is given back before anybody relies on it.
"""

import pytest

from lockfast import LeaseLost, State, StoreUnavailable
from tests.contract.driver import done
from tests.support.topologies import Replicated
from tests.topology.conftest import driver


def cut_off(group: Replicated) -> None:
    """From now on no replica hears of anything, and nobody minds."""
    group.steady()
    for replica in group.replicas():
        replica.pause()
    group.master().raw("CLIENT", "KILL", "TYPE", "replica")


def fail_over(group: Replicated) -> None:
    """The master dies with what it alone knew, and a replica takes over: one, and once."""
    old = group.master()
    old.kill()
    for server in group.data:
        if server is not old:
            server.resume()
    group.fail_over(old)


@pytest.mark.system("C6")
def test_without_acknowledgement_both_hold_and_both_are_told(sentinel: Replicated, flavour: str) -> None:
    """The first does not renew by itself, so that the second is sure to be faster."""
    d = driver(flavour, sentinel)
    told: list[str] = []

    async def play() -> None:
        first, second = d.connect(), d.connect()
        await done(first.lock("warm").locked())
        cut_off(sentinel)
        lock = first.lock("thing", ttl=25, renew=False, on_lost=lambda lease: told.append(lease.holder))
        lost = await done(lock.acquire(timeout=5))
        fail_over(sentinel)
        lease = await done(second.lock("thing").acquire(timeout=15))
        assert lease.fence > lost.fence
        assert (lost.state, lease.state) == (State.HELD, State.HELD)
        with pytest.raises(LeaseLost, match="another was faster"):
            await done(lost.renew())
        assert lost.reasserted == 0
        await d.until(lambda: told == [lost.holder], "the first to be told")
        assert lease.state is State.HELD

    d.run(play())


@pytest.mark.system("C6")
def test_with_acknowledgement_nobody_holds_what_can_be_lost(sentinel: Replicated, flavour: str) -> None:
    d = driver(flavour, sentinel)

    async def play() -> None:
        first = d.connect(replicas=1, replica_timeout=0.3)
        await done(first.lock("warm").locked())
        cut_off(sentinel)
        with pytest.raises(StoreUnavailable, match=r"0 of the 1 replicas asked for acknowledged it within 0.3 s"):
            await done(first.lock("thing", ttl=20).acquire(timeout=0))
        assert sentinel.master().raw("EXISTS", "thing") == 0
        fail_over(sentinel)
        lease = await done(first.lock("thing", ttl=20).acquire(timeout=15))
        assert lease.acknowledged >= 1
        assert sentinel.master().raw("GET", "thing") == lease.holder

    d.run(play())


def test_a_lease_that_nobody_took_meanwhile_goes_on(sentinel: Replicated, flavour: str) -> None:
    """Re-asserted: the same holder and the same fence, and later grants get a greater one."""
    d = driver(flavour, sentinel)

    async def play() -> None:
        locks = d.connect()
        await done(locks.lock("warm").locked())
        cut_off(sentinel)
        lease = await done(locks.lock("thing", ttl=20).acquire(timeout=5))
        fail_over(sentinel)
        await d.until(lambda: lease.reasserted == 1, "the lease to be taken back in", 15)
        assert lease.state is State.HELD
        info = await done(locks.lock("thing").inspect())
        assert (info.holder, info.fence) == (lease.holder, lease.fence)
        assert await done(lease.release())
        assert (await done(locks.lock("thing").acquire(timeout=5))).fence > lease.fence

    d.run(play())
