"""Semaphores: troubles that users of other libraries had, on a real server."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest

import lockfast
import lockfast.aio
from lockfast import LeaseLost, LockError, StoreUnavailable
from tests.contract.driver import BOUND, FLAVOURS, Driver, done, held, scenario
from tests.support.proxy import FaultProxy
from tests.support.servers import Server
from tests.support.waiting import until
from tests.traps.observation import Stopwatch, await_nothing_left, await_queue, companions, on, queue_length, traces
from tests.traps.programs import Program

pytestmark = pytest.mark.timing


@pytest.fixture(params=FLAVOURS)
def d(request: pytest.FixtureRequest, valkey: Server) -> Driver:
    return FLAVOURS[request.param]("valkey9", valkey.url, valkey)


def is_notification(args: Sequence[bytes]) -> bool:
    return args[0] == b"message"


async def acquire(lock: Any) -> Any:
    return await done(lock.acquire())


async def take_turns(d: Driver, lock: Any, rounds: int) -> None:
    for _ in range(rounds):
        async with held(lock):
            await d.pause()


@scenario
async def test_permits_of_a_killed_process_come_back(d: Driver, valkey: Server) -> None:
    with Program("hold_permits", d.flavour, valkey.url, "gpu", ttl=1) as holder:
        assert holder.line().startswith("held")
        waiting = d.start(acquire, d.locks.semaphore("gpu", 4, permits=4))
        await d.queue_length(d.lock("gpu"), 1)
        await d.until(lambda: valkey.raw("PTTL", "gpu") > 950, "a renewal, so that a second is left")
        holder.kill()
        watch = Stopwatch()
        permit = await waiting.result()
        assert watch.seconds < watch.most(1.25)
        assert permit.slots == (0, 1, 2, 3)


@pytest.mark.parametrize("seed", range(3))
@scenario
async def test_permits_in_use_are_always_those_of_live_leases(
    d: Driver, valkey: Server, proxy: FaultProxy, seed: int
) -> None:
    """Random acquisitions, releases, forced releases and lost replies: nothing leaks, nothing is counted twice."""
    randomness, limit = random.Random(seed), 5
    clients = [d.connect(), d.connect(url=proxy.url)]
    leases: list[Any] = []
    for _ in range(60):
        step, client = randomness.random(), randomness.choice(clients)
        if step < 0.1:
            proxy.drop_reply(on("gpu"))
        if step < 0.6 or not leases:
            gpus = client.semaphore(
                "gpu", limit, permits=randomness.randint(1, 2), ttl=5, renew=randomness.random() < 0.5
            )
            with suppress(StoreUnavailable):  # its reply was lost, and the time is over
                permit = await done(gpus.acquire(timeout=0.01))
                leases += [permit] if permit else []
        elif step < 0.9:
            with suppress(LockError):
                await done(leases.pop(randomness.randrange(len(leases))).release())
        else:
            await done(d.lock("gpu").force_release(leases.pop().holder))
        proxy.clear()
        live = {lease.holder: lease.slots for lease in leases}

        async def agrees(live: dict[str, Any] = live) -> bool:
            info = await done(d.lock("gpu").inspect())
            return {one.holder: one.slots for one in info.holders} == live

        await d.until(agrees, "the clean-up of lost replies")
        used = sorted(slot for slots in live.values() for slot in slots)
        assert used == sorted(set(used)), "no slot has two holders"
        assert valkey.raw("BITCOUNT", companions("gpu")["s"]) == len(used) <= limit
    for lease in leases:
        await done(lease.release())
    assert (await done(d.locks.semaphore("gpu", limit, permits=limit).acquire(timeout=0))).slots == (0, 1, 2, 3, 4)


@scenario
async def test_release_of_several_permits_is_not_half_done_if_one_was_lost(d: Driver, valkey: Server) -> None:
    names = ("gpu", "licence", "socket")

    async def work() -> None:
        permits = d.locks.all_of(*(d.locks.semaphore(name, 2, cancel_on_loss=False) for name in names))
        async with held(permits) as leases:
            await done(d.connect().lock("licence").force_release(leases["licence"].holder))

    with pytest.raises(LeaseLost) as caught:
        await work()
    assert caught.value.name == "licence"
    assert [traces(valkey, name) for name in names] == [[], [], []]


@scenario
async def test_waiters_that_miss_their_wake_up_are_served(d: Driver, proxy: FaultProxy) -> None:
    permit = await done(d.locks.semaphore("gpu", 2, permits=2).acquire())
    waiting = [d.start(take_turns, d, d.connect(url=proxy.url).semaphore("gpu", 2), 1) for _ in range(4)]
    await d.queue_length(d.lock("gpu"), 4)
    lost = proxy.drop_pushes(is_notification, times=6)
    await done(permit.release())
    for one in waiting:
        await one.result()
    assert lost.hits >= 2


def test_processes_that_start_together_do_not_reset_the_count(valkey: Server) -> None:
    """Ten processes make the same semaphore of four at once; at no moment are more than four inside."""
    programs = [Program("pass_through", "threads", valkey.url, "gpu", ttl=10) for _ in range(10)]
    try:
        for program in programs:
            program.tell()
        lines = [program.line().split() for program in programs for _ in range(10)]
    finally:
        for program in programs:
            program.__exit__(None, None, None)
    holds = [(int(slot), float(start), float(end)) for slot, start, end in lines]
    changes = sorted([(start, 1) for _, start, _ in holds] + [(end, -1) for _, _, end in holds])
    inside = [0]
    for _, change in changes:
        inside.append(inside[-1] + change)
    assert max(inside) <= 4
    for slot in range(4):
        of_slot = sorted((start, end) for one, start, end in holds if one == slot)
        assert all(end <= start for (_, end), (start, _) in pairwise(of_slot)), "a slot has one holder at a time"


@scenario
async def test_lost_reply_to_a_waiter_leaves_no_ghost_in_the_queue(
    d: Driver, valkey: Server, proxy: FaultProxy
) -> None:
    permit = await done(d.locks.semaphore("gpu", 1).acquire())
    client = d.connect(url=proxy.url)
    await done(client.lock("gpu").inspect())
    lost = proxy.drop_reply(lambda args: on("gpu")(args) and any(b"lockfast:inbox:" in arg for arg in args))  # type: ignore[operator]
    waiting = d.start(take_turns, d, client.semaphore("gpu", 1, timeout=BOUND), 1)
    behind = d.start(take_turns, d, d.connect().semaphore("gpu", 1, timeout=BOUND), 1)
    await d.queue_length(d.lock("gpu"), 2)
    await d.until(lambda: lost.hits, "the lost reply")
    await done(permit.release())
    await waiting.result()
    await behind.result()
    assert traces(valkey, "gpu") == []


async def test_cancellation_at_any_moment_leaves_no_permit_taken(valkey: Server) -> None:
    async with lockfast.aio.connect(valkey.url) as locks:
        gpus = locks.semaphore("gpu", 1)
        for steps in range(60):
            task = asyncio.create_task(gpus.acquire())
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            with suppress(asyncio.CancelledError):
                permit = await task
                assert permit is not None
                await permit.release()
            permit = await gpus.acquire(timeout=BOUND)
            assert permit is not None, f"after a cancellation at step {steps}"
            await permit.release()
        await asyncio.to_thread(await_nothing_left, valkey, "gpu")


@scenario
async def test_holder_that_is_cut_off_is_told_and_its_permit_is_free(d: Driver, proxy: FaultProxy) -> None:
    lost: list[Any] = []
    permit = await done(d.connect(url=proxy.url).semaphore("gpu", 1, ttl=1, on_lost=lost.append).acquire())
    proxy.refuse()
    proxy.reset_connections()
    waiting = d.start(acquire, d.locks.semaphore("gpu", 1))
    watch, ends = Stopwatch(), permit.remaining
    assert await done(permit.lost.wait(timeout=BOUND)) is True
    assert watch.seconds < watch.most(ends + 0.05)
    assert (await waiting.result()).slot == 0
    await d.until(lambda: lost, "the callback")


@scenario
async def test_everybody_is_served_after_a_time_of_lost_messages(d: Driver, proxy: FaultProxy) -> None:
    randomness = random.Random(1)

    def one_in_five(args: Sequence[bytes]) -> bool:
        return args[0] in (b"EVAL", b"EVALSHA") and randomness.random() < 0.2

    faults = [proxy.drop_request(one_in_five, times=1000), proxy.drop_reply(one_in_five, times=1000)]
    served: list[int] = []

    async def work(client: Any) -> None:
        gpus = client.semaphore("gpu", 2, ttl=2)
        while len(served) < 60:
            with suppress(LockError):
                async with held(gpus):
                    served.append(1)
        proxy.clear()
        await take_turns(d, client.semaphore("gpu", 2, ttl=2, timeout=BOUND), 3)

    workers = [d.start(work, d.connect(url=proxy.url)) for _ in range(4)]
    for worker in workers:
        await worker.result()
    assert sum(fault.hits for fault in faults) > 5
    await d.until(lambda: queue_length(d.server, "gpu") == 0, "an empty queue")  # type: ignore[arg-type]
    permit = await done(d.locks.semaphore("gpu", 2, permits=2).acquire(timeout=BOUND))
    assert permit.slots == (0, 1)


async def test_cancelled_wait_does_not_stick_to_the_semaphore(valkey: Server) -> None:
    async with lockfast.aio.connect(valkey.url) as locks, lockfast.aio.connect(valkey.url) as others:
        gpus = locks.semaphore("gpu", 1)
        async with others.semaphore("gpu", 1):
            for _ in range(3):
                waiting = asyncio.create_task(gpus.acquire())
                await asyncio.to_thread(await_queue, valkey, "gpu", 1)
                waiting.cancel()
                await asyncio.wait([waiting])
                assert waiting.cancelled()
        async with gpus as permit:
            permit.ensure_held()


@scenario
async def test_semaphore_of_one_hands_over_like_a_mutex(d: Driver) -> None:
    """Two clients in turn, 50 times each."""
    watch = Stopwatch()
    workers = [d.start(take_turns, d, d.connect().semaphore("gpu", 1), 50) for _ in range(2)]
    for worker in workers:
        await worker.result()
    assert watch.seconds < watch.most(2.0)


async def test_cancelled_job_frees_its_permit_at_once_without_any_option(valkey: Server) -> None:
    async with lockfast.aio.connect(valkey.url) as locks:

        async def job() -> None:
            async with locks.semaphore("gpu", 1):
                await asyncio.sleep(60)

        running = asyncio.create_task(job())
        await asyncio.to_thread(until, lambda: traces(valkey, "gpu"), "the job to start")
        running.cancel()
        await asyncio.wait([running])
        assert traces(valkey, "gpu") == []


@scenario
async def test_redelivered_job_takes_its_own_permit_over(d: Driver) -> None:
    """The first worker exports its permit with the job; the second adopts it instead of waiting for it."""
    gpus = d.locks.semaphore("gpu", 1)
    ticket = (await done(gpus.acquire())).export()
    assert await done(d.connect().semaphore("gpu", 1).acquire(timeout=0)) is None
    permit = await done(d.connect().adopt(ticket))
    assert permit.slot == 0
    await done(permit.release())
    assert await done(gpus.locked()) is False


@scenario
async def test_freed_permit_wakes_a_waiter_of_the_same_process(d: Driver) -> None:
    """Twenty threads or tasks of one client share two permits, ten turns each."""
    watch = Stopwatch()
    gpus = d.locks.semaphore("gpu", 2)
    workers = [d.start(take_turns, d, gpus, 10) for _ in range(20)]
    for worker in workers:
        await worker.result()
    assert watch.seconds < watch.most(4.0), "no worker sleeps between polls while a permit is free"


@scenario
async def test_short_outage_during_a_renewal_loses_nothing(d: Driver, proxy: FaultProxy) -> None:
    lost: list[Any] = []
    permit = await done(d.connect(url=proxy.url).semaphore("gpu", 2, ttl=6, on_lost=lost.append).acquire())
    cut = proxy.drop_request(on("gpu"), times=2)
    await d.until(lambda: cut.hits == 2, "two failed renewals")
    await d.until(lambda: permit.remaining > 4.5, "the next renewal")
    permit.ensure_held()
    assert lost == []
    assert await done(permit.release()) is True


@scenario
async def test_two_operators_who_free_a_leaked_permit_remove_it_once(d: Driver) -> None:
    leaked = await done(d.connect().semaphore("gpu", 1).acquire())
    operators = [d.connect().semaphore("gpu", 1) for _ in range(2)]
    assert await done(operators[0].force_release(leaked.holder)) is not None
    successor = await done(d.locks.semaphore("gpu", 1).acquire(timeout=0))
    assert await done(operators[1].force_release(leaked.holder)) is None
    successor.ensure_held()
    assert [one.holder for one in (await done(d.lock("gpu").inspect())).holders] == [successor.holder]


def test_stream_that_is_closed_early_releases_its_permit(valkey: Server) -> None:
    def stream() -> Iterator[int]:
        with locks.semaphore("gpu", 1):
            yield from range(100)

    with lockfast.connect(valkey.url) as locks:
        words: Any = stream()
        assert next(words) == 0
        assert traces(valkey, "gpu") != []
        words.close()
        assert traces(valkey, "gpu") == []


async def test_async_stream_that_is_closed_early_releases_its_permit(valkey: Server) -> None:
    async def stream() -> AsyncIterator[int]:
        async with locks.semaphore("gpu", 1):
            for number in range(100):
                yield number

    async with lockfast.aio.connect(valkey.url) as locks:
        words: Any = stream()
        assert await anext(words) == 0
        assert traces(valkey, "gpu") != []
        await words.aclose()
        assert traces(valkey, "gpu") == []


@pytest.mark.parametrize("ending", ["returns", "fails", "is interrupted", "is put back"])
@scenario
async def test_job_frees_its_permit_however_it_ends(d: Driver, valkey: Server, ending: str) -> None:
    class Interrupted(BaseException):
        pass

    async def job() -> str:
        async with held(d.locks.semaphore("gpu", 1)):
            if ending == "fails":
                raise ValueError
            if ending == "is interrupted":
                raise Interrupted
            return "again" if ending == "is put back" else "done"

    for _ in range(3):
        with suppress(ValueError, Interrupted):
            await job()
        assert traces(valkey, "gpu") == []


@scenario
async def test_job_that_sleeps_before_its_retry_holds_no_permit(d: Driver, valkey: Server) -> None:
    tries: list[bool] = []

    async def call_model() -> None:
        async with held(d.locks.semaphore("gpu", 1)):
            tries.append(bool(traces(valkey, "gpu")))
            raise ConnectionError

    for _ in range(3):
        with suppress(ConnectionError):
            await call_model()
        assert traces(valkey, "gpu") == [], "here the job sleeps"
    assert tries == [True] * 3
