"""`locks.guarantees()` on each engine, with and without permissions, and the conclusions from known facts."""

import logging
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockfast.client.guarantees import Guarantees, Verdict, guarantees_of
from lockfast.facts import Facts, Persistence, Topology
from tests.contract.driver import FLAVOURS, Driver, done, scenario
from tests.support.servers import Server

FLAVOUR = pytest.mark.parametrize("flavour", FLAVOURS)


def guarantees_at(flavour: str, url: str) -> Guarantees:
    """Return the guarantees of a connection to `url`."""
    found: list[Guarantees] = []

    async def request(d: Driver) -> None:
        found.append(await done(d.locks.guarantees()))

    scenario(request)(FLAVOURS[flavour]("any", url))
    return found[0]


@FLAVOUR
def test_local_stores_promise_one_holder_within_their_reach(flavour: str, tmp_path: Path) -> None:
    for url, engine, reach in (
        ("memory://guarantees", "memory", "process"),
        (f"sqlite:///{tmp_path}/a.db", "sqlite", "host"),
    ):
        found = guarantees_at(flavour, url)
        assert (found.facts.engine, found.facts.reach) == (engine, reach)
        assert found.about("one holder").verdict is Verdict.YES
        assert found.about("reach").verdict is Verdict.NO
        assert found.about("semaphores").verdict is Verdict.YES
        assert found.about("stopped").verdict is Verdict.NO
        assert not found.dangers


@FLAVOUR
def test_every_kind_of_server_reveals_its_facts(flavour: str, any_server: Server) -> None:
    facts = guarantees_at(flavour, any_server.url).facts
    assert facts.engine == ("valkey" if any_server.kind == "valkey9" else "redis")
    assert facts.version is not None
    assert facts.version[0].isdigit()
    assert (facts.role, facts.persistence, facts.replicas) == ("master", Persistence.NONE, 0)
    assert facts.eviction == "noeviction"
    assert facts.identity is not None
    assert len(facts.identity) == 40
    assert facts.uptime is not None
    assert facts.clock_offset is not None
    assert abs(facts.clock_offset) < 5.0


@FLAVOUR
def test_facts_are_the_same_with_resp2_and_resp3(flavour: str, valkey: Server) -> None:
    for protocol in (2, 3):
        assert guarantees_at(flavour, f"{valkey.url}?protocol={protocol}").facts.persistence is Persistence.NONE


@pytest.fixture(scope="module")
def durable() -> Iterator[Server]:
    with Server(args=("--appendonly", "yes", "--appendfsync", "always")) as server:
        yield server


def test_the_restart_verdict_follows_the_persistence_settings(durable: Server) -> None:
    def found() -> Guarantees:
        return guarantees_at("threads", durable.url)

    assert found().about("restart").verdict is Verdict.YES
    durable.raw("CONFIG", "SET", "appendfsync", "everysec")
    assert found().about("restart").verdict is Verdict.IF
    durable.raw("CONFIG", "SET", "appendonly", "no")
    assert found().about("restart").verdict is Verdict.DANGER
    durable.raw("CONFIG", "SET", "save", "3600 1")
    assert found().about("restart").verdict is Verdict.NO


def test_a_policy_that_evicts_locks_is_a_danger(fresh_server: Server, caplog: pytest.LogCaptureFixture) -> None:
    fresh_server.raw("CONFIG", "SET", "maxmemory-policy", "volatile-ttl")
    assert guarantees_at("threads", fresh_server.url).about("eviction").verdict is Verdict.IF
    fresh_server.raw("CONFIG", "SET", "maxmemory", "100mb")
    caplog.clear()
    with caplog.at_level(logging.WARNING, "lockfast"):
        found = guarantees_at("threads", fresh_server.url)
    assert found.about("eviction").verdict is Verdict.DANGER
    assert any("volatile-ttl" in record.getMessage() for record in caplog.records)


@FLAVOUR
def test_a_danger_is_logged_once(flavour: str, valkey: Server, caplog: pytest.LogCaptureFixture) -> None:
    async def request_twice(d: Driver) -> None:
        for _ in range(2):
            await done(d.locks.guarantees())

    with caplog.at_level(logging.WARNING, "lockfast"):
        scenario(request_twice)(FLAVOURS[flavour]("valkey9", valkey.url))
    assert len([record for record in caplog.records if "restart" in record.getMessage()]) == 1


@FLAVOUR
def test_an_account_without_permissions_gets_unknowns(flavour: str, fresh_server: Server) -> None:
    fresh_server.raw("ACL", "SETUSER", "mute", "on", ">secret", "~*", "&*", "-@all", "+ping", "+client", "+hello")
    found = guarantees_at(flavour, fresh_server.url.replace("redis://", "redis://mute:secret@"))
    facts = found.facts
    assert (facts.version, facts.role, facts.persistence, facts.eviction, facts.identity) == (None,) * 5
    for topic in ("restart", "eviction", "outage", "clock"):
        assert found.about(topic).verdict is Verdict.UNKNOWN
    assert "secret" not in str(found)


@FLAVOUR
def test_a_replica_is_a_danger(flavour: str, valkey: Server) -> None:
    with Server(args=("--replicaof", "127.0.0.1", str(valkey.port))) as replica:
        found = guarantees_at(flavour, replica.url)
    assert found.about("one holder").verdict is Verdict.DANGER
    assert found.facts.role == "replica"


def test_the_outage_verdict_follows_the_replicas() -> None:
    beside = Facts("valkey", role="master", replicas=2)
    assert guarantees_of(beside).about("outage").verdict is Verdict.NO
    assert guarantees_of(beside._replace(acknowledged=1)).about("outage").verdict is Verdict.IF
    watched = Facts("valkey", topology=Topology.SENTINEL, replicas=None)
    assert guarantees_of(watched).about("outage").verdict is Verdict.NO


def test_the_clock_verdict_follows_the_offset() -> None:
    for offset, wanted in ((0.2, Verdict.YES), (40.0, Verdict.IF), (-3600.0, Verdict.IF), (None, Verdict.UNKNOWN)):
        assert guarantees_of(Facts("valkey", clock_offset=offset)).about("clock").verdict is wanted
    assert "40 s ahead" in guarantees_of(Facts("valkey", clock_offset=40.0)).about("clock").text


def quorum(*nodes: Facts, **others: Any) -> Guarantees:
    return guarantees_of(Facts("quorum", topology=Topology.QUORUM, nodes=nodes, queue=False, **others))


KEEPS = Facts("valkey", persistence=Persistence.LOG_ALWAYS, eviction="noeviction")
FORGETS = KEEPS._replace(persistence=Persistence.NONE)
DOWN = Facts("valkey", silent="no connection")


@pytest.mark.system("C6")
def test_the_verdicts_of_a_quorum_follow_its_servers() -> None:
    sound = quorum(KEEPS, KEEPS, KEEPS)
    assert sound.about("semaphores").verdict is Verdict.NO
    assert not sound.dangers
    assert sound.about("order").verdict is Verdict.NO
    assert quorum(KEEPS, KEEPS, DOWN).about("outage").verdict is Verdict.YES
    assert quorum(KEEPS, DOWN, DOWN).about("outage").verdict is Verdict.DANGER
    assert quorum(KEEPS, KEEPS).about("outage").verdict is Verdict.NO
    assert quorum(KEEPS, KEEPS, FORGETS).about("restart").verdict is Verdict.NO
    assert quorum(FORGETS, FORGETS, FORGETS).about("restart").verdict is Verdict.DANGER
    assert quorum(FORGETS, FORGETS, FORGETS, sits_out=30.0).about("restart").verdict is Verdict.IF
    evicts = KEEPS._replace(eviction="allkeys-lru", memory_limit=1)
    assert quorum(KEEPS, KEEPS, evicts).about("eviction").verdict is Verdict.DANGER


def test_guarantees_pickle_and_print(shared_server: Callable[[str], Server]) -> None:
    found = guarantees_at("threads", shared_server("valkey9").url)
    assert pickle.loads(pickle.dumps(found)) == found
    text = str(found)
    assert all(line.topic in text and line.verdict.value in text for line in found.lines)
    assert max(map(len, text.splitlines())) <= 120
    with pytest.raises(KeyError):
        found.about("nonsense")
