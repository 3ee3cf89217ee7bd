"""Fixtures: both flavours, clients in them, and a recorder of callbacks."""

from collections.abc import Iterator

import pytest

from tests.keepalive import measurements
from tests.keepalive.callbacks import CallbackRecorder
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
    """Another client of the shared server."""
    return flavour.connect(valkey.url)


@pytest.fixture
def callbacks() -> CallbackRecorder:
    return CallbackRecorder()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    found = measurements.lines()
    if found:
        terminalreporter.section("measured by the tests of the keepalive")
        for line in found:
            terminalreporter.write_line(line)
