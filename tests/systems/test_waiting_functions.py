"""E2, E3, E4: wait up to a limit, hold up to another, give back by WATCH and MULTI."""

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
from tests.traps.watching import Stopwatch

each_how = pytest.mark.parametrize("how", HOWS)


@on_all_servers
@each_how
@scenario
async def test_e2_an_id_when_it_is_free_and_false_when_it_stays_taken(k: Kit, how: str) -> None:
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


@each_how
@scenario
async def test_e2_who_waits_gets_it_soon_after_it_was_given_back(k: Kit, how: str) -> None:
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


@each_how
@scenario
async def test_e2_ids_of_many_waiters_take_turns(k: Kit, how: str) -> None:
    client = k.client()
    inside = 0
    worst = 0
    turns = 0

    async def worker() -> None:
        nonlocal inside, worst, turns
        for _ in range(3):
            identifier = await done(k.simple.acquire_lock(client, "market", 9, 9, how=how))
            assert identifier
            inside += 1
            worst = max(worst, inside)
            await k.sleep(0.001)
            inside -= 1
            turns += 1
            assert await done(k.simple.release_lock(client, "market", identifier, how=how))

    workers = [k.start(worker) for _ in range(5)]
    for one in workers:
        await one.result()
    assert (worst, turns) == (1, 15)


@scenario
async def test_e2_a_lock_that_nobody_gives_back_ends_after_thirty_seconds(k: Kit) -> None:
    """The book's first lock never ends when its holder dies; here there is always a longest hold."""
    assert await done(k.simple.acquire_lock(k.client(), "market"))
    assert 29_000 < k.server.raw("PTTL", "market") <= 30_000


def test_e3_released_by_watch_and_multi_even_if_others_touch_the_key(any_server: Server) -> None:
    with meddler(any_server, lambda: any_server.raw("EXPIRE", "market", 60), times=20) as client:
        identifier = lockfast.simple.acquire_lock(client, "market", 1, 60)
        assert identifier
        assert lockfast.simple.release_lock(client, "market", identifier, how="transaction") is True
        assert type(client).left == 0
    assert any_server.raw("EXISTS", "market") == 0


def test_e3_a_key_that_never_comes_to_rest_is_an_error_and_no_guess(valkey: Server) -> None:
    with meddler(valkey, lambda: valkey.raw("EXPIRE", "market", 60), times=1000) as client:
        identifier = lockfast.simple.acquire_lock(client, "market", 1, 60)
        assert identifier
        with pytest.raises(StoreUnavailable, match="changed by others"):
            lockfast.simple.release_lock(client, "market", identifier, how="transaction")
    assert valkey.raw("GET", "market") == identifier


@scenario
async def test_e3_released_by_watch_and_multi_when_it_is_anothers_by_now(k: Kit) -> None:
    client = k.client()
    identifier = await done(k.simple.acquire_lock(client, "market", 1, 60, how="transaction"))
    k.server.raw("SET", "market", "another")
    assert await done(k.simple.release_lock(client, "market", identifier, how="transaction")) is False
    assert k.server.raw("GET", "market") == "another"


@each_how
@scenario
async def test_e4_wait_and_hold_have_a_limit_each_in_fractions_of_a_second(k: Kit, how: str) -> None:
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


def test_e4_when_the_last_answer_is_lost_nothing_is_left_behind(
    unsteady: redis.Redis,
    proxy: FaultProxy,
    valkey: Server,
) -> None:
    lockfast.simple.acquire_lock(unsteady, "other")
    proxy.drop_reply(b"EVALSHA")
    with pytest.raises(StoreUnavailable):
        lockfast.simple.acquire_lock(unsteady, "market")
    assert valkey.raw("EXISTS", "market") == 0


@each_how
def test_e4_a_cancelled_wait_leaves_nothing_behind(valkey: Server, how: Any) -> None:
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
