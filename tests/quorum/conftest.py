"""Five servers, shared or to be harmed, and a driver of either colour for the quorum that they make."""

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
def five(shared_group: Callable[[str], Group]) -> list[Server]:
    """Five servers that nobody may harm."""
    return shared_group("quorum").servers


@pytest.fixture
def d(flavour: str, five: list[Server]) -> Driver:
    """A quorum of servers that nobody may harm."""
    return FLAVOURS[flavour]("quorum", [server.url for server in five])  # type: ignore[arg-type]


@pytest.fixture
def fragile() -> Iterator[list[Server]]:
    """Five servers of the test's own, to kill, pause or restart."""
    with Five() as group:
        yield group.servers
