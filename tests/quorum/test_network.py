"""A network that loses requests to some servers, or their replies."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.contract.driver import FLAVOURS, Driver, done, scenario
from tests.quorum.cycles import QUICK, cycles
from tests.support.proxy import FaultProxy
from tests.support.servers import Server


@pytest.fixture
def proxies(shared_servers: list[Server]) -> Iterator[list[FaultProxy]]:
    with ExitStack() as stack:
        yield [stack.enter_context(FaultProxy(server.port)) for server in shared_servers]


@pytest.fixture
def d(flavour: str, proxies: list[FaultProxy]) -> Driver:
    """A quorum behind proxies."""
    return FLAVOURS[flavour]("quorum", [proxy.url for proxy in proxies])  # type: ignore[arg-type]


@pytest.mark.parametrize("direction", ["to_server", "to_client"])
@scenario
async def test_servers_unreachable_in_one_direction_delay_nobody(
    d: Driver, proxies: list[FaultProxy], shared_servers: list[Server], direction: Any
) -> None:
    lock = d.lock()
    await cycles(lock, 3)
    for proxy in proxies[:2]:
        proxy.stall(direction)
    assert await cycles(lock, 15) < QUICK
    for proxy in proxies[:2]:
        proxy.unstall(direction)
    await cycles(lock, 3)
    await d.until(lambda: all(server.raw("EXISTS", "thing") == 0 for server in shared_servers), "no key to be left")


@scenario
async def test_a_vote_whose_reply_was_lost_is_released_too(
    d: Driver, proxies: list[FaultProxy], shared_servers: list[Server]
) -> None:
    for server in shared_servers[2:]:
        server.raw("SET", "thing", "another", "PX", "60000")
    await cycles(d.lock("warm"), 1)
    rule = proxies[0].drop_reply(b"thing", then="silence")
    assert await done(d.lock().acquire(timeout=0)) is None
    assert rule is not None
    await d.until(
        lambda: [server.raw("EXISTS", "thing") for server in shared_servers[:2]] == [0, 0], "no vote to be left"
    )
