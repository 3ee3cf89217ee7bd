"""One timer of the event loop ends all waits: in order, on time, and without entries that pile up."""

import asyncio
import random
import threading
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from lockfast.runtime.asyncio import AsyncioRuntime, TaskWaker, Timers
from lockfast.testing.sandbox import Clock, VirtualLoop


class SuspendableClock:
    """The clock of the waits. It includes `suspended`, the seconds that the clock of the event loop does not count."""

    def __init__(self) -> None:
        self.loop_clock = Clock()
        self.suspended = 0.0

    def __call__(self) -> float:
        return self.loop_clock.now() + self.suspended


@pytest.fixture
def clock() -> SuspendableClock:
    return SuspendableClock()


def run(clock: SuspendableClock, work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(clock.loop_clock)) as runner:
        runner.run(work)


def test_each_wait_ends_on_time(clock: SuspendableClock) -> None:
    async def work() -> None:
        timers = Timers(asyncio.get_running_loop(), clock)
        began = clock()
        ends: dict[float, float] = {}

        async def wait(seconds: float) -> None:
            assert await TaskWaker(timers).wait(began + seconds) is False
            ends[seconds] = clock() - began

        await asyncio.gather(*(wait(seconds) for seconds in (3.0, 1.0, 2.0, 1.0, 0.5)))
        assert list(ends) == [0.5, 1.0, 2.0, 3.0]
        assert all(ends[seconds] == pytest.approx(seconds, abs=0.01) for seconds in ends)

    run(clock, work())


@pytest.mark.parametrize("seed", range(20))
def test_random_waits_end_when_woken_or_on_time(clock: SuspendableClock, seed: int) -> None:
    """Each wait is independent of the others and of the order in which they begin."""
    randomness = random.Random(seed)

    async def work() -> None:
        timers = Timers(asyncio.get_running_loop(), clock)

        async def wait() -> None:
            await asyncio.sleep(randomness.uniform(0, 3))
            waker, until = (
                TaskWaker(timers),
                clock() + randomness.choice((0.5, 1.0, 1.0, 1.0, randomness.uniform(0, 5))),
            )
            woken_at = clock() + randomness.uniform(0, 5)
            asyncio.get_running_loop().call_later(woken_at - clock(), waker.wake)
            assert await waker.wait(until) is (woken_at < until)
            assert clock() == pytest.approx(min(woken_at, until), abs=0.01)

        await asyncio.gather(*(wait() for _ in range(200)))

    run(clock, work())


@pytest.mark.parametrize("other", [None, 1800.0, 7200.0])
def test_a_wake_up_leaves_no_timer_and_no_entry(clock: SuspendableClock, other: float | None) -> None:
    async def work() -> None:
        timers = Timers(asyncio.get_running_loop(), clock)
        if other is not None:
            timers.set(asyncio.get_running_loop().create_future(), clock() + other, other)  # never woken
        for _ in range(5000):
            waker = TaskWaker(timers)
            asyncio.get_running_loop().call_soon(waker.wake)
            assert await waker.wait(clock() + 3600.0) is True
        assert len(timers) <= Timers.SLACK + (1 if other is None else 3)

    run(clock, work())


def test_a_cancelled_wait_does_not_affect_the_others(clock: SuspendableClock) -> None:
    async def work() -> None:
        timers = Timers(asyncio.get_running_loop(), clock)
        began = clock()
        first = asyncio.ensure_future(TaskWaker(timers).wait(began + 1.0))
        second = asyncio.ensure_future(TaskWaker(timers).wait(began + 2.0))
        await asyncio.sleep(0.5)
        first.cancel()
        assert await second is False
        assert clock() - began == pytest.approx(2.0, abs=0.01)

    run(clock, work())


def test_after_a_suspended_machine_a_new_wait_is_not_late(clock: SuspendableClock) -> None:
    async def work() -> None:
        timers = Timers(asyncio.get_running_loop(), clock)
        long = asyncio.ensure_future(TaskWaker(timers).wait(clock() + 10.0))
        await asyncio.sleep(1.0)
        clock.suspended += 3600.0
        woke = clock()
        assert await TaskWaker(timers).wait(woke + 1.0) is False
        assert clock() - woke == pytest.approx(1.0, abs=0.01)
        assert long.done()

    run(clock, work())


async def test_a_wait_ends_even_if_every_round_of_the_loop_adds_one() -> None:
    loop = asyncio.get_running_loop()
    timers = Timers(loop, time.monotonic)
    began = time.monotonic()
    waiting = asyncio.ensure_future(TaskWaker(timers).wait(began + 0.02))
    while not waiting.done() and time.monotonic() < began + 20.0:
        timers.set(loop.create_future(), time.monotonic() + 60.0, 60.0)
        await asyncio.sleep(0)
    assert waiting.done()
    assert waiting.result() is False


async def test_a_waker_belongs_to_the_running_loop() -> None:
    runtime = AsyncioRuntime()
    runtime.attach()

    async def elsewhere() -> bool:
        return await runtime.waker().wait(runtime.now() + 0.02)

    assert await asyncio.to_thread(asyncio.run, elsewhere()) is False
    assert await runtime.waker().wait(runtime.now() + 0.02) is False


def test_a_loop_that_moved_to_another_thread_is_woken() -> None:
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
