"""The driver that every scenario is given."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contract.driver import COLOURS, Driver
from tests.contract.stores import EVERYWHERE, NOT_ON_A_QUORUM, STORES, Surroundings
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
    store, colour = request.param
    place = STORES[store](Surroundings(tmp_path, shared_server, shared_group))
    driver = COLOURS[colour](store, place.url, place.server)
    driver.options = place.options
    return driver


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what a store cannot do by its nature."""
    items[:] = [item for item in items if not (_store_of(item) == "quorum" and _name_of(item) in NOT_ON_A_QUORUM)]


def _store_of(item: pytest.Item) -> str:
    given = getattr(getattr(item, "callspec", None), "params", {}).get("d")
    return str(given[0]) if isinstance(given, tuple) else ""


def _name_of(item: pytest.Item) -> str:
    return str(getattr(item, "originalname", item.name))
