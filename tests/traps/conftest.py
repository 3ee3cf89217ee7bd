"""Fixtures: one colour after the other, and clients of it."""

from collections.abc import Iterator

import pytest

from tests.conftest import require
from tests.support.servers import Server
from tests.traps.flavours import FLAVOURS, Client, Colour
from tests.traps.long_waits import LongWaits


@pytest.fixture(params=FLAVOURS)
def flavour(request: pytest.FixtureRequest) -> Iterator[Colour]:
    with FLAVOURS[request.param]() as flavour:
        yield flavour


@pytest.fixture
def us(flavour: Colour, valkey: Server) -> Client:
    """A client of the shared server."""
    return flavour.connect(valkey.url)


@pytest.fixture
def them(flavour: Colour, valkey: Server) -> Client:
    """Another one, as in another process."""
    return flavour.connect(valkey.url)


@pytest.fixture(scope="session", autouse=True)
def long_waits() -> Iterator[LongWaits]:
    require("valkey9")
    with Server() as server, FLAVOURS["threads"]() as threads, FLAVOURS["asyncio"]() as tasks:
        yield LongWaits(server, [threads, tasks])
        server.raw("FLUSHALL")  # whoever still waits may go
