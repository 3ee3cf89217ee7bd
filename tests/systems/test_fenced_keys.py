"""Keys that refuse late writers, through both flavours of redis-py and valkey-py."""

from collections.abc import Callable
from typing import Any

import pytest
import redis
import redis.asyncio
import valkey as valkey_py
import valkey.asyncio

import lockfast
from lockfast import StaleFence
from lockfast.fenced.redis import AsyncWriter, Writer
from lockfast.stores.redis.keys import companion, slot
from tests.contract.driver import done
from tests.support.servers import Server

pytestmark = pytest.mark.system("D2")

Open = Callable[..., Any]
CLIENTS: dict[str, Open] = {
    "redis-py": redis.Redis.from_url,
    "redis-py, text": lambda url: redis.Redis.from_url(url, decode_responses=True),
    "redis-py, RESP3": lambda url: redis.Redis.from_url(url, protocol=3),
    "valkey-py": valkey_py.Valkey.from_url,
    "redis.asyncio": redis.asyncio.Redis.from_url,
    "valkey.asyncio": valkey.asyncio.Valkey.from_url,
}


def text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


async def play(client: Any, write: Callable[[int], Any]) -> None:
    assert text(await done(write(8).set("doc", "new"))) in ("OK", True)
    with pytest.raises(StaleFence, match="fence 7, but fence 8 was here before") as caught:
        await done(write(7).set("doc", "late"))
    assert (caught.value.name, caught.value.newest) == ("doc", 8)
    assert text(await done(write(8).get("doc"))) == "new"
    assert await done(write(8).hset("hash", {"a": 1, "b": 2})) == 2
    assert await done(write(9).call("RPUSH", "list", "x", "y")) == 2
    with pytest.raises(StaleFence):
        await done(write(8).call("RPUSH", "list", "z"))
    assert await done(client.llen("list")) == 2
    assert await done(write(9).delete("list")) is True
    assert await done(write(9).delete("list")) is False
    with pytest.raises(StaleFence):
        await done(write(8).delete("list"))


@pytest.mark.parametrize("kind", CLIENTS)
async def test_smaller_fence_may_not_write(kind: str, valkey: Server) -> None:
    client = CLIENTS[kind](valkey.url)
    awaited = "asyncio" in kind
    try:
        await play(client, lambda fence: AsyncWriter(client, fence) if awaited else Writer(client, fence))
    finally:
        await done(client.aclose() if awaited else client.close())


@pytest.fixture
def client(any_server: Server) -> Any:
    with redis.Redis.from_url(any_server.url) as client:
        yield client


def test_read_blocks_older_writers(client: Any) -> None:
    client.set("doc", "old")
    assert Writer(client, 8).get("doc") == b"old"
    with pytest.raises(StaleFence):
        Writer(client, 7).set("doc", "late")
    assert client.get("doc") == b"old"


def test_leases_as_fences(client: Any) -> None:
    with lockfast.connect(client) as locks:
        with locks.lock("doc:lock") as late:
            Writer(client, late).set("doc", "first")
        with locks.lock("doc:lock") as lease:
            Writer(client, lease).set("doc", "second")
            with pytest.raises(StaleFence):
                Writer(client, late).set("doc", "late")
    assert client.get("doc") == b"second"


def test_one_guard_for_keys_that_change_together(client: Any) -> None:
    """Otherwise a late writer could still change a key that its successor has not written yet."""
    Writer(client, 8, guard="account:7").set("{account:7}:balance", 1)
    with pytest.raises(StaleFence):
        Writer(client, 7, guard="account:7").set("{account:7}:log", "late")
    assert client.exists("{account:7}:log") == 0
    assert Writer(client, 7).set("{account:7}:log", "a guard of its own") == b"OK"


def test_failed_command_raises_its_error(client: Any) -> None:
    client.rpush("list", "x")
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        Writer(client, 8).get("list")
    with pytest.raises(redis.ResponseError):
        Writer(client, 8).call("NOSUCHCOMMAND", "list")


def test_flushed_script_is_loaded_again(client: Any) -> None:
    writer = Writer(client, 8)
    writer.set("doc", 1)
    client.script_flush()
    writer.set("doc", 2)
    assert client.get("doc") == b"2"


def test_guard_ttl(client: Any) -> None:
    Writer(client, 8).set("doc", 1)
    assert client.pttl("lockfast:{doc}:f") == -1
    Writer(client, 8, keep=60).set("doc", 1)
    assert 50_000 < client.pttl("lockfast:{doc}:f") <= 60_000


def test_large_fences_are_exact(client: Any) -> None:
    """Neither the script nor the server may round them."""
    for fence in range(2**53 - 3, 2**53):
        Writer(client, fence).set("doc", fence)
        with pytest.raises(StaleFence):
            Writer(client, fence - 1).set("doc", "late")


def test_documented_permissions_suffice(valkey: Server) -> None:
    """As listed in docs/permissions.md."""
    needed = ("+evalsha", "+script|load", "+get", "+set", "+rpush")
    valkey.raw("ACL", "SETUSER", "writer", "reset", "on", ">pw", "~doc", "~lockfast:{doc}:f", "-@all", *needed)
    try:
        with redis.Redis.from_url(f"redis://writer:pw@{valkey.host}:{valkey.port}/0") as client:
            assert Writer(client, 8).call("RPUSH", "doc", "x") == 1
            with pytest.raises(StaleFence):
                Writer(client, 7).call("RPUSH", "doc", "late")
    finally:
        valkey.raw("ACL", "DELUSER", "writer")


@pytest.mark.parametrize("key", ["doc", "{tag}doc", "a}b", "{}", "ünicode"])
def test_guard_is_in_the_slot_of_its_key(key: str) -> None:
    assert slot(companion(key.encode(), b"f")) == slot(key.encode())


@pytest.mark.parametrize("bad", ["redis://localhost", 7, object()])
def test_invalid_clients_are_rejected(bad: object) -> None:
    with pytest.raises(lockfast.ConfigurationError, match="a client of redis-py or valkey-py"):
        Writer(bad, 7)


def test_pipeline_is_rejected(valkey: Server) -> None:
    with redis.Redis.from_url(valkey.url) as client, pytest.raises(lockfast.ConfigurationError):
        Writer(client.pipeline(), 7)
