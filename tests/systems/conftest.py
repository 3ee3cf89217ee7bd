"""Fixtures of the scenarios: `k`, a redis-py client on a server, and `d`, a store; each in one flavour."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.contract.conftest import environment
from tests.contract.driver import Driver
from tests.contract.stores import Environment, on
from tests.support.proxy import FaultProxy
from tests.support.servers import KINDS, Server
from tests.systems.databases import postgres_server
from tests.systems.kit import KITS, Kit

ON_ALL = [pytest.param((kind, flavour), id=f"{kind}-{flavour}") for kind in KINDS for flavour in KITS]
ON_VALKEY = [pytest.param(("valkey9", flavour), id=flavour) for flavour in KITS]
ONE_OF_EACH = ("memory", "sqlite", "valkey9")
"""One store of each kind; the contract suite shows that all servers behave alike."""

__all__ = ["environment"]

on_all_servers = pytest.mark.parametrize("k", ON_ALL, indirect=True)


@pytest.fixture(params=ON_VALKEY)
def k(request: pytest.FixtureRequest, shared_server: Callable[[str], Server]) -> Kit:
    kind, flavour = request.param
    kit: Kit = KITS[flavour](shared_server(kind))
    return kit


@pytest.fixture(params=on(ONE_OF_EACH))
def d(request: pytest.FixtureRequest, environment: Environment) -> Driver:
    """One store in one flavour."""
    return environment.driver(*request.param)


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[Callable[[], str]]:
    """Return the address of the shared PostgreSQL server; the first call starts it."""
    with ExitStack() as stack:
        started: list[str] = []

        def get() -> str:
            if not started:
                started.append(stack.enter_context(postgres_server()))
            return started[0]

        yield get


@pytest.fixture
def unsteady(proxy: FaultProxy) -> Iterator[redis.Redis]:
    """A client without retries, behind a network that can lose replies."""
    with redis.Redis(port=proxy.port, retry=Retry(NoBackoff(), 0)) as client:
        yield client
