"""The async flavour in virtual time, cancelled at every await.

Each scenario runs once to count its awaits, and then three times for each of them: cancelled while it waits; cancelled
in the instant in which the result arrives, which is then lost; and cancelled twice, the second time during the
clean-up. In every case it ends within 100 ms, leaves neither a grant nor a ticket behind, and other clients continue.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

import pytest

from lockfast.client.locks import AsyncLocks
from lockfast.core import acquire
from lockfast.errors import LeaseLost
from lockfast.runtime.asyncio import AsyncioRuntime
from lockfast.stores.redis.store import RedisStore
from lockfast.stores.redis.transport.tasks import TaskInbox, TaskWire
from lockfast.testing.sandbox import Clock, VirtualLoop
from lockfast.values import Owner
from tests.schedules.virtual_connection import LoopServer
from verify.mutation import python

TTL = 3.0
TAKES_EFFECT = 0.1


class Cancelled(Coroutine[Any, Any, None]):
    """A coroutine that is cancelled at its await number `at`; with None it only counts them."""

    def __init__(self, work: Coroutine[Any, Any, None], at: int | None, how: str) -> None:
        self._work = work
        self._at = at
        self._how = how
        self.awaits = 0
        self.cancelled_at: float | None = None

    def send(self, value: Any) -> Any:
        return self._count(self._work.send(value))

    def throw(self, *error: Any) -> Any:
        return self._count(self._work.throw(*error))

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Any:
        raise NotImplementedError

    def _count(self, future: Any) -> Any:
        self.awaits += 1
        if self.awaits == self._at or (self._how == "twice" and self.awaits - 1 == self._at):
            if self._how != "as its result arrives" or future is None:
                asyncio.get_running_loop().call_soon(self._cancel, asyncio.current_task())
            else:  # registered before the callback of the task, so it runs first
                task = asyncio.current_task()
                future.add_done_callback(lambda _: self._cancel(task))
        return future

    def _cancel(self, task: asyncio.Task[None] | None) -> None:
        if task is not None and not task.done():
            self.cancelled_at = asyncio.get_running_loop().time()
            task.cancel()


class Clients:
    """Two clients on one server; `ours` is cancelled."""

    def __init__(self) -> None:
        self.server = LoopServer()
        self.runtime = AsyncioRuntime()
        self.holders: set[str] = set()
        new_holder_id = self.runtime.new_holder_id

        def recorded() -> str:
            holder = new_holder_id()
            self.holders.add(holder)
            return holder

        self.runtime.new_holder_id = recorded
        self.ours = self._client(self.runtime)
        self.rival = self._client(AsyncioRuntime())

    def _client(self, runtime: AsyncioRuntime) -> AsyncLocks:
        store = RedisStore(TaskWire(self.server.dial, runtime), TaskInbox(self.server.dial, runtime))
        return AsyncLocks(store, runtime, owner=Owner("host", 1), store_timeout=10.0, address="virtual://")


Scenario = Callable[[Clients], Coroutine[Any, Any, None]]


async def free(clients: Clients) -> None:
    """Acquire a free lock and release it."""
    lease = await clients.ours.lock("door", ttl=TTL).acquire()
    assert lease is not None
    await lease.release()


async def block(clients: Clients) -> None:
    async with clients.ours.lock("door", ttl=TTL):
        await asyncio.sleep(0.01)


async def long_block(clients: Clients) -> None:
    """Hold the lock during two renewals."""
    async with clients.ours.lock("door", ttl=TTL):
        await asyncio.sleep(2.5)


async def queued(clients: Clients) -> None:
    """Wait for another holder, and be granted the lock by a notification."""
    held = await clients.rival.lock("door", ttl=TTL).acquire()
    assert held is not None

    releasing = asyncio.create_task(after_a_while(held))
    try:
        async with clients.ours.lock("door", ttl=TTL):
            await asyncio.sleep(0.01)
    finally:
        await asyncio.wait([releasing])


async def timed_out(clients: Clients) -> None:
    held = await clients.rival.lock("door", ttl=TTL).acquire()
    assert held is not None
    try:
        assert await clients.ours.lock("door", ttl=TTL).acquire(timeout=0.05) is None
    finally:
        await held.release()


async def adopted(clients: Clients) -> None:
    held = await clients.rival.lock("door", ttl=TTL).acquire()
    assert held is not None
    lease = await clients.ours.adopt(held.export())
    await lease.release()


async def renewed(clients: Clients) -> None:
    async with clients.ours.lock("door", ttl=TTL) as lease:
        await lease.renew()


async def closed(clients: Clients) -> None:
    await clients.ours.lock("door", ttl=TTL).acquire()
    await clients.ours.close()


async def reading(clients: Clients) -> None:
    """Wait to read behind a writer, and read again."""
    held = await clients.rival.lock("door", ttl=TTL).acquire()
    assert held is not None
    releasing = asyncio.create_task(after_a_while(held))
    reader = clients.ours.rwlock("door", ttl=TTL).reader
    try:
        async with reader, reader:
            await asyncio.sleep(0.01)
    finally:
        await asyncio.wait([releasing])


async def after_a_while(lease: Any) -> None:
    await asyncio.sleep(0.05)
    await lease.release()


async def downgraded(clients: Clients) -> None:
    async with clients.ours.rwlock("door", ttl=TTL).writer as lease:
        await lease.downgrade()
        await asyncio.sleep(0.01)


async def permits(clients: Clients) -> None:
    """Wait for two permits."""
    held = await clients.rival.semaphore("door", 2, ttl=TTL).acquire()
    assert held is not None
    releasing = asyncio.create_task(after_a_while(held))
    try:
        async with clients.ours.semaphore("door", 2, permits=2, ttl=TTL):
            await asyncio.sleep(0.01)
    finally:
        await asyncio.wait([releasing])


async def several_at_once(clients: Clients) -> None:
    """Acquire free locks of every mode with one request."""
    ours = clients.ours
    async with ours.all_of("{door}:1", ours.rwlock("{door}:2").reader, ours.semaphore("{door}:3", 2), ttl=TTL):
        await asyncio.sleep(0.01)


async def several_in_order(clients: Clients) -> None:
    """Wait for the second of three locks."""
    held = await clients.rival.lock("door", ttl=TTL).acquire()
    assert held is not None
    releasing = asyncio.create_task(after_a_while(held))
    try:
        async with clients.ours.all_of("attic", "door", "gate", ttl=TTL):
            await asyncio.sleep(0.01)
    finally:
        await asyncio.wait([releasing])


SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (
        free,
        block,
        long_block,
        queued,
        timed_out,
        adopted,
        renewed,
        closed,
        reading,
        downgraded,
        permits,
        several_at_once,
        several_in_order,
    )
}
PATIENCE = {"adopted": TTL}
"""Seconds after which another client has the lock: none, but an exported lease that is not adopted lasts its ttl."""
HOW = ("while it waits", "as its result arrives", "twice")


class Ended(NamedTuple):
    awaits: int
    cancelled: bool
    took: float
    left_behind: list[bytes]
    rival_waited: float
    tasks: list[str]


async def run_once(scenario: Scenario, at: int | None, how: str) -> Ended:
    clients = Clients()
    loop = asyncio.get_running_loop()
    work = Cancelled(scenario(clients), at, how)
    task = loop.create_task(work)
    await asyncio.wait([task])
    took = 0.0 if work.cancelled_at is None else loop.time() - work.cancelled_at
    if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, LeaseLost):
        raise error
    await asyncio.sleep(0.5)
    left_behind = clients.server.traces(clients.holders)
    before = loop.time()
    lease = await clients.rival.lock("door", ttl=TTL).acquire(timeout=2 * TTL)
    rival_waited = loop.time() - before if lease is not None else float("inf")
    await clients.ours.close()
    await clients.rival.close()
    await asyncio.sleep(2)
    tasks = [one.get_name() for one in asyncio.all_tasks() if one is not asyncio.current_task()]
    return Ended(work.awaits, task.cancelled(), took, left_behind, rival_waited, tasks)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Coroutine[Any, Any, Ended]], Ended]:
    """Run in an event loop of virtual time; the shipped runtime uses its clock."""
    clock = Clock()
    monkeypatch.setattr("lockfast.runtime.asyncio.now", clock.now)

    def run_virtually(work: Coroutine[Any, Any, Ended]) -> Ended:
        clock.__init__()  # type: ignore[misc]
        with asyncio.Runner(loop_factory=lambda: VirtualLoop(clock)) as runner:
            return runner.run(work)

    return run_virtually


Run = Callable[[Coroutine[Any, Any, Ended]], Ended]


def failures(name: str, run: Run) -> list[str]:
    """Cancel this scenario at each await in each way, and return what failed."""
    undisturbed = run(run_once(SCENARIOS[name], None, ""))
    assert not undisturbed.cancelled
    assert undisturbed.awaits >= 3
    found, cancelled = [], 0
    for at in range(1, undisturbed.awaits + 1):
        for how in HOW:
            ended = run(run_once(SCENARIOS[name], at, how))
            cancelled += ended.cancelled
            late = ended.took > TAKES_EFFECT or ended.rival_waited >= PATIENCE.get(name, 0.1)
            if late or ended.left_behind or ended.tasks:
                found.append(f"{name}, cancelled at await {at} of {undisturbed.awaits}, {how}: {ended}")
    assert cancelled >= undisturbed.awaits, "most runs should have been cancelled"
    return found


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_cancellation_at_every_await_leaves_nothing_behind(name: str, run: Run) -> None:
    assert failures(name, run) == []


def test_a_missing_clean_up_is_detected(run: Run) -> None:
    with python(acquire.Acquisition, "_clean_up", "if self._traces:", "if False:"):
        assert failures("queued", run)


def test_a_clean_up_without_a_shield_is_detected(run: Run) -> None:
    with python(
        AsyncioRuntime, "finish", "await asyncio.wait([self._start(work, name)], timeout=patience)", "await work()"
    ):
        assert failures("queued", run)


def test_a_clean_up_of_one_of_several_locks_is_detected(run: Run) -> None:
    with python(acquire, "remove", "for claim in rest:", "for claim in ():"):
        assert failures("several_at_once", run)
