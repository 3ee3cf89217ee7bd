"""Passing a lock on inside a process: who gets it, what its lease is worth, and when it goes back to the store."""

import asyncio
import os
from typing import Any

import pytest

from lockfast import ConfigurationError, LeaseLost
from lockfast.core import local_handoff as passing
from lockfast.core import local_queue as rooms
from lockfast.core.acquire import Grant
from lockfast.runtime.runner import run
from tests.contract.driver import BOUND, Contender, Driver, Gate, TaskContender, done, held, scenario
from tests.contract.stores import only

PATIENT = 60.0
"""Seconds for which these tests pass a lock on, and wait for it: the machine may be slow."""
AS_SHIPPED = ("test_a_busy_process_does_not_starve_another",)


@pytest.fixture(autouse=True)
def patient(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.originalname not in AS_SHIPPED:
        for name in ("SPAN", "PATIENCE", "LONG_PATIENCE"):
            monkeypatch.setattr(rooms, name, PATIENT)
        monkeypatch.setattr(passing, "EXTRA", PATIENT * 1.01)


class Member:
    """One who takes the lock, and gives it back when told to."""

    def __init__(self, d: Driver, **options: Any) -> None:
        self.lease: Any = None
        self._go: Gate = d.gate()
        self._lock = d.lock(**{"timeout": BOUND, "ttl": 10, **options})
        self._contender: Contender = d.start(self._live)

    async def _live(self) -> Any:
        async with held(self._lock) as self.lease:
            await self._go.passed()
        return self.lease

    async def has_it(self, d: Driver) -> Any:
        return await d.until(lambda: self.lease, "its turn")

    async def leave(self) -> Any:
        self._go.open()
        return await self._contender.result()

    def cancel(self) -> None:
        assert isinstance(self._contender, TaskContender)
        self._contender.cancel()

    async def result(self) -> Any:
        return await self._contender.result()


def local_queue(d: Driver) -> rooms.LocalQueue:
    found: rooms.LocalQueue = d.locks.passing.local_queue("thing")
    return found


async def seated(d: Driver, count: int) -> None:
    await d.until(lambda: len(local_queue(d)._local_waiters) == count, f"{count} in the seats")


async def household(d: Driver, *options: dict[str, Any]) -> list[Member]:
    """The first holds a tenancy, the others sit and wait for it to be passed on."""
    plain = await done(d.lock().acquire())
    if not d.locks.store.reserves:
        await done(plain.release())
        pytest.skip("on this store locks are not passed on")
    first = Member(d, **options[0])
    await d.queue_length(d.lock(), 1)  # it has company, so it asks for a tenancy
    members = [first]
    for number, chosen in enumerate(options[1:], 1):
        members.append(Member(d, **chosen))
        await seated(d, number)
    await done(plain.release())
    await first.has_it(d)
    return members


@scenario
async def test_a_lock_is_passed_on_in_order_under_one_holder_with_rising_fences(d: Driver) -> None:
    members = await household(d, {}, {}, {})
    leases = []
    for member in members:
        lease = await member.has_it(d)
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
async def test_a_passed_lease_is_worth_its_whole_ttl(d: Driver) -> None:
    first, second = await household(d, {}, {})
    await first.leave()
    lease = await second.has_it(d)
    assert lease.ttl == 10
    age = lease._shared_grant._age
    assert (
        lease._lease_state.valid_until - lease._lease_state.next_renewal > 10 * (1 - 1 / 3) * 0.99
    )  # as at the first moment
    assert age < 10 / 2
    assert lease._lease_state.valid_until <= lease._shared_grant._until
    await second.leave()


@scenario
async def test_who_gave_a_lease_away_can_do_nothing_with_it(d: Driver) -> None:
    first, second = await household(d, {}, {})
    old = await first.leave()
    lease = await second.has_it(d)
    assert await done(old.release()) is False
    lease.ensure_held()
    assert (await done(d.lock().inspect())).holder == lease.holder
    assert await done(second.leave()) is lease


@scenario
async def test_what_two_give_back_at_once_is_passed_on_and_stays_the_next_ones(
    d: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await household(d, {}, {})
    lease, shipped = await first.has_it(d), rooms.LocalQueue.pass_on

    def overtaken(*call: Any) -> bool:
        """Another thread gives the same lease back, to its end, when this one has just found it alive."""
        monkeypatch.setattr(rooms.LocalQueue, "pass_on", shipped)
        assert run(lease._release()) is True
        return shipped(*call)

    monkeypatch.setattr(rooms.LocalQueue, "pass_on", overtaken)
    assert await done(lease.release()) is False
    passed = await second.has_it(d)
    assert (await done(d.lock().inspect())).holder == passed.holder
    await second.leave()
    await first.leave()


@scenario
async def test_another_ttl_is_not_passed_on_but_asked_for(d: Driver) -> None:
    first, second = await household(d, {}, {"ttl": 20})
    old = await first.leave()
    lease = await second.has_it(d)
    assert lease.holder != old.holder
    assert lease.remaining > 10
    await second.leave()


@scenario
async def test_without_passing_each_lease_is_the_stores_own(d: Driver) -> None:
    members = [Member(d, passing=False) for _ in range(3)]
    seen = []
    while members:
        member = await d.until(lambda: next((one for one in members if one.lease), None), "a turn")
        members.remove(member)
        seen.append((await member.leave()).holder)
    assert len(set(seen)) == 3


@scenario
async def test_a_try_does_not_jump_the_seats(d: Driver) -> None:
    first, second = await household(d, {}, {})
    assert await done(d.lock().acquire(timeout=0)) is None
    await first.leave()
    await second.has_it(d)
    assert await done(d.lock().acquire(blocking=False)) is None
    await second.leave()


@scenario
async def test_a_seat_keeps_to_its_time_limit_and_leaves_nothing(d: Driver) -> None:
    first, second = await household(d, {}, {})
    hurried = Member(d, timeout=0.05)
    with pytest.raises(TimeoutError):
        await hurried.result()
    await seated(d, 1)
    await first.leave()
    await second.has_it(d)
    await second.leave()
    assert (await done(d.lock().inspect())).locked is False


@only(flavour="asyncio")
@scenario
async def test_a_turn_of_one_that_was_cancelled_goes_on_to_the_next(d: Driver) -> None:
    first, second, third = await household(d, {}, {}, {})
    await (await first.has_it(d)).release()  # passes it to the second, which has not run since
    second.cancel()
    lease = await third.has_it(d)
    assert lease.holder == first.lease.holder
    with pytest.raises(asyncio.CancelledError):
        await second.result()
    assert second.lease is None
    await first.leave()
    await third.leave()
    assert (await d.lock().inspect()).locked is False


@only(flavour="asyncio")
@scenario
async def test_a_turn_of_the_last_one_who_was_cancelled_goes_back_to_the_store(d: Driver) -> None:
    first, second = await household(d, {}, {})
    await (await first.has_it(d)).release()
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second.result()
    assert (await d.lock().inspect()).locked is False
    await first.leave()


@scenario
async def test_a_turn_that_was_slept_through_is_not_used(d: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = await household(d, {}, {})
    shipped = rooms.SharedGrant.next

    def long_ago(self: rooms.SharedGrant, local_waiter: rooms.LocalWaiter, now: float) -> Grant:
        return shipped(self, local_waiter, now - 9)

    monkeypatch.setattr(rooms.SharedGrant, "next", long_ago)
    old = await first.leave()
    lease = await second.has_it(d)
    assert lease.holder != old.holder
    assert lease.remaining > 5
    await second.leave()


@scenario
async def test_a_lost_lease_is_not_passed_on(d: Driver) -> None:
    first, second = await household(d, {"on_lost": lambda _: None}, {})
    old = await first.has_it(d)
    old._lease_state.valid_until = d.locks.runtime.now()  # as if no renewal had got through
    d.locks.keepalive._wake()
    lease = await second.has_it(d)
    assert lease.holder != old.holder
    await second.leave()
    with pytest.raises(LeaseLost):
        await first.leave()


@scenario
async def test_an_exported_lease_is_not_passed_on(d: Driver) -> None:
    first, second = await household(d, {}, {})
    text = (await first.has_it(d)).export()
    adopted = await done(d.locks.adopt(text))
    await first.leave()
    assert second.lease is None
    await done(adopted.release())
    await second.has_it(d)
    await second.leave()


@scenario
async def test_closing_sends_away_who_sits(d: Driver) -> None:
    first, second = await household(d, {}, {})
    await done(d.locks.close())
    with pytest.raises(ConfigurationError, match="closed"):
        await second.result()
    assert second.lease is None
    await first.leave()
    assert (await done(d.connect().lock("thing").acquire(timeout=0))) is not None


@scenario
async def test_a_longer_hold_than_the_span_goes_back_to_the_store(d: Driver) -> None:
    first, second = await household(d, {}, {})
    shared_grant = (await first.has_it(d))._shared_grant
    shared_grant.span_ends = 0.0  # as if it had been held for long
    other = d.connect().lock("thing")

    async def stranger() -> Any:
        lease = await done(other.acquire(timeout=BOUND))
        found = second.lease
        await done(lease.release())
        return found

    contender = d.start(stranger)
    await d.queue_length(d.lock(), 1)
    old = await first.leave()
    assert await contender.result() is None, "who waits in the store comes before who waits in the process"
    assert (await second.has_it(d)).holder != old.holder
    await second.leave()


@scenario
async def test_a_block_of_fences_that_is_used_up_ends_the_passing(d: Driver) -> None:
    first, second = await household(d, {}, {})
    shared_grant = (await first.has_it(d))._shared_grant
    shared_grant._used = shared_grant._last
    old = await first.leave()
    lease = await second.has_it(d)
    assert lease.holder != old.holder
    assert lease.fence > shared_grant._last
    await second.leave()


@scenario
async def test_a_busy_process_does_not_starve_another(d: Driver) -> None:
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
    if not d.locks.store.reserves:
        pytest.skip("on this store nobody is in order")
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
async def test_a_forked_child_has_no_seats_and_no_tenancy(d: Driver) -> None:
    first, second = await household(d, {}, {})
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if not local_queue(d)._local_waiters and local_queue(d)._shared_grant is None else 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(child, 0)  # noqa: ASYNC222 - on threads only
    assert os.waitstatus_to_exitcode(status) == 0
    await first.leave()
    await second.has_it(d)
    await second.leave()


@only(flavour="asyncio")
@scenario
async def test_the_end_of_a_block_may_be_a_task_of_its_own(d: Driver) -> None:
    """As with every coroutine; also when the lock was passed on and nothing is left to do."""
    (first,) = await household(d, {})
    lock = d.lock(timeout=BOUND, ttl=10)

    async def live() -> None:
        await lock.__aenter__()
        await asyncio.create_task(lock.__aexit__(None, None, None))

    second = d.start(live)
    await seated(d, 1)
    third = Member(d)
    await seated(d, 2)
    holder = (await first.leave()).holder
    await second.result()
    assert (await third.leave()).holder == holder, "it was passed on"
