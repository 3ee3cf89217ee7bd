"""The driver that every scenario runs on."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contract.driver import Driver
from tests.contract.stores import STORES, Environment, on
from tests.support.servers import Server
from tests.support.topologies import Group

SAME_STORE = ("replicated", "sentinel", "cluster", "quorum")
"""Groups of servers. The checks of the port run on them in `make test`, but for "replicated", which differs from one
server in a single option; the scenarios above the port would repeat the same code on them."""


@pytest.fixture
def environment(
    tmp_path: Path, shared_server: Callable[[str], Server], shared_group: Callable[[str], Group]
) -> Environment:
    return Environment(tmp_path, shared_server, shared_group)


@pytest.fixture(params=on(STORES))
def d(request: pytest.FixtureRequest, environment: Environment) -> Driver:
    """One store in one flavour."""
    return environment.driver(*request.param)


@pytest.hookimpl(tryfirst=True)  # before `-m` deselects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        store = _store_of(item)
        if store in SAME_STORE and (store == "replicated" or "test_store_port" not in item.nodeid):
            item.add_marker(pytest.mark.repeat)


def _store_of(item: pytest.Item) -> str:
    given = getattr(getattr(item, "callspec", None), "params", {}).get("d")
    return str(given[0]) if isinstance(given, tuple) else ""
