"""`locks.rlock()`: acquired again without a round trip, counted locally, and never held longer than its lease."""

import asyncio
import os
from collections.abc import AsyncIterator, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

import lockfast.aio
from lockfast import ConfigurationError, LeaseLost, NotHeld, State, StoreRefused
from tests.contract.driver import Driver, done, held, scenario
from tests.contract.stores import only
from tests.keepalive.loss import lose

pytestmark = pytest.mark.system("D4")

DEEP = 1000


@asynccontextmanager
async def nested(lock: Any, depth: int) -> AsyncIterator[list[Any]]:
    """`depth` nested blocks of one lock; yields their leases."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(held(lock)) for _ in range(depth)]


@scenario
async def test_acquiring_again_returns_the_same_lease(d: Driver) -> None:
    lock = d.locks.rlock("thing")
    async with held(lock) as outer:
        async with held(lock) as inner:
            assert inner.fence == outer.fence
            assert (await done(lock.acquire())).fence == outer.fence
            assert lock.depth == 3
            assert await done(lock.release()) is True
        assert await done(d.lock("thing").locked()), "leaving an inner block does not release the lock"
        assert outer.state is State.HELD
    assert lock.depth == 0
    assert await done(d.lock("thing").locked()) is False


@scenario
async def test_a_thousand_levels(d: Driver) -> None:
    lock = d.locks.rlock("thing")
    fences = {(await done(lock.acquire())).fence for _ in range(DEEP)}
    assert len(fences) == 1
    assert lock.depth == DEEP
    for _ in range(DEEP - 1):
        assert await done(lock.release()) is True
    assert await done(d.lock("thing").locked()), "only the last release frees the lock"
    assert await done(lock.release()) is True
    assert await done(d.lock("thing").locked()) is False
    async with nested(lock, DEEP) as leases:
        assert len({lease.fence for lease in leases}) == 1
    assert await done(d.lock("thing").locked()) is False


@only(flavour="threads", stores=("memory",))
@scenario
async def test_recursive_function(d: Driver) -> None:
    lock = d.locks.rlock("thing")

    @lock  # type: ignore[untyped-decorator]
    def down(levels: int) -> int:
        return int(down(levels - 1)) if levels else int(lock.depth)

    assert down(200) == 201
    assert lock.depth == 0


@only(stores=("valkey9",))
@scenario
async def test_acquiring_again_costs_no_round_trip(d: Driver) -> None:
    lock = d.locks.rlock("thing", ttl=300)
    async with held(lock):
        assert d.server is not None
        d.server.raw("CONFIG", "RESETSTAT")
        async with nested(lock, 100):
            pass
        commands = d.server.commands_processed()
    assert [command for command in commands if "eval" in command] == []


@scenario
async def test_another_caller_waits_for_the_outermost_release(d: Driver) -> None:
    lock = d.locks.rlock("thing")
    async with nested(lock, 3):
        assert await done(d.lock("thing").acquire(timeout=0)) is None

        async def another() -> tuple[bool, bool]:
            """The same object, in another thread or task."""
            refused = await done(lock.acquire(timeout=0)) is None
            async with held(lock):
                return refused, lock.depth == 1

        other = d.start(another)
        await d.queue_length(d.lock("thing"), 1)
        assert not other.ended
    assert await other.result() == (True, True)


@scenario
async def test_only_its_caller_can_release_it(d: Driver) -> None:
    lock = d.locks.rlock("thing")
    with pytest.raises(NotHeld):
        await done(lock.release())

    async def stranger() -> None:
        await done(lock.release())

    async with nested(lock, 2):
        with pytest.raises(RuntimeError, match="acquired no lease"):
            await d.start(stranger).result()
        assert lock.depth == 2
    with pytest.raises(NotHeld):
        await done(lock.release())


@scenario
async def test_loss_unwinds_all_levels_with_one_error(d: Driver) -> None:
    """On threads the innermost block raises it; on asyncio the body is cancelled and the outermost block raises it."""
    lock, after = d.locks.rlock("thing"), []
    with pytest.raises(LeaseLost, match="the test ended it") as caught:  # noqa: PT012
        async with held(lock):
            async with held(lock) as lease:
                async with held(lock):
                    lose(lease)
                    if d.flavour == "asyncio":
                        await asyncio.sleep(10)
                after.append("the middle level")
            after.append("the outermost level")
    assert after == []
    assert caught.value.fence == lease.fence
    assert not isinstance(caught.value.__cause__, LeaseLost)
    assert caught.value.__context__ is None or not isinstance(caught.value.__context__, LeaseLost)
    assert lock.depth == 0
    assert await d.locks.session.store.release("thing", lease.holder, d.locks.session.runtime.now() + 5)
    async with held(lock) as again:
        assert again.fence > lease.fence


@scenario
async def test_outer_block_raises_a_loss_that_an_inner_one_suppressed(d: Driver) -> None:
    lock = d.locks.rlock("thing", cancel_on_loss=False)
    with pytest.raises(LeaseLost):  # noqa: PT012
        async with held(lock):
            with pytest.raises(LeaseLost):
                async with held(lock) as lease:
                    lose(lease)
    assert lock.depth == 0


@scenario
async def test_lost_lease_cannot_be_acquired_again(d: Driver) -> None:
    """A naive counter would still say "held"."""
    lock = d.locks.rlock("thing")
    lease = await done(lock.acquire())
    await done(lock.acquire())
    lose(lease)
    for _ in range(2):
        with pytest.raises(LeaseLost, match="the test ended it"):
            await done(lock.acquire(timeout=0))
    assert lock.depth == 2
    assert [await done(lock.release()), await done(lock.release())] == [False, False]
    with pytest.raises(NotHeld):
        await done(lock.release())


@scenario
async def test_levels_end_with_the_ttl(d: Driver) -> None:
    lock = d.locks.rlock("thing", ttl=0.05, renew=False)
    lease = await done(lock.acquire())
    await d.until(lambda: d.lock("thing").acquire(timeout=0), "another client to acquire it")
    assert lease.state is State.LOST
    with pytest.raises(LeaseLost, match="ttl ran out"):
        await done(lock.acquire())
    assert await done(lock.release()) is False
    assert await done(d.lock("thing").locked()), "the successor's grant was not released"


@scenario
async def test_releasing_the_lease_ends_all_levels(d: Driver) -> None:
    lock = d.locks.rlock("thing")
    async with held(lock), held(lock) as lease:
        assert await done(lease.release()) is True
        assert await done(d.lock("thing").locked()) is False
        async with held(lock) as new:
            assert new.fence > lease.fence
        assert lock.depth == 0
    assert await done(d.lock("thing").locked()) is False


@scenario
async def test_error_in_an_inner_block_propagates_and_releases(d: Driver) -> None:
    lock = d.locks.rlock("thing")
    with pytest.raises(KeyError, match="own"):
        async with nested(lock, 3):
            raise KeyError("the body's own")
    assert await done(d.lock("thing").locked()) is False


@scenario
async def test_failed_release_can_be_repeated(d: Driver) -> None:
    lock, store = d.locks.rlock("thing"), d.locks.session.store
    await done(lock.acquire())
    await done(lock.acquire())
    release = store.release

    async def refuse(*_: Any) -> bool:
        raise StoreRefused("not now")

    assert await done(lock.release()) is True
    store.release = refuse
    with pytest.raises(StoreRefused):
        await done(lock.release())
    store.release = release
    assert await done(lock.release()) is True
    assert (lock.depth, await done(d.lock("thing").locked())) == (0, False)


@scenario
async def test_acquiring_again_checks_its_arguments(d: Driver) -> None:
    lock = d.locks.rlock("thing")
    async with held(lock):
        for bad in ({"timeout": -1}, {"blocking": False, "timeout": 1}, {"blocking": "yes"}, {"timeout": "1"}):
            with pytest.raises(ValueError, match=r"timeout|blocking"):
                await done(lock.acquire(**bad))
        assert lock.depth == 1


@only(flavour="asyncio", stores=("memory",))
@scenario
async def test_child_task_does_not_inherit_the_lock(d: Driver) -> None:
    lock = d.locks.rlock("thing")

    async def child() -> Any:
        return await lock.acquire(timeout=0)

    async with lock:
        assert await asyncio.create_task(child()) is None
        assert lock.depth == 1


@only(flavour="asyncio", stores=("memory",))
@scenario
async def test_loss_after_an_inner_block_still_cancels_the_outer(d: Driver) -> None:
    lock = d.locks.rlock("thing")
    with pytest.raises(LeaseLost):  # noqa: PT012
        async with lock as lease:
            async with lock:
                pass
            lose(lease)
            await asyncio.sleep(10)
    assert lease._scope is None
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


@only(flavour="threads", stores=("sqlite", "valkey9"))
@scenario
async def test_forked_child_holds_nothing(d: Driver) -> None:
    lock = d.locks.rlock("thing")
    with lock, lock:
        child = os.fork()
        if child == 0:
            try:
                os._exit(0 if lock.acquire(timeout=0) is None else 1)
            finally:
                os._exit(2)
        _, status = os.waitpid(child, 0)  # noqa: ASYNC222 - on threads a scenario blocks
        assert os.waitstatus_to_exitcode(status) == 0
        assert lock.depth == 2
    assert d.lock("thing").locked() is False


@only(flavour="threads", stores=("memory",))
@scenario
async def test_levels_of_threads_that_ended_are_removed(d: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = d.locks.rlock("thing", ttl=0.01, renew=False)

    async def acquire_only() -> None:
        await done(lock.acquire())

    for _ in range(3):
        await d.start(acquire_only).result()
    assert len(lock._levels) == 3
    monkeypatch.setattr("lockfast.client.rlock.MOST_CALLERS", 2)
    await d.start(acquire_only).result()
    assert len(lock._levels) == 1


# The rules alone, without a store.


def test_transition_table() -> None:
    with lockfast.connect("memory://") as locks:
        lock = locks.rlock("thing", ttl=30)
        lease = lock.acquire()
        assert lease is not None
        assert lock.acquire() is lease
        lease._core.renewal_failed(lease._core.next_renewal)
        assert lease.state is State.AT_RISK
        assert lock.acquire() is lease
        lose(lease)
        with pytest.raises(LeaseLost):
            lock.acquire()
        assert lock.depth == 3, "a refusal adds no level"
        assert [lock.release() for _ in range(3)] == [False] * 3
        with pytest.raises(NotHeld):
            lock.release()
        again = locks.rlock("other").acquire()
        assert again is not None


def test_released_lease_is_acquired_anew() -> None:
    with lockfast.connect("memory://") as locks:
        lock = locks.rlock("thing")
        first = lock.acquire()
        assert first is not None
        assert lock.acquire() is first
        first.release()
        second = lock.acquire()
        assert second is not None
        assert second.fence > first.fence
        assert lock.depth == 1


@only(flavour="threads", stores=("memory",))
@scenario
async def test_generator_closed_by_another_thread(d: Driver) -> None:
    lock = d.locks.rlock("thing")

    def deep() -> Generator[int, None, None]:
        with lock, lock:
            yield lock.depth

    suspended = deep()
    assert next(suspended) == 2

    async def end_it() -> None:
        suspended.close()

    await d.start(end_it).result()
    assert lock.depth == 0
    assert d.lock("thing").locked() is False


def test_one_object_in_successive_event_loops() -> None:
    lock = lockfast.aio.connect("memory://").rlock("thing", ttl=5, timeout=0)

    async def twice() -> int:
        async with lock, lock:
            return lock.depth

    assert [asyncio.run(twice()), asyncio.run(twice())] == [2, 2]
    assert len(lock._levels) == 0
    assert repr(lock) == "<AsyncRLock 'thing', ttl 5 s>", "without a running loop"


def test_another_event_loop_is_another_caller() -> None:
    """Also while the holder's loop is blocked."""
    locks = lockfast.aio.connect("memory://")
    lock, plain = locks.rlock("thing", ttl=5), locks.lock("other", ttl=5)

    async def intrude() -> None:
        with pytest.raises(ConfigurationError):
            await lock.acquire()
        with pytest.raises(NotHeld):
            await plain.release()

    async def main() -> None:
        async with lock, plain as lease:
            with ThreadPoolExecutor() as threads:
                threads.submit(asyncio.run, intrude()).result(10)
            assert lease.state is State.HELD

    asyncio.run(main())
