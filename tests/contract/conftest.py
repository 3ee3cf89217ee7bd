"""The driver that every scenario is given."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contract.driver import COLOURS, Driver
from tests.contract.stores import EVERYWHERE, STORES, Surroundings
from tests.support.servers import Server


@pytest.fixture(params=EVERYWHERE)
def d(request: pytest.FixtureRequest, tmp_path: Path, shared_server: Callable[[str], Server]) -> Driver:
    """One store in one colour."""
    store, colour = request.param
    place = STORES[store](Surroundings(tmp_path, shared_server))
    return COLOURS[colour](store, place.url, place.server)
