"""Server groups whose masters a test may kill; each test gets them healthy."""

from collections.abc import Iterator

import pytest

from tests.conftest import require
from tests.contract.driver import FLAVOURS, Driver
from tests.support.topologies import Cluster, Group, Replicated


@pytest.fixture(scope="package")
def own_sentinel() -> Iterator[Replicated]:
    require("valkey9")
    with Replicated(2, 3) as group:
        yield group


@pytest.fixture(scope="package")
def own_cluster() -> Iterator[Cluster]:
    require("valkey9")
    with Cluster(3) as group:
        yield group


@pytest.fixture(scope="package")
def own_replicated() -> Iterator[Replicated]:
    require("valkey9")
    with Replicated(2) as group:
        yield group


@pytest.fixture
def sentinel(own_sentinel: Replicated) -> Replicated:
    own_sentinel.heal()
    return own_sentinel


@pytest.fixture
def cluster(own_cluster: Cluster) -> Cluster:
    own_cluster.heal()
    return own_cluster


@pytest.fixture
def replicated(own_replicated: Replicated) -> Replicated:
    own_replicated.heal()
    return own_replicated


def driver(flavour: str, group: Group) -> Driver:
    return FLAVOURS[flavour]("group", group.url)


@pytest.fixture(params=FLAVOURS)
def flavour(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name
