"""Renewal with a virtual clock: how often, how many at once, with which ttl, and without a gap for other holders."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockfast import LeaseLost, State
from lockfast.core.lease_state import ALIVE
from lockfast.errors import LockError
from tests.keepalive.virtual import START, Fault, World

TTL = 3.0
A_MOMENT = 0.001


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.time.close()


async def _quietly(work: Any) -> None:
    try:
        await work
    except LockError:
        return


class TestHowOften:
    def test_every_third_of_the_ttl(self, world: World) -> None:
        world.acquire(ttl=TTL)
        world.time.run_for(10 * TTL)
        moments = [START, *(one.at for one in world.store.renewals())]
        pauses = [after - before for before, after in pairwise(moments)]
        assert 29 <= len(pauses) <= 36
        assert max(pauses) <= TTL / 3 + A_MOMENT
        assert min(pauses) >= TTL / 3 * 0.8

    def test_one_keepalive_for_all_leases(self, world: World) -> None:
        for number in range(50):
            world.acquire(f"thing {number}", ttl=TTL)
            world.time.run_for(0.1)
        world.time.run_for(10)
        assert world.time.spawned.count("keepalive") == 1

    def test_a_retired_keepalive_starts_again(self, world: World) -> None:
        for round_ in range(3):
            lease = world.acquire(ttl=TTL)
            world.time.run_for(2 * TTL)
            assert world.time.do(lease.release()) is True
            world.time.run_for(10)
            assert world.time.spawned.count("keepalive") == round_ + 1
        before = len(world.store.requests)
        world.time.run_for(1000)
        assert len(world.store.requests) == before, "no request while nothing is held"

    @pytest.mark.parametrize("idle", [0.0, 0.5, 0.999, 1.0, 1.001, 1.5, 1.999, 2.0, 2.001, 2.5])
    def test_a_lease_that_begins_as_the_keepalive_retires_is_renewed(self, world: World, idle: float) -> None:
        world.time.do(world.acquire(ttl=TTL).release())
        world.time.run_for(idle)
        lease = world.acquire("another", ttl=0.3)
        world.time.run_for(5)
        assert lease.state is State.HELD

    def test_a_short_lease_beside_long_ones_is_renewed(self, world: World) -> None:
        for number in range(20):
            world.acquire(f"thing {number}", ttl=300)
        world.time.run_for(7)
        short = world.acquire("short", ttl=0.06)
        world.time.run_for(3)
        assert short.state is State.HELD

    def test_an_unanswered_renewal_of_a_long_lease_does_not_lose_a_short_one(self, world: World) -> None:
        """A dead connection is replaced when a request times out, for a long lease perhaps after the short ttl."""
        world.acquire("long", ttl=90)
        world.time.run_for(29.5)
        short = world.acquire("short", ttl=6)
        world.time.run_for(0.4)
        world.store.fault = "stuck"
        world.time.run_for(10)
        assert world.store.fault == "none"
        assert short.state is State.HELD

    def test_many_leases_are_renewed_together(self, world: World) -> None:
        """Ten thousand leases that began one after another, during a whole ttl."""
        leases = []
        for number in range(10_000):
            leases.append(world.acquire(f"thing {number}", ttl=30))
            if number % 100 == 99:
                world.time.run_for(0.3)
        world.time.run_for(30)
        before = len(world.store.renewals())
        world.time.run_for(60)
        requests = world.store.renewals()[before:]
        renewals = sum(len(one.names) for one in requests)
        assert renewals >= 10_000 * 6
        assert renewals / len(requests) >= 250
        assert renewals <= 10_000 * 6 * 1.3, "few are renewed much too early"
        assert {lease.state for lease in leases} == {State.HELD}

    def test_a_released_lease_is_not_renewed(self, world: World) -> None:
        """The keepalive sends the first of several requests while leases of the last one are exported or released."""
        leases = [world.acquire(f"thing {number}", ttl=30) for number in range(1200)]
        world.store.reply_delay = 0.5
        world.time.run_for(10.1)
        assert world.store.renewals("thing 0"), "the first request is under way"
        exported, released = leases[1100], leases[1150]
        exported.export()
        world.time.do(released.release())
        world.time.run_for(15)
        assert world.store.renewals("thing 1000"), "the others of that request were renewed"
        assert world.store.renewals("thing 1100") == []
        assert world.store.renewals("thing 1150") == []


class TestItsLimits:
    def test_without_renewal_it_ends_with_its_ttl(self, world: World) -> None:
        lease = world.acquire(ttl=TTL, renew=False)
        world.time.run_for(TTL * 0.998 - 0.003)
        assert lease.state is State.HELD
        world.time.run_for(A_MOMENT * 2)
        assert world.kinds() == ["lost"]
        assert world.store.renewals() == []
        with pytest.raises(LeaseLost, match="not renewed"):
            lease.ensure_held()

    @pytest.mark.parametrize("max_hold", [0.5, 3.0, 3.5, 10.0, 100.0])
    def test_max_hold_ends_it_on_time(self, world: World, max_hold: float) -> None:
        lease = world.acquire(ttl=TTL, max_hold=max_hold)
        usable = max_hold if max_hold > TTL else min(max_hold, TTL) * 0.998 - 0.002
        world.time.run_for(usable - 2 * A_MOMENT)
        assert lease.state is State.HELD
        assert world.kinds() == []
        world.time.run_until(START + max_hold + A_MOMENT)
        assert world.kinds() == ["lost"]
        world.time.run_for(max_hold * 0.01 + 0.02)
        assert world.store.holder("thing") is None, "the store frees it at that time too"

    def test_max_hold_needs_no_useless_renewal(self, world: World) -> None:
        """Once the store keeps the grant until `max_hold` ends, no renewal is sent."""
        world.acquire(ttl=TTL, max_hold=10.0)
        world.time.run_for(9.9)
        asked = world.store.renewals()
        assert len(asked) <= 3 * 10 / TTL + 1
        assert asked[-1].ttls[0] < TTL

    def test_a_manual_renewal_does_not_exceed_max_hold(self, world: World) -> None:
        lease = world.acquire(ttl=TTL, max_hold=5.0)
        world.time.do(lease.renew(60.0))
        assert lease.remaining <= 5.0
        world.time.run_until(START + 5.0 + A_MOMENT)
        assert world.kinds() == ["lost"]
        world.time.run_for(0.2)
        assert world.store.holder("thing") is None


class TestAnotherTtl:
    def test_longer(self, world: World) -> None:
        lease = world.acquire(ttl=TTL)
        world.time.do(lease.renew(30.0))
        assert (lease.ttl, lease.remaining) == (30.0, pytest.approx(29.938))
        world.time.run_for(300)
        assert lease.state is State.HELD
        assert len(world.store.renewals()) <= 40

    def test_shorter_does_not_shorten_the_grant_and_is_renewed(self, world: World) -> None:
        lease = world.acquire(ttl=30)
        world.time.run_for(5)
        world.time.do(lease.renew(0.3))
        assert (lease.ttl, lease.remaining) == (0.3, pytest.approx(24.938))
        world.time.run_for(60)
        assert lease.state is State.HELD
        assert lease.remaining <= 0.3
        check_that_held_means_held(world, [lease])
        world.time.run_for(10)
        assert lease.state is State.HELD

    @pytest.mark.parametrize("fault", ["refused", "silent", "deaf", "late"])
    def test_shorter_without_an_answer(self, world: World, fault: Fault) -> None:
        lease = world.acquire(ttl=3, renew=False)
        check_that_held_means_held(world, [lease])
        world.store.fault = fault
        world.time.spawn(lambda: _quietly(lease.renew(0.5)), "renew")
        world.time.run_for(4)
        assert lease.state is State.LOST

    def test_longer_does_not_count_before_an_answer(self, world: World) -> None:
        lease = world.acquire(ttl=0.5, renew=False)
        world.store.fault = "silent"
        world.time.spawn(lambda: _quietly(lease.renew(60.0)), "renew")
        world.time.run_for(0.4)
        assert lease.remaining < 0.2
        world.time.run_for(0.2)
        assert lease.state is State.LOST

    def test_a_short_one_that_arrives_late_after_a_long_one(self, world: World) -> None:
        """The short renewal waited in the buffer of a stopped server, while the long one used a new connection."""
        lease = world.acquire(ttl=30, renew=False)
        world.store.fault = "late"
        world.time.spawn(lambda: _quietly(lease.renew(2.5)), "renew")
        world.time.run_for(2.0)  # that request timed out, and will be executed 0.1 s later
        world.store.fault = "none"
        world.time.do(lease.renew(30.0))
        check_that_held_means_held(world, [lease])
        world.time.run_for(10)

    def test_two_at_once_where_the_shorter_is_executed_last(self, world: World) -> None:
        lease = world.acquire(ttl=30, renew=False)
        world.store.request_delay = 0.1
        world.time.spawn(lambda: _quietly(lease.renew(0.5)), "renew")
        world.time.run_for(0.01)
        world.store.request_delay = 0.0  # the other thread's request overtakes it
        world.time.spawn(lambda: _quietly(lease.renew(30.0)), "renew")
        check_that_held_means_held(world, [lease])
        world.time.run_for(20)

    def test_a_renewal_of_the_keepalive_that_arrives_after_a_longer_one(self, world: World) -> None:
        lease = world.acquire(ttl=0.6)
        world.store.request_delay = 0.08
        world.time.run_for(0.21)
        assert len(world.store.renewals()) == 1, "the request of the keepalive is on its way"
        world.store.request_delay = 0.0
        world.time.do(lease.renew(30.0))
        check_that_held_means_held(world, [lease])
        world.time.run_for(20)
        assert lease.state is State.HELD


def check_that_held_means_held(world: World, leases: list[Any]) -> None:
    """A lease that is held for the client must be held in the store; otherwise another client could acquire it."""

    def check() -> None:
        for lease in leases:
            if lease.state in ALIVE and world.store.holder(lease.name) != lease.holder:
                raise AssertionError(
                    f"at {world.time.now() - START:.3f} the lease says {lease.state.value}, {lease.remaining:.3f} s "
                    f"left; the store has no such grant; requests: {world.store.requests[-6:]}"
                )

    world.time.check = check


TIMES = st.sampled_from([0.01, 0.05, 0.2, 0.4, 0.9, 1.7, 4.0])
ACTIONS = st.one_of(
    st.tuples(st.just("run"), TIMES),
    st.tuples(st.just("freeze"), TIMES),
    st.tuples(st.just("fault"), st.sampled_from(["none", "none", "refused", "silent", "deaf", "late"])),
    st.tuples(st.just("request_delay"), st.sampled_from([0.0, 0.02, 0.3])),
    st.tuples(st.just("reply_delay"), st.sampled_from([0.0, 0.02, 0.3])),
    st.tuples(st.just("renew"), st.sampled_from([None, 0.3, 1.0, 6.0])),
    st.tuples(st.just("release"), st.none()),
    st.tuples(st.just("acquire"), st.sampled_from([0.3, 1.0, 6.0])),
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(ACTIONS, min_size=5, max_size=40))
def test_a_held_lease_is_held_in_the_store_under_random_faults(actions: list[tuple[str, Any]]) -> None:
    world = World()
    leases: list[Any] = [world.acquire("thing 0", ttl=1.0)]
    check_that_held_means_held(world, leases)
    for action, value in actions:
        if action == "run":
            world.time.run_for(value)
        elif action == "freeze":
            world.time.freeze(value)
        elif action in ("fault", "request_delay", "reply_delay"):
            setattr(world.store, action, value)
        elif action == "renew":
            world.time.spawn(lambda lease=leases[-1], ttl=value: _quietly(lease.renew(ttl)), "renew")  # type: ignore[misc]
        elif action == "release":
            world.time.spawn(lambda lease=leases[-1]: _quietly(lease.release()), "release")  # type: ignore[misc]
        elif world.store.fault == "none" and world.store.request_delay == world.store.reply_delay == 0.0:
            leases.append(world.acquire(f"thing {len(leases)}", ttl=value))
    world.store.fault, world.store.request_delay, world.store.reply_delay = "none", 0.0, 0.0
    world.time.run_for(12)
    for lease in leases:
        kinds = world.kinds(lease.name)
        assert kinds.count("lost") == (lease.state is State.LOST)
        assert "lost" not in kinds[:-1]
        if lease.state not in ALIVE:
            assert world.store.holder(lease.name) is None, "the store holds no ended lease"
    world.time.close()
