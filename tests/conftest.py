"""Fixtures: servers that live for the whole run, servers that a test may break, and a network to break."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.support.proxy import FaultProxy
from tests.support.servers import KINDS, NEEDS, Server, available
from tests.support.topologies import GROUPS, Group


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Callable[[str], Server]]:
    """Give the shared server of a kind, cleared; it is started when first asked for."""
    running: dict[str, Server] = {}
    with ExitStack() as stack:

        def get(kind: str) -> Server:
            require(kind)
            if kind not in running:
                running[kind] = stack.enter_context(Server(kind))
            running[kind].clear()
            return running[kind]

        yield get


@pytest.fixture(scope="session")
def shared_group() -> Iterator[Callable[[str], Group]]:
    """Give the shared servers of a set-up, cleared: "replicated", "sentinel" or "cluster"."""
    running: dict[str, Group] = {}
    with ExitStack() as stack:

        def get(kind: str) -> Group:
            require("valkey9")
            if kind not in running:
                running[kind] = stack.enter_context(GROUPS[kind]())
            running[kind].clear()
            return running[kind]

        yield get


def require(kind: str) -> None:
    if not available(kind):
        pytest.skip(f"{kind} is missing: it needs {NEEDS[kind]}")


@pytest.fixture
def valkey(shared_server: Callable[[str], Server]) -> Server:
    return shared_server("valkey9")


@pytest.fixture(params=KINDS)
def any_server(request: pytest.FixtureRequest, shared_server: Callable[[str], Server]) -> Server:
    kind: str = request.param
    return shared_server(kind)


@pytest.fixture
def fresh_server() -> Iterator[Server]:
    """A server of the test's own, to kill, pause or restart."""
    require("valkey9")
    with Server("valkey9") as server:
        yield server


@pytest.fixture
def proxy(valkey: Server) -> Iterator[FaultProxy]:
    """A proxy in front of `valkey`, with no fault set."""
    with FaultProxy(valkey.port) as proxy:
        yield proxy
