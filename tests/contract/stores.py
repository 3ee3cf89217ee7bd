"""The stores of the suite. A new one is one line in `STORES`."""

import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

import lockfast
from lockfast.ports import Capabilities
from tests.contract.driver import FLAVOURS, Driver
from tests.support.servers import KINDS, Server
from tests.support.topologies import Group


class Target(NamedTuple):
    """An empty store that the test has to itself. `url` may be a list: a quorum."""

    url: Any
    server: Server | None = None
    options: Mapping[str, Any] = MappingProxyType({})


class Environment(NamedTuple):
    """The folder and the servers that a store can use."""

    folder: Path
    shared_server: Callable[[str], Server]
    shared_group: Callable[[str], Group]

    def driver(self, store: str, flavour: str) -> Driver:
        target = STORES[store](self)
        driver = FLAVOURS[flavour](store, target.url, target.server)
        driver.options = target.options
        return driver

    def on_server(self, kind: str) -> Target:
        server = self.shared_server(kind)
        return Target(server.url, server)

    def on_group(self, kind: str, **options: Any) -> Target:
        return Target(self.shared_group(kind).url, options=options)


def _transactions(environment: Environment) -> Target:
    """An account that must not run scripts, so that the store falls back to transactions."""
    server = environment.shared_server("valkey9")
    server.raw("ACL", "SETUSER", "plain", "reset", "on", ">word", "~*", "&*", "+@all", *NO_SCRIPTS)
    return Target(server.url.replace("//", "//plain:word@"), server)


NO_SCRIPTS = ("-eval", "-evalsha", "-eval_ro", "-evalsha_ro", "-script", "-function", "-fcall", "-fcall_ro")

STORES: dict[str, Callable[[Environment], Target]] = {
    "memory": lambda _: Target(f"memory://{uuid.uuid4()}"),
    "sqlite": lambda environment: Target(f"sqlite:///{environment.folder}/locks.db"),
    "valkey9": lambda environment: environment.on_server("valkey9"),
    "redis62": lambda environment: environment.on_server("redis62"),
    "redis7": lambda environment: environment.on_server("redis7"),
    "replicated": lambda environment: environment.on_group("replicated", replicas=1),
    "sentinel": lambda environment: environment.on_group("sentinel"),
    "cluster": lambda environment: environment.on_group("cluster"),
    "quorum": lambda environment: environment.on_group("quorum"),
    "transactions": _transactions,
}

SERVERS = KINDS
BETWEEN_PROCESSES = ("sqlite", *SERVERS, "replicated", "sentinel", "cluster")
QUEUEING = tuple(store for store in STORES if store != "transactions")
"""Stores with a queue: they list and count waiters, and hand off to them."""
IN_ORDER = tuple(store for store in QUEUEING if store != "quorum")
"""Stores that serve waiters in order of arrival."""
LOCAL_HANDOFF = ("memory", "sqlite", *SERVERS)
"""Stores that reserve blocks of fences, which local hand-off needs."""
ONE_CLOCK = tuple(store for store in STORES if store != "quorum")
"""Stores whose times come from one clock, exact to the millisecond."""


def on(stores: Iterable[str], flavour: str | None = None) -> list[Any]:
    """Parameters of the fixture `d`: each store in each flavour, or in one."""
    return [
        pytest.param((store, one), id=f"{store}-{one}")
        for store in stores
        for one in FLAVOURS
        if flavour in (None, one)
    ]


def only(*, flavour: str | None = None, stores: Iterable[str] = tuple(STORES)) -> pytest.MarkDecorator:
    """Narrow a scenario to a flavour or to some stores: a thread, for example, cannot be cancelled."""
    return pytest.mark.parametrize("d", on(stores, flavour), indirect=True)


def capabilities(d: Driver) -> Capabilities:
    """What the store offers: known once a client is connected."""
    with lockfast.connect(d.url, **d.options) as locks:
        locks.lock("any").inspect()
        return locks.session.store.capabilities
