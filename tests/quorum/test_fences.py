"""Fences on real servers: one and the same on a majority before it is used, and greater than all before."""

from functools import partial
from typing import Any

import pytest

from lockfast.testing import contract
from lockfast.testing.contract import run_check
from lockfast.values import Claim
from tests.contract.driver import FLAVOURS, Driver, done, scenario
from tests.quorum.cycling import cycles
from tests.support.proxy import FaultProxy
from tests.support.servers import Server

META = "lockfast:{thing}:m"


def fences(servers: list[Server]) -> list[int]:
    """The last fence that each server remembers."""
    return [int((server.raw("GET", META) or "0").split(" ")[0]) for server in servers]


def agree(servers: list[Server], fence: int) -> bool:
    return fences(servers).count(fence) >= 3


@pytest.fixture
def d(flavour: str, fragile: list[Server]) -> Driver:
    """A quorum of servers that may be harmed."""
    return FLAVOURS[flavour]("quorum", [server.url for server in fragile])  # type: ignore[arg-type]


@scenario
async def test_all_nodes_give_the_same_fence(d: Driver, fragile: list[Server]) -> None:
    for _ in range(3):
        lease = await done(d.lock().acquire(timeout=5))
        fence = lease.fence
        await d.until(partial(agree, fragile, fence), "a majority with that fence")
        assert await done(lease.release()) is True


@scenario
async def test_the_largest_is_written_back_to_a_majority_before_it_is_used(d: Driver, fragile: list[Server]) -> None:
    await cycles(d.lock(), 1)
    ahead = max(fences(fragile)) + 3_600_000_000
    fragile[0].raw("SET", META, f"{ahead} someon else:1:")
    fragile[3].pause()
    fragile[4].pause()
    try:
        lease = await done(d.lock().acquire(timeout=5))
    finally:
        fragile[3].resume()
        fragile[4].resume()
    assert lease.fence > ahead
    assert sum(fence >= lease.fence for fence in fences(fragile)) >= 3
    assert await done(lease.release()) is True
    fragile[0].kill()
    later = await done(d.connect().lock("thing").acquire(timeout=5))
    assert later.fence > lease.fence


@scenario
async def test_majorities_that_share_one_node_only(d: Driver, fragile: list[Server]) -> None:
    seen: list[int] = []

    async def take_with_only(*awake: int) -> Any:
        others = [server for number, server in enumerate(fragile) if number not in awake]
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
        await take_with_only(*awake)
        await d.until(lambda: all(server.raw("EXISTS", "thing") == 0 for server in fragile), "all to be free")
    assert seen == sorted(set(seen))


@scenario
async def test_fences_go_on_when_every_server_has_forgotten_everything(d: Driver, fragile: list[Server]) -> None:
    lease = await done(d.lock().acquire(timeout=5))
    await done(lease.release())
    for server in fragile:
        server.restart()
    later = await done(d.lock().acquire(timeout=9))
    assert later.fence > lease.fence


@scenario
async def test_a_request_repeated_after_another_had_the_lock_gets_a_greater_fence(d: Driver) -> None:
    store, now = d.locks.store, d.locks.runtime.now
    claim = Claim("thing", "one-who-repeats", 0.3, "host:1:")
    first = await store.acquire(claim, None, now() + 5)
    assert await store.acquire(claim, None, now() + 5) == first
    between = await done(d.connect().lock("thing").acquire(timeout=5))
    assert await done(between.release()) is True
    last = await store.acquire(claim, None, now() + 5)
    assert first.fence < between.fence < last.fence
    assert await store.release("thing", claim.holder, now() + 5) is True


@scenario
async def test_a_look_at_all_locks_bears_a_node_that_is_ahead(
    d: Driver, fragile: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What reaches one of the nodes late gets a fence by that node's clock, greater than what the others agreed on."""
    monkeypatch.setattr("lockfast.core.quorum.store.REPLY_TIMEOUT", 10.0)  # a check asks once, a lock would ask again
    with FaultProxy(fragile[2].port) as proxy:
        proxy.delay_requests(b"contract:", 0.02)
        urls = [server.url for server in fragile]
        urls[2] = proxy.url
        late = type(d)("quorum", urls)  # type: ignore[arg-type]
        await run_check(contract.listing, lambda: late.connect().store, d.locks.runtime)
