"""The places in which the command is tried."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import lockfast
from tests.cli.driving import LOCKFAST, Target, Terminals
from tests.support.servers import Server
from tests.support.terminal import Pty


def sqlite(folder: Path) -> Target:
    url = f"sqlite:///{folder}/locks.db"
    with lockfast.connect(url) as locks:
        locks.lock("made").inspect()  # so that the file is there, as it is after the first use
    return Target(url, folder)


@pytest.fixture(params=["sqlite", "valkey9"])
def place(request: pytest.FixtureRequest, tmp_path: Path, shared_server: Callable[[str], Server]) -> Iterator[Target]:
    place = sqlite(tmp_path) if request.param == "sqlite" else Target(shared_server("valkey9").url, tmp_path)
    yield place
    place.close()


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[Target]:
    """The embedded store, where it does not matter which."""
    place = sqlite(tmp_path)
    yield place
    place.close()


@pytest.fixture
def served(valkey: Server, tmp_path: Path) -> Iterator[Target]:
    place = Target(valkey.url, tmp_path)
    yield place
    place.close()


@pytest.fixture
def terminals() -> Iterator[Terminals]:
    """Start programs on terminals of their own."""
    opened: list[Pty] = []

    def start(place: Target, *words: str, command: list[str] | None = None, **variables: str) -> Pty:
        opened.append(Pty(command or [*LOCKFAST, *words], place.environment(**variables)))
        return opened[-1]

    yield start
    for one in opened:
        one.close()
