"""Acquire and release without waiters."""

import asyncio
import gc
import time
import weakref

import pytest

from lockfast import AcquireTimeout, LeaseLost, NotHeld, State
from tests.contract.driver import Driver, done, held, scenario
from tests.contract.stores import only


@scenario
async def test_acquire_and_release_repeatedly(d: Driver) -> None:
    lock = d.lock()
    for _ in range(3):
        lease = await done(lock.acquire())
        assert (lease.name, lease.ttl, lease.state) == ("thing", 30, State.HELD)
        assert await done(lock.release()) is True
        assert lease.state is State.RELEASED


@scenario
async def test_held_lock_returns_none(d: Driver) -> None:
    other = d.connect().lock("thing")
    lease = await done(d.lock().acquire())
    assert await done(other.acquire(timeout=0)) is None
    assert await done(other.acquire(blocking=False)) is None
    assert await done(d.lock().acquire(timeout=0)) is None, "another lock object of the same client competes too"
    assert await done(lease.release()) is True
    assert await done(other.acquire(timeout=0)) is not None


@scenario
async def test_locked(d: Driver) -> None:
    lock, other = d.lock(), d.connect().lock("thing")
    assert await done(other.locked()) is False
    async with held(lock):
        assert await done(other.locked()) is True
    assert await done(other.locked()) is False


@scenario
async def test_fences_rise_with_every_grant(d: Driver) -> None:
    first, second = d.lock(), d.connect().lock("thing")
    fences = []
    for _ in range(20):
        for lock in (first, second):
            lease = await done(lock.acquire(timeout=0))
            fences.append(lease.fence)
            await done(lease.release())
    assert fences == sorted(set(fences))


@scenario
async def test_block_is_not_entered_after_a_timeout(d: Driver) -> None:
    holder = await done(d.lock().acquire())
    entered = False
    with pytest.raises(AcquireTimeout, match=r"stayed taken for 0\.05 s") as caught:
        async with held(d.connect().lock("thing", timeout=0.05)):
            entered = True
    assert not entered
    assert (caught.value.name, caught.value.timeout) == ("thing", 0.05)
    info = await done(d.lock().inspect())
    assert (info.holder, info.waiting) == (holder.holder, 0)


@scenario
async def test_error_in_the_body_propagates_and_releases(d: Driver) -> None:
    error = KeyError("the body's own")
    with pytest.raises(KeyError) as caught:
        async with held(d.lock()):
            raise error
    assert caught.value is error
    assert await done(d.lock().locked()) is False


@scenario
async def test_lease_can_be_released_inside_its_block(d: Driver) -> None:
    async with held(d.lock()) as lease:
        assert await done(lease.release()) is True
    async with held(d.lock()) as lease:
        text = lease.export()
    await done((await done(d.locks.adopt(text))).release())

    async def release_and_fail() -> None:
        async with held(d.lock()) as lease:
            await done(lease.release())
            raise KeyError("the body's own")

    with pytest.raises(KeyError, match="own"):
        await release_and_fail()


@scenario
async def test_release_without_acquire(d: Driver) -> None:
    lock = d.lock()
    with pytest.raises(NotHeld, match="acquired no lease"):
        await done(lock.release())
    lease = await done(d.lock().acquire())
    with pytest.raises(NotHeld):
        await done(lock.release())
    assert lease.state is State.HELD


@scenario
async def test_second_release_does_not_affect_the_successor(d: Driver) -> None:
    lock = d.lock()
    lease = await done(lock.acquire())
    assert await done(lease.release()) is True
    successor = await done(d.connect().lock("thing").acquire(timeout=0))
    assert await done(lease.release()) is False
    with pytest.raises(NotHeld):
        await done(lock.release())
    assert (await done(lock.inspect())).holder == successor.holder


@scenario
async def test_lease_can_be_released_by_another_caller(d: Driver) -> None:
    lease = await done(d.lock().acquire())

    async def elsewhere() -> bool:
        gone: bool = await done(lease.release())
        return gone

    assert await d.start(elsewhere).result() is True
    assert await done(d.lock().locked()) is False


@scenario
async def test_lock_object_releases_only_its_callers_lease(d: Driver) -> None:
    lock = d.lock()
    lease = await done(lock.acquire())

    async def stranger() -> None:
        with pytest.raises(NotHeld):
            await done(lock.release())

    await d.start(stranger).result()
    assert (await done(lock.inspect())).holder == lease.holder
    assert await done(lock.release()) is True


@scenario
async def test_callers_of_one_lock_object_have_separate_leases(d: Driver) -> None:
    lock = d.lock(ttl=0.15, renew=False)
    acquired, proceed = d.gate(), d.gate()

    async def first() -> bool:
        assert await done(lock.acquire()) is not None
        acquired.open()
        await proceed.passed()
        gone: bool = await done(lock.release())
        return gone

    contender = d.start(first)
    await acquired.passed()
    second = await done(d.lock("thing", ttl=30).acquire(timeout=5))
    proceed.open()
    assert await contender.result() is False
    assert (await done(lock.inspect())).holder == second.holder


@scenario
async def test_block_with_an_expired_lease_raises_lease_lost(d: Driver) -> None:
    lock = d.lock(ttl=0.15, renew=False)
    entered, proceed = d.gate(), d.gate()

    async def first() -> None:
        async with held(lock):
            entered.open()
            await proceed.passed()

    contender = d.start(first)
    await entered.passed()
    second = await done(d.connect().lock("thing").acquire(timeout=5))
    proceed.open()
    with pytest.raises(LeaseLost, match="its ttl ran out"):
        await contender.result()
    assert (await done(lock.inspect())).holder == second.holder


@scenario
async def test_block_ends_its_own_lease_only(d: Driver) -> None:
    """Also when the same caller acquired the lock again after the lease of the block had expired."""
    lock = d.lock(ttl=0.15, renew=False, cancel_on_loss=False)
    leases = []

    async def twice() -> None:
        async with held(lock) as lease:
            leases.append(lease)
            leases.append(await done(d.lock(ttl=30).acquire(timeout=5)))

    with pytest.raises(LeaseLost):
        await twice()
    assert [lease.state for lease in leases] == [State.LOST, State.HELD]


@only(flavour="asyncio")
@scenario
async def test_loss_cancels_the_body(d: Driver) -> None:
    with pytest.raises(LeaseLost) as caught:
        async with held(d.lock(ttl=0.1, renew=False)):
            await asyncio.Event().wait()
    assert isinstance(caught.value.__cause__, asyncio.CancelledError)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0, "the cancellation was undone"


@scenario
async def test_many_locks_at_once(d: Driver) -> None:
    locks = [d.lock(f"thing:{number}") for number in range(200)]
    leases = [await done(lock.acquire(timeout=0)) for lock in locks]
    other = d.connect()
    for number in (0, 99, 199):
        assert await done(other.lock(f"thing:{number}").acquire(timeout=0)) is None
    assert len({lease.holder for lease in leases}) == 200
    assert [await done(lock.release()) for lock in locks] == [True] * 200


@scenario
async def test_lock_object_keeps_no_released_leases(d: Driver) -> None:
    """A service may use one lock object for years and release through the lease."""
    lock = d.lock()
    references = []
    for _ in range(20):
        lease = await done(lock.acquire(timeout=0))
        await done(lease.release())
        references.append(weakref.ref(lease))
    gc.collect()
    assert sum(reference() is not None for reference in references) <= 2


@scenario
async def test_free_lock_is_acquired_at_once(d: Driver) -> None:
    """Whatever the timeout."""
    lock = d.lock()
    await done(lock.acquire(timeout=0))  # connects
    await done(lock.release())
    started = time.monotonic()
    assert await done(lock.acquire(timeout=5)) is not None
    assert time.monotonic() - started < 4
