"""The stores of the suite. A new one is one line in `STORES`."""

import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

import lockfast
from tests.contract.driver import FLAVOURS
from tests.support.servers import KINDS, Server
from tests.support.topologies import Group


class Target(NamedTuple):
    """Where a store can be found; empty, and nobody else's for the length of a test. `url` may be a list: a quorum."""

    url: Any
    server: Server | None = None
    options: Mapping[str, Any] = MappingProxyType({})


class Surroundings(NamedTuple):
    """What a place may be made of."""

    folder: Path
    shared_server: Callable[[str], Server]
    shared_group: Callable[[str], Group]

    def at(self, kind: str) -> Target:
        server = self.shared_server(kind)
        return Target(server.url, server)

    def among(self, kind: str, **options: Any) -> Target:
        return Target(self.shared_group(kind).url, options=options)


def _sqlite(around: Surroundings) -> Target:
    if not (Path(lockfast.__file__).parent / "stores" / "sqlite" / "__init__.py").exists():
        pytest.skip("the SQLite store is missing")
    return Target(f"sqlite:///{around.folder}/locks.db")


def _transactions(around: Surroundings) -> Target:
    """Locks without scripts, as an account has to take them that may run none."""
    server = around.shared_server("valkey9")
    server.raw("ACL", "SETUSER", "plain", "reset", "on", ">word", "~*", "&*", "+@all", *NO_SCRIPTS)
    return Target(server.url.replace("//", "//plain:word@"), server)


NO_SCRIPTS = ("-eval", "-evalsha", "-eval_ro", "-evalsha_ro", "-script", "-function", "-fcall", "-fcall_ro")

STORES: dict[str, Callable[[Surroundings], Target]] = {
    "memory": lambda _: Target(f"memory://{uuid.uuid4()}"),
    "sqlite": _sqlite,
    "valkey9": lambda around: around.at("valkey9"),
    "redis62": lambda around: around.at("redis62"),
    "redis7": lambda around: around.at("redis7"),
    "replicated": lambda around: around.among("replicated", replicas=1),
    "sentinel": lambda around: around.among("sentinel"),
    "cluster": lambda around: around.among("cluster"),
    "quorum": lambda around: around.among("quorum"),
    "transactions": _transactions,
}

NOT_ON_A_QUORUM = {
    "strict first-come order": (
        "test_first_come_first_served",
        "test_who_comes_new_does_not_overtake",
        "test_every_waiter_gets_past_crashed_holders",
        "test_those_who_wait_in_order",
        "order",
        "places",
    ),
    "times to the millisecond, since they come from several servers": ("test_a_lock_that_is_held",),
}
"""What a quorum does not promise, and the scenarios and checks that show it elsewhere."""

WITHOUT_A_QUEUE = {
    "first-come order": (
        "test_first_come_first_served",
        "test_who_comes_new_does_not_overtake",
        "test_every_waiter_gets_past_crashed_holders",
        "test_those_who_wait_in_order",
        "order",
        "places",
        "told_first",
    ),
    "hand-off": (
        "handed_over",
        "inherited",
        "passed_over",
        "forgotten",
        "test_a_waiter_whose_inbox_breaks_asks_again_and_keeps_its_place",
        "test_a_waiter_that_was_killed_is_passed_over",
        "test_passing",
    ),
    "those who wait are not listed or counted, and a mailbox tells them to look again": (
        "inspected",
        "surveyed",
        "taken_away",
        "patience",
        "test_labels_come_back_as_they_were_given",
        "test_every_name_has_a_queue_of_its_own",
        "test_what_is_told_of_each",
    ),
}
"""What a store cannot do where nobody queues, and the scenarios and checks that show it elsewhere."""

EVERYWHERE = [pytest.param((store, flavour), id=f"{store}-{flavour}") for store in STORES for flavour in FLAVOURS]


def only(*, flavour: str | None = None, stores: tuple[str, ...] = tuple(STORES)) -> pytest.MarkDecorator:
    """Narrow a scenario to what can have its subject: a thread, say, cannot be cancelled."""
    chosen = [
        pytest.param((store, one), id=f"{store}-{one}")
        for store in stores
        for one in FLAVOURS
        if flavour is None or one == flavour
    ]
    return pytest.mark.parametrize("d", chosen, indirect=True)


SERVERS = KINDS
BETWEEN_PROCESSES = ("sqlite", *SERVERS, "replicated", "sentinel", "cluster")
