"""Taking a lock and giving it back, without anyone who waits."""

import asyncio
import gc
import time
import weakref

import pytest

from lockfast import AcquireTimeout, LeaseLost, NotHeld, State
from tests.contract.driver import Driver, done, held, scenario
from tests.contract.stores import only


@scenario
async def test_take_give_back_and_take_again(d: Driver) -> None:
    lock = d.lock()
    for _ in range(3):
        lease = await done(lock.acquire())
        assert (lease.name, lease.ttl, lease.state) == ("thing", 30, State.HELD)
        assert await done(lock.release()) is True
        assert lease.state is State.RELEASED


@scenario
async def test_taken_is_none_and_no_error(d: Driver) -> None:
    other = d.connect().lock("thing")
    lease = await done(d.lock().acquire())
    assert await done(other.acquire(timeout=0)) is None
    assert await done(other.acquire(blocking=False)) is None
    assert await done(d.lock().acquire(timeout=0)) is None, "another object of the same client is another contender"
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
async def test_fences_rise_from_grant_to_grant(d: Driver) -> None:
    first, second = d.lock(), d.connect().lock("thing")
    fences = []
    for _ in range(20):
        for lock in (first, second):
            lease = await done(lock.acquire(timeout=0))
            fences.append(lease.fence)
            await done(lease.release())
    assert fences == sorted(set(fences))


@scenario
async def test_a_block_that_cannot_be_entered_is_not_entered(d: Driver) -> None:
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
async def test_an_error_in_the_body_releases_and_passes_unmasked(d: Driver) -> None:
    error = KeyError("the body's own")
    with pytest.raises(KeyError) as caught:
        async with held(d.lock()):
            raise error
    assert caught.value is error
    assert await done(d.lock().locked()) is False


@scenario
async def test_a_lease_may_be_given_back_inside_its_block(d: Driver) -> None:
    async with held(d.lock()) as lease:
        assert await done(lease.release()) is True
    async with held(d.lock()) as lease:
        text = lease.export()
    await done((await done(d.locks.adopt(text))).release())

    async def give_back_and_fail() -> None:
        async with held(d.lock()) as lease:
            await done(lease.release())
            raise KeyError("the body's own")

    with pytest.raises(KeyError, match="own"):
        await give_back_and_fail()


@scenario
async def test_release_without_holding(d: Driver) -> None:
    lock = d.lock()
    with pytest.raises(NotHeld, match="holds no lease"):
        await done(lock.release())
    lease = await done(d.lock().acquire())
    with pytest.raises(NotHeld):
        await done(lock.release())
    assert lease.state is State.HELD


@scenario
async def test_a_second_release_finds_nothing(d: Driver) -> None:
    lock = d.lock()
    lease = await done(lock.acquire())
    assert await done(lease.release()) is True
    successor = await done(d.connect().lock("thing").acquire(timeout=0))
    assert await done(lease.release()) is False
    with pytest.raises(NotHeld):
        await done(lock.release())
    assert (await done(lock.inspect())).holder == successor.holder


@scenario
async def test_a_lease_can_be_given_back_from_elsewhere(d: Driver) -> None:
    lease = await done(d.lock().acquire())

    async def elsewhere() -> bool:
        gone: bool = await done(lease.release())
        return gone

    assert await d.start(elsewhere).result() is True
    assert await done(d.lock().locked()) is False


@scenario
async def test_a_lock_object_gives_back_only_what_its_caller_took(d: Driver) -> None:
    lock = d.lock()
    lease = await done(lock.acquire())

    async def stranger() -> None:
        with pytest.raises(NotHeld):
            await done(lock.release())

    await d.start(stranger).result()
    assert (await done(lock.inspect())).holder == lease.holder
    assert await done(lock.release()) is True


@scenario
async def test_contenders_that_share_a_lock_object_do_not_mix_their_leases(d: Driver) -> None:
    lock = d.lock(ttl=0.15, renew=False)
    taken, told = d.gate(), d.gate()

    async def first() -> bool:
        assert await done(lock.acquire()) is not None
        taken.open()
        await told.passed()
        gone: bool = await done(lock.release())
        return gone

    contender = d.start(first)
    await taken.passed()
    second = await done(d.lock("thing", ttl=30).acquire(timeout=5))
    told.open()
    assert await contender.result() is False
    assert (await done(lock.inspect())).holder == second.holder


@scenario
async def test_a_block_whose_lease_ran_out_ends_with_lease_lost(d: Driver) -> None:
    lock = d.lock(ttl=0.15, renew=False)
    entered, told = d.gate(), d.gate()

    async def first() -> None:
        async with held(lock):
            entered.open()
            await told.passed()

    contender = d.start(first)
    await entered.passed()
    second = await done(d.connect().lock("thing").acquire(timeout=5))
    told.open()
    with pytest.raises(LeaseLost, match="its ttl ran out"):
        await contender.result()
    assert (await done(lock.inspect())).holder == second.holder


@scenario
async def test_a_block_ends_the_lease_that_it_began(d: Driver) -> None:
    """Also when the same caller took the lock once more after the block's own lease had run out."""
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
    assert task.cancelling() == 0, "the cancellation was ours and is over"


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
async def test_a_lock_object_does_not_collect_what_was_given_back(d: Driver) -> None:
    """A service takes the same lock for years, and gives it back through the lease."""
    lock = d.lock()
    given_back = []
    for _ in range(20):
        lease = await done(lock.acquire(timeout=0))
        await done(lease.release())
        given_back.append(weakref.ref(lease))
    gc.collect()
    assert sum(reference() is not None for reference in given_back) <= 2


@scenario
async def test_acquire_returns_soon_when_the_lock_is_free(d: Driver) -> None:
    """A free lock is not waited for, whatever the timeout."""
    lock = d.lock()
    await done(lock.acquire(timeout=0))  # connects
    await done(lock.release())
    started = time.monotonic()
    assert await done(lock.acquire(timeout=5)) is not None
    assert time.monotonic() - started < 4
