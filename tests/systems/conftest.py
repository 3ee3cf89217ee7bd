"""The kit that every scenario is given: both colours, on every server unless a test asks for one."""

from collections.abc import Callable, Iterator

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.support.proxy import FaultProxy
from tests.support.servers import KINDS, Server
from tests.systems.kit import KITS, Kit

ON_ALL = [pytest.param((kind, colour), id=f"{kind}-{colour}") for kind in KINDS for colour in KITS]
ON_VALKEY = [pytest.param(("valkey9", colour), id=colour) for colour in KITS]

on_all_servers = pytest.mark.parametrize("k", ON_ALL, indirect=True)


@pytest.fixture(params=ON_VALKEY)
def k(request: pytest.FixtureRequest, shared_server: Callable[[str], Server]) -> Kit:
    kind, colour = request.param
    kit: Kit = KITS[colour](shared_server(kind))
    return kit


@pytest.fixture
def unsteady(proxy: FaultProxy) -> Iterator[redis.Redis]:
    """A client that does not repeat by itself what got no answer, behind a network that loses things."""
    with redis.Redis(port=proxy.port, retry=Retry(NoBackoff(), 0)) as client:
        yield client
