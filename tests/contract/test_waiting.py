"""Waiting for a lock: the order, the end of patience, and who is passed over."""

import asyncio
import subprocess
import sys
from typing import Any

import pytest

from lockfast import State
from tests.contract.driver import BOUND, Driver, TaskContender, done, held, scenario
from tests.contract.stores import BETWEEN_PROCESSES, SERVERS, only
from tests.support.lateness import lateness
from tests.support.lateness import watch as watch_lateness
from tests.traps.watching import Stopwatch

pytestmark = pytest.mark.timing


@scenario
async def test_a_waiter_gets_the_lock_when_it_is_given_back(d: Driver) -> None:
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


@scenario
async def test_first_come_first_served(d: Driver) -> None:
    clients = [d.locks, d.connect()]
    lease = await done(d.lock().acquire())
    order, fences = [], [lease.fence]

    async def waiter(number: int) -> None:
        lock = clients[number % 2].lock("thing", timeout=BOUND, label=f"number {number}")
        async with held(lock) as attempt:
            order.append(number)
            fences.append(attempt.fence)

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


@scenario
async def test_who_comes_new_does_not_overtake(d: Driver) -> None:
    lease = await done(d.lock().acquire())
    told = d.gate()

    async def waiter() -> None:
        async with held(d.connect().lock("thing", timeout=BOUND)):
            await told.passed()

    contender = d.start(waiter)
    await d.queue_length(d.lock(), 1)
    await done(lease.release())
    assert await done(d.lock().acquire(timeout=0)) is None, "the lock was handed to the one who waited"
    told.open()
    await contender.result()


@scenario
async def test_a_timeout_is_waited_for_in_full_and_leaves_nothing(d: Driver) -> None:
    lease = await done(d.lock().acquire())
    waiting = d.connect().lock("thing")
    await done(waiting.inspect())  # connects
    watch = Stopwatch()
    assert await done(waiting.acquire(timeout=0.3)) is None
    assert 0.3 <= watch.seconds < watch.most(1.2)
    info = await done(d.lock().inspect())
    assert (info.holder, info.waiting) == (lease.holder, 0)


@scenario
async def test_who_timed_out_is_not_granted_later(d: Driver) -> None:
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
async def test_a_crashed_holder_blocks_for_its_ttl_and_no_longer(d: Driver) -> None:
    watch = Stopwatch()
    left_alone = await done(d.lock(ttl=0.2, renew=False).acquire())
    successor = await done(d.connect().lock("thing").acquire(timeout=BOUND))
    # The server may round the moment of expiry to a millisecond.
    assert 0.198 <= watch.seconds < watch.most(1)
    assert successor.fence > left_alone.fence
    assert left_alone.state is State.LOST, "it is told by its own clock, before another can have the lock"


@scenario
async def test_every_waiter_gets_past_crashed_holders(d: Driver) -> None:
    """The next in line, not merely anyone, gets the lock of a holder that is gone."""
    watch_lateness()
    await done(d.lock(ttl=1, renew=False).acquire())
    order = []

    async def waiter(number: int) -> None:
        assert await done(d.connect().lock("thing", ttl=0.6, renew=False).acquire(timeout=BOUND)) is not None
        order.append(number)  # and is left alone, as if it had crashed too

    contenders = []
    last = d.lock()
    for number in range(2):
        contenders.append(d.start(waiter, number))
        await d.queue_length(last, number + 1)
    for contender in contenders:
        await contender.result()
    # A place ends with its ttl too, if its waiter does not ask again: where the machine halts, not in this order.
    assert order == [0, 1] or (sorted(order) == [0, 1] and lateness() > 0.6)
    assert await done(last.acquire(timeout=BOUND)) is not None


@only(flavour="asyncio")
@scenario
async def test_a_cancelled_waiter_leaves_its_place(d: Driver) -> None:
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
async def test_a_waiter_whose_inbox_breaks_asks_again_and_keeps_its_place(d: Driver) -> None:
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
async def test_a_waiter_that_was_killed_is_passed_over(d: Driver) -> None:
    lease = await done(d.lock().acquire())
    waiting = d.connect().lock("thing")

    async def waiter() -> Any:
        return await done(waiting.acquire(timeout=BOUND))

    program = [sys.executable, "-c", WAITING_PROCESS[d.flavour], d.url]
    with subprocess.Popen(program) as process:  # noqa: ASYNC220 - nobody else uses this loop
        try:
            await d.queue_length(d.lock(), 1)
        finally:
            process.kill()
    contender = d.start(waiter)
    await d.queue_length(d.lock(), 2)
    await done(lease.release())
    watch = Stopwatch()
    assert await contender.result() is not None
    assert watch.seconds < watch.most(3), "it has not to wait for the ttl of the dead one, which is 30 s"
