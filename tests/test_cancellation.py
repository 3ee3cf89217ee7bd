"""Cancelled at every await: whatever the point, CancelledError comes out and nothing is left behind.

A call is run again and again, and cancelled when it has suspended for the first time, the second, and so on until it
comes to its end uncancelled. At each point there are two ways: while what it waits for is still to come, and when that
has just come and the task has not run yet, so that a grant would be lost that is already in hand.
"""

import asyncio
import gc
import itertools
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from typing import Any

import pytest

import lockfast.aio
from lockfast import LeaseLost, LockInfo
from lockfast.client.locks import AsyncLocks
from tests.support.servers import Server

MOST_STEPS = 100
SETTLES_WITHIN = 20.0
"""Seconds for clean-up that goes on after the caller has gone."""

Work = Callable[[], Coroutine[Any, Any, Any]]


class Stepped:
    """Runs one call in a task, and cancels the task at its n-th suspension."""

    def __init__(self, work: Work, at: int, *, in_hand: bool) -> None:
        self._work = work
        self._at = at
        self._in_hand = in_hand
        self.cancelled_it = False

    async def run(self) -> Any:
        return await asyncio.create_task(self._drive())

    @types.coroutine
    def _stepping(self, work: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        step, send = itertools.count(1), work.send
        argument: Any = None
        while True:
            try:
                awaited = send(argument)
            except StopIteration as stop:
                return stop.value
            if next(step) == self._at:
                self.cancelled_it = True
                if self._in_hand and awaited is not None:
                    awaited.add_done_callback(lambda _: task.cancel())  # runs before the task's own
                else:
                    loop.call_soon(task.cancel)
            try:
                argument, send = (yield awaited), work.send
            except BaseException as error:
                argument, send = error, work.throw

    async def _drive(self) -> Any:
        return await self._stepping(self._work().__await__())


async def cancel_everywhere(
    prepare: Callable[[], Awaitable[Work]], check: Callable[[Any], Awaitable[None]], *, in_hand: bool
) -> int:
    """Run what `prepare` gives, cancelled at each point in turn, and `check` after each; how many points there were."""
    for at in range(1, MOST_STEPS):
        stepped = Stepped(await prepare(), at, in_hand=in_hand)
        try:
            result = await stepped.run()
        except asyncio.CancelledError:
            assert stepped.cancelled_it
            result = None
        else:
            if not stepped.cancelled_it:
                await check(result)
                return at - 1
        await check(result)
    raise AssertionError(f"not at its end after {MOST_STEPS} suspensions")


@pytest.fixture(params=["memory", "valkey"])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "memory":
        return f"memory://{request.node.name}"
    server: Server = request.getfixturevalue("valkey")
    return server.url


@pytest.fixture
async def us(url: str) -> AsyncIterator[AsyncLocks]:
    async with lockfast.aio.connect(url) as locks:
        lease = await locks.lock("warm-up").acquire()
        assert lease is not None
        assert await locks.lock("warm-up").acquire(timeout=0.001) is None
        await lease.release()
        yield locks


@pytest.fixture
async def them(url: str) -> AsyncIterator[AsyncLocks]:
    async with lockfast.aio.connect(url) as locks:
        yield locks


IN_HAND = pytest.mark.parametrize("in_hand", [False, True], ids=["while it waits", "with the answer in hand"])


async def check_free(locks: AsyncLocks, name: str = "report") -> None:
    """At once: no key, no place in the queue, and the lock can be had."""
    info = await locks.lock(name).inspect()
    assert (info.locked, info.waiting) == (False, 0)
    lease = await locks.lock(name).acquire(timeout=0)
    assert lease is not None
    await lease.release()


async def settled(locks: AsyncLocks, is_so: Callable[[LockInfo], bool]) -> LockInfo:
    """What is seen of the lock once it is so; clean-up may go on in the background."""
    async with asyncio.timeout(SETTLES_WITHIN):
        while True:
            info = await locks.lock("report").inspect()
            if is_so(info):
                return info
            await asyncio.sleep(0.001)


@IN_HAND
class TestAcquire:
    async def test_of_a_free_lock(self, us: AsyncLocks, them: AsyncLocks, in_hand: bool) -> None:
        async def prepare() -> Work:
            return us.lock("report").acquire

        async def check(lease: Any) -> None:
            if lease is not None:
                await lease.release()
            await check_free(them)

        points = await cancel_everywhere(prepare, check, in_hand=in_hand)
        assert points >= (0 if us.session.store.__class__.__name__ == "MemoryStore" else 1)

    async def test_with_nothing_connected_yet(self, url: str, them: AsyncLocks, in_hand: bool) -> None:
        opened: list[AsyncLocks] = []

        async def prepare() -> Work:
            opened.append(lockfast.aio.connect(url))
            return opened[-1].lock("report").acquire

        async def check(lease: Any) -> None:
            if lease is not None:
                await lease.release()
            await check_free(them)
            await opened[-1].close()

        await cancel_everywhere(prepare, check, in_hand=in_hand)

    async def test_that_waits_and_is_handed_the_lock(self, us: AsyncLocks, them: AsyncLocks, in_hand: bool) -> None:
        helpers: list[asyncio.Task[None]] = []

        async def prepare() -> Work:
            held = await them.lock("report").acquire(timeout=0)
            assert held is not None

            async def hand_over() -> None:
                try:
                    await settled(them, lambda info: info.waiting == 1)
                finally:
                    await held.release()

            helpers.append(asyncio.create_task(hand_over()))
            return us.lock("report").acquire

        async def check(lease: Any) -> None:
            helpers[-1].cancel()
            await asyncio.wait([helpers[-1]])
            if lease is not None:
                await lease.release()
            await check_free(them)

        assert await cancel_everywhere(prepare, check, in_hand=in_hand) >= 1

    async def test_that_waits_in_vain(self, us: AsyncLocks, them: AsyncLocks, in_hand: bool) -> None:
        held = await them.lock("report").acquire()
        assert held is not None

        async def prepare() -> Work:
            return lambda: us.lock("report").acquire(timeout=0.005)

        async def check(lease: Any) -> None:
            assert lease is None
            # Its last step waits for the clean-up, which goes on by itself if that wait is cancelled.
            info = await settled(them, lambda info: info.waiting == 0)
            assert info.holder == held.holder

        assert await cancel_everywhere(prepare, check, in_hand=in_hand) >= 1
        await held.release()
        await check_free(them)


@IN_HAND
class TestTheBlock:
    async def test_from_its_first_line_to_its_end(self, us: AsyncLocks, them: AsyncLocks, in_hand: bool) -> None:
        bodies: list[str] = []

        async def block() -> None:
            async with us.lock("report"):
                bodies.append("begun")
                await asyncio.sleep(0.001)
                await us.lock("report").inspect()
                bodies.append("ended")

        async def prepare() -> Work:
            return block

        async def check(_: Any) -> None:
            await settled(them, lambda info: not info.locked and info.waiting == 0)
            await check_free(them)

        assert await cancel_everywhere(prepare, check, in_hand=in_hand) >= 1
        assert bodies.count("begun") > bodies.count("ended") >= 1

    async def test_in_which_the_lease_is_lost(self, us: AsyncLocks, them: AsyncLocks, in_hand: bool) -> None:
        """Two cancellations meet: ours, since the lease was lost, and somebody else's, which must win."""
        outcomes: list[str] = []

        async def block() -> None:
            try:
                async with us.lock("report", ttl=0.02, renew=False):
                    await asyncio.sleep(30)
            except LeaseLost:
                outcomes.append("lost")
                raise

        async def prepare() -> Work:
            async def work() -> None:
                try:
                    await block()
                except LeaseLost:
                    return

            return work

        async def check(_: Any) -> None:
            await settled(them, lambda info: not info.locked)

        await cancel_everywhere(prepare, check, in_hand=in_hand)
        assert outcomes


@IN_HAND
class TestRelease:
    async def test_by_the_lease_frees_the_lock_all_the_same(
        self, us: AsyncLocks, them: AsyncLocks, in_hand: bool
    ) -> None:
        """Whoever called release meant the lock to be free."""

        async def prepare() -> Work:
            lease = await us.lock("report").acquire(timeout=0)
            assert lease is not None
            return lease.release

        async def check(_: Any) -> None:
            await settled(them, lambda info: not info.locked and info.waiting == 0)
            await check_free(them)

        await cancel_everywhere(prepare, check, in_hand=in_hand)

    async def test_by_the_lock_frees_it_all_the_same(self, us: AsyncLocks, them: AsyncLocks, in_hand: bool) -> None:
        async def acquire_and_release() -> None:
            lock = us.lock("report")
            assert await lock.acquire(timeout=0) is not None
            assert await lock.release() is True

        async def prepare() -> Work:
            return acquire_and_release

        async def check(_: Any) -> None:
            await settled(them, lambda info: not info.locked and info.waiting == 0)
            await check_free(them)

        await cancel_everywhere(prepare, check, in_hand=in_hand)

    async def test_hands_the_lock_to_who_waits(self, us: AsyncLocks, them: AsyncLocks, in_hand: bool) -> None:
        waiting: list[asyncio.Task[Any]] = []

        async def prepare() -> Work:
            lease = await us.lock("report").acquire(timeout=0)
            assert lease is not None
            waiting.append(asyncio.create_task(them.lock("report").acquire(timeout=5)))
            await settled(them, lambda info: info.waiting == 1)
            return lease.release

        async def check(_: Any) -> None:
            async with asyncio.timeout(SETTLES_WITHIN):
                granted = await waiting[-1]
            assert granted is not None
            await granted.release()
            await check_free(them)

        await cancel_everywhere(prepare, check, in_hand=in_hand)


@IN_HAND
class TestTheRest:
    async def test_renew_keeps_the_lease(self, us: AsyncLocks, them: AsyncLocks, in_hand: bool) -> None:
        lease = await us.lock("report").acquire(timeout=0)
        assert lease is not None

        async def prepare() -> Work:
            return lease.renew

        async def check(_: Any) -> None:
            lease.ensure_held()
            assert (await them.lock("report").inspect()).holder == lease.holder

        await cancel_everywhere(prepare, check, in_hand=in_hand)
        assert await lease.release() is True

    async def test_adopt_leaves_a_lease_that_can_be_adopted_or_a_lock_that_is_free(
        self, us: AsyncLocks, them: AsyncLocks, in_hand: bool
    ) -> None:
        texts: list[str] = []

        async def prepare() -> Work:
            lease = await them.lock("report").acquire(timeout=0)
            assert lease is not None
            texts.append(lease.export())
            return lambda: us.adopt(texts[-1])

        async def check(lease: Any) -> None:
            try:
                adopted = lease if lease is not None else await them.adopt(texts[-1])
            except LeaseLost:
                await settled(them, lambda info: not info.locked)
            else:
                assert await adopted.release() is True
            await check_free(them)

        await cancel_everywhere(prepare, check, in_hand=in_hand)

    async def test_close_ends_all_the_same(self, url: str, them: AsyncLocks, in_hand: bool) -> None:
        opened: list[AsyncLocks] = []

        async def prepare() -> Work:
            locks = lockfast.aio.connect(url)
            opened.append(locks)
            await locks.lock("report").acquire(timeout=0)
            return locks.close

        async def check(_: Any) -> None:
            await opened[-1].close()
            gc.collect()  # a connection that was left open is reported here
            await settled(them, lambda info: not info.locked)
            await check_free(them)

        await cancel_everywhere(prepare, check, in_hand=in_hand)
