"""Fixtures: servers for the whole run, servers that a test may break, and a faulty network."""

import asyncio
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import hypothesis
import pytest

from lockfast.stores.redis.transport import connect
from tests.support import signals
from tests.support.proxy import FaultProxy
from tests.support.servers import KINDS, NEEDS, Server, available
from tests.support.topologies import GROUPS, Group

hypothesis.settings.register_profile("lockfast", deadline=None)  # 200 ms by default, which a busy machine exceeds
hypothesis.settings.load_profile("lockfast")

OTHER_SERVERS = set(KINDS) - {"valkey9"}
"""A test with one of these as a parameter repeats the test on valkey9, and gets the marker `repeat`."""
USES_SERVERS = {"shared_server", "shared_group", "fresh_server"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--system", metavar="ID", help="run only the tests of one row of docs/systems.md, such as C5")


@pytest.hookimpl(tryfirst=True)  # before `-m` deselects by marker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if not OTHER_SERVERS.isdisjoint(parameters(item)):
            item.add_marker(pytest.mark.repeat)
    if wanted := config.getoption("--system"):
        select(config, items, lambda item: any(wanted in mark.args for mark in item.iter_markers("system")))


def parameters(item: pytest.Item) -> Iterator[object]:
    """The parameters of a test; a tuple counts as its parts."""
    for given in getattr(getattr(item, "callspec", None), "params", {}).values():
        yield from (one for one in (given if isinstance(given, tuple) else (given,)) if isinstance(one, str))


def select(config: pytest.Config, items: list[pytest.Item], wanted: Callable[[pytest.Item], bool]) -> None:
    """Keep the wanted tests, and report the others as deselected."""
    config.hook.pytest_deselected(items=[item for item in items if not wanted(item)])
    items[:] = [item for item in items if wanted(item)]


def pytest_collection_finish() -> None:
    """Exempt the collected tests from garbage collection, which would otherwise scan them again and again."""
    gc.collect()
    gc.freeze()


if os.environ.get("LOCKFAST_TEST_LOOP") == "uvloop":  # `make test-all` repeats the async tests on it
    import uvloop

    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())


@pytest.fixture(scope="session", autouse=True)
def default_signals() -> None:
    """Runs in the processes that run tests, not in one that only distributes them."""
    signals.reset_for_children()


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Callable[[str], Server]]:
    """Return the shared server of a kind, cleared; the first call starts it."""
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
    """Return a shared group of servers, cleared: "replicated", "sentinel", "cluster" or "quorum"."""
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


@pytest.fixture(autouse=True)
def tolerate_a_busy_machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the 80 ms that a non-blocking call waits for an answer: a busy machine exceeds them.

    Tests that measure time keep the shipped value.
    """
    if USES_SERVERS.isdisjoint(request.fixturenames) or request.node.get_closest_marker("timing") is not None:
        return
    monkeypatch.setattr(connect, "MIN_GRACE", connect.INITIAL_GRACE)


@pytest.fixture
def valkey(shared_server: Callable[[str], Server]) -> Server:
    return shared_server("valkey9")


@pytest.fixture(params=KINDS)
def any_server(request: pytest.FixtureRequest, shared_server: Callable[[str], Server]) -> Server:
    kind: str = request.param
    return shared_server(kind)


@pytest.fixture
def fresh_server() -> Iterator[Server]:
    """A server for one test, to kill, pause or restart."""
    require("valkey9")
    with Server("valkey9") as server:
        yield server


@pytest.fixture
def proxy(valkey: Server) -> Iterator[FaultProxy]:
    """A proxy in front of `valkey`, without faults."""
    with FaultProxy(valkey.port) as proxy:
        yield proxy
