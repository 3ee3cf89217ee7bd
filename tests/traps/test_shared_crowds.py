"""Crowds of readers and of tasks that want a permit, counted by a process that has nothing to do with the locks."""

import asyncio
import json
import re
import subprocess
import sys

import pytest
import redis.asyncio

from tests.contract.driver import FLAVOURS, Driver, scenario
from tests.support.servers import Server

pytestmark = pytest.mark.timing

TASKS = 1000
LIMIT = 10
READERS = 50

OBSERVER = """
import json, redis, sys
client = redis.Redis(port=int(sys.argv[1]))
inside, most, order = set(), 0, []
for _ in range(2 * int(sys.argv[2])):
    _, event = client.blpop("events", timeout=50)
    kind, number = event.decode().split()
    if kind == "in":
        inside.add(number)
        order.append(int(number))
    else:
        inside.remove(number)
    most = max(most, len(inside))
print(json.dumps([most, order]))
"""
"""Counts from the events of the tasks, in the order of the server. A task reports only while it holds its permit."""


@pytest.fixture
def d(valkey: Server) -> Driver:
    return FLAVOURS["asyncio"]("valkey9", valkey.url, valkey)


@scenario
async def test_no_more_tasks_than_permits_at_once_and_all_in_order(d: Driver, valkey: Server) -> None:
    with observer(valkey) as process:
        most, order, queued = await crowd(d, valkey, process)
    assert most == LIMIT
    assert sorted(order) == list(range(TASKS))
    places = {number: place for place, number in enumerate(queued)}
    late = max(abs(place - places[number]) for place, number in enumerate(order))
    assert late < LIMIT, "those that hold permits together may report in any order, nobody else"


def observer(valkey: Server) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", OBSERVER, str(valkey.port), str(TASKS)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


async def crowd(d: Driver, valkey: Server, process: subprocess.Popen[str]) -> tuple[int, list[int], list[int]]:
    """Let the tasks in. Return the most that were inside at once, their order, and the order of the queue."""
    events = redis.asyncio.Redis(port=valkey.port, single_connection_client=True)

    async def work(number: int) -> None:
        async with d.locks.semaphore("crowd", LIMIT, ttl=60, label=str(number)):
            await events.rpush("events", f"in {number}")
            await asyncio.sleep(0)
            await events.rpush("events", f"out {number}")

    all_permits = await d.connect().semaphore("crowd", LIMIT).acquire(permits=LIMIT)
    working = [asyncio.ensure_future(work(number)) for number in range(TASKS)]
    await d.queue_length(d.lock("crowd"), TASKS)
    queued = [int(waiter.owner.label) for waiter in (await d.lock("crowd").inspect()).waiters]
    await all_permits.release()
    await asyncio.gather(*working)
    await events.aclose()
    most, order = json.loads(process.communicate(timeout=50)[0])
    return most, order, queued


def scripts_run(server: Server) -> int:
    found = re.search(r"cmdstat_evalsha:calls=(\d+)", server.raw("INFO", "commandstats"))
    return int(found[1]) if found else 0


@scenario
async def test_readers_behind_a_writer_all_enter_with_its_release(d: Driver, valkey: Server) -> None:
    """They hold at the same instant, and none of them has to ask again: one request, and one message to each."""
    clients = [d.connect() for _ in range(5)]
    writer = await d.locks.rwlock("config", ttl=60).writer.acquire()
    reading = [asyncio.ensure_future(client.rwlock("config", ttl=60).reader.acquire()) for client in clients * 10]
    await d.queue_length(d.lock("config"), READERS)
    before = scripts_run(valkey)
    await writer.release()
    leases = await asyncio.wait_for(asyncio.gather(*reading), 20)
    assert scripts_run(valkey) - before == 1
    assert len((await d.lock("config").inspect()).holders) == READERS
    for lease in leases:
        lease.ensure_held()
