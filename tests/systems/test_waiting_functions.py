"""`acquire_lock` and `release_lock`: a wait limit, a hold limit, and release by WATCH and MULTI."""

import asyncio
import time
from typing import Any

import pytest
import redis
import redis.asyncio

import lockfast.simple
import lockfast.simple.aio
from lockfast import StoreUnavailable
from tests.contract.driver import done
from tests.support.proxy import FaultProxy
from tests.support.servers import Server
from tests.support.waiting import until
from tests.systems.conftest import on_all_servers
from tests.systems.kit import HOWS, Kit, run_cancelling, scenario
from tests.systems.test_plain_functions import meddler
from tests.traps.observation import Stopwatch

each_how = pytest.mark.parametrize("how", HOWS)


@pytest.mark.system("E2")
@on_all_servers
@each_how
@scenario
async def test_acquire_lock_returns_an_identifier_or_false_after_the_timeout(k: Kit, how: str) -> None:
    client = k.client()
    identifier = await done(k.simple.acquire_lock(client, "market", 1, how=how))
    assert isinstance(identifier, str)
    assert k.server.raw("GET", "market") == identifier
    started = time.monotonic()
    assert await done(k.simple.acquire_lock(client, "market", 0.15, how=how)) is False
    assert 0.15 <= time.monotonic() - started < 10
    assert await done(k.simple.acquire_lock(client, "market", 0, how=how)) is False
    assert await done(k.simple.release_lock(client, "market", "another", how=how)) is False
    assert await done(k.simple.release_lock(client, "market", identifier, how=how)) is True
    assert await done(k.simple.release_lock(client, "market", identifier, how=how)) is False


@pytest.mark.system("E2")
@each_how
@scenario
async def test_waiter_acquires_soon_after_a_release(k: Kit, how: str) -> None:
    client = k.client()
    first = await done(k.simple.acquire_lock(client, "market", 1, how=how))

    async def wait() -> Any:
        return await done(k.simple.acquire_lock(client, "market", 20, how=how))

    waiting = k.start(wait)
    await k.sleep(0.05)
    assert not waiting.ended
    watch = Stopwatch()
    assert await done(k.simple.release_lock(client, "market", first, how=how))
    second = await waiting.result()
    assert isinstance(second, str)
    assert second != first
    assert watch.seconds < watch.most(2)


@pytest.mark.system("E2")
@each_how
@scenario
async def test_many_waiters_never_hold_at_the_same_time(k: Kit, how: str) -> None:
    client = k.client()
    inside = 0
    most_inside = 0
    rounds = 0

    async def worker() -> None:
        nonlocal inside, most_inside, rounds
        for _ in range(3):
            identifier = await done(k.simple.acquire_lock(client, "market", 9, 9, how=how))
            assert identifier
            inside += 1
            most_inside = max(most_inside, inside)
            await k.sleep(0.001)
            inside -= 1
            rounds += 1
            assert await done(k.simple.release_lock(client, "market", identifier, how=how))

    workers = [k.start(worker) for _ in range(5)]
    for one in workers:
        await one.result()
    assert (most_inside, rounds) == (1, 15)


@pytest.mark.system("E2")
@scenario
async def test_unreleased_lock_expires_after_thirty_seconds(k: Kit) -> None:
    """Unlike the first lock of the seed text, which stays locked when its holder dies."""
    assert await done(k.simple.acquire_lock(k.client(), "market"))
    assert 29_000 < k.server.raw("PTTL", "market") <= 30_000


@pytest.mark.system("E3")
def test_release_retries_while_others_touch_the_key(any_server: Server) -> None:
    with meddler(any_server, lambda: any_server.raw("EXPIRE", "market", 60), times=20) as client:
        identifier = lockfast.simple.acquire_lock(client, "market", 1, 60)
        assert identifier
        assert lockfast.simple.release_lock(client, "market", identifier, how="transaction") is True
        assert type(client).left == 0
    assert any_server.raw("EXISTS", "market") == 0


@pytest.mark.system("E3")
def test_release_of_a_constantly_changing_key_raises(valkey: Server) -> None:
    with meddler(valkey, lambda: valkey.raw("EXPIRE", "market", 60), times=1000) as client:
        identifier = lockfast.simple.acquire_lock(client, "market", 1, 60)
        assert identifier
        with pytest.raises(StoreUnavailable, match=r"Other clients changed the key 'market'.*not released"):
            lockfast.simple.release_lock(client, "market", identifier, how="transaction")
    assert valkey.raw("GET", "market") == identifier


@pytest.mark.system("E3")
@scenario
async def test_release_of_a_lock_that_another_client_holds_returns_false(k: Kit) -> None:
    client = k.client()
    identifier = await done(k.simple.acquire_lock(client, "market", 1, 60, how="transaction"))
    k.server.raw("SET", "market", "another")
    assert await done(k.simple.release_lock(client, "market", identifier, how="transaction")) is False
    assert k.server.raw("GET", "market") == "another"


@pytest.mark.system("E4")
@each_how
@scenario
async def test_wait_and_hold_limits_are_separate_and_fractional(k: Kit, how: str) -> None:
    client = k.client()
    first = await done(k.simple.acquire_lock_with_timeout(client, "market", 0.05, 0.25, how=how))
    assert isinstance(first, str)
    assert 0 < k.server.raw("PTTL", "market") <= 250
    second = await done(
        k.simple.acquire_lock_with_timeout(client, "market", acquire_timeout=5, lock_timeout=2.5, how=how)
    )
    assert isinstance(second, str)
    assert 2000 < k.server.raw("PTTL", "market") <= 2500
    assert await done(k.simple.release_lock(client, "market", first, how=how)) is False
    assert await done(k.simple.release_lock(client, "market", second, how=how)) is True


@pytest.mark.system("E4")
def test_lost_last_reply_leaves_no_lock_behind(
    unsteady: redis.Redis,
    proxy: FaultProxy,
    valkey: Server,
) -> None:
    lockfast.simple.acquire_lock(unsteady, "other")
    proxy.drop_reply(b"EVALSHA")
    with pytest.raises(StoreUnavailable):
        lockfast.simple.acquire_lock(unsteady, "market")
    assert valkey.raw("EXISTS", "market") == 0


@pytest.mark.system("E4")
@each_how
def test_cancelled_wait_leaves_no_lock_behind(valkey: Server, how: Any) -> None:
    async def main() -> None:
        async with redis.asyncio.Redis.from_url(valkey.url) as client:
            valkey.raw("SET", "market", "another", "PX", 60_000)
            waiting = [
                asyncio.create_task(lockfast.simple.aio.acquire_lock(client, "market", 30, how=how)) for _ in range(8)
            ]
            await asyncio.sleep(0.02)
            valkey.raw("DEL", "market")
            for task in waiting:
                task.cancel()
            got = await asyncio.gather(*waiting, return_exceptions=True)
            for identifier in got:
                if isinstance(identifier, str):
                    await lockfast.simple.aio.release_lock(client, "market", identifier, how=how)
            await asyncio.to_thread(until, lambda: not valkey.raw("EXISTS", "market"), "the lock to be free")

    run_cancelling(main)
