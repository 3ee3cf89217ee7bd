"""Servers that are down, paused or restarted empty: a majority keeps working without waiting for them."""

import time
from functools import partial
from typing import Any

import pytest

import lockfast
from tests.contract.driver import FLAVOURS, Driver, done, scenario
from tests.quorum.cycles import QUICK, cycles
from tests.support.servers import Server


@pytest.fixture
def d(flavour: str, own_servers: list[Server]) -> Driver:
    """A quorum of the test's own servers."""
    return FLAVOURS[flavour]("quorum", [server.url for server in own_servers])  # type: ignore[arg-type]


def has(server: Server, holder: str) -> bool:
    return bool(server.raw("GET", "thing") == holder)


@pytest.mark.parametrize("down", [0, 1, 2])
@scenario
async def test_a_majority_keeps_working_when_servers_are_killed(
    d: Driver, own_servers: list[Server], down: int
) -> None:
    lock = d.lock()
    await cycles(lock, 5)
    for server in own_servers[:down]:
        server.kill()
    assert await cycles(lock, 15) < QUICK
    other = d.connect()  # a client that never connected to the killed servers
    assert await cycles(other.lock("thing"), 15) < QUICK


@pytest.mark.parametrize("down", [1, 2])
@scenario
async def test_a_majority_keeps_working_when_servers_are_paused(
    d: Driver, own_servers: list[Server], down: int
) -> None:
    lock = d.lock()
    await cycles(lock, 5)
    for server in own_servers[-down:]:
        server.pause()
    try:
        assert await cycles(lock, 15) < QUICK
        assert await done(d.lock("other", renew=False).acquire(timeout=0)) is not None
    finally:
        for server in own_servers[-down:]:
            server.resume()
    await cycles(lock, 3)
    left = [server.raw("EXISTS", "thing") for server in own_servers]
    await d.until(lambda: all(server.raw("EXISTS", "thing") == 0 for server in own_servers), f"no key, not {left}")


@scenario
async def test_the_error_without_a_majority_has_the_vote_of_each_server(d: Driver, own_servers: list[Server]) -> None:
    lock = d.lock()
    await cycles(lock, 3)
    for server in own_servers[2:]:
        server.kill()
    with pytest.raises(lockfast.QuorumNotReached) as caught:
        await done(lock.acquire(timeout=0.3))
    error = caught.value
    assert isinstance(error, lockfast.StoreUnavailable)
    assert [address for address, _ in error.votes] == [server.url for server in own_servers]
    assert all(server.url in str(error) for server in own_servers)
    await d.until(
        lambda: all(server.raw("EXISTS", "thing") == 0 for server in own_servers[:2]), "the votes to be released"
    )


@scenario
async def test_a_waiter_gets_the_lock_when_a_majority_is_back(d: Driver, own_servers: list[Server]) -> None:
    await cycles(d.lock(), 3)
    for server in own_servers[2:]:
        server.kill()

    async def waiter() -> Any:
        return await done(d.lock("thing", renew=False).acquire(timeout=20))

    waiting = d.start(waiter)
    await d.pause()
    for server in own_servers[2:]:
        server.start()
    assert await waiting.result() is not None


@scenario
async def test_a_lease_is_renewed_by_a_majority_and_restored_on_servers_that_forgot_it(
    d: Driver, own_servers: list[Server]
) -> None:
    lost: list[Any] = []
    lease = await done(d.lock(ttl=1.8, on_lost=lost.append).acquire())
    for server in own_servers:  # a rolling restart must not lose the lock
        server.restart()
        await d.until(partial(has, server, lease.holder), "the lease to be restored")
    assert lost == []
    lease.ensure_held()
    assert await done(lease.release()) is True


@scenario
async def test_a_lease_without_a_majority_is_lost_and_removed_from_the_rest(
    d: Driver, own_servers: list[Server]
) -> None:
    lost: list[Any] = []
    lease = await done(d.lock(ttl=3, on_lost=lost.append).acquire())
    for server in own_servers[:3]:
        server.raw("SET", "thing", "another", "PX", "20000")
    await d.until(lambda: lost, "the loss to be reported")
    assert lease.state is lockfast.State.LOST
    await d.until(
        lambda: [server.raw("EXISTS", "thing") for server in own_servers[3:]] == [0, 0], "the rest to be removed"
    )
    assert [server.raw("GET", "thing") for server in own_servers[:3]] == ["another"] * 3


@scenario
async def test_restarted_servers_do_not_vote_while_they_sit_out(d: Driver, own_servers: list[Server]) -> None:
    """They may have forgotten grants, so they do not vote until those have expired."""
    locks = d.connect(sits_out=3600)
    with pytest.raises(lockfast.QuorumNotReached) as caught:
        await done(locks.lock("thing").acquire(timeout=0.5))
    assert {vote for _, vote in caught.value.votes} == {"restarted, does not vote yet"}
    assert [server.raw("EXISTS", "thing") for server in own_servers] == [0] * 5
    assert (await done(locks.guarantees())).facts.sits_out == 3600


@scenario
async def test_servers_vote_again_after_sitting_out(d: Driver, own_servers: list[Server]) -> None:
    began = time.monotonic()
    own_servers[0].restart()
    locks = d.connect(sits_out=1.0)
    for server in own_servers[3:]:
        server.kill()
    assert await done(locks.lock("thing").acquire(timeout=20)) is not None
    assert time.monotonic() - began > 0.9


@scenario
async def test_a_server_that_logs_every_grant_does_not_sit_out(d: Driver, own_servers: list[Server]) -> None:
    for server in own_servers[:3]:
        server.raw("CONFIG", "SET", "appendonly", "yes")
        server.raw("CONFIG", "SET", "appendfsync", "always")
    locks = d.connect(sits_out=3600)
    assert await done(locks.lock("thing").acquire(timeout=20)) is not None
    assert [server.raw("EXISTS", "thing") for server in own_servers] == [1, 1, 1, 0, 0]


@scenario
async def test_a_release_works_on_servers_that_lost_their_scripts(d: Driver, own_servers: list[Server]) -> None:
    """Once a majority has replied, nobody reads that a script is missing on the others."""
    for _ in range(10):
        lease = await done(d.lock().acquire(timeout=20))
        for server in own_servers:
            server.raw("SCRIPT", "FLUSH")
        assert await done(lease.release()) is True
        await d.until(
            lambda: all(server.raw("EXISTS", "thing") == 0 for server in own_servers), "all servers to be free"
        )
