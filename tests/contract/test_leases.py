"""Leases: remaining time, renewal, `max_hold`, loss."""

import time
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from lockfast import LeaseLost, State
from tests.contract.driver import BOUND, Driver, done, scenario
from tests.traps.observation import Stopwatch


@scenario
async def test_remaining_is_at_most_the_ttl_and_falls(d: Driver) -> None:
    lease = await done(d.lock(ttl=10, renew=False).acquire())
    first = lease.remaining
    assert 8 < first <= 10
    await d.until(lambda: lease.remaining < first, "time to pass")
    await done(lease.release())
    assert lease.remaining == 0


@pytest.mark.parametrize("ttl", [timedelta(seconds=9.5), Decimal("9.5"), 9.5], ids=["timedelta", "Decimal", "float"])
@scenario
async def test_seconds_can_be_timedelta_decimal_or_float(d: Driver, ttl: Any) -> None:
    lease = await done(d.lock(ttl=ttl, max_hold=ttl).acquire(timeout=ttl))
    assert lease.ttl == 9.5
    assert 8 < (await done(d.lock().inspect())).ttl_left <= 9.5
    await done(lease.renew(ttl))
    assert await done(lease.release()) is True


@scenario
async def test_renew_restores_the_full_ttl(d: Driver) -> None:
    lease = await done(d.lock(ttl=5, renew=False).acquire())
    await d.until(lambda: lease.remaining < 4.95, "time to pass")
    await done(lease.renew())
    assert lease.remaining > 4.9
    await done(lease.renew(20))
    assert lease.ttl == 20
    assert lease.remaining > 19
    assert (await done(d.lock().inspect())).ttl_left > 19


@scenario
async def test_lost_lease_cannot_be_renewed(d: Driver) -> None:
    lease = await done(d.lock(ttl=0.1, renew=False).acquire())
    successor = await done(d.connect().lock("thing").acquire(timeout=BOUND))
    with pytest.raises(LeaseLost) as caught:
        await done(lease.renew())
    assert (caught.value.name, caught.value.fence) == ("thing", lease.fence)
    with pytest.raises(LeaseLost):
        lease.ensure_held()
    assert (await done(d.lock().inspect())).holder == successor.holder


@scenario
async def test_released_lease_cannot_be_renewed(d: Driver) -> None:
    lease = await done(d.lock().acquire())
    lease.ensure_held()
    await done(lease.release())
    with pytest.raises(LeaseLost, match="already released"):
        await done(lease.renew())
    with pytest.raises(LeaseLost, match="already released"):
        lease.ensure_held()
    assert await done(d.lock().locked()) is False


@scenario
async def test_releasing_a_lost_lease_does_not_affect_its_successor(d: Driver) -> None:
    lock = d.lock(ttl=0.1, renew=False)
    lease = await done(lock.acquire())
    successor = await done(d.connect().lock("thing").acquire(timeout=BOUND))
    assert await done(lease.release()) is False
    info = await done(d.lock().inspect())
    assert (info.holder, info.fence) == (successor.holder, successor.fence)


@pytest.mark.system("D2")
@scenario
async def test_renewal_keeps_a_lease_beyond_its_ttl(d: Driver) -> None:
    lost: list[Any] = []
    lock = d.lock(ttl=2.4, on_lost=lost.append)
    lease = await done(lock.acquire())
    watcher = d.connect().lock("thing")
    left = []
    ends = time.monotonic() + 2.6
    while time.monotonic() < ends:
        info = await done(watcher.inspect())
        assert info.holder == lease.holder
        left.append(info.ttl_left)
        await d.pause()
    info = await done(watcher.inspect())
    assert info.holder == lease.holder
    assert 0 < min(left) <= max(left) <= 2.4
    assert info.held_for > 2.4
    assert await done(lease.release()) is True
    assert lost == []


@scenario
async def test_shortened_ttl_is_renewed_in_time(d: Driver) -> None:
    lease = await done(d.lock(ttl=30).acquire())
    await done(lease.renew(0.3))
    assert await done(lease.lost.wait(timeout=0.5)) is False
    assert await done(lease.release()) is True


@scenario
async def test_keepalive_does_not_renew_during_a_release(d: Driver) -> None:
    client = d.connect()
    lease = await done(client.lock("thing").acquire())
    release, slow = client.session.store.release, [0.2]

    async def first_slow(name: str, holder: str, until: float) -> Any:
        for lease_state in client.session.keepalive.held():
            lease_state.next_renewal = client.session.runtime.now()  # so that the keepalive runs meanwhile
        client.session.keepalive._wake()
        await client.session.runtime.sleep(slow.pop() if slow else 0)
        return await release(name, holder, until)

    client.session.store.release = first_slow
    assert await done(lease.release()) is True


@scenario
async def test_max_hold_ends_the_lease(d: Driver) -> None:
    lost: list[Any] = []
    watch = Stopwatch()
    lease = await done(d.lock(ttl=0.9, max_hold=1.2, on_lost=lost.append).acquire())
    assert await done(lease.lost.wait(timeout=BOUND)) is True
    assert 1.19 <= watch.seconds < watch.most(4)
    assert lease.state is State.LOST
    with pytest.raises(LeaseLost, match="max_hold"):
        lease.ensure_held()
    assert await done(d.connect().lock("thing").acquire(timeout=BOUND)) is not None
    await d.until(lambda: lost, "the callback")
    assert lost == [lease]


@scenario
async def test_on_lost_is_called_once(d: Driver) -> None:
    lost: list[Any] = []
    leases = [
        await done(d.lock(f"thing {number}", ttl=0.1, renew=False, on_lost=lost.append).acquire())
        for number in range(3)
    ]
    for lease in leases:
        assert await done(lease.lost.wait(timeout=BOUND)) is True
        assert await done(lease.release()) is False
        assert lease.lost.is_set()
    await d.until(lambda: len(lost) >= 3, "three callbacks")
    await done(d.locks.close())
    assert sorted(lost, key=leases.index) == leases


@scenario
async def test_on_lost_can_be_a_coroutine_function(d: Driver) -> None:
    lost: list[Any] = []

    async def on_lost(lease: Any) -> None:
        lost.append(lease)

    lease = await done(d.lock(ttl=0.05, renew=False, on_lost=on_lost).acquire())
    await d.until(lambda: lost, "the callback")
    assert lost == [lease]


@scenario
async def test_waiting_for_a_loss_keeps_its_timeout(d: Driver) -> None:
    lease = await done(d.lock().acquire())
    watch = Stopwatch()
    assert await done(lease.lost.wait(timeout=0.05)) is False
    assert 0.05 <= watch.seconds < watch.most(1)
    assert not lease.lost
