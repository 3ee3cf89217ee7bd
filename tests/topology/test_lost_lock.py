"""A failover to a replica that never received the grant.

Without acknowledgement two clients hold the lock: the second has the greater fence, and the first learns of its loss.
With acknowledgement the grant is released before a caller relies on it.
"""

import pytest

from lockfast import LeaseLost, State, StoreUnavailable
from tests.contract.driver import done
from tests.support.topologies import Replicated
from tests.topology.conftest import driver


def cut_off(group: Replicated) -> None:
    """Stop replication without a failover."""
    group.steady()
    for replica in group.replicas():
        replica.pause()
    group.master().raw("CLIENT", "KILL", "TYPE", "replica")


def fail_over(group: Replicated) -> None:
    """Kill the master with its unreplicated writes; one replica takes over."""
    old = group.master()
    old.kill()
    for server in group.data:
        if server is not old:
            server.resume()
    group.fail_over(old)


@pytest.mark.system("C6")
def test_without_acknowledgement_two_clients_hold_and_the_first_learns_of_its_loss(
    sentinel: Replicated, flavour: str
) -> None:
    """The first client does not renew, so the second always acquires first."""
    d = driver(flavour, sentinel)
    reported: list[str] = []

    async def play() -> None:
        first, second = d.connect(), d.connect()
        await done(first.lock("warm").locked())
        cut_off(sentinel)
        lock = first.lock("thing", ttl=25, renew=False, on_lost=lambda lease: reported.append(lease.holder))
        lost = await done(lock.acquire(timeout=5))
        fail_over(sentinel)
        lease = await done(second.lock("thing").acquire(timeout=15))
        assert lease.fence > lost.fence
        assert (lost.state, lease.state) == (State.HELD, State.HELD)
        with pytest.raises(LeaseLost, match="another client was faster"):
            await done(lost.renew())
        assert lost.reasserted == 0
        await d.until(lambda: reported == [lost.holder], "the loss to be reported")
        assert lease.state is State.HELD

    d.run(play())


@pytest.mark.system("C6")
def test_with_acknowledgement_an_unreplicated_grant_is_released(sentinel: Replicated, flavour: str) -> None:
    d = driver(flavour, sentinel)

    async def play() -> None:
        first = d.connect(replicas=1, replica_timeout=0.3)
        await done(first.lock("warm").locked())
        cut_off(sentinel)
        with pytest.raises(StoreUnavailable, match=r"0 of the 1 required replicas acknowledged it within 0\.3 s"):
            await done(first.lock("thing", ttl=20).acquire(timeout=0))
        assert sentinel.master().raw("EXISTS", "thing") == 0
        fail_over(sentinel)
        lease = await done(first.lock("thing", ttl=20).acquire(timeout=15))
        assert lease.acknowledged >= 1
        assert sentinel.master().raw("GET", "thing") == lease.holder

    d.run(play())


def test_lease_is_reasserted_if_the_lock_stayed_free(sentinel: Replicated, flavour: str) -> None:
    """It keeps its holder id and its fence; later grants get a greater fence."""
    d = driver(flavour, sentinel)

    async def play() -> None:
        locks = d.connect()
        await done(locks.lock("warm").locked())
        cut_off(sentinel)
        lease = await done(locks.lock("thing", ttl=20).acquire(timeout=5))
        fail_over(sentinel)
        await d.until(lambda: lease.reasserted == 1, "the lease to be reasserted", 15)
        assert lease.state is State.HELD
        info = await done(locks.lock("thing").inspect())
        assert (info.holder, info.fence) == (lease.holder, lease.fence)
        assert await done(lease.release())
        assert (await done(locks.lock("thing").acquire(timeout=5))).fence > lease.fence

    d.run(play())
