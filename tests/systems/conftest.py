"""What the scenarios are given: a kit of servers and clients in both colours, or a driver of a store in one colour."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.contract.driver import FLAVOURS, Driver
from tests.contract.stores import STORES, Surroundings
from tests.support.proxy import FaultProxy
from tests.support.servers import KINDS, Server
from tests.support.topologies import Group
from tests.systems.databases import postgres_server
from tests.systems.kit import KITS, Kit

ON_ALL = [pytest.param((kind, flavour), id=f"{kind}-{flavour}") for kind in KINDS for flavour in KITS]
ON_VALKEY = [pytest.param(("valkey9", flavour), id=flavour) for flavour in KITS]
ONE_OF_EACH = ("memory", "sqlite", "valkey9")
"""One store of each kind: that all servers behave alike is shown by the contract suite."""

on_all_servers = pytest.mark.parametrize("k", ON_ALL, indirect=True)


@pytest.hookimpl(tryfirst=True)  # before what has the mark is left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Etcd and ZooKeeper keep the contract in one colour each here, and in the other in `make faults`."""
    for item in items:
        name, _, parameters = item.name.partition("[")
        if name.startswith("test_c7_the_contract") and not parameters.startswith(("etcd-asyncio", "zookeeper-threads")):
            item.add_marker(pytest.mark.faults)


@pytest.fixture(params=ON_VALKEY)
def k(request: pytest.FixtureRequest, shared_server: Callable[[str], Server]) -> Kit:
    kind, flavour = request.param
    kit: Kit = KITS[flavour](shared_server(kind))
    return kit


@pytest.fixture(
    params=[pytest.param((one, flavour), id=f"{one}-{flavour}") for one in ONE_OF_EACH for flavour in FLAVOURS]
)
def d(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    shared_server: Callable[[str], Server],
    shared_group: Callable[[str], Group],
) -> Driver:
    """One store in one colour."""
    store, flavour = request.param
    enqueue = STORES[store](Surroundings(tmp_path, shared_server, shared_group))
    return FLAVOURS[flavour](store, enqueue.url, enqueue.server)


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[Callable[[], str]]:
    """Give the address of the shared PostgreSQL server; it is started when first asked for."""
    with ExitStack() as stack:
        started: list[str] = []

        def get() -> str:
            if not started:
                started.append(stack.enter_context(postgres_server()))
            return started[0]

        yield get


@pytest.fixture
def unsteady(proxy: FaultProxy) -> Iterator[redis.Redis]:
    """A client that does not repeat by itself what got no answer, behind a network that loses things."""
    with redis.Redis(port=proxy.port, retry=Retry(NoBackoff(), 0)) as client:
        yield client
