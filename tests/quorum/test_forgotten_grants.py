"""Servers that restart without persistence forget their grants: how many let a second holder in, and the cure.

A server lacks a lease if it was unreachable at the grant or has forgotten it since. Three of five that lack a lease
can grant the lock again. So three restarts are needed after a grant by all five, but one is enough after a grant by
three. The restarts need not coincide.
"""

import time
from typing import Any

import pytest

import lockfast
from tests.contract.driver import FLAVOURS, Driver, done, scenario
from tests.quorum.test_contention import ENOUGH, contend
from tests.support.servers import Server

SIT_OUT = 2.0


@pytest.fixture
def d(flavour: str, own_servers: list[Server]) -> Driver:
    """A quorum of the test's own servers."""
    return FLAVOURS[flavour]("quorum", [server.url for server in own_servers])  # type: ignore[arg-type]


async def acquire_on(d: Driver, servers: list[Server]) -> Any:
    """Acquire the lock without renewal, and wait until all of `servers` have the grant."""
    lease = await done(d.connect().lock("thing", ttl=60, renew=False).acquire(timeout=5))
    await d.until(lambda: all(server.raw("GET", "thing") == lease.holder for server in servers), "all grants")
    return lease


@pytest.mark.parametrize(("unreachable", "restarts"), [(0, 3), (1, 2), (2, 1)])
@scenario
async def test_a_second_holder_gets_in_when_three_of_five_servers_lack_the_lease(
    d: Driver, own_servers: list[Server], unreachable: int, restarts: int
) -> None:
    away, granting = own_servers[:unreachable], own_servers[unreachable:]
    for server in away:
        server.kill()
    first = await acquire_on(d, granting)
    for server in away:
        server.start()
    rival = d.connect().lock("thing")
    for server in granting[:restarts]:
        assert await done(rival.acquire(timeout=0)) is None, "fewer servers are not enough"
        server.restart()
    second = await done(d.connect().lock("thing").acquire(timeout=5))
    assert second is not None
    assert second.fence > first.fence
    first.ensure_held()  # its holder cannot know yet: only a check of the fence keeps it out


@scenario
async def test_no_second_holder_gets_in_while_restarted_servers_sit_out(d: Driver, own_servers: list[Server]) -> None:
    lock = d.connect(sits_out=SIT_OUT).lock("thing", ttl=SIT_OUT, renew=False)
    await done((await done(lock.acquire(timeout=20))).release())  # all servers vote by now
    began = time.monotonic()
    await done(lock.acquire(timeout=5))
    for server in own_servers:
        server.restart()
    rival = d.connect(sits_out=SIT_OUT).lock("thing")
    while True:
        try:
            second = await done(rival.acquire(timeout=20))
            break
        except lockfast.QuorumNotReached:
            assert time.monotonic() - began < 20
    assert second is not None
    assert time.monotonic() - began > SIT_OUT


@pytest.mark.faults
@scenario
async def test_rolling_restarts_cause_no_overlap_while_restarted_servers_sit_out(
    d: Driver, own_servers: list[Server]
) -> None:
    async def restart() -> None:
        for server in own_servers * 2:
            server.restart()
            for _ in range(300):
                await d.pause()

    restarting = d.start(restart)
    section = await contend(d, rounds=20, rivals=3, tries=False, ttl=SIT_OUT, may_be_lost=True, sits_out=SIT_OUT)
    assert section.fences == sorted(set(section.fences))
    await d.until(lambda: restarting.ended, "the restarts to end", ENOUGH)
