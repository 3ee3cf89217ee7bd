"""The driver that every scenario is given."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contract.driver import FLAVOURS, Driver
from tests.contract.stores import EVERYWHERE, NOT_ON_A_QUORUM, STORES, WITHOUT_A_QUEUE, Surroundings
from tests.support.servers import Server
from tests.support.topologies import Group


@pytest.fixture(params=EVERYWHERE)
def d(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    shared_server: Callable[[str], Server],
    shared_group: Callable[[str], Group],
) -> Driver:
    """One store in one colour."""
    store, flavour = request.param
    enqueue = STORES[store](Surroundings(tmp_path, shared_server, shared_group))
    driver = FLAVOURS[flavour](store, enqueue.url, enqueue.server)
    driver.options = enqueue.options
    return driver


TWINS = ("redis62", "replicated")
"""Stores that differ from another one in the suite by their server alone: left to `make faults`."""
LONG = ("sentinel", "cluster", "quorum")
"""Stores behind which the scenarios run the same code as on one server: `make test` runs the checks of the port on
them, and the scenarios above it are left to `make faults`."""


@pytest.hookimpl(tryfirst=True)  # before what has these marks is left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what a store cannot do by its nature."""
    missing = {
        "quorum": {name for names in NOT_ON_A_QUORUM.values() for name in names},
        "transactions": {name for names in WITHOUT_A_QUEUE.values() for name in names},
    }
    items[:] = [item for item in items if not missing.get(_store_of(item), set()) & _names_of(item)]
    for item in items:
        store = _store_of(item)
        if store in TWINS or (store in LONG and "test_store_port" not in item.nodeid):
            item.add_marker(pytest.mark.faults)


def _store_of(item: pytest.Item) -> str:
    given = getattr(getattr(item, "callspec", None), "params", {}).get("d")
    return str(given[0]) if isinstance(given, tuple) else ""


def _names_of(item: pytest.Item) -> set[str]:
    """The scenario's name, that of the check that it runs, and that of its module."""
    check = getattr(getattr(item, "callspec", None), "params", {}).get("check")
    return {str(getattr(item, "originalname", item.name)), str(getattr(check, "__name__", "")), item.path.stem}
