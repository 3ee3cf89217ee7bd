"""The asyncio shell in virtual time, cancelled at every await it comes to.

Each scenario runs once to count its awaits, and then for each of them: cancelled while it waits there; cancelled in the
very instant in which what it waits for arrives (its result is then lost to it); and cancelled there and once more while
it cleans up. Whatever is cancelled: it ends within 100 ms, leaves neither a grant nor a place behind, and everybody
else goes on.
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
from lockfast.stores.redis.transport.task_inbox import TaskInbox
from lockfast.stores.redis.transport.tasks import TaskWire
from lockfast.testing.virtual_time import Clock, VirtualLoop
from lockfast.values import Owner
from tests.shells.wires import LoopServer
from verify.mutation import python

TTL = 3.0
TAKES_EFFECT = 0.1


class Cancelled(Coroutine[Any, Any, None]):
    """A coroutine that is cancelled at its await number `at`; None only counts them."""

    def __init__(self, work: Coroutine[Any, Any, None], at: int | None, how: str) -> None:
        self._work = work
        self._at = at
        self._how = how
        self.awaits = 0
        self.cancelled_at: float | None = None

    def send(self, value: Any) -> Any:
        return self._seen(self._work.send(value))

    def throw(self, *error: Any) -> Any:
        return self._seen(self._work.throw(*error))

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Any:
        raise NotImplementedError

    def _seen(self, future: Any) -> Any:
        self.awaits += 1
        if self.awaits == self._at or (self._how == "twice" and self.awaits - 1 == self._at):
            if self._how != "as its result arrives" or future is None:
                asyncio.get_running_loop().call_soon(self._cancel, asyncio.current_task())
            else:  # registered before the task's own callback, so it comes first
                task = asyncio.current_task()
                future.add_done_callback(lambda _: self._cancel(task))
        return future

    def _cancel(self, task: asyncio.Task[None] | None) -> None:
        if task is not None and not task.done():
            self.cancelled_at = asyncio.get_running_loop().time()
            task.cancel()


class Scene:
    """Two clients on one server; `ours` is cancelled."""

    def __init__(self) -> None:
        self.server = LoopServer()
        self.runtime = AsyncioRuntime()
        self.holders: set[str] = set()
        new_holder_id = self.runtime.new_holder_id

        def noted() -> str:
            holder = new_holder_id()
            self.holders.add(holder)
            return holder

        self.runtime.new_holder_id = noted
        self.ours = self._client(self.runtime)
        self.rival = self._client(AsyncioRuntime())

    def _client(self, runtime: AsyncioRuntime) -> AsyncLocks:
        store = RedisStore(TaskWire(self.server.dial, runtime), TaskInbox(self.server.dial, runtime))
        return AsyncLocks(store, runtime, owner=Owner("host", 1), store_timeout=10.0, address="virtual://")


Play = Callable[[Scene], Coroutine[Any, Any, None]]


async def free(scene: Scene) -> None:
    """Take a free lock and give it back."""
    lease = await scene.ours.lock("door", ttl=TTL).acquire()
    assert lease is not None
    await lease.release()


async def block(scene: Scene) -> None:
    async with scene.ours.lock("door", ttl=TTL):
        await asyncio.sleep(0.01)


async def long_block(scene: Scene) -> None:
    """Over two renewals."""
    async with scene.ours.lock("door", ttl=TTL):
        await asyncio.sleep(2.5)


async def queued(scene: Scene) -> None:
    """Wait for another, and be handed the lock by a push."""
    held = await scene.rival.lock("door", ttl=TTL).acquire()
    assert held is not None

    async def give_back() -> None:
        await asyncio.sleep(0.05)
        await held.release()

    giving = asyncio.create_task(give_back())
    try:
        async with scene.ours.lock("door", ttl=TTL):
            await asyncio.sleep(0.01)
    finally:
        await asyncio.wait([giving])


async def timed_out(scene: Scene) -> None:
    held = await scene.rival.lock("door", ttl=TTL).acquire()
    assert held is not None
    try:
        assert await scene.ours.lock("door", ttl=TTL).acquire(timeout=0.05) is None
    finally:
        await held.release()


async def adopted(scene: Scene) -> None:
    held = await scene.rival.lock("door", ttl=TTL).acquire()
    assert held is not None
    lease = await scene.ours.adopt(held.export())
    await lease.release()


async def renewed(scene: Scene) -> None:
    async with scene.ours.lock("door", ttl=TTL) as lease:
        await lease.renew()


async def closed(scene: Scene) -> None:
    await scene.ours.lock("door", ttl=TTL).acquire()
    await scene.ours.close()


PLAYS: dict[str, Play] = {
    play.__name__: play for play in (free, block, long_block, queued, timed_out, adopted, renewed, closed)
}
PATIENCE = {"adopted": TTL}
"""Seconds after which another has the lock: at once, but an exported lease that nobody adopted lasts for its ttl."""
HOW = ("while it waits", "as its result arrives", "twice")


class Ended(NamedTuple):
    awaits: int
    cancelled: bool
    took: float
    left_behind: list[bytes]
    rival_waited: float
    tasks: list[str]


async def once(play: Play, at: int | None, how: str) -> Ended:
    scene = Scene()
    loop = asyncio.get_running_loop()
    work = Cancelled(play(scene), at, how)
    task = loop.create_task(work)
    await asyncio.wait([task])
    took = 0.0 if work.cancelled_at is None else loop.time() - work.cancelled_at
    if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, LeaseLost):
        raise error
    await asyncio.sleep(0.5)
    left_behind = scene.server.traces(scene.holders)
    before = loop.time()
    lease = await scene.rival.lock("door", ttl=TTL).acquire(timeout=2 * TTL)
    rival_waited = loop.time() - before if lease is not None else float("inf")
    await scene.ours.close()
    await scene.rival.close()
    await asyncio.sleep(2)
    tasks = [one.get_name() for one in asyncio.all_tasks() if one is not asyncio.current_task()]
    return Ended(work.awaits, task.cancelled(), took, left_behind, rival_waited, tasks)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Coroutine[Any, Any, Ended]], Ended]:
    """Run in an event loop of virtual time, with the shipped runtime on its clock."""
    clock = Clock()
    monkeypatch.setattr("lockfast.runtime.asyncio.now", clock.now)

    def play(work: Coroutine[Any, Any, Ended]) -> Ended:
        clock.__init__()  # type: ignore[misc]
        with asyncio.Runner(loop_factory=lambda: VirtualLoop(clock)) as runner:
            return runner.run(work)

    return play


Run = Callable[[Coroutine[Any, Any, Ended]], Ended]


def broken(name: str, run: Run) -> list[str]:
    """What goes wrong if this play is cancelled, at any await and in any way."""
    calm = run(once(PLAYS[name], None, ""))
    assert not calm.cancelled
    assert calm.awaits >= 3
    found, stopped = [], 0
    for at in range(1, calm.awaits + 1):
        for how in HOW:
            ended = run(once(PLAYS[name], at, how))
            stopped += ended.cancelled
            late = ended.took > TAKES_EFFECT or ended.rival_waited >= PATIENCE.get(name, 0.1)
            if late or ended.left_behind or ended.tasks:
                found.append(f"{name}, cancelled at await {at} of {calm.awaits}, {how}: {ended}")
    assert stopped >= calm.awaits, "most of them should have been cancelled indeed"
    return found


@pytest.mark.parametrize("name", PLAYS)
def test_a_cancellation_at_every_await_leaves_nothing_behind(name: str, run: Run) -> None:
    assert broken(name, run) == []


def test_a_clean_up_that_is_forgotten_is_noticed(run: Run) -> None:
    with python(acquire.Acquisition, "_clean_up", "if self._traces:", "if False:"):
        assert broken("queued", run)


def test_a_clean_up_that_is_not_shielded_is_noticed(run: Run) -> None:
    with python(
        AsyncioRuntime, "finish", "await asyncio.wait([self._start(work, name)], timeout=patience)", "await work()"
    ):
        assert broken("queued", run)
