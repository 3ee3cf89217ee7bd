"""Stores and terminals for tests of the command."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import lockfast
from tests.cli.harness import LOCKFAST, Target, Terminals
from tests.support.servers import Server
from tests.support.terminal import Pty


def sqlite(folder: Path) -> Target:
    url = f"sqlite:///{folder}/locks.db"
    with lockfast.connect(url) as locks:
        locks.lock("made").inspect()  # creates the file, as any first use does
    return Target(url, folder)


@pytest.fixture(params=["sqlite", "valkey9"])
def target(request: pytest.FixtureRequest, tmp_path: Path, shared_server: Callable[[str], Server]) -> Iterator[Target]:
    target = sqlite(tmp_path) if request.param == "sqlite" else Target(shared_server("valkey9").url, tmp_path)
    yield target
    target.close()


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[Target]:
    """The embedded store, for tests that need no server."""
    target = sqlite(tmp_path)
    yield target
    target.close()


@pytest.fixture
def served(valkey: Server, tmp_path: Path) -> Iterator[Target]:
    target = Target(valkey.url, tmp_path)
    yield target
    target.close()


@pytest.fixture
def terminals() -> Iterator[Terminals]:
    """Starts programs, each on its own terminal."""
    opened: list[Pty] = []

    def start(target: Target, *words: str, command: list[str] | None = None, **variables: str) -> Pty:
        opened.append(Pty(command or [*LOCKFAST, *words], target.environment(**variables)))
        return opened[-1]

    yield start
    for one in opened:
        one.close()
