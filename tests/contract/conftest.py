"""The driver that every scenario is given."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contract.driver import COLOURS, Driver
from tests.contract.stores import EVERYWHERE, STORES, WITHOUT_A_QUEUE, Surroundings
from tests.support.servers import Server


@pytest.fixture(params=EVERYWHERE)
def d(request: pytest.FixtureRequest, tmp_path: Path, shared_server: Callable[[str], Server]) -> Driver:
    """One store in one colour."""
    store, colour = request.param
    place = STORES[store](Surroundings(tmp_path, shared_server))
    return COLOURS[colour](store, place.url, place.server)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what a store cannot do by its nature."""
    missing = {name for names in WITHOUT_A_QUEUE.values() for name in names}
    items[:] = [item for item in items if not (_params(item)[0] == "transactions" and _params(item)[1] & missing)]


def _params(item: pytest.Item) -> tuple[str, set[str]]:
    """The store of a scenario, its name, and that of the check that it runs."""
    given = getattr(getattr(item, "callspec", None), "params", {})
    check = getattr(given.get("check"), "__name__", "")
    store = given["d"][0] if isinstance(given.get("d"), tuple) else ""
    return store, {getattr(item, "originalname", item.name), check}
