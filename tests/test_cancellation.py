"""A call that is cancelled, at whatever await, raises CancelledError and leaves nothing behind.

Each call runs repeatedly: cancelled at its first suspension, at its second, and so on, until it ends without a
cancellation. At each suspension there are two cases: the answer has not arrived, or it has arrived and the task has not
run yet, so that a grant could be lost.
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
"""Seconds for clean-up that continues in the background."""

Work = Callable[[], Coroutine[Any, Any, Any]]


class CancelledCall:
    """Runs one call in a task, and cancels the task at its n-th suspension."""

    def __init__(self, work: Work, at: int, *, answered: bool) -> None:
        self._work = work
        self._at = at
        self._answered = answered
        self.cancelled_it = False

    async def run(self) -> Any:
        return await asyncio.create_task(self._drive())

    @types.coroutine
    def _step(self, work: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
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
                if self._answered and awaited is not None:
                    awaited.add_done_callback(lambda _: task.cancel())  # runs before the callback of the task
                else:
                    loop.call_soon(task.cancel)
            try:
                argument, send = (yield awaited), work.send
            except BaseException as error:
                argument, send = error, work.throw

    async def _drive(self) -> Any:
        return await self._step(self._work().__await__())


async def cancel_everywhere(
    prepare: Callable[[], Awaitable[Work]], check: Callable[[Any], Awaitable[None]], *, answered: bool
) -> int:
    """Cancel the call from `prepare` at each suspension, with a `check` after each. Return how many there were."""
    for at in range(1, MOST_STEPS):
        call = CancelledCall(await prepare(), at, answered=answered)
        try:
            result = await call.run()
        except asyncio.CancelledError:
            assert call.cancelled_it
            result = None
        else:
            if not call.cancelled_it:
                await check(result)
                return at - 1
        await check(result)
    raise AssertionError(f"the call did not end after {MOST_STEPS} suspensions")


@pytest.fixture(params=["memory", "valkey"])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "memory":
        return f"memory://{request.node.name}"
    server: Server = request.getfixturevalue("valkey")
    return server.url


@pytest.fixture
async def ours(url: str) -> AsyncIterator[AsyncLocks]:
    async with lockfast.aio.connect(url) as locks:
        lease = await locks.lock("warm-up").acquire()
        assert lease is not None
        assert await locks.lock("warm-up").acquire(timeout=0.001) is None
        await lease.release()
        yield locks


@pytest.fixture
async def others(url: str) -> AsyncIterator[AsyncLocks]:
    async with lockfast.aio.connect(url) as locks:
        yield locks


ANSWERED = pytest.mark.parametrize("answered", [False, True], ids=["while it waits", "as the answer arrives"])


async def check_free(locks: AsyncLocks, name: str = "report") -> None:
    """The lock is free now: no key, no ticket, and it can be acquired."""
    info = await locks.lock(name).inspect()
    assert (info.locked, info.waiting) == (False, 0)
    lease = await locks.lock(name).acquire(timeout=0)
    assert lease is not None
    await lease.release()


async def settled(locks: AsyncLocks, condition: Callable[[LockInfo], bool]) -> LockInfo:
    """Return the lock once the condition holds; clean-up may continue in the background."""
    async with asyncio.timeout(SETTLES_WITHIN):
        while True:
            info = await locks.lock("report").inspect()
            if condition(info):
                return info
            await asyncio.sleep(0.001)


@ANSWERED
class TestAcquire:
    async def test_of_a_free_lock(self, ours: AsyncLocks, others: AsyncLocks, answered: bool) -> None:
        async def prepare() -> Work:
            return ours.lock("report").acquire

        async def check(lease: Any) -> None:
            if lease is not None:
                await lease.release()
            await check_free(others)

        points = await cancel_everywhere(prepare, check, answered=answered)
        assert points >= (0 if ours.session.store.__class__.__name__ == "MemoryStore" else 1)

    async def test_without_a_connection(self, url: str, others: AsyncLocks, answered: bool) -> None:
        opened: list[AsyncLocks] = []

        async def prepare() -> Work:
            opened.append(lockfast.aio.connect(url))
            return opened[-1].lock("report").acquire

        async def check(lease: Any) -> None:
            if lease is not None:
                await lease.release()
            await check_free(others)
            await opened[-1].close()

        await cancel_everywhere(prepare, check, answered=answered)

    async def test_in_the_queue_until_it_is_granted(self, ours: AsyncLocks, others: AsyncLocks, answered: bool) -> None:
        helpers: list[asyncio.Task[None]] = []

        async def prepare() -> Work:
            held = await others.lock("report").acquire(timeout=0)
            assert held is not None

            async def release_to_waiter() -> None:
                try:
                    await settled(others, lambda info: info.waiting == 1)
                finally:
                    await held.release()

            helpers.append(asyncio.create_task(release_to_waiter()))
            return ours.lock("report").acquire

        async def check(lease: Any) -> None:
            helpers[-1].cancel()
            await asyncio.wait([helpers[-1]])
            if lease is not None:
                await lease.release()
            await check_free(others)

        assert await cancel_everywhere(prepare, check, answered=answered) >= 1

    async def test_in_the_queue_until_it_times_out(self, ours: AsyncLocks, others: AsyncLocks, answered: bool) -> None:
        held = await others.lock("report").acquire()
        assert held is not None

        async def prepare() -> Work:
            return lambda: ours.lock("report").acquire(timeout=0.005)

        async def check(lease: Any) -> None:
            assert lease is None
            # Its last await waits for the clean-up, which continues in the background if that wait is cancelled.
            info = await settled(others, lambda info: info.waiting == 0)
            assert info.holder == held.holder

        assert await cancel_everywhere(prepare, check, answered=answered) >= 1
        await held.release()
        await check_free(others)


@ANSWERED
class TestTheBlock:
    async def test_from_its_first_line_to_its_end(self, ours: AsyncLocks, others: AsyncLocks, answered: bool) -> None:
        bodies: list[str] = []

        async def block() -> None:
            async with ours.lock("report"):
                bodies.append("begun")
                await asyncio.sleep(0.001)
                await ours.lock("report").inspect()
                bodies.append("ended")

        async def prepare() -> Work:
            return block

        async def check(_: Any) -> None:
            await settled(others, lambda info: not info.locked and info.waiting == 0)
            await check_free(others)

        assert await cancel_everywhere(prepare, check, answered=answered) >= 1
        assert bodies.count("begun") > bodies.count("ended") >= 1

    async def test_in_which_the_lease_is_lost(self, ours: AsyncLocks, others: AsyncLocks, answered: bool) -> None:
        """Two cancellations meet: that of lockfast for the lost lease, and that of another task, which must win."""
        outcomes: list[str] = []

        async def block() -> None:
            try:
                async with ours.lock("report", ttl=0.02, renew=False):
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
            await settled(others, lambda info: not info.locked)

        await cancel_everywhere(prepare, check, answered=answered)
        assert outcomes


@ANSWERED
class TestRelease:
    async def test_of_the_lease_frees_the_lock(self, ours: AsyncLocks, others: AsyncLocks, answered: bool) -> None:
        """The caller of release wants the lock to be free."""

        async def prepare() -> Work:
            lease = await ours.lock("report").acquire(timeout=0)
            assert lease is not None
            return lease.release

        async def check(_: Any) -> None:
            await settled(others, lambda info: not info.locked and info.waiting == 0)
            await check_free(others)

        await cancel_everywhere(prepare, check, answered=answered)

    async def test_of_the_lock_frees_it(self, ours: AsyncLocks, others: AsyncLocks, answered: bool) -> None:
        async def acquire_and_release() -> None:
            lock = ours.lock("report")
            assert await lock.acquire(timeout=0) is not None
            assert await lock.release() is True

        async def prepare() -> Work:
            return acquire_and_release

        async def check(_: Any) -> None:
            await settled(others, lambda info: not info.locked and info.waiting == 0)
            await check_free(others)

        await cancel_everywhere(prepare, check, answered=answered)

    async def test_grants_the_lock_to_a_waiter(self, ours: AsyncLocks, others: AsyncLocks, answered: bool) -> None:
        waiting: list[asyncio.Task[Any]] = []

        async def prepare() -> Work:
            lease = await ours.lock("report").acquire(timeout=0)
            assert lease is not None
            waiting.append(asyncio.create_task(others.lock("report").acquire(timeout=5)))
            await settled(others, lambda info: info.waiting == 1)
            return lease.release

        async def check(_: Any) -> None:
            async with asyncio.timeout(SETTLES_WITHIN):
                granted = await waiting[-1]
            assert granted is not None
            await granted.release()
            await check_free(others)

        await cancel_everywhere(prepare, check, answered=answered)


@ANSWERED
class TestOtherCalls:
    async def test_renew_keeps_the_lease(self, ours: AsyncLocks, others: AsyncLocks, answered: bool) -> None:
        lease = await ours.lock("report").acquire(timeout=0)
        assert lease is not None

        async def prepare() -> Work:
            return lease.renew

        async def check(_: Any) -> None:
            lease.ensure_held()
            assert (await others.lock("report").inspect()).holder == lease.holder

        await cancel_everywhere(prepare, check, answered=answered)
        assert await lease.release() is True

    async def test_adopt_leaves_an_adoptable_lease_or_a_free_lock(
        self, ours: AsyncLocks, others: AsyncLocks, answered: bool
    ) -> None:
        texts: list[str] = []

        async def prepare() -> Work:
            lease = await others.lock("report").acquire(timeout=0)
            assert lease is not None
            texts.append(lease.export())
            return lambda: ours.adopt(texts[-1])

        async def check(lease: Any) -> None:
            try:
                adopted = lease if lease is not None else await others.adopt(texts[-1])
            except LeaseLost:
                await settled(others, lambda info: not info.locked)
            else:
                assert await adopted.release() is True
            await check_free(others)

        await cancel_everywhere(prepare, check, answered=answered)

    async def test_close_closes(self, url: str, others: AsyncLocks, answered: bool) -> None:
        opened: list[AsyncLocks] = []

        async def prepare() -> Work:
            locks = lockfast.aio.connect(url)
            opened.append(locks)
            await locks.lock("report").acquire(timeout=0)
            return locks.close

        async def check(_: Any) -> None:
            await opened[-1].close()
            gc.collect()  # reports a connection that is still open
            await settled(others, lambda info: not info.locked)
            await check_free(others)

        await cancel_everywhere(prepare, check, answered=answered)
