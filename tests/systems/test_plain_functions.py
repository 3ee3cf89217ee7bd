"""The plain functions `acquire` and `release`, in their three implementations."""

import asyncio
from typing import Any

import pytest
import redis
import redis.asyncio

import lockfast.simple
import lockfast.simple.aio
from lockfast import ConfigurationError, StoreProtocolError, StoreRefused, StoreUnavailable
from tests.contract.driver import done
from tests.support.proxy import FaultProxy
from tests.support.servers import Server
from tests.support.waiting import until
from tests.systems.conftest import on_all_servers
from tests.systems.kit import HOWS, Kit, run_cancelling, scenario

each_how = pytest.mark.parametrize("how", HOWS)


@pytest.mark.system("A1")
@on_all_servers
@each_how
@scenario
async def test_acquire_and_release_check_the_uid(k: Kit, how: str) -> None:
    client = k.client()
    assert await done(k.simple.acquire(client, "lock", 10086, "moto", how=how)) is True
    assert await done(k.simple.acquire(client, "lock", 123, "nokia", how=how)) is False
    assert await done(k.simple.release(client, "lock", "nokia", how=how)) is False
    assert k.server.raw("GET", "lock") == "moto"
    assert 10085 < k.server.raw("TTL", "lock") <= 10086
    assert await done(k.simple.release(client, "lock", "moto", how=how)) is True
    assert k.server.raw("EXISTS", "lock") == 0
    assert await done(k.simple.release(client, "lock", "moto", how=how)) is False


@pytest.mark.system("A1")
@each_how
@scenario
async def test_lock_expires_after_its_timeout(k: Kit, how: str) -> None:
    client = k.client()
    assert await done(k.simple.acquire(client, "lock", 0.05, "moto", how=how))

    async def free() -> Any:
        return await done(k.simple.acquire(client, "lock", 60, "nokia", how=how))

    await k.until(free, "the lock to expire")
    assert await done(k.simple.release(client, "lock", "moto", how=how)) is False
    assert k.server.raw("GET", "lock") == "nokia"


@pytest.mark.system("A1")
@each_how
@scenario
async def test_early_release_lets_the_next_client_acquire(k: Kit, how: str) -> None:
    first, second = k.client(), k.client()
    assert await done(k.simple.acquire(first, "lock", 1000, "moto", how=how))
    assert await done(k.simple.release(first, "lock", "moto", how=how))
    assert await done(k.simple.acquire(second, "lock", 1000, "nokia", how=how))


@pytest.mark.system("A1")
@each_how
@scenario
async def test_repeated_acquire_by_the_holder_succeeds_and_never_shortens_the_ttl(k: Kit, how: str) -> None:
    client = k.client()
    assert await done(k.simple.acquire(client, "lock", 10, "moto", how=how))
    assert await done(k.simple.acquire(client, "lock", 100, "moto", how=how)) is True
    assert k.server.raw("TTL", "lock") > 90
    assert await done(k.simple.acquire(client, "lock", 10, "moto", how=how)) is True
    assert k.server.raw("TTL", "lock") > 90


@pytest.mark.system("A1")
@each_how
@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("protocol", [2, 3])
@scenario
async def test_works_with_any_client_encoding_and_protocol(k: Kit, how: str, decode: bool, protocol: int) -> None:
    client = k.client(decode_responses=decode, protocol=protocol)
    assert await done(k.simple.acquire(client, "lock", 10, "moto", how=how)) is True
    assert await done(k.simple.acquire(client, "lock", 10, "moto", how=how)) is True
    assert await done(k.simple.acquire(client, "lock", 10, "nokia", how=how)) is False
    k.server.raw("SET", "other", b"\xff\xfe not text")
    assert await done(k.simple.acquire(client, "other", 10, "moto", how=how)) is False
    assert await done(k.simple.release(client, "other", "moto", how=how)) is False
    assert await done(k.simple.release(client, "lock", "moto", how=how)) is True


@pytest.mark.system("A1")
@each_how
def test_works_with_a_valkey_py_client(valkey: Server, how: Any) -> None:
    from valkey import Valkey

    with Valkey.from_url(valkey.url) as client:
        assert lockfast.simple.acquire(client, "lock", 10, "moto", how=how)
        assert not lockfast.simple.acquire(client, "lock", 10, "nokia", how=how)
        assert lockfast.simple.release(client, "lock", "moto", how=how)


@pytest.mark.system("A1")
@pytest.mark.parametrize("first", HOWS)
@pytest.mark.parametrize("second", HOWS)
@scenario
async def test_all_implementations_and_lock_objects_exclude_one_another(k: Kit, first: str, second: str) -> None:
    client = k.client()
    assert await done(k.simple.acquire(client, "lock", 10, "moto", how=first))
    assert not await done(k.simple.acquire(client, "lock", 10, "nokia", how=second))
    assert await done(k.library.Lock(client, "lock").acquire(timeout=0)) is None
    assert not await done(client.lock("lock").acquire(blocking=False))
    assert await done(k.simple.release(client, "lock", "moto", how=second))
    lease = await done(k.library.Lock(client, "lock").acquire(timeout=0))
    assert not await done(k.simple.acquire(client, "lock", 10, "nokia", how=first))
    assert await done(lease.release())


@pytest.mark.system("A1")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": ""}, "must not be empty"),
        ({"key": "lockfast:x"}, "lockfast uses such keys"),
        ({"uid": ""}, "holder id"),
        ({"uid": b"moto"}, "holder id"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": True}, "timeout"),
        ({"timeout": float("nan")}, "timeout"),
        ({"how": "magic"}, "'script', 'transaction' or 'native'"),
        ({"client": "redis://localhost"}, "client of redis-py"),
        ({"client": None}, "client of redis-py"),
    ],
    ids=lambda value: str(value)[:30],
)
@scenario
async def test_invalid_arguments_raise_before_any_request(k: Kit, change: dict[str, Any], message: str) -> None:
    given = {"client": k.client(), "key": "lock", "timeout": 10, "uid": "moto", **change}
    with pytest.raises(ConfigurationError, match=message):
        await done(k.simple.acquire(**given))
    assert k.server.raw("DBSIZE") == 0


@pytest.mark.system("A1")
def test_client_of_the_other_flavour_or_a_pipeline_is_rejected(valkey: Server) -> None:
    with pytest.raises(ConfigurationError, match=r"lockfast\.simple\.aio"):
        lockfast.simple.acquire(redis.asyncio.Redis.from_url(valkey.url), "lock", 10, "moto")
    with redis.Redis.from_url(valkey.url) as client:
        with pytest.raises(ConfigurationError, match="pipeline"):
            lockfast.simple.acquire(client.pipeline(), "lock", 10, "moto")
        with pytest.raises(ConfigurationError, match=r"of lockfast\.simple "):
            asyncio.run(lockfast.simple.aio.acquire(client, "lock", 10, "moto"))


@pytest.mark.system("A1")
@each_how
@scenario
async def test_key_with_other_data_is_not_changed(k: Kit, how: str) -> None:
    client = k.client()
    k.server.raw("HSET", "lock", "field", "value")
    with pytest.raises(StoreProtocolError, match="holds other data"):
        await done(k.simple.acquire(client, "lock", 10, "moto", how=how))
    with pytest.raises(StoreProtocolError, match="holds other data"):
        await done(k.simple.release(client, "lock", "moto", how=how))
    assert k.server.raw("HGET", "lock", "field") == "value"


@pytest.mark.system("A1")
@each_how
@scenario
async def test_dead_server_raises_store_unavailable(k: Kit, how: str) -> None:
    with Server("valkey9") as server:
        client = k.client(url=server.url)
        server.kill()
        with pytest.raises(StoreUnavailable):
            await done(k.simple.acquire(client, "lock", 10, "moto", how=how))


@pytest.mark.system("A1")
def test_call_can_be_repeated_after_a_lost_reply(unsteady: redis.Redis, proxy: FaultProxy) -> None:
    lockfast.simple.acquire(unsteady, "other", 10, "moto")  # now the server has the script
    proxy.drop_reply(b"EVALSHA")
    with pytest.raises(StoreUnavailable) as caught:
        lockfast.simple.acquire(unsteady, "lock", 10, "moto")
    assert caught.value.outcome is lockfast.Outcome.UNKNOWN
    assert lockfast.simple.acquire(unsteady, "lock", 10, "moto") is True


@pytest.mark.system("A2")
def test_transaction_with_a_lost_reply_is_repeated(unsteady: redis.Redis, proxy: FaultProxy) -> None:
    lost = proxy.drop_reply(b"EXEC")
    assert lockfast.simple.acquire(unsteady, "lock", 10, "moto", how="transaction") is True
    lost.wait()
    lost = proxy.drop_reply(b"EXEC")
    assert lockfast.simple.release(unsteady, "lock", "moto", how="transaction") is True
    lost.wait()


# Transactions


WITHOUT_SCRIPTS = ["on", "nopass", "~*", "&*", "+@all", "-@scripting"]


@pytest.mark.system("A2")
@on_all_servers
@scenario
async def test_transactions_work_for_an_account_without_scripts(k: Kit) -> None:
    k.server.raw("ACL", "SETUSER", "plain", *WITHOUT_SCRIPTS)
    client = k.client(username="plain", password="")
    with pytest.raises(StoreRefused, match="permissions"):
        await done(k.simple.acquire(client, "lock", 10, "moto"))
    assert await done(k.simple.acquire(client, "lock", 10, "moto", how="transaction")) is True
    assert await done(k.simple.acquire(client, "lock", 10, "nokia", how="transaction")) is False
    assert await done(k.simple.release(client, "lock", "nokia", how="transaction")) is False
    assert await done(k.simple.release(client, "lock", "moto", how="transaction")) is True
    assert await done(k.simple.release(client, "lock", "moto", how="transaction")) is False


class Meddler(redis.Redis):
    """A client in whose transactions another client changes the key between WATCH and MULTI."""

    meddle: Any = None
    left = 1

    def pipeline(self, *args: Any, **options: Any) -> Any:
        pipe = super().pipeline(*args, **options)
        begin = pipe.multi

        def multi() -> None:
            if type(self).left:
                type(self).left -= 1
                type(self).meddle()
            begin()

        pipe.multi = multi  # type: ignore[method-assign]
        return pipe


def meddler(server: Server, meddle: Any, times: int = 1) -> Meddler:
    kind = type("Meddler", (Meddler,), {"meddle": staticmethod(meddle), "left": times})
    client: Meddler = kind(port=server.port, max_connections=1)
    return client


def unwatched(server: Server, client: Meddler) -> bool:
    """Whether the client's only connection watches nothing: a change of the key does not fail its next EXEC."""
    connection = client.connection_pool.get_connection()
    try:
        for change, command in ((False, "MULTI"), (True, "PING"), (False, "EXEC")):
            if change:
                server.raw("SET", "lock", "changed")
            connection.send_command(command)  # type: ignore[no-untyped-call]
            reply = connection.read_response()
    finally:
        client.connection_pool.release(connection)
    return reply is not None


@pytest.mark.system("A2")
def test_lost_race_returns_false(valkey: Server) -> None:
    with meddler(valkey, lambda: valkey.raw("SET", "lock", "nokia", "PX", 60_000)) as client:
        assert lockfast.simple.acquire(client, "lock", 10, "moto", how="transaction") is False
        assert valkey.raw("GET", "lock") == "nokia"
        assert unwatched(valkey, client)


@pytest.mark.system("A2")
def test_acquire_retries_after_a_race_that_left_the_lock_free(valkey: Server) -> None:
    def acquire_and_release() -> None:
        valkey.raw("SET", "lock", "nokia")
        valkey.raw("DEL", "lock")

    with meddler(valkey, acquire_and_release) as client:
        assert lockfast.simple.acquire(client, "lock", 10, "moto", how="transaction") is True
        assert valkey.raw("GET", "lock") == "moto"


@pytest.mark.system("A2")
@pytest.mark.parametrize("held", [None, "moto", "nokia"])
@pytest.mark.parametrize("call", ["acquire", "release"])
def test_no_path_leaves_the_key_watched(valkey: Server, held: str | None, call: str) -> None:
    if held is not None:
        valkey.raw("SET", "lock", held)
    with meddler(valkey, lambda: None) as client:
        if call == "acquire":
            lockfast.simple.acquire(client, "lock", 10, "moto", how="transaction")
        else:
            lockfast.simple.release(client, "lock", "moto", how="transaction")
        assert unwatched(valkey, client)


@pytest.mark.system("A2")
def test_error_leaves_no_key_watched(valkey: Server) -> None:
    with meddler(valkey, lambda: None) as client:
        valkey.raw("HSET", "lock", "field", "value")
        with pytest.raises(StoreProtocolError):
            lockfast.simple.acquire(client, "lock", 10, "moto", how="transaction")
        valkey.raw("DEL", "lock")
        assert unwatched(valkey, client)


# Scripts


@pytest.mark.system("A3")
@on_all_servers
@scenario
async def test_flushed_scripts_are_sent_again(k: Kit) -> None:
    client = k.client()
    assert await done(k.simple.acquire(client, "lock", 10, "moto"))
    k.server.raw("SCRIPT", "FLUSH")
    assert await done(k.simple.acquire(client, "lock", 10, "nokia")) is False
    k.server.raw("SCRIPT", "FLUSH")
    assert await done(k.simple.release(client, "lock", "moto")) is True


@pytest.mark.system("A3")
@scenario
async def test_acquire_and_release_take_one_round_trip_each(k: Kit) -> None:
    client = k.client()
    await done(k.simple.acquire(client, "lock", 10, "moto"))
    await done(k.simple.release(client, "lock", "moto"))
    k.server.raw("CONFIG", "RESETSTAT")
    await done(k.simple.acquire(client, "lock", 10, "moto"))
    await done(k.simple.release(client, "lock", "moto"))
    calls = k.server.commands_processed()
    assert calls["evalsha"] == 2
    assert "eval" not in calls


# Native commands


@pytest.mark.system("C1")
@pytest.mark.parametrize(("given", "kept_ms"), [(10, 10_000), (0.25, 250), (1.2345, 1235)])
@scenario
async def test_native_acquire_is_one_set_command_with_a_ttl_in_milliseconds(k: Kit, given: float, kept_ms: int) -> None:
    client = k.client()
    await done(client.ping())
    k.server.raw("CONFIG", "RESETSTAT")
    assert await done(k.simple.acquire(client, "lock", given, "random", how="native"))
    left = k.server.raw("PTTL", "lock")
    assert kept_ms - 200 < left <= kept_ms
    assert k.server.commands_processed()["set"] == 1
    assert "evalsha" not in k.server.commands_processed()


@pytest.mark.system("D3")
@on_all_servers
@scenario
async def test_native_release_uses_delete_if_equal_or_a_script(k: Kit) -> None:
    client = k.client()
    await done(client.ping())
    k.server.raw("CONFIG", "RESETSTAT")
    for _ in range(3):
        assert await done(k.simple.acquire(client, "lock", 10, "moto", how="native"))
        assert await done(k.simple.release(client, "lock", "nokia", how="native")) is False
        assert await done(k.simple.release(client, "lock", "moto", how="native")) is True
    calls = k.server.commands_processed()
    if k.server.kind == "valkey9":
        assert calls["delifeq"] == 6
        assert "evalsha" not in calls
    else:
        assert calls["evalsha"] == 6
        assert errors_of(k.server) == 2  # DELIFEQ and DELEX are tried once per client, not once per call


def errors_of(server: Server) -> int:
    """How many error replies had the generic code ERR, as for an unknown command."""
    errors = server.raw("INFO", "errorstats")
    found = [line for line in errors.splitlines() if line.startswith("errorstat_ERR:")]
    return int(found[0].partition("count=")[2]) if found else 0


class Redis84(redis.Redis):
    """A client whose server has DELEX but no DELIFEQ, like Redis 8.4; simulated on Valkey."""

    sent: list[str]

    def execute_command(self, *args: Any, **options: Any) -> Any:
        self.sent.append(args[0])
        if args[0] == "DELIFEQ":
            raise redis.exceptions.ResponseError("unknown command 'DELIFEQ', with args beginning with: 'lock' 'moto' ")
        if args[0] == "DELEX":
            _, key, condition, value = args
            assert condition == "IFEQ"
            return super().execute_command("DELIFEQ", key, value, **options)  # type: ignore[no-untyped-call]
        return super().execute_command(*args, **options)  # type: ignore[no-untyped-call]


@pytest.mark.system("D3")
def test_native_release_uses_delex_on_redis_8_4(valkey: Server) -> None:
    with Redis84.from_url(valkey.url) as client:
        client.sent = []
        for _ in range(2):
            assert lockfast.simple.acquire(client, "lock", 10, "moto", how="native")
            assert lockfast.simple.release(client, "lock", "nokia", how="native") is False
            assert lockfast.simple.release(client, "lock", "moto", how="native") is True
        assert client.sent.count("DELIFEQ") == 1
        assert client.sent.count("DELEX") == 4


# Concurrency and cancellation


@pytest.mark.system("A1")
@each_how
@scenario
async def test_exactly_one_of_many_concurrent_callers_acquires(k: Kit, how: str) -> None:
    client = k.client()

    async def contend(number: int) -> bool:
        won: bool = await done(k.simple.acquire(client, "lock", 10, f"uid{number}", how=how))
        return won

    contenders = [k.start(contend, number) for number in range(12)]
    assert sum([await one.result() for one in contenders]) == 1


@pytest.mark.system("A1")
@each_how
def test_cancelled_acquire_leaves_no_lock_behind(valkey: Server, how: Any) -> None:
    async def main() -> None:
        async with redis.asyncio.Redis.from_url(valkey.url) as client:
            await client.ping()
            for steps in range(25):
                task = asyncio.create_task(lockfast.simple.aio.acquire(client, "lock", 60, f"uid{steps}", how=how))
                for _ in range(steps):
                    await asyncio.sleep(0)
                task.cancel()
                try:
                    if await task:
                        await lockfast.simple.aio.release(client, "lock", f"uid{steps}", how=how)
                except asyncio.CancelledError:
                    pass
            await asyncio.to_thread(until, lambda: not valkey.raw("EXISTS", "lock"), "the lock to be free")

    run_cancelling(main)
