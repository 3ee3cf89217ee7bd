"""The driver that every scenario is given."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contract.driver import COLOURS, Driver
from tests.contract.stores import EVERYWHERE, STORES, Surroundings
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
