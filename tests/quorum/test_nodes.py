"""Nodes that are down, paused or restarted empty: a majority goes on, and nobody waits for them."""

import time
from functools import partial
from typing import Any

import pytest

import lockfast
from tests.contract.driver import FLAVOURS, Driver, done, scenario
from tests.quorum.cycling import QUICK, cycles
from tests.support.servers import Server


@pytest.fixture
def d(flavour: str, fragile: list[Server]) -> Driver:
    """A quorum of servers that may be harmed."""
    return FLAVOURS[flavour]("quorum", [server.url for server in fragile])  # type: ignore[arg-type]


def has(server: Server, holder: str) -> bool:
    return bool(server.raw("GET", "thing") == holder)


@pytest.mark.parametrize("down", [0, 1, 2])
@scenario
async def test_a_majority_goes_on_when_nodes_are_killed(d: Driver, fragile: list[Server], down: int) -> None:
    lock = d.lock()
    await cycles(lock, 5)
    for server in fragile[:down]:
        server.kill()
    assert await cycles(lock, 15) < QUICK
    other = d.connect()  # one that never met the dead
    assert await cycles(other.lock("thing"), 15) < QUICK


@pytest.mark.parametrize("down", [1, 2])
@scenario
async def test_a_majority_goes_on_when_nodes_are_paused(d: Driver, fragile: list[Server], down: int) -> None:
    lock = d.lock()
    await cycles(lock, 5)
    for server in fragile[-down:]:
        server.pause()
    try:
        assert await cycles(lock, 15) < QUICK
        assert await done(d.lock("other", renew=False).acquire(timeout=0)) is not None
    finally:
        for server in fragile[-down:]:
            server.resume()
    await cycles(lock, 3)
    left = [server.raw("EXISTS", "thing") for server in fragile]
    await d.until(lambda: all(server.raw("EXISTS", "thing") == 0 for server in fragile), f"no key, not {left}")


@scenario
async def test_without_a_majority_it_says_what_each_node_said(d: Driver, fragile: list[Server]) -> None:
    lock = d.lock()
    await cycles(lock, 3)
    for server in fragile[2:]:
        server.kill()
    with pytest.raises(lockfast.QuorumNotReached) as caught:
        await done(lock.acquire(timeout=0.3))
    error = caught.value
    assert isinstance(error, lockfast.StoreUnavailable)
    assert [address for address, _ in error.votes] == [server.url for server in fragile]
    assert all(server.url in str(error) for server in fragile)
    await d.until(
        lambda: all(server.raw("EXISTS", "thing") == 0 for server in fragile[:2]), "what was taken to be freed"
    )


@scenario
async def test_who_waits_without_a_majority_gets_the_lock_when_nodes_come_back(
    d: Driver, fragile: list[Server]
) -> None:
    await cycles(d.lock(), 3)
    for server in fragile[2:]:
        server.kill()

    async def waiter() -> Any:
        return await done(d.lock("thing", renew=False).acquire(timeout=20))

    waiting = d.start(waiter)
    await d.pause()
    for server in fragile[2:]:
        server.start()
    assert await waiting.result() is not None


@scenario
async def test_a_lease_is_renewed_by_a_majority_and_put_back_where_it_was_forgotten(
    d: Driver, fragile: list[Server]
) -> None:
    lost: list[Any] = []
    lease = await done(d.lock(ttl=1.8, on_lost=lost.append).acquire())
    for server in fragile:  # one after the other: nobody may lose the lock to a rolling restart
        server.restart()
        await d.until(partial(has, server, lease.holder), "the lease to be put back")
    assert lost == []
    lease.ensure_held()
    assert await done(lease.release()) is True


@scenario
async def test_a_lease_whose_majority_forgot_it_is_lost_and_its_rest_removed(d: Driver, fragile: list[Server]) -> None:
    lost: list[Any] = []
    lease = await done(d.lock(ttl=3, on_lost=lost.append).acquire())
    for server in fragile[:3]:
        server.raw("SET", "thing", "another", "PX", "20000")
    await d.until(lambda: lost, "the loss to be told")
    assert lease.state is lockfast.State.LOST
    await d.until(lambda: [server.raw("EXISTS", "thing") for server in fragile[3:]] == [0, 0], "the rest to be removed")
    assert [server.raw("GET", "thing") for server in fragile[:3]] == ["another"] * 3


@scenario
async def test_nodes_that_restarted_lately_sit_out(d: Driver, fragile: list[Server]) -> None:
    """They may have forgotten what they granted, so they do not count until that has run out."""
    locks = d.connect(sits_out=3600)
    with pytest.raises(lockfast.QuorumNotReached) as caught:
        await done(locks.lock("thing").acquire(timeout=0.5))
    assert {vote for _, vote in caught.value.votes} == {"restarted, does not vote yet"}
    assert [server.raw("EXISTS", "thing") for server in fragile] == [0] * 5
    assert (await done(locks.guarantees())).facts.sits_out == 3600


@scenario
async def test_nodes_count_again_when_they_have_sat_out(d: Driver, fragile: list[Server]) -> None:
    began = time.monotonic()
    fragile[0].restart()
    locks = d.connect(sits_out=1.0)
    for server in fragile[3:]:
        server.kill()
    assert await done(locks.lock("thing").acquire(timeout=20)) is not None
    assert time.monotonic() - began > 0.9


@scenario
async def test_a_node_that_keeps_every_grant_on_disk_need_not_sit_out(d: Driver, fragile: list[Server]) -> None:
    for server in fragile[:3]:
        server.raw("CONFIG", "SET", "appendonly", "yes")
        server.raw("CONFIG", "SET", "appendfsync", "always")
    locks = d.connect(sits_out=3600)
    assert await done(locks.lock("thing").acquire(timeout=20)) is not None
    assert [server.raw("EXISTS", "thing") for server in fragile] == [1, 1, 1, 0, 0]


@scenario
async def test_a_release_does_not_depend_on_scripts_that_a_node_has_lost(d: Driver, fragile: list[Server]) -> None:
    """Once a majority has answered, nobody hears that a script is missing on the others."""
    for _ in range(10):
        lease = await done(d.lock().acquire(timeout=20))
        for server in fragile:
            server.raw("SCRIPT", "FLUSH")
        assert await done(lease.release()) is True
        await d.until(lambda: all(server.raw("EXISTS", "thing") == 0 for server in fragile), "all nodes to be free")
