"""Five servers, shared by all tests or owned by one, and a driver of either flavour for a quorum of them."""

from collections.abc import Callable, Iterator

import pytest

from tests.contract.driver import FLAVOURS, Driver
from tests.support.servers import Server
from tests.support.topologies import Five, Group


@pytest.fixture(params=FLAVOURS)
def flavour(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture
def shared_servers(shared_group: Callable[[str], Group]) -> list[Server]:
    """Five servers that a test must not disturb."""
    return shared_group("quorum").servers


@pytest.fixture
def d(flavour: str, shared_servers: list[Server]) -> Driver:
    """A quorum of the shared servers."""
    return FLAVOURS[flavour]("quorum", [server.url for server in shared_servers])  # type: ignore[arg-type]


@pytest.fixture
def own_servers() -> Iterator[list[Server]]:
    """Five servers that the test may kill, pause or restart."""
    with Five() as group:
        yield group.servers
