"""Fixtures: one colour after the other, clients of it, and somebody who listens to a lease's callbacks."""

from collections.abc import Iterator

import pytest

from tests.keepalive import measuring
from tests.keepalive.listening import Listener
from tests.support.servers import Server
from tests.traps.flavours import FLAVOURS, Client, Flavour


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
    """Another one, as in another process."""
    return flavour.connect(valkey.url)


@pytest.fixture
def listener() -> Listener:
    return Listener()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    found = measuring.lines()
    if found:
        terminalreporter.section("measured by the keeper's tests")
        for line in found:
            terminalreporter.write_line(line)
