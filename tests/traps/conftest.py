"""Fixtures: one colour after the other, and clients of it."""

from collections.abc import Iterator

import pytest

from tests.conftest import require
from tests.support.servers import Server
from tests.traps.colours import COLOURS, Client, Colour
from tests.traps.long_waits import LongWaits


@pytest.fixture(params=COLOURS)
def colour(request: pytest.FixtureRequest) -> Iterator[Colour]:
    with COLOURS[request.param]() as colour:
        yield colour


@pytest.fixture
def us(colour: Colour, valkey: Server) -> Client:
    """A client of the shared server."""
    return colour.connect(valkey.url)


@pytest.fixture
def them(colour: Colour, valkey: Server) -> Client:
    """Another one, as in another process."""
    return colour.connect(valkey.url)


@pytest.fixture(scope="session", autouse=True)
def long_waits() -> Iterator[LongWaits]:
    require("valkey9")
    with Server() as server, COLOURS["threads"]() as threads, COLOURS["asyncio"]() as tasks:
        yield LongWaits(server, [threads, tasks])
        server.raw("FLUSHALL")  # whoever still waits may go
