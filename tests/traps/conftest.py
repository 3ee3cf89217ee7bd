"""Fixtures: each flavour in turn, and its clients."""

from collections.abc import Iterator

import pytest

from tests.conftest import require
from tests.support.servers import Server
from tests.traps.flavours import FLAVOURS, Client, Flavour
from tests.traps.long_waits import LongWaits


@pytest.fixture(params=FLAVOURS)
def flavour(request: pytest.FixtureRequest) -> Iterator[Flavour]:
    with FLAVOURS[request.param]() as flavour:
        yield flavour


@pytest.fixture
def us(flavour: Flavour, valkey: Server) -> Client:
    """A client of the shared server."""
    return flavour.connect(valkey.url)


@pytest.fixture
def them(flavour: Flavour, valkey: Server) -> Client:
    """A second client, as in another process."""
    return flavour.connect(valkey.url)


@pytest.fixture(scope="session", autouse=True)
def long_waits() -> Iterator[LongWaits]:
    require("valkey9")
    with Server() as server, FLAVOURS["threads"]() as threads, FLAVOURS["asyncio"]() as tasks:
        yield LongWaits(server, [threads, tasks])
        server.raw("FLUSHALL")  # ends the waits that have no timeout
