"""Lists of servers that are no quorum are refused as early as possible, before anything is locked."""

import logging
from typing import Any

import pytest
import redis
import redis.asyncio

import lockfast
import lockfast.aio
from tests.contract.driver import Driver, done, scenario
from tests.support.servers import Server

URLS = [f"redis://10.0.0.{number}:6379/0" for number in range(1, 6)]

REFUSED: list[tuple[str, Any, str]] = [
    ("empty", [], "list is empty"),
    ("one", URLS[:1], "A quorum of 1"),
    ("two", URLS[:2], "A quorum of 2"),
    ("twice", [*URLS[:2], URLS[0]], "twice"),
    ("twice in another database", [*URLS[:2], "redis://10.0.0.1:6379/7"], "twice"),
    ("a list in a list", [URLS[0], URLS[1], [URLS[2]]], "not a nested list"),
    ("nothing", [URLS[0], URLS[1], None], "takes a URL or a client"),
    ("files", ["sqlite:///a.db", "sqlite:///b.db", "sqlite:///c.db"], "Redis or Valkey servers"),
    ("memory", ["memory://a", "memory://b", "memory://c"], "Redis or Valkey servers"),
    ("a cluster", [*URLS[:2], "redis+cluster://10.0.0.9:6379"], "single servers"),
    ("sentinels", [*URLS[:2], "redis+sentinel://10.0.0.9:26379/main"], "single servers"),
]


@pytest.mark.parametrize(("targets", "words"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
@pytest.mark.parametrize("connect", [lockfast.connect, lockfast.aio.connect], ids=["threads", "asyncio"])
def test_a_list_that_is_no_quorum_is_refused(connect: Any, targets: Any, words: str) -> None:
    with pytest.raises(lockfast.ConfigurationError, match=words):
        connect(targets)


@pytest.mark.parametrize("option", [{"sits_out": -1}, {"sits_out": "30"}, {"sits_out": float("nan")}, {"replicas": 1}])
def test_an_invalid_option_is_refused(option: dict[str, Any]) -> None:
    with pytest.raises(lockfast.ConfigurationError):
        lockfast.connect(URLS, **option)


def test_clients_of_the_other_flavour_are_refused() -> None:
    mixed = [redis.Redis(port=1), redis.Redis(port=2), redis.asyncio.Redis(port=3)]
    with pytest.raises(lockfast.ConfigurationError, match=r"lockfast\.aio\.connect"):
        lockfast.connect(mixed)
    with pytest.raises(lockfast.ConfigurationError, match=r"lockfast\.connect"):
        lockfast.aio.connect(mixed)


def test_an_even_number_of_servers_works_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "lockfast"):
        lockfast.connect(URLS[:4]).close()
    assert "no more failures than one of 3" in caplog.text


def test_repr_hides_passwords() -> None:
    urls = [url.replace("//", "//user:s3cret@") for url in URLS]
    assert "s3cret" not in repr(lockfast.connect(urls))


@scenario
async def test_one_server_under_two_addresses_is_refused_at_the_first_use(
    d: Driver, shared_servers: list[Server]
) -> None:
    twice = [shared_servers[0].url, shared_servers[1].url, shared_servers[0].url.replace("127.0.0.1", "localhost")]
    client = d.open(twice)
    with pytest.raises(lockfast.ConfigurationError, match="one and the same server"):
        await done(client.lock("thing").acquire(timeout=5))
    await done(client.close())
    assert [server.raw("EXISTS", "thing") for server in shared_servers[:2]] == [0, 0]


@scenario
async def test_clients_work_like_urls(d: Driver, shared_servers: list[Server]) -> None:
    kind: Any = redis.Redis if d.flavour == "threads" else redis.asyncio.Redis
    clients = [kind(port=server.port) for server in shared_servers]
    locks = d.open([*clients[:3], shared_servers[3].url, shared_servers[4].url])
    lease = await done(locks.lock("thing").acquire(timeout=1))
    assert [server.raw("GET", "thing") for server in shared_servers].count(lease.holder) >= 3
    assert await done(lease.release()) is True
    await done(locks.close())
    for client in clients:
        await done(client.aclose() if d.flavour == "asyncio" else client.close())


@scenario
async def test_one_server_under_two_addresses_is_refused_without_a_run_id(
    d: Driver, shared_servers: list[Server]
) -> None:
    for server in shared_servers[:2]:
        server.raw("ACL", "SETUSER", "mute", "on", ">secret", "~*", "&*", "+@all", "-info")
    urls = [server.url.replace("//", "//mute:secret@") for server in shared_servers[:2]]
    client = d.open([*urls, urls[0].replace("127.0.0.1", "localhost")])
    with pytest.raises(lockfast.ConfigurationError, match="one and the same server") as caught:
        await done(client.lock("thing").acquire(timeout=5))
    assert "secret" not in str(caught.value)
    await done(client.close())
    for server in shared_servers[:2]:
        server.raw("ACL", "DELUSER", "mute")
