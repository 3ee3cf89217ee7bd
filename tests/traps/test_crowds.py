"""Many waiters for one lock: in order, over few connections, each woken once."""

import asyncio
import threading
from concurrent.futures import Future, wait
from typing import Any

import pytest

import lockfast
import lockfast.aio
from tests.support.proxy import FaultProxy
from tests.support.servers import Server
from tests.traps.observation import Stopwatch, await_queue, normal_clients, pubsub_clients, traces

pytestmark = pytest.mark.timing

TASKS = 2000
THREADS = 300
MOST_CONNECTIONS = 3


async def test_two_thousand_tasks_get_the_lock_in_order(valkey: Server) -> None:
    order: list[int] = []
    connections: list[int] = []

    async def worker(number: int) -> None:
        async with locks.lock("report", local_handoff=False):  # in the order of the store
            order.append(number)
            if number == TASKS // 2:
                connections.append(normal_clients(valkey) + pubsub_clients(valkey))

    async with lockfast.aio.connect(valkey.url) as locks:
        lease = await locks.lock("report").acquire()
        assert lease is not None
        tasks = [asyncio.create_task(worker(number)) for number in range(TASKS)]
        await asyncio.to_thread(await_queue, valkey, "report", TASKS, 20)
        watch = Stopwatch()
        await lease.release()
        await asyncio.gather(*tasks)
        assert watch.seconds < watch.most(TASKS * 0.005)
    assert order == list(range(TASKS))
    assert connections[0] <= MOST_CONNECTIONS
    assert traces(valkey, "report") == []


def test_three_hundred_threads_share_the_connections(valkey: Server) -> None:
    order: list[int] = []
    futures: list[Future[Any]] = [Future() for _ in range(THREADS)]

    def worker(number: int) -> None:
        try:
            with locks.lock("report"):
                order.append(number)
            futures[number].set_result(None)
        except BaseException as error:
            futures[number].set_exception(error)

    with lockfast.connect(valkey.url) as locks:
        lease = locks.lock("report").acquire()
        assert lease is not None
        for number in range(THREADS):
            threading.Thread(target=worker, args=(number,), daemon=True).start()
            if number % 50 == 0:  # every 50th waiter in a known order
                await_queue(valkey, "report", number + 1)
        await_queue(valkey, "report", THREADS)
        assert normal_clients(valkey) + pubsub_clients(valkey) <= MOST_CONNECTIONS
        lease.release()
        wait(futures, 40)
        assert [future.result(0) for future in futures] == [None] * THREADS
    assert sorted(order) == list(range(THREADS))
    known = [number for number in order if number % 50 == 0]
    assert known == sorted(known)
    assert traces(valkey, "report") == []


async def test_hand_off_wakes_one_waiter_and_sends_no_request(valkey: Server, proxy: FaultProxy) -> None:
    def claims() -> int:
        return sum(any(b"lockfast:inbox:" in arg for arg in args) for args in proxy.requests if args[0] != b"SUBSCRIBE")

    async with lockfast.aio.connect(valkey.url) as holder, lockfast.aio.connect(proxy.url) as locks:
        lease = await holder.lock("report").acquire()
        assert lease is not None
        waiting = [asyncio.create_task(locks.lock("report").acquire()) for _ in range(20)]
        await asyncio.to_thread(await_queue, valkey, "report", 20)
        before = claims()
        await lease.release()
        for waiter in waiting:
            lease = await waiter
            assert lease is not None
            await lease.release()
        assert claims() - before <= 1  # a refresh that was due anyway
