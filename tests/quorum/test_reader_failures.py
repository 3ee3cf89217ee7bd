"""Readers and downgrades while servers are down, paused or restarted empty."""

from functools import partial
from typing import Any

import pytest

import lockfast
from tests.contract.driver import FLAVOURS, Driver, done, scenario
from tests.quorum.test_readers import has_reader, readers_on
from tests.support.servers import Server


@pytest.fixture
def d(flavour: str, own_servers: list[Server]) -> Driver:
    """A quorum of the test's own servers."""
    return FLAVOURS[flavour]("quorum", [server.url for server in own_servers])  # type: ignore[arg-type]


@scenario
async def test_readers_survive_a_rolling_restart(d: Driver, own_servers: list[Server]) -> None:
    lost: list[Any] = []
    leases = [
        await done(d.connect().rwlock("thing", ttl=1.8, on_lost=lost.append).reader.acquire(timeout=5))
        for _ in range(2)
    ]
    for server in own_servers:
        server.restart()
        for lease in leases:
            await d.until(partial(has_reader, server, lease.holder), "the reader to be restored")
    assert lost == []
    for lease in leases:
        lease.ensure_held()
        assert await done(lease.release()) is True


@scenario
async def test_a_reader_without_a_majority_is_lost_and_removed_from_the_rest(
    d: Driver, own_servers: list[Server]
) -> None:
    lost: list[Any] = []
    lease = await done(d.locks.rwlock("thing", ttl=1.8, on_lost=lost.append).reader.acquire(timeout=5))
    await d.until(lambda: all(has_reader(server, lease.holder) for server in own_servers), "all grants")
    for server in own_servers[:3]:
        server.restart()
    await d.until(lambda: lost, "the loss")
    await d.until(lambda: not any(readers_on(server) for server in own_servers), "all votes to be removed")


@scenario
async def test_a_writer_waits_for_a_reader_while_two_servers_are_down(d: Driver, own_servers: list[Server]) -> None:
    reader = await done(d.connect().rwlock("thing").reader.acquire(timeout=5))
    for server in own_servers[:2]:
        server.kill()
    assert await done(d.connect().lock("thing").acquire(timeout=0)) is None
    assert await done(reader.release()) is True
    writer = await done(d.connect().lock("thing").acquire(timeout=5))
    assert writer.fence > reader.fence
    for server in own_servers[:2]:
        server.start()
    assert await done(writer.release()) is True


@scenario
async def test_a_downgrade_reaches_paused_servers_later(d: Driver, own_servers: list[Server]) -> None:
    lease = await done(d.locks.rwlock("thing", ttl=1.8).writer.acquire(timeout=5))
    await d.until(lambda: all(server.raw("GET", "thing") == lease.holder for server in own_servers), "all grants")
    own_servers[0].pause()
    own_servers[1].pause()
    try:
        await done(lease.downgrade())
        assert sum(has_reader(server, lease.holder) for server in own_servers[2:]) == 3
    finally:
        own_servers[0].resume()
        own_servers[1].resume()
    await d.until(lambda: all(has_reader(server, lease.holder) for server in own_servers), "all to downgrade")
    lease.ensure_held()
    assert await done(lease.release()) is True


@scenario
async def test_a_downgrade_without_a_majority_can_be_repeated(d: Driver, own_servers: list[Server]) -> None:
    lease = await done(d.locks.rwlock("thing").writer.acquire(timeout=5))
    for server in own_servers[:3]:
        server.pause()
    try:
        with pytest.raises(lockfast.QuorumNotReached):
            await done(lease.downgrade())
    finally:
        for server in own_servers[:3]:
            server.resume()
    await d.until(partial(_reaches_a_majority, d), "a majority")
    await done(lease.downgrade())
    with pytest.raises(lockfast.NotHeld, match="shared already"):
        await done(lease.downgrade())
    reader = await done(d.connect().rwlock("thing").reader.acquire(timeout=5))
    assert reader.fence > lease.fence
    assert await done(reader.release()) is True
    assert await done(lease.release()) is True


async def _reaches_a_majority(d: Driver) -> bool:
    try:
        return bool(await done(d.lock().inspect()))
    except lockfast.QuorumNotReached:
        return False
