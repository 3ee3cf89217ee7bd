"""`locks.update`: WATCH as an optimistic lock, with bounded, jittered retries and a real lock under contention."""

import asyncio
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import redis

import lockfast
from lockfast import Outcome, StoreUnavailable, UpdateConflict
from lockfast.client import update
from lockfast.client.update import LOCK_AT, MOST_CONTENTION, Contention, _contention_of
from lockfast.stores.redis.watch import ThreadWatchConnection
from tests.contract.driver import Driver, done, scenario
from tests.contract.stores import only
from tests.support.servers import Server

on_a_server = only(stores=("valkey9",))
on_servers = only(stores=("valkey9", "redis62"))


def more(old: bytes | None) -> int:
    return int(old or 0) + 1


def meddle(d: Driver, times: int) -> Callable[[bytes | None], int]:
    """A change during which another client writes, in its first `times` calls."""
    left = times

    def change(old: bytes | None) -> int:
        nonlocal left
        if left:
            left -= 1
            assert d.server is not None
            d.server.raw("INCRBY", "stock", 100)
        return more(old)

    return change


def stored(d: Driver) -> Any:
    assert d.server is not None
    return d.server.raw("GET", "stock")


@pytest.mark.system("E1")
@on_servers
@scenario
async def test_update_changes_the_value(d: Driver) -> None:
    assert await done(d.locks.update("stock", more)) == 1
    assert await done(d.locks.update("stock", more)) == 2
    assert await done(d.locks.update("stock", lambda old: (old or b"") + b"!")) == b"2!"
    assert await done(d.locks.update("stock", lambda old: "ü")) == "ü"
    assert await done(d.locks.update("stock", lambda old: 0.5)) == 0.5
    assert stored(d) == "0.5"


@pytest.mark.system("E1")
@on_a_server
@scenario
async def test_change_that_returns_none_writes_nothing(d: Driver) -> None:
    assert await done(d.locks.update("stock", lambda old: None)) is None
    assert stored(d) is None
    await done(d.locks.update("stock", more))
    assert await done(d.locks.update("stock", lambda old: None)) is None
    assert stored(d) == "1"


@pytest.mark.system("E1")
@on_a_server
@scenario
async def test_update_keeps_the_ttl_of_the_key(d: Driver) -> None:
    assert d.server is not None
    d.server.raw("SET", "stock", "1", "EX", "100")
    await done(d.locks.update("stock", more))
    assert 90 < d.server.raw("TTL", "stock") <= 100


@pytest.mark.system("E1")
@on_servers
@scenario
async def test_concurrent_write_is_not_overwritten(d: Driver) -> None:
    assert await done(d.locks.update("stock", meddle(d, 2))) == 201
    assert stored(d) == "201"


@pytest.mark.system("E1")
@on_a_server
@scenario
async def test_number_of_attempts_is_bounded(d: Driver) -> None:
    with pytest.raises(UpdateConflict, match="during each of 3 attempts") as caught:
        await done(d.locks.update("stock", meddle(d, 10), attempts=3))
    assert (caught.value.key, caught.value.attempts) == ("stock", 3)
    assert stored(d) == "300", "nothing was written by update"


@pytest.mark.system("E1")
@on_a_server
@scenario
async def test_time_for_attempts_is_bounded(d: Driver) -> None:
    with pytest.raises(UpdateConflict):
        await done(d.locks.update("stock", meddle(d, 10), timeout=0))
    assert stored(d) == "100"


@pytest.mark.system("E1")
@on_a_server
@scenario
async def test_error_in_the_change_propagates_and_writes_nothing(d: Driver) -> None:
    def fail(old: bytes | None) -> int:
        raise KeyError("the change's own")

    await done(d.locks.update("stock", more))
    with pytest.raises(KeyError, match="own"):
        await done(d.locks.update("stock", fail))
    for bad in (True, object(), [1]):
        with pytest.raises(lockfast.ConfigurationError, match="A value is"):
            await done(d.locks.update("stock", lambda old, bad=bad: bad))
    assert stored(d) == "1"
    assert await done(d.locks.update("stock", more)) == 2, "the key is no longer watched"


@pytest.mark.system("E1")
@on_a_server
@scenario
async def test_no_concurrent_update_is_lost(d: Driver) -> None:
    clients = [d.connect() for _ in range(4)]

    async def work(client: Any) -> None:
        for _ in range(25):
            await done(client.update("stock", more, attempts=10_000, timeout=60))

    workers = [d.start(work, client) for client in clients for _ in range(2)]
    for worker in workers:
        await worker.result()
    assert stored(d) == "200"


@pytest.mark.system("E1")
@on_a_server
@scenario
async def test_update_switches_to_the_lock_under_conflicts_and_back(d: Driver) -> None:
    contention = _contention_of(d.locks.session, "stock")
    seen: list[bool] = []

    async def watch_the_lock(old: bytes | None) -> int:
        seen.append(await done(d.lock("update:stock").locked()))
        return more(old)

    change = watch_the_lock if d.flavour == "asyncio" else d.function(watch_the_lock)
    await done(d.locks.update("stock", meddle(d, LOCK_AT)))
    assert contention.locking
    for _ in range(LOCK_AT + 1):
        await done(d.locks.update("stock", change))
    assert seen == [True] * (LOCK_AT - 1) + [False] * 2, "the attempt after the last conflict already used the lock"
    assert not contention.locking
    assert await done(d.lock("update:stock").locked()) is False


@pytest.mark.system("E1")
@on_a_server
@scenario
async def test_concurrent_write_is_noticed_under_the_lock(d: Driver) -> None:
    contention = _contention_of(d.locks.session, "stock")
    for _ in range(MOST_CONTENTION):
        contention.conflict()
    assert await done(d.locks.update("stock", meddle(d, 2))) == 201


@pytest.mark.system("E1")
@on_a_server
@scenario
async def test_update_lock_that_stays_taken_raises_update_conflict(d: Driver) -> None:
    contention = _contention_of(d.locks.session, "stock")
    for _ in range(MOST_CONTENTION):
        contention.conflict()
    lease = await done(d.lock("update:stock").acquire())
    with pytest.raises(UpdateConflict, match="held its lock"):
        await done(d.locks.update("stock", more, timeout=0.05))
    assert await done(d.locks.update("stock", more, adaptive=False)) == 1
    await done(lease.release())
    assert await done(d.locks.update("stock", more, timeout=5)) == 2


@pytest.mark.system("E1")
@only(stores=("memory", "sqlite"))
@scenario
async def test_store_without_values_is_rejected(d: Driver) -> None:
    with pytest.raises(lockfast.ConfigurationError, match="holds locks and no values"):
        await done(d.locks.update("stock", more))


@pytest.mark.system("E1")
@on_a_server
@pytest.mark.parametrize("bad", [{"attempts": 0}, {"attempts": True}, {"timeout": -1}, {"adaptive": 1}], ids=str)
@scenario
async def test_invalid_options_are_rejected(d: Driver, bad: dict[str, Any]) -> None:
    with pytest.raises(lockfast.ConfigurationError):
        await done(d.locks.update("stock", more, **bad))
    with pytest.raises(lockfast.ConfigurationError):
        await done(d.locks.update("", more))


@pytest.mark.system("E1")
@on_a_server
@scenario
async def test_key_of_another_type_is_an_error(d: Driver) -> None:
    assert d.server is not None
    d.server.raw("RPUSH", "stock", "x")
    with pytest.raises(lockfast.StoreProtocolError, match="holds other data"):
        await done(d.locks.update("stock", more))


@pytest.mark.system("E1")
@on_a_server
@scenario
async def test_account_without_watch_is_refused(d: Driver) -> None:
    """Without WATCH, conflicts would go unnoticed."""
    assert d.server is not None
    d.server.raw("ACL", "SETUSER", "blind", "on", ">pw", "~*", "&*", "+@all", "-watch")
    client = d.open(f"redis://blind:pw@{d.server.host}:{d.server.port}/0")
    try:
        with pytest.raises(lockfast.StoreRefused):
            await done(client.update("stock", more))
    finally:
        await done(client.close())
        d.server.raw("ACL", "DELUSER", "blind")
    assert stored(d) is None


@pytest.mark.system("E1")
@on_a_server
@scenario
async def test_documented_permissions_suffice_for_update(d: Driver) -> None:
    """As listed in docs/permissions.md."""
    assert d.server is not None
    needed = ("+watch", "+unwatch", "+multi", "+exec", "+get", "+set")
    d.server.raw("ACL", "SETUSER", "updater", "reset", "on", ">pw", "~stock", "-@all", *needed)
    client = d.open(f"redis://updater:pw@{d.server.host}:{d.server.port}/0")
    try:
        assert await done(client.update("stock", more)) == 1
        with pytest.raises(lockfast.StoreRefused):
            await done(client.update("another", more))
    finally:
        await done(client.close())
        d.server.raw("ACL", "DELUSER", "updater")


@pytest.mark.system("E1")
@only(flavour="threads", stores=("valkey9",))
@scenario
async def test_forked_child_opens_its_own_connections(d: Driver) -> None:
    assert d.locks.update("stock", more) == 1
    child = os.fork()
    if child == 0:
        try:
            os._exit(d.locks.update("stock", more))
        finally:
            os._exit(99)
    _, status = os.waitpid(child, 0)  # noqa: ASYNC222 - on threads a scenario blocks
    assert os.waitstatus_to_exitcode(status) == 2
    assert d.locks.update("stock", more) == 3


@pytest.mark.system("E1")
@on_a_server
@scenario
async def test_dead_idle_connection_is_replaced(d: Driver) -> None:
    assert d.server is not None
    await done(d.locks.update("stock", more))
    d.server.raw("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    assert await done(d.locks.update("stock", more)) == 2


@pytest.mark.system("E1")
@only(flavour="threads", stores=("valkey9",))
@scenario
async def test_write_with_a_lost_reply_is_not_repeated(d: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = ThreadWatchConnection.exchange

    async def lossy(self: ThreadWatchConnection, requests: list[bytes], until: float) -> list[Any]:
        answer = await exchange(self, requests, until)
        if b"EXEC" in requests[-1]:
            raise StoreUnavailable("the reply was lost", outcome=Outcome.UNKNOWN)
        return answer

    monkeypatch.setattr(ThreadWatchConnection, "exchange", lossy)
    with pytest.raises(StoreUnavailable) as caught:
        await done(d.locks.update("stock", more))
    assert caught.value.outcome is Outcome.UNKNOWN
    assert stored(d) == "1", "written exactly once"


@pytest.mark.system("E1")
@only(flavour="asyncio", stores=("valkey9",))
@scenario
async def test_cancelled_change_writes_nothing(d: Driver) -> None:
    began = asyncio.Event()

    async def hang(old: bytes | None) -> int:
        began.set()
        await asyncio.sleep(60)
        return 0

    task = asyncio.create_task(d.locks.update("stock", hang))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stored(d) is None
    assert await d.locks.update("stock", more) == 1


@pytest.mark.system("E1")
def test_update_and_redis_py_transactions_notice_each_other(valkey: Server) -> None:
    def theirs() -> None:
        with redis.Redis.from_url(valkey.url) as client:
            for _ in range(50):
                client.transaction(
                    lambda pipe: (value := pipe.get("stock"), pipe.multi(), pipe.set("stock", int(value or 0) + 1)),
                    "stock",
                )

    def ours() -> None:
        with lockfast.connect(valkey.url) as locks:
            for _ in range(50):
                locks.update("stock", more, attempts=10_000, timeout=60)

    threads = [threading.Thread(target=work) for work in (theirs, ours, ours)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert valkey.raw("GET", "stock") == "150"


# Contention and pauses, without a server


@pytest.mark.system("E1")
def test_contention_switches_with_hysteresis() -> None:
    contention = Contention()
    for _ in range(LOCK_AT - 1):
        contention.conflict()
    assert not contention.locking
    contention.conflict()
    assert contention.locking
    for _ in range(LOCK_AT - 1):
        contention.no_conflict()
    assert contention.locking, "switches back at 0, not at the threshold"
    contention.no_conflict()
    assert not contention.locking
    for _ in range(10 * MOST_CONTENTION):
        contention.conflict()
    for _ in range(MOST_CONTENTION):
        contention.no_conflict()
    assert not contention.locking, "a long contention cools down as fast as a short one"


@pytest.mark.system("E1")
def test_pauses_grow_with_jitter_up_to_a_bound() -> None:
    full = [update.conflict_pause(conflicts, 1.0) for conflicts in range(1, 30)]
    assert full == sorted(full)
    assert full[-1] == update.LONGEST_PAUSE
    assert update.conflict_pause(5, 0.0) == 0.0
