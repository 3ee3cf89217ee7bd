"""Fixtures: one colour after the other, clients of it, and somebody who listens to a lease's callbacks."""

from collections.abc import Iterator

import pytest

from tests.keeper import measuring
from tests.keeper.listening import Listener
from tests.support.servers import Server
from tests.traps.colours import COLOURS, Client, Colour


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


@pytest.fixture
def listener() -> Listener:
    return Listener()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    found = measuring.lines()
    if found:
        terminalreporter.section("measured by the keeper's tests")
        for line in found:
            terminalreporter.write_line(line)
