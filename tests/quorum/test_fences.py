"""Fences on real servers: a majority has the same one before it is used, and it is greater than all before."""

from functools import partial
from typing import Any

import pytest

from lockfast.testing import contract
from lockfast.testing.contract import run_check
from lockfast.values import Claim
from tests.contract.driver import FLAVOURS, Driver, done, scenario
from tests.quorum.cycles import cycles
from tests.support.proxy import FaultProxy
from tests.support.servers import Server

META = "lockfast:{thing}:m"


def fences(servers: list[Server]) -> list[int]:
    """The last fence that each server remembers."""
    return [int((server.raw("GET", META) or "0").split(" ")[0]) for server in servers]


def agree(servers: list[Server], fence: int) -> bool:
    return fences(servers).count(fence) >= 3


@pytest.fixture
def d(flavour: str, own_servers: list[Server]) -> Driver:
    """A quorum of the test's own servers."""
    return FLAVOURS[flavour]("quorum", [server.url for server in own_servers])  # type: ignore[arg-type]


@scenario
async def test_all_servers_grant_the_same_fence(d: Driver, own_servers: list[Server]) -> None:
    for _ in range(3):
        lease = await done(d.lock().acquire(timeout=5))
        fence = lease.fence
        await d.until(partial(agree, own_servers, fence), "a majority with that fence")
        assert await done(lease.release()) is True


@scenario
async def test_the_highest_fence_is_written_to_a_majority_before_it_is_used(
    d: Driver, own_servers: list[Server]
) -> None:
    await cycles(d.lock(), 1)
    ahead = max(fences(own_servers)) + 3_600_000_000
    own_servers[0].raw("SET", META, f"{ahead} someon else:1:")
    own_servers[3].pause()
    own_servers[4].pause()
    try:
        lease = await done(d.lock().acquire(timeout=5))
    finally:
        own_servers[3].resume()
        own_servers[4].resume()
    assert lease.fence > ahead
    assert sum(fence >= lease.fence for fence in fences(own_servers)) >= 3
    assert await done(lease.release()) is True
    own_servers[0].kill()
    later = await done(d.connect().lock("thing").acquire(timeout=5))
    assert later.fence > lease.fence


@scenario
async def test_fences_grow_across_majorities_that_share_one_server(d: Driver, own_servers: list[Server]) -> None:
    seen: list[int] = []

    async def acquire_with_only(*awake: int) -> Any:
        others = [server for number, server in enumerate(own_servers) if number not in awake]
        for server in others:
            server.pause()
        try:
            lease = await done(d.lock().acquire(timeout=5))
            seen.append(lease.fence)
            await done(lease.release())
        finally:
            for server in others:
                server.resume()

    await cycles(d.lock("warm"), 1)
    for awake in ((0, 1, 2), (2, 3, 4), (0, 1, 4), (1, 2, 3)):
        await acquire_with_only(*awake)
        await d.until(lambda: all(server.raw("EXISTS", "thing") == 0 for server in own_servers), "all to be free")
    assert seen == sorted(set(seen))


@scenario
async def test_fences_grow_after_every_server_restarted_empty(d: Driver, own_servers: list[Server]) -> None:
    lease = await done(d.lock().acquire(timeout=5))
    await done(lease.release())
    for server in own_servers:
        server.restart()
    later = await done(d.lock().acquire(timeout=9))
    assert later.fence > lease.fence


@scenario
async def test_a_claim_repeated_after_another_holder_gets_a_greater_fence(d: Driver) -> None:
    store, now = d.locks.session.store, d.locks.session.runtime.now
    claim = Claim("thing", "repeated-claim", 0.3, "host:1:")
    first = await store.acquire(claim, None, now() + 5)
    assert await store.acquire(claim, None, now() + 5) == first
    between = await done(d.connect().lock("thing").acquire(timeout=5))
    assert await done(between.release()) is True
    last = await store.acquire(claim, None, now() + 5)
    assert first.fence < between.fence < last.fence
    assert await store.release("thing", claim.holder, now() + 5) is True


@scenario
async def test_listing_tolerates_a_server_with_a_higher_fence(
    d: Driver, own_servers: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that a request reaches late grants a fence by its own clock, above the one of the others."""
    monkeypatch.setattr(
        "lockfast.core.quorum.store.REPLY_TIMEOUT", 10.0
    )  # the check sends one request, a lock would retry
    with FaultProxy(own_servers[2].port) as proxy:
        proxy.delay_requests(b"contract:", 0.02)
        urls = [server.url for server in own_servers]
        urls[2] = proxy.url
        late = type(d)("quorum", urls)  # type: ignore[arg-type]
        await run_check(contract.listing, lambda: late.connect().session.store, d.locks.session.runtime)
