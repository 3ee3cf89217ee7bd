"""Local hand-off: which local waiter gets the lock, how long its lease is valid, and when the store gets it back."""

import asyncio
import os
from typing import Any

import pytest

from lockfast import ConfigurationError, LeaseLost
from lockfast.core import local_handoff
from lockfast.core import local_handoff as passing
from lockfast.core.acquire import Grant
from lockfast.runtime.base import run
from tests.contract.driver import BOUND, Contender, Driver, Gate, TaskContender, done, held, scenario
from tests.contract.stores import LOCAL_HANDOFF, QUEUEING, STORES, Environment, on, only

PATIENT = 60.0
"""Seconds that local hand-off and its waiters are given, because the machine may be slow."""
AS_SHIPPED = ("test_busy_process_does_not_starve_another",)


@pytest.fixture(autouse=True)
def patient(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.originalname not in AS_SHIPPED:
        for name in ("SPAN", "PATIENCE", "LONG_PATIENCE"):
            monkeypatch.setattr(local_handoff, name, PATIENT)
        monkeypatch.setattr(passing, "EXTRA", PATIENT * 1.01)


@pytest.fixture(params=on(LOCAL_HANDOFF))
def d(request: pytest.FixtureRequest, environment: Environment) -> Driver:
    return environment.driver(*request.param)


class Member:
    """A contender that acquires the lock and releases it at `leave()`."""

    def __init__(self, d: Driver, **options: Any) -> None:
        self.lease: Any = None
        self._go: Gate = d.gate()
        self._lock = d.lock(**{"timeout": BOUND, "ttl": 10, **options})
        self._contender: Contender = d.start(self._hold)

    async def _hold(self) -> Any:
        async with held(self._lock) as self.lease:
            await self._go.passed()
        return self.lease

    async def acquired(self, d: Driver) -> Any:
        return await d.until(lambda: self.lease, "the member to acquire the lock")

    async def leave(self) -> Any:
        self._go.open()
        return await self._contender.result()

    def cancel(self) -> None:
        assert isinstance(self._contender, TaskContender)
        self._contender.cancel()

    async def result(self) -> Any:
        return await self._contender.result()


def local_queue(d: Driver) -> local_handoff.LocalQueue:
    found: local_handoff.LocalQueue = d.locks.session.local_queues.queue("thing")
    return found


async def local_waiters(d: Driver, count: int) -> None:
    await d.until(lambda: len(local_queue(d)._waiters) == count, f"{count} local waiters")


async def sharing(d: Driver, *options: dict[str, Any]) -> list[Member]:
    """One member per set of options: the first holds a pooled grant, the others are its local waiters."""
    plain = await done(d.lock().acquire())
    assert d.locks.session.store.capabilities.fence_blocks
    first = Member(d, **options[0])
    await d.queue_length(d.lock(), 1)  # there are other local waiters, so it claims a pooled grant
    members = [first]
    for number, chosen in enumerate(options[1:], 1):
        members.append(Member(d, **chosen))
        await local_waiters(d, number)
    await done(plain.release())
    await first.acquired(d)
    return members


@only(stores=STORES)
@scenario
async def test_stores_with_local_handoff(d: Driver) -> None:
    await done((await done(d.lock().acquire())).release())
    assert d.locks.session.store.capabilities.fence_blocks is (d.store in LOCAL_HANDOFF)


@scenario
async def test_hand_off_in_order_under_one_holder_id_with_rising_fences(d: Driver) -> None:
    members = await sharing(d, {}, {}, {})
    leases = []
    for member in members:
        lease = await member.acquired(d)
        lease.ensure_held()
        assert (await done(d.lock().inspect())).holder == lease.holder
        leases.append(await member.leave())
    assert len({lease.holder for lease in leases}) == 1
    fences = [lease.fence for lease in leases]
    assert fences == sorted(set(fences))
    assert (await done(d.lock().inspect())).locked is False
    later = await done(d.connect().lock("thing").acquire(timeout=0))
    assert later.fence > fences[-1]


@scenario
async def test_handed_off_lease_is_valid_for_its_whole_ttl(d: Driver) -> None:
    first, second = await sharing(d, {}, {})
    await first.leave()
    lease = await second.acquired(d)
    assert lease.ttl == 10
    age = lease._pooled_grant._age
    assert lease._core.valid_until - lease._core.next_renewal > 10 * (1 - 1 / 3) * 0.99  # as at the first moment
    assert age < 10 / 2
    assert lease._core.valid_until <= lease._pooled_grant._until
    await second.leave()


@scenario
async def test_lease_that_was_handed_off_is_powerless(d: Driver) -> None:
    first, second = await sharing(d, {}, {})
    old = await first.leave()
    lease = await second.acquired(d)
    assert await done(old.release()) is False
    lease.ensure_held()
    assert (await done(d.lock().inspect())).holder == lease.holder
    assert await done(second.leave()) is lease


@scenario
async def test_two_concurrent_releases_hand_off_once(d: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = await sharing(d, {}, {})
    lease, shipped = await first.acquired(d), local_handoff.LocalQueue.hand_off

    def after_another_release(*call: Any) -> bool:
        """Another thread releases the same lease completely, just after this one has found it alive."""
        monkeypatch.setattr(local_handoff.LocalQueue, "hand_off", shipped)
        assert run(lease._release()) is True
        return shipped(*call)

    monkeypatch.setattr(local_handoff.LocalQueue, "hand_off", after_another_release)
    assert await done(lease.release()) is False
    handed_off = await second.acquired(d)
    assert (await done(d.lock().inspect())).holder == handed_off.holder
    await second.leave()
    await first.leave()


@scenario
async def test_waiter_with_another_ttl_claims_from_the_store(d: Driver) -> None:
    first, second = await sharing(d, {}, {"ttl": 20})
    old = await first.leave()
    lease = await second.acquired(d)
    assert lease.holder != old.holder
    assert lease.remaining > 10
    await second.leave()


@only(stores=QUEUEING)
@scenario
async def test_without_local_handoff_every_lease_comes_from_the_store(d: Driver) -> None:
    members = [Member(d, local_handoff=False) for _ in range(3)]
    seen = []
    while members:
        member = await d.until(
            lambda: next((one for one in members if one.lease), None), "a member to acquire the lock"
        )
        members.remove(member)
        seen.append((await member.leave()).holder)
    assert len(set(seen)) == 3


@scenario
async def test_non_blocking_acquire_does_not_overtake_local_waiters(d: Driver) -> None:
    first, second = await sharing(d, {}, {})
    assert await done(d.lock().acquire(timeout=0)) is None
    await first.leave()
    await second.acquired(d)
    assert await done(d.lock().acquire(blocking=False)) is None
    await second.leave()


@scenario
async def test_local_waiter_times_out_and_leaves_the_local_queue(d: Driver) -> None:
    first, second = await sharing(d, {}, {})
    hurried = Member(d, timeout=0.05)
    with pytest.raises(TimeoutError):
        await hurried.result()
    await local_waiters(d, 1)
    await first.leave()
    await second.acquired(d)
    await second.leave()
    assert (await done(d.lock().inspect())).locked is False


@only(flavour="asyncio", stores=LOCAL_HANDOFF)
@scenario
async def test_hand_off_to_a_cancelled_waiter_goes_to_the_next(d: Driver) -> None:
    first, second, third = await sharing(d, {}, {}, {})
    await (await first.acquired(d)).release()  # hands it off to the second, which has not run since
    second.cancel()
    lease = await third.acquired(d)
    assert lease.holder == first.lease.holder
    with pytest.raises(asyncio.CancelledError):
        await second.result()
    assert second.lease is None
    await first.leave()
    await third.leave()
    assert (await d.lock().inspect()).locked is False


@only(flavour="asyncio", stores=LOCAL_HANDOFF)
@scenario
async def test_hand_off_to_a_cancelled_last_waiter_is_released(d: Driver) -> None:
    first, second = await sharing(d, {}, {})
    await (await first.acquired(d)).release()
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second.result()
    assert (await d.lock().inspect()).locked is False
    await first.leave()


@scenario
async def test_hand_off_that_is_too_old_is_not_used(d: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = await sharing(d, {}, {})
    shipped = local_handoff.PooledGrant.next

    def long_ago(self: local_handoff.PooledGrant, local_waiter: local_handoff.LocalWaiter, now: float) -> Grant:
        return shipped(self, local_waiter, now - 9)

    monkeypatch.setattr(local_handoff.PooledGrant, "next", long_ago)
    old = await first.leave()
    lease = await second.acquired(d)
    assert lease.holder != old.holder
    assert lease.remaining > 5
    await second.leave()


@scenario
async def test_lost_lease_is_not_handed_off(d: Driver) -> None:
    first, second = await sharing(d, {"on_lost": lambda _: None}, {})
    old = await first.acquired(d)
    old._core.valid_until = d.locks.session.runtime.now()  # as if every renewal had failed
    d.locks.session.keepalive._wake()
    lease = await second.acquired(d)
    assert lease.holder != old.holder
    await second.leave()
    with pytest.raises(LeaseLost):
        await first.leave()


@scenario
async def test_exported_lease_is_not_handed_off(d: Driver) -> None:
    first, second = await sharing(d, {}, {})
    text = (await first.acquired(d)).export()
    adopted = await done(d.locks.adopt(text))
    await first.leave()
    assert second.lease is None
    await done(adopted.release())
    await second.acquired(d)
    await second.leave()


@scenario
async def test_closing_ends_the_waits_of_local_waiters(d: Driver) -> None:
    first, second = await sharing(d, {}, {})
    await done(d.locks.close())
    with pytest.raises(ConfigurationError, match="closed"):
        await second.result()
    assert second.lease is None
    await first.leave()
    assert (await done(d.connect().lock("thing").acquire(timeout=0))) is not None


@scenario
async def test_hold_longer_than_the_span_goes_back_to_the_store(d: Driver) -> None:
    first, second = await sharing(d, {}, {})
    pooled_grant = (await first.acquired(d))._pooled_grant
    pooled_grant.span_ends = 0.0  # as if the hold had exceeded the span
    other = d.connect().lock("thing")

    async def stranger() -> Any:
        lease = await done(other.acquire(timeout=BOUND))
        found = second.lease
        await done(lease.release())
        return found

    contender = d.start(stranger)
    await d.queue_length(d.lock(), 1)
    old = await first.leave()
    assert await contender.result() is None, "a waiter in the store comes before a local waiter"
    assert (await second.acquired(d)).holder != old.holder
    await second.leave()


@scenario
async def test_used_up_fence_block_ends_the_hand_off(d: Driver) -> None:
    first, second = await sharing(d, {}, {})
    pooled_grant = (await first.acquired(d))._pooled_grant
    pooled_grant._used = pooled_grant._last
    old = await first.leave()
    lease = await second.acquired(d)
    assert lease.holder != old.holder
    assert lease.fence > pooled_grant._last
    await second.leave()


@scenario
async def test_busy_process_does_not_starve_another(d: Driver) -> None:
    stop: list[bool] = []
    holds: list[int] = []
    inside: list[int] = []

    async def busy(number: int) -> None:
        lock = d.lock(ttl=10)
        while not stop:
            async with held(lock) as lease:
                inside.append(number)
                holds.append(lease.fence)
                await d.pause()
                assert inside.pop() == number
                assert not inside

    await done((await done(d.lock().acquire())).release())
    contenders = [d.start(busy, number) for number in range(4)]
    await d.until(lambda: len(holds) > 20, "a busy process")
    other = d.connect().lock("thing", ttl=10)
    for _ in range(3):
        lease = await done(other.acquire(timeout=BOUND))
        assert lease is not None
        assert not inside
        assert lease.fence > holds[-1]
        assert await done(lease.release()) is True
    stop.append(True)
    for contender in contenders:
        await contender.result()
    assert holds == sorted(set(holds))


@only(stores=("memory", "sqlite"), flavour="threads")
@scenario
async def test_forked_child_has_no_local_waiters_and_no_pooled_grant(d: Driver) -> None:
    first, second = await sharing(d, {}, {})
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if not local_queue(d)._waiters and local_queue(d)._pooled is None else 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(child, 0)  # noqa: ASYNC222 - on threads only
    assert os.waitstatus_to_exitcode(status) == 0
    await first.leave()
    await second.acquired(d)
    await second.leave()


@only(flavour="asyncio", stores=LOCAL_HANDOFF)
@scenario
async def test_exit_of_a_block_can_run_in_another_task(d: Driver) -> None:
    """Also when the lock was handed off and the exit has nothing left to do."""
    (first,) = await sharing(d, {})
    lock = d.lock(timeout=BOUND, ttl=10)

    async def hold() -> None:
        await lock.__aenter__()
        await asyncio.create_task(lock.__aexit__(None, None, None))

    second = d.start(hold)
    await local_waiters(d, 1)
    third = Member(d)
    await local_waiters(d, 2)
    holder = (await first.leave()).holder
    await second.result()
    assert (await third.leave()).holder == holder, "it was handed off"
