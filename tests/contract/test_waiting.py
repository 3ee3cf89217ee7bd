"""Waiters: their order, timeouts, and dead or cancelled waiters."""

import asyncio
import subprocess
import sys
from typing import Any

import pytest

from lockfast import State
from tests.contract.driver import BOUND, Driver, TaskContender, done, held, scenario
from tests.contract.stores import BETWEEN_PROCESSES, IN_ORDER, SERVERS, only
from tests.support.lateness import lateness
from tests.support.lateness import watch as watch_lateness
from tests.traps.observation import Stopwatch

pytestmark = pytest.mark.timing


@scenario
async def test_waiter_gets_the_lock_after_a_release(d: Driver) -> None:
    lease = await done(d.lock().acquire())
    waiting = d.connect().lock("thing")

    async def waiter() -> Any:
        return await done(waiting.acquire(timeout=BOUND))

    contender = d.start(waiter)
    await d.queue_length(d.lock(), 1)
    assert not contender.ended
    assert await done(lease.release()) is True
    successor = await contender.result()
    assert successor.state is State.HELD
    assert successor.fence > lease.fence
    assert (await done(d.lock().inspect())).holder == successor.holder


@only(stores=IN_ORDER)
@scenario
async def test_first_come_first_served(d: Driver) -> None:
    clients = [d.locks, d.connect()]
    lease = await done(d.lock().acquire())
    order, fences = [], [lease.fence]

    async def waiter(number: int) -> None:
        lock = clients[number % 2].lock("thing", timeout=BOUND, label=f"number {number}")
        async with held(lock) as successor:
            order.append(number)
            fences.append(successor.fence)

    contenders = []
    for number in range(6):
        contenders.append(d.start(waiter, number))
        info = await d.queue_length(d.lock(), number + 1)
        assert [one.owner.label for one in info.waiters] == [f"number {n}" for n in range(number + 1)]
    await done(lease.release())
    for contender in contenders:
        await contender.result()
    assert order == list(range(6))
    assert fences == sorted(set(fences))
    info = await done(d.lock().inspect())
    assert (info.locked, info.waiting) == (False, 0)


@only(stores=IN_ORDER)
@scenario
async def test_newcomer_does_not_overtake(d: Driver) -> None:
    lease = await done(d.lock().acquire())
    proceed = d.gate()

    async def waiter() -> None:
        async with held(d.connect().lock("thing", timeout=BOUND)):
            await proceed.passed()

    contender = d.start(waiter)
    await d.queue_length(d.lock(), 1)
    await done(lease.release())
    assert await done(d.lock().acquire(timeout=0)) is None, "the lock was handed off to the waiter"
    proceed.open()
    await contender.result()


@scenario
async def test_timeout_is_kept_and_leaves_no_ticket(d: Driver) -> None:
    lease = await done(d.lock().acquire())
    waiting = d.connect().lock("thing")
    await done(waiting.inspect())  # connects
    watch = Stopwatch()
    assert await done(waiting.acquire(timeout=0.3)) is None
    assert 0.3 <= watch.seconds < watch.most(1.2)
    info = await done(d.lock().inspect())
    assert (info.holder, info.waiting) == (lease.holder, 0)


@scenario
async def test_waiter_that_timed_out_is_not_granted_later(d: Driver) -> None:
    lease = await done(d.lock().acquire())
    patient = d.connect().lock("thing")

    async def waiter() -> Any:
        return await done(patient.acquire(timeout=BOUND))

    assert await done(d.connect().lock("thing").acquire(timeout=0.05)) is None
    contender = d.start(waiter)
    await d.queue_length(d.lock(), 1)
    await done(lease.release())
    successor = await contender.result()
    await done(successor.release())
    assert await done(d.lock().locked()) is False


@scenario
async def test_crashed_holder_blocks_for_its_ttl_only(d: Driver) -> None:
    watch = Stopwatch()
    abandoned = await done(d.lock(ttl=0.2, renew=False).acquire())
    successor = await done(d.connect().lock("thing").acquire(timeout=BOUND))
    # The server may round the expiry time to a millisecond.
    assert 0.198 <= watch.seconds < watch.most(1)
    assert successor.fence > abandoned.fence
    assert abandoned.state is State.LOST, "its own clock ends the lease before the store grants again"


@only(stores=IN_ORDER)
@scenario
async def test_waiters_get_past_crashed_holders_in_order(d: Driver) -> None:
    watch_lateness()
    await done(d.lock(ttl=1, renew=False).acquire())
    order = []

    async def waiter(number: int) -> None:
        assert await done(d.connect().lock("thing", ttl=0.6, renew=False).acquire(timeout=BOUND)) is not None
        order.append(number)  # not released, as if this waiter had crashed too

    contenders = []
    last = d.lock()
    for number in range(2):
        contenders.append(d.start(waiter, number))
        await d.queue_length(last, number + 1)
    for contender in contenders:
        await contender.result()
    # A ticket expires too if its waiter does not refresh it in time, which can happen when the machine stalls.
    assert order == [0, 1] or (sorted(order) == [0, 1] and lateness() > 0.6)
    assert await done(last.acquire(timeout=BOUND)) is not None


@only(flavour="asyncio")
@scenario
async def test_cancelled_waiter_leaves_the_queue(d: Driver) -> None:
    lease = await done(d.lock().acquire())
    waiting = d.connect().lock("thing")

    async def waiter() -> Any:
        return await waiting.acquire()

    contender = d.start(waiter)
    assert isinstance(contender, TaskContender)
    await d.queue_length(d.lock(), 1)
    contender.cancel()
    with pytest.raises(asyncio.CancelledError):
        await contender.result()
    assert (await done(d.lock().inspect())).waiting == 0
    await done(lease.release())
    assert await done(d.lock().locked()) is False


@only(stores=SERVERS)
@scenario
async def test_waiter_whose_inbox_breaks_is_still_granted(d: Driver) -> None:
    assert d.server is not None
    lease = await done(d.lock().acquire())
    order = []

    async def waiter(number: int) -> None:
        async with held(d.connect().lock("thing", timeout=BOUND)):
            order.append(number)

    contenders = []
    for number in range(2):
        contenders.append(d.start(waiter, number))
        await d.queue_length(d.lock(), number + 1)
    assert d.server.raw("CLIENT", "KILL", "TYPE", "pubsub") == 2
    await done(lease.release())
    for contender in contenders:
        await contender.result()
    assert sorted(order) == [0, 1]


WAITING_PROCESS = {
    "threads": "import lockfast, sys; lockfast.connect(sys.argv[1]).lock('thing').acquire()",
    "asyncio": """
import asyncio, lockfast.aio, sys
async def main():
    await lockfast.aio.connect(sys.argv[1]).lock("thing").acquire()
asyncio.run(main())
""",
}


@only(stores=BETWEEN_PROCESSES)
@scenario
async def test_killed_waiter_is_skipped(d: Driver) -> None:
    lease = await done(d.lock().acquire())
    waiting = d.connect().lock("thing")

    async def waiter() -> Any:
        return await done(waiting.acquire(timeout=BOUND))

    program = [sys.executable, "-c", WAITING_PROCESS[d.flavour], d.url]
    with subprocess.Popen(program) as process:  # noqa: ASYNC220 - nothing else runs in this loop
        try:
            await d.queue_length(d.lock(), 1)
        finally:
            process.kill()
    contender = d.start(waiter)
    await d.queue_length(d.lock(), 2)
    await done(lease.release())
    watch = Stopwatch()
    assert await contender.result() is not None
    assert watch.seconds < watch.most(3), "it does not wait for the ttl of the dead waiter, 30 s"
