"""One timer of the event loop ends all waits: in order, on time, without piling up."""

import asyncio
import random
import threading
import time as real
from collections.abc import Coroutine
from typing import Any

import pytest

from lockfast.runtime.asyncio import AsyncioRuntime, TaskWaker, Timers
from lockfast.testing.virtual_time import Clock, VirtualLoop


class Time:
    """The clock that waits are measured by; the event loop's own stands still while the machine is `suspended`."""

    def __init__(self) -> None:
        self.loops = Clock()
        self.suspended = 0.0

    def __call__(self) -> float:
        return self.loops.now() + self.suspended


@pytest.fixture
def time() -> Time:
    return Time()


def play(time: Time, work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(time.loops)) as runner:
        runner.run(work)


def test_each_wait_ends_at_its_own_time(time: Time) -> None:
    async def work() -> None:
        timers = Timers(asyncio.get_running_loop(), time)
        began = time()
        ends: dict[float, float] = {}

        async def wait(seconds: float) -> None:
            assert await TaskWaker(timers).wait(began + seconds) is False
            ends[seconds] = time() - began

        await asyncio.gather(*(wait(seconds) for seconds in (3.0, 1.0, 2.0, 1.0, 0.5)))
        assert list(ends) == [0.5, 1.0, 2.0, 3.0]
        assert all(ends[seconds] == pytest.approx(seconds, abs=0.01) for seconds in ends)

    play(time, work())


@pytest.mark.parametrize("seed", range(20))
def test_whoever_waits_and_wakes_each_ends_as_it_should(time: Time, seed: int) -> None:
    """Woken, or at its own time: whatever the others do, and in whatever order they came."""
    randomness = random.Random(seed)

    async def work() -> None:
        timers = Timers(asyncio.get_running_loop(), time)

        async def wait() -> None:
            await asyncio.sleep(randomness.uniform(0, 3))
            waker, until = TaskWaker(timers), time() + randomness.choice((0.5, 1.0, 1.0, 1.0, randomness.uniform(0, 5)))
            woken_at = time() + randomness.uniform(0, 5)
            asyncio.get_running_loop().call_later(woken_at - time(), waker.wake)
            assert await waker.wait(until) is (woken_at < until)
            assert time() == pytest.approx(min(woken_at, until), abs=0.01)

        await asyncio.gather(*(wait() for _ in range(200)))

    play(time, work())


@pytest.mark.parametrize("other", [None, 1800.0, 7200.0])
def test_who_is_woken_leaves_no_timer_and_no_entry_behind(time: Time, other: float | None) -> None:
    async def work() -> None:
        timers = Timers(asyncio.get_running_loop(), time)
        if other is not None:
            timers.set(asyncio.get_running_loop().create_future(), time() + other, other)  # waits all the time
        for _ in range(5000):
            waker = TaskWaker(timers)
            asyncio.get_running_loop().call_soon(waker.wake)
            assert await waker.wait(time() + 3600.0) is True
        assert len(timers) <= Timers.SLACK + (1 if other is None else 3)

    play(time, work())


def test_a_wait_that_is_cancelled_takes_nothing_from_the_others(time: Time) -> None:
    async def work() -> None:
        timers = Timers(asyncio.get_running_loop(), time)
        began = time()
        first = asyncio.ensure_future(TaskWaker(timers).wait(began + 1.0))
        second = asyncio.ensure_future(TaskWaker(timers).wait(began + 2.0))
        await asyncio.sleep(0.5)
        first.cancel()
        assert await second is False
        assert time() - began == pytest.approx(2.0, abs=0.01)

    play(time, work())


def test_after_a_suspended_machine_a_new_wait_is_not_late(time: Time) -> None:
    async def work() -> None:
        timers = Timers(asyncio.get_running_loop(), time)
        long = asyncio.ensure_future(TaskWaker(timers).wait(time() + 10.0))
        await asyncio.sleep(1.0)
        time.suspended += 3600.0
        woke = time()
        assert await TaskWaker(timers).wait(woke + 1.0) is False
        assert time() - woke == pytest.approx(1.0, abs=0.01)
        assert long.done()

    play(time, work())


async def test_an_alarm_rings_though_another_is_set_in_every_round_of_the_loop() -> None:
    loop = asyncio.get_running_loop()
    timers = Timers(loop, real.monotonic)
    began = real.monotonic()
    waiting = asyncio.ensure_future(TaskWaker(timers).wait(began + 0.02))
    while not waiting.done() and real.monotonic() < began + 20.0:
        timers.set(loop.create_future(), real.monotonic() + 60.0, 60.0)
        await asyncio.sleep(0)
    assert waiting.done()
    assert waiting.result() is False


async def test_a_waker_is_of_the_loop_that_runs_though_the_connection_is_of_another() -> None:
    runtime = AsyncioRuntime()
    runtime.attach()

    async def elsewhere() -> bool:
        return await runtime.waker().wait(runtime.now() + 0.02)

    assert await asyncio.to_thread(asyncio.run, elsewhere()) is False
    assert await runtime.waker().wait(runtime.now() + 0.02) is False


def test_a_loop_that_changed_threads_is_woken_all_the_same() -> None:
    loop = asyncio.new_event_loop()

    async def make() -> TaskWaker:
        return AsyncioRuntime().waker()

    waker = loop.run_until_complete(make())  # in this thread
    runner = threading.Thread(target=loop.run_forever)
    runner.start()

    async def wait() -> bool:
        threading.Thread(target=waker.wake).start()
        return await waker.wait(None)

    assert asyncio.run_coroutine_threadsafe(wait(), loop).result(10) is True
    loop.call_soon_threadsafe(loop.stop)
    runner.join(10)
    loop.close()
