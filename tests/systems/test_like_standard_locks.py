"""`Lock` behaves as `threading.Lock` and `asyncio.Lock` do in the standard library's tests.

On every kind of store, in both flavours. Differences: `acquire` returns a lease or None instead of True or False, and
only the caller that acquired the lock can release it through the lock object (through the lease, any caller can).
"""

import asyncio
import gc
import threading
import time
import weakref
from typing import Any

import pytest

import lockfast
from lockfast import ConfigurationError, LeaseLost, NotHeld, State
from tests.contract.driver import BOUND, Driver, done, held, scenario
from tests.keepalive.loss import lose

pytestmark = pytest.mark.system("B1")


@scenario
async def test_unused_lock_can_be_deleted(d: Driver) -> None:
    lock = d.lock()
    del lock


@scenario
async def test_repr_shows_name_and_ttl(d: Driver) -> None:
    lock = d.lock("thing", ttl=7)
    kind = "AsyncLock" if d.flavour == "asyncio" else "Lock"
    assert repr(lock) == f"<{kind} 'thing', ttl 7 s>"


@scenario
async def test_locked_is_a_bool(d: Driver) -> None:
    lock = d.lock()
    assert await done(lock.locked()) is False
    await done(lock.acquire())
    assert await done(lock.locked()) is True
    await done(lock.release())
    assert await done(lock.locked()) is False


@scenario
async def test_acquire_and_release_repeatedly(d: Driver) -> None:
    lock = d.lock()
    for _ in range(20):
        assert await done(lock.acquire())
        assert await done(lock.release()) is True


@scenario
async def test_lease_outlives_its_lock_object(d: Driver) -> None:
    lease = await done(d.lock().acquire())
    gc.collect()
    assert await done(d.lock().locked()), "the grant belongs to the lease, not to the lock object"
    await done(lease.release())


@scenario
async def test_non_blocking_acquire(d: Driver) -> None:
    assert await done(d.lock().acquire(False)) is not None
    assert await done(d.lock().acquire(False)) is None
    assert await done(d.lock().acquire(blocking=False)) is None
    assert await done(d.lock().acquire(timeout=0)) is None


@scenario
async def test_non_blocking_acquire_while_another_caller_holds_it(d: Driver) -> None:
    lock = d.lock()
    await done(lock.acquire())

    async def other() -> Any:
        return await done(lock.acquire(blocking=False))

    assert await d.start(other).result() is None
    await done(lock.release())
    lease = await d.start(other).result()
    assert lease is not None
    await done(lease.release())


@scenario
async def test_acquire_waits_for_the_release(d: Driver) -> None:
    lock = d.lock()
    lease = await done(lock.acquire())
    phases: list[str] = []

    async def other() -> None:
        phases.append("waiting")
        async with held(lock):
            phases.append("held")

    contender = d.start(other)
    await d.until(lambda: phases == ["waiting"], "the other caller to start")
    await d.queue_length(lock, 1)
    assert phases == ["waiting"]
    await done(lease.release())
    await contender.result()
    assert phases == ["waiting", "held"]


@scenario
async def test_waiters_hold_it_one_at_a_time(d: Driver) -> None:
    lock, inside, most, finished = d.lock(timeout=BOUND), 0, 0, 0

    async def worker() -> None:
        nonlocal inside, most, finished
        async with held(lock):
            inside += 1
            most = max(most, inside)
            await d.pause()
            finished += 1
            inside -= 1

    contenders = [d.start(worker) for _ in range(10)]
    for one in contenders:
        await one.result()
    assert (most, finished) == (1, 10)


@scenario
async def test_with_block_releases_after_an_error(d: Driver) -> None:
    lock = d.lock()
    for error in (None, ZeroDivisionError):
        try:
            async with held(lock):
                assert await done(lock.locked())
                if error is not None:
                    raise error
        except ZeroDivisionError:
            pass
        assert not await done(lock.locked())


@scenario
async def test_release_without_acquire(d: Driver) -> None:
    with pytest.raises(RuntimeError) as caught:
        await done(d.lock().release())
    assert isinstance(caught.value, NotHeld)


@scenario
async def test_lost_lock_can_be_released_once(d: Driver) -> None:
    """Inside a block as well as without one."""
    lock = d.lock(ttl=1)  # the store does not know of the loss, and grants again after the ttl
    with pytest.raises(LeaseLost):  # noqa: PT012
        async with held(lock) as lease:
            lose(lease)
            assert await done(lock.release()) is False
            with pytest.raises(NotHeld):
                await done(lock.release())
            other = await done(lock.acquire())
            assert await done(lock.release()) is True
            assert other.state is State.RELEASED
            with pytest.raises(NotHeld):
                await done(lock.release())


@scenario
async def test_release_twice(d: Driver) -> None:
    lock = d.lock()
    await done(lock.acquire())
    await done(lock.release())
    with pytest.raises(RuntimeError):
        await done(lock.release())


@scenario
async def test_another_caller_can_release_through_the_lease(d: Driver) -> None:
    lock = d.lock()
    lease = await done(lock.acquire())

    async def other() -> Any:
        with pytest.raises(NotHeld):
            await done(lock.release())
        return await done(lease.release())

    assert await d.start(other).result() is True
    assert await done(lock.acquire(timeout=0)) is not None


@scenario
async def test_invalid_timeouts(d: Driver) -> None:
    lock = d.lock()
    with pytest.raises(ValueError, match="blocking=False"):
        await done(lock.acquire(False, 1))
    for timeout in (-1, -100, float("nan"), float("inf"), "1", 1e20):
        with pytest.raises(ConfigurationError):
            await done(lock.acquire(timeout=timeout))
    assert not await done(lock.locked())


@scenario
async def test_timeout_is_kept(d: Driver) -> None:
    lock = d.lock()
    await done(lock.acquire())

    async def other() -> float:
        started = time.monotonic()
        assert await done(lock.acquire(timeout=0.2)) is None
        return time.monotonic() - started

    assert 0.2 <= await d.start(other).result() < 2


@scenario
async def test_weak_reference_to_a_lock(d: Driver) -> None:
    lock = d.lock()
    reference = weakref.ref(lock)
    assert reference() is lock
    del lock
    gc.collect()
    assert reference() is None


@scenario
async def test_weak_reference_to_a_released_lease(d: Driver) -> None:
    lock = d.lock()
    lease = await done(lock.acquire())
    reference = weakref.ref(lease)
    await done(lease.release())
    del lease

    def gone() -> bool:
        gc.collect()
        return reference() is None

    await d.until(gone, "the lease to be collected")


@scenario
async def test_two_objects_of_one_name_exclude_each_other(d: Driver) -> None:
    first, second = d.lock(), d.lock()
    assert first is not second
    await done(first.acquire())
    assert await done(second.acquire(timeout=0)) is None
    with pytest.raises(NotHeld):
        await done(second.release())


def test_ended_thread_leaves_no_reference() -> None:
    with lockfast.connect("memory://") as locks:
        lock = locks.lock("thing")

        def body() -> None:
            lock.acquire()
            lock.release()

        thread = threading.Thread(target=body)
        thread.start()
        thread.join(BOUND)
        assert lock._leases == {}


def test_next_waiter_gets_the_lock_after_a_cancelled_one() -> None:
    async def main() -> None:
        async with lockfast.aio.connect("memory://") as locks:
            lock = locks.lock("thing")
            lease = await lock.acquire()
            assert lease is not None
            first, second = (asyncio.create_task(lock.acquire()) for _ in range(2))
            await asyncio.sleep(0.01)
            first.cancel()
            await lease.release()
            with pytest.raises(asyncio.CancelledError):
                await first
            async with asyncio.timeout(BOUND):
                assert await second is not None

    asyncio.run(main())
