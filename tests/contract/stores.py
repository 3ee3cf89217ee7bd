"""The stores of the suite. A new one is one line in `STORES`."""

import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

import holdfast
from tests.contract.driver import COLOURS
from tests.support.servers import KINDS, Server
from tests.support.topologies import Group


class Place(NamedTuple):
    """Where a store can be found; empty, and nobody else's for the length of a test. `url` may be a list: a quorum."""

    url: Any
    server: Server | None = None
    options: Mapping[str, Any] = MappingProxyType({})


class Surroundings(NamedTuple):
    """What a place may be made of."""

    folder: Path
    shared_server: Callable[[str], Server]
    shared_group: Callable[[str], Group]

    def at(self, kind: str) -> Place:
        server = self.shared_server(kind)
        return Place(server.url, server)

    def among(self, kind: str, **options: Any) -> Place:
        return Place(self.shared_group(kind).url, options=options)


def _sqlite(around: Surroundings) -> Place:
    if not (Path(holdfast.__file__).parent / "stores" / "sqlite" / "__init__.py").exists():
        pytest.skip("the SQLite store is missing")
    return Place(f"sqlite:///{around.folder}/locks.db")


STORES: dict[str, Callable[[Surroundings], Place]] = {
    "memory": lambda _: Place(f"memory://{uuid.uuid4()}"),
    "sqlite": _sqlite,
    "valkey9": lambda around: around.at("valkey9"),
    "redis62": lambda around: around.at("redis62"),
    "redis7": lambda around: around.at("redis7"),
    "replicated": lambda around: around.among("replicated", replicas=1),
    "sentinel": lambda around: around.among("sentinel"),
    "cluster": lambda around: around.among("cluster"),
    "quorum": lambda around: around.among("quorum"),
}

NOT_ON_A_QUORUM = ("test_every_waiter_gets_past_crashed_holders",)
"""Its ttl is about as long as it takes to dial five servers, twice each; and order is not promised."""

EVERYWHERE = [pytest.param((store, colour), id=f"{store}-{colour}") for store in STORES for colour in COLOURS]


def only(*, colour: str | None = None, stores: tuple[str, ...] = tuple(STORES)) -> pytest.MarkDecorator:
    """Narrow a scenario to what can have its subject: a thread, say, cannot be cancelled."""
    chosen = [
        pytest.param((store, one), id=f"{store}-{one}")
        for store in stores
        for one in COLOURS
        if colour is None or one == colour
    ]
    return pytest.mark.parametrize("d", chosen, indirect=True)


SERVERS = KINDS
BETWEEN_PROCESSES = ("sqlite", *SERVERS, "replicated", "sentinel", "cluster")
