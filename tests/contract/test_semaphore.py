"""Semaphores: permits, slots, weights, loss, and a store that does not answer."""

import asyncio
from typing import Any

import pytest

from lockfast import AcquireTimeout, ConfigurationError, LeaseLost, NotHeld, State, StoreUnavailable
from lockfast.values import Mode
from tests.contract.driver import BOUND, Driver, TaskContender, done, held, scenario
from tests.contract.stores import IN_ORDER, QUEUEING, capabilities, only


@pytest.fixture(autouse=True)
def offers_permits(d: Driver) -> None:
    if not capabilities(d).permits:
        pytest.skip("the store grants no permits")


@scenario
async def test_permits_are_held_together_up_to_the_limit(d: Driver) -> None:
    gpus, elsewhere = d.locks.semaphore("gpu", 2), d.connect().semaphore("gpu", 2)
    async with held(gpus) as permit, held(elsewhere) as other:
        assert (permit.slot, other.slot) == (0, 1)
        assert other.fence > permit.fence
        assert permit.enforced
        assert await done(gpus.acquire(timeout=0)) is None
        assert await done(gpus.locked()) is True
        info = await done(gpus.inspect())
        assert (info.mode, info.permits, [one.slots for one in info.holders]) == (Mode.PERMITS, 2, [(0,), (1,)])
    assert await done(gpus.locked()) is False
    assert (await done(gpus.inspect())).holders == ()


@scenario
async def test_one_claim_can_take_several_permits(d: Driver) -> None:
    gpus = d.locks.semaphore("gpu", 5, permits=2)
    async with held(gpus) as pair:
        assert pair.slots == (0, 1)
        single = await done(gpus.acquire(permits=1, timeout=0))
        assert single.slots == (2,)
        assert await done(gpus.acquire(permits=3, timeout=0)) is None
        assert (await done(gpus.inspect())).permits == 3, "a claim that does not fit takes no permit"
        await done(single.release())
        rest = await done(gpus.acquire(permits=3, timeout=0))
        assert rest.slots == (2, 3, 4)
        await done(rest.release())
    assert (await done(gpus.acquire(permits=5, timeout=0))).slots == (0, 1, 2, 3, 4)


@scenario
async def test_lowest_free_slot_is_used_again(d: Driver) -> None:
    gpus = d.locks.semaphore("gpu", 3)
    permits = [await done(gpus.acquire()) for _ in range(3)]
    assert [permit.slot for permit in permits] == [0, 1, 2]
    await done(permits[1].release())
    again = await done(gpus.acquire(timeout=0))
    assert (again.slot, permits[2].slot) == (1, 2)


@scenario
async def test_waiter_gets_the_permit_that_is_released(d: Driver) -> None:
    gpus = d.locks.semaphore("gpu", 2)
    permits = [await done(gpus.acquire()) for _ in range(2)]

    async def wait() -> Any:
        async with held(d.connect().semaphore("gpu", 2, timeout=BOUND)) as permit:
            return permit.slot

    waiting = d.start(wait)
    await d.queue_length(gpus, 1)
    assert await done(permits[0].release()) is True
    assert await waiting.result() == 0


@only(stores=IN_ORDER)
@scenario
async def test_claim_for_one_permit_does_not_overtake_a_claim_for_many(d: Driver) -> None:
    gpus, order = d.locks.semaphore("gpu", 3), []
    permit = await done(gpus.acquire())

    async def take(permits: int) -> None:
        async with held(d.connect().semaphore("gpu", 3, permits=permits, timeout=BOUND)):
            order.append(permits)

    many = d.start(take, 3)
    await d.queue_length(gpus, 1)
    one = d.start(take, 1)
    info = await d.queue_length(gpus, 2)
    assert [(waiter.mode, waiter.permits) for waiter in info.waiters] == [(Mode.PERMITS, 3), (Mode.PERMITS, 1)]
    assert await done(gpus.locked()) is True, "a claim for one permit would have to wait, though two are free"
    await done(permit.release())
    await many.result()
    await one.result()
    assert order == [3, 1]


@scenario
async def test_many_contenders_never_exceed_the_limit(d: Driver) -> None:
    inside: list[int] = []
    most: list[int] = []

    async def work(locks: Any) -> None:
        for _ in range(5):
            async with held(locks.semaphore("gpu", 3, timeout=BOUND)) as permit:
                assert permit.slot not in inside, "two holders never share a slot"
                inside.append(permit.slot)
                most.append(len(inside))
                await d.pause()
                inside.remove(permit.slot)

    for contender in [d.start(work, client) for client in (d.locks, d.connect()) for _ in range(4)]:
        await contender.result()
    assert max(most) <= 3


@only(stores=QUEUEING)
@scenario
async def test_timeout_leaves_nothing_behind(d: Driver) -> None:
    gpus = d.locks.semaphore("gpu", 1, timeout=0.05)
    permit = await done(d.connect().semaphore("gpu", 1).acquire())
    assert await done(gpus.acquire()) is None
    with pytest.raises(AcquireTimeout, match="gpu"):
        async with held(gpus):
            pass
    info = await done(gpus.inspect())
    assert ([one.holder for one in info.holders], info.waiting) == ([permit.holder], 0)


@scenario
async def test_decorated_function_runs_under_a_permit(d: Driver) -> None:
    gpus = d.locks.semaphore("gpu", 2)

    async def in_use() -> int:
        permits: int = (await done(gpus.inspect())).permits
        return permits

    guarded = gpus(d.function(in_use))
    assert await done(guarded()) == 1
    assert await in_use() == 0


@scenario
async def test_exported_permits_are_adopted_with_their_slots(d: Driver) -> None:
    gpus = d.locks.semaphore("gpu", 4)
    first = await done(gpus.acquire())
    permit = await done(gpus.acquire(permits=2))
    adopted = await done(d.connect().adopt(permit.export()))
    assert type(adopted) is type(permit)
    assert adopted.slots == permit.slots == (1, 2)
    assert adopted.fence > permit.fence
    assert (await done(gpus.inspect())).permits == 3
    assert await done(adopted.release()) is True
    info = await done(gpus.inspect())
    assert [one.holder for one in info.holders] == [first.holder]


@scenario
async def test_forced_release_of_one_permit_is_the_loss_of_that_lease_only(d: Driver) -> None:
    gpus = d.locks.semaphore("gpu", 2, ttl=0.6)
    kept, lost = [await done(gpus.acquire()) for _ in range(2)]
    await done(d.connect().semaphore("gpu", 2).force_release(lost.holder))
    assert await done(lost.lost.wait(timeout=BOUND)) is True
    with pytest.raises(LeaseLost, match="gpu"):
        lost.ensure_held()
    kept.ensure_held()
    successor = await done(gpus.acquire(timeout=0))
    assert successor.slot == lost.slot
    assert await done(lost.release()) is False
    assert (await done(gpus.inspect())).permits == 2, "a late release frees no other permit"


@only(flavour="asyncio")
@scenario
async def test_loss_of_a_permit_cancels_the_body(d: Driver) -> None:
    gpus = d.locks.semaphore("gpu", 2, ttl=0.6)

    async def work() -> None:
        async with gpus as permit:
            await d.connect().semaphore("gpu", 2).force_release(permit.holder)
            await asyncio.sleep(BOUND)

    with pytest.raises(LeaseLost):
        await work()


@scenario
async def test_permits_are_renewed_beyond_their_ttl(d: Driver) -> None:
    gpus = d.locks.semaphore("gpu", 2, ttl=0.9)
    permits = [await done(gpus.acquire()) for _ in range(2)]
    now = d.locks.session.runtime.now
    ends = now() + 2.0
    while now() < ends:
        assert (await done(gpus.inspect())).permits == 2
        await d.pause()
    assert [await done(permit.release()) for permit in permits] == [True, True]


@scenario
async def test_expired_permit_is_free_while_another_lives(d: Driver) -> None:
    gpus = d.locks.semaphore("gpu", 2)
    steady = await done(gpus.acquire())
    brief = await done(d.connect().semaphore("gpu", 2, ttl=0.1, renew=False).acquire())
    successor = await done(gpus.acquire(timeout=BOUND))
    assert successor.slot == brief.slot
    assert brief.state is State.LOST
    steady.ensure_held()


@scenario
async def test_lock_and_semaphore_of_one_name_exclude_each_other(d: Driver) -> None:
    async with held(d.locks.semaphore("gpu", 2)):
        assert await done(d.connect().lock("gpu").acquire(timeout=0)) is None
    async with held(d.lock("gpu")):
        assert await done(d.connect().semaphore("gpu", 2).acquire(timeout=0)) is None


@scenario
async def test_lowered_limit_counts_all_permits(d: Driver) -> None:
    before = [await done(d.locks.semaphore("gpu", 3).acquire()) for _ in range(3)]
    lowered = d.connect().semaphore("gpu", 2)
    await done(before[0].release())
    assert await done(lowered.acquire(timeout=0)) is None
    await done(before[1].release())
    assert (await done(lowered.acquire(timeout=0))).slot == 0
    assert (await done(d.locks.semaphore("gpu", 3).acquire(timeout=0))).slot == 1


@only(flavour="asyncio", stores=QUEUEING)
@scenario
async def test_cancelled_waiter_leaves_nothing_and_the_object_stays_usable(d: Driver) -> None:
    gpus = d.connect().semaphore("gpu", 1)
    permit = await d.locks.semaphore("gpu", 1).acquire()
    waiting = TaskContender(gpus.acquire, ())
    await d.queue_length(gpus, 1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting.result()
    await d.queue_length(gpus, 0)
    await permit.release()
    assert (await gpus.acquire(timeout=0)).slot == 0


@pytest.mark.parametrize("limit", [0, -1, True, "4", 4.0, None, 10**9])
@only(stores=["memory"])
@scenario
async def test_unusable_limit_is_refused(d: Driver, limit: Any) -> None:
    with pytest.raises(ConfigurationError, match="limit must be a whole number from 1 to 100000"):
        d.locks.semaphore("gpu", limit)


@pytest.mark.parametrize("permits", [0, -1, True, "2", 2.0, 5])
@only(stores=["memory"])
@scenario
async def test_unusable_number_of_permits_is_refused(d: Driver, permits: Any) -> None:
    with pytest.raises(ConfigurationError, match="permits must be a whole number from 1 to 4"):
        d.locks.semaphore("gpu", 4, permits=permits)
    gpus = d.locks.semaphore("gpu", 4)
    with pytest.raises(ConfigurationError, match="permits must be a whole number from 1 to 4"):
        await done(gpus.acquire(permits=permits))
    assert await done(gpus.locked()) is False


@only(stores=["memory"])
@scenario
async def test_unusable_answer_to_an_unavailable_store_is_refused(d: Driver) -> None:
    with pytest.raises(ConfigurationError, match='unavailable must be "raise" or "allow"'):
        d.locks.semaphore("gpu", 4, unavailable="ignore")


def break_store(client: Any) -> None:
    async def fail(*_: Any) -> Any:
        raise StoreUnavailable("out of order")

    client.session.store.acquire = fail


@scenario
async def test_unavailable_store_raises_by_default(d: Driver) -> None:
    client = d.connect(store_timeout=0.1)
    break_store(client)
    with pytest.raises(StoreUnavailable, match="out of order"):
        await done(client.semaphore("gpu", 4).acquire())


@scenario
async def test_unavailable_store_can_let_callers_of_several_in(d: Driver) -> None:
    client = d.connect(store_timeout=0.1)
    break_store(client)

    async def fail(*_: Any) -> Any:
        raise StoreUnavailable("out of order")

    client.session.store.acquire_all = fail
    both = client.all_of(*(client.semaphore(name, 4, unavailable="allow") for name in ("cpu", "gpu")), timeout=BOUND)
    async with held(both) as leases:
        assert (leases["gpu"].enforced, leases.state) == (False, State.HELD)
        leases.ensure_held()
    assert leases.state is State.RELEASED


@scenario
async def test_unavailable_store_can_let_callers_in(d: Driver, caplog: pytest.LogCaptureFixture) -> None:
    events: list[Any] = []

    class Observer:
        def observe(self, event: Any) -> None:
            events.append(event.kind.value)

    client = d.connect(store_timeout=0.1, observer=Observer())
    break_store(client)
    gpus = client.semaphore("gpu", 4, unavailable="allow")
    async with held(gpus) as permit:
        permit.ensure_held()
        await done(permit.renew())
        assert (permit.enforced, permit.slots, permit.name) == (False, (), "gpu")
        for refused in (lambda: permit.slot, permit.export):
            with pytest.raises(NotHeld, match="let this caller in without a permit"):
                refused()
        with pytest.raises(NotHeld):
            await done(permit.downgrade())
    assert "let its caller in without a permit" in caplog.text
    assert events.count("let in") == 1
    permit = await done(gpus.acquire())
    assert await done(gpus.release()) is True
    with pytest.raises(NotHeld):
        await done(gpus.release())
    assert (await done(d.locks.semaphore("gpu", 4).inspect())).permits == 0
