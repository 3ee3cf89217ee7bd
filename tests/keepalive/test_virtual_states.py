"""Every state change with a virtual clock: when it happens, how often it is reported, and which never happens."""

from collections.abc import Iterator
from typing import Any

import pytest

from lockfast import LeaseLost, State
from lockfast.core.acquire import Grant
from lockfast.core.lease_state import ALIVE, TRANSITIONS, LeaseState
from lockfast.errors import StoreProtocolError, StoreRefused
from lockfast.values import Claim
from tests.keepalive.virtual import START, Fault, VirtualRuntime, World

TTL = 3.0
DEADLINE = 0.998 * TTL - 0.002
"""Seconds from the request for which a grant is valid without a renewal."""

FAULTS: tuple[Fault, ...] = ("refused", "silent", "deaf", "late")
A_MOMENT = 0.001
PROMISED = 0.05
"""Seconds within which a loss is reported."""


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.time.close()


class TestTheTable:
    """Each possible transition, and each impossible one."""

    @pytest.fixture
    def lease_state(self) -> LeaseState:
        runtime = VirtualRuntime()
        grant = Grant(Claim("thing", "me", TTL, ""), fence=1, sent_at=START, valid_until=START + DEADLINE)
        lease_state = LeaseState(runtime, renews=True, max_hold=None)
        lease_state.begin(grant)
        return lease_state

    CAUSES: dict[State, Any] = {  # noqa: RUF012
        State.HELD: lambda lease_state: lease_state.renewed(START, TTL),
        State.AT_RISK: lambda lease_state: lease_state.renewal_failed(START + 1),
        State.LOST: lambda lease_state: lease_state.lose("gone"),
        State.RELEASED: lambda lease_state: lease_state.release(),
    }
    WAYS = {  # noqa: RUF012
        State.HELD: (),
        State.AT_RISK: (State.AT_RISK,),
        State.LOST: (State.LOST,),
        State.RELEASED: (State.RELEASED,),
    }

    @pytest.mark.parametrize("cause", State)
    @pytest.mark.parametrize("before", State)
    def test_only_its_transitions_happen(self, lease_state: LeaseState, before: State, cause: State) -> None:
        for step in self.WAYS[before]:
            self.CAUSES[step](lease_state)
        reported: list[State] = []
        lease_state.on_change = reported.append
        self.CAUSES[cause](lease_state)
        expected = cause if cause in TRANSITIONS[before] else before
        assert lease_state.state is expected
        assert reported == ([expected] if expected not in (before, State.RELEASED) else [])  # the holder causes it

    @pytest.mark.parametrize("before", State)
    def test_the_clock_ends_a_live_lease(self, lease_state: LeaseState, before: State) -> None:
        for step in self.WAYS[before]:
            self.CAUSES[step](lease_state)
        reported: list[State] = []
        lease_state.on_change = reported.append
        assert lease_state.check(START + DEADLINE - A_MOMENT) is before
        expected = State.LOST if before in ALIVE else before
        for _ in range(3):
            assert lease_state.check(START + DEADLINE) is expected
        assert reported == ([State.LOST] if before in ALIVE else [])


class TestAStoreThatFails:
    @pytest.mark.parametrize("ttl", [0.6, 3.0, 3.7, 30.0])
    @pytest.mark.parametrize("fault", FAULTS)
    def test_until_the_deadline_means_risk_and_then_loss(self, world: World, fault: Fault, ttl: float) -> None:
        lease = world.acquire(ttl=ttl)
        world.time.run_for(2.5 * ttl)  # renewals succeed for a while
        assert lease.state is State.HELD
        last = world.store.renewals()[-1].at
        deadline = last + 0.998 * ttl - 0.002
        world.store.fault = fault
        world.time.run_until(last + ttl / 3 - A_MOMENT)
        assert lease.state is State.HELD
        world.time.run_until(last + ttl / 3 + ttl / 6 + 2 * PROMISED)
        assert lease.state.value == "at risk"
        world.time.run_until(deadline - A_MOMENT)
        assert lease.state.value == "at risk"
        assert 0 < lease.remaining < 2 * A_MOMENT
        assert world.kinds() == ["risk"]
        world.time.run_until(deadline + PROMISED)
        assert world.kinds() == ["risk", "lost"], "reported by the clock, not by a check of the state"
        assert deadline - A_MOMENT < world.calls[-1][0] + START
        assert lease.state.value == "lost"
        assert lease.remaining == 0
        with pytest.raises(LeaseLost, match="ran out"):
            lease.ensure_held()
        world.time.run_for(3 * ttl)
        assert world.kinds() == ["risk", "lost"]

    @pytest.mark.parametrize("fault", FAULTS)
    def test_for_a_while_means_risk_and_then_held_again(self, world: World, fault: Fault) -> None:
        lease = world.acquire(ttl=TTL)
        for spell in (1, 2):
            last = world.store.renewals()[-1].at if world.store.renewals() else START
            world.store.fault = fault
            world.time.run_until(last + 0.7 * TTL)
            assert lease.state is State.AT_RISK
            assert world.kinds() == ["risk"] * spell
            world.store.fault = "none"
            world.time.run_until(last + 0.9 * TTL)
            assert lease.state.value == "held"
            world.time.run_for(2 * TTL)
        assert lease.state is State.HELD
        assert world.kinds() == ["risk", "risk"]
        assert world.time.do(lease.release()) is True

    @pytest.mark.parametrize("error", [StoreRefused("NOPERM"), StoreProtocolError("odd"), ValueError("a bug")])
    def test_with_an_unexpected_error_is_reported_too(
        self, world: World, error: Exception, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lease = world.acquire(ttl=TTL)

        async def renew(*_: Any) -> list[bool]:
            raise error

        monkeypatch.setattr(world.store, "renew", renew)
        world.time.run_for(TTL + A_MOMENT)
        assert lease.state is State.LOST
        assert world.kinds()[-1] == "lost"
        monkeypatch.undo()
        again = world.acquire("another", ttl=TTL)
        world.time.run_for(3 * TTL)
        assert again.state is State.HELD, "the keepalive continues"

    def test_does_not_cause_a_busy_loop(self, world: World) -> None:
        """Ten thousand leases and a server that refuses: the keepalive retries with pauses."""
        for number in range(1500):
            world.acquire(f"thing {number}", ttl=30)
        world.store.fault = "refused"
        world.time.run_for(10.5)
        before = len(world.store.renewals())
        world.time.run_for(5)
        assert len(world.store.renewals()) - before <= 5 * 4 * 3, "attempts in five seconds, for three batches"

    def test_puts_all_leases_at_risk(self, world: World) -> None:
        leases = [world.acquire(f"thing {number}", ttl=30) for number in range(1500)]
        world.store.fault = "refused"
        world.time.run_for(20)
        assert {lease.state for lease in leases} == {State.AT_RISK}
        world.time.run_for(10)
        assert {lease.state for lease in leases} == {State.LOST}
        assert sorted(kind for _, kind, _ in world.calls) == ["lost"] * 1500 + ["risk"] * 1500


class TestExternalChange:
    def test_is_detected_by_the_next_renewal(self, world: World) -> None:
        lease = world.acquire(ttl=TTL)
        world.time.run_for(TTL)
        world.store.space.drop("thing")
        changed_at = world.time.now()
        world.time.run_for(TTL / 3 + A_MOMENT)
        assert world.kinds() == ["lost"]
        assert world.calls[0][0] + START - changed_at <= TTL / 3 + A_MOMENT
        with pytest.raises(LeaseLost, match="took or deleted it"):
            lease.ensure_held()
        assert world.time.do(lease.release()) is False

    def test_is_detected_at_once_if_the_store_reports_changes(self, world: World) -> None:
        world.store.capabilities = world.store.capabilities._replace(change_events=True)
        world.acquire(ttl=TTL)
        world.acquire("another", ttl=TTL)
        world.time.run_for(1.1)
        world.store.space.drop("thing")
        world.store.report_change("thing")
        world.time.run_for(A_MOMENT)
        assert world.kinds() == ["lost"]
        assert world.kinds("another") == []

    def test_a_report_without_a_change_costs_one_renewal(self, world: World) -> None:
        world.store.capabilities = world.store.capabilities._replace(change_events=True)
        lease = world.acquire(ttl=30)
        world.time.run_for(2)
        before = len(world.store.renewals())
        world.store.report_change("thing")
        world.store.report_change(None)
        world.time.run_for(0.5)
        assert len(world.store.renewals()) == before + 1
        assert lease.state is State.HELD

    def test_many_reports_cost_little(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        """All keys are deleted at once, and the server reports them one by one."""
        world.store.capabilities = world.store.capabilities._replace(change_events=True)
        names = [f"thing {number}" for number in range(4000)]
        for name in names:
            world.acquire(name, ttl=30)
        world.time.run_for(2)
        checked = 0
        held = world.locks.session.keepalive.held

        def counted() -> list[LeaseState]:
            nonlocal checked
            found = held()
            checked += len(found)
            return found

        monkeypatch.setattr(world.locks.session.keepalive, "held", counted)
        for name in names:
            world.store.report_change(name)
        assert checked < 20 * len(names), "leases checked, for as many reports"

    def test_the_next_holder_is_not_affected(self, world: World) -> None:
        lease = world.acquire(ttl=TTL)
        world.store.space.drop("thing")
        other = world.locks.lock("thing", ttl=TTL, renew=False)
        theirs = world.time.do(other.acquire(timeout=0))
        world.time.run_for(TTL / 2)
        assert lease.state is State.LOST
        assert world.time.do(lease.release()) is False
        assert world.store.holder("thing") == theirs.holder


class TestAStoppedProcess:
    @pytest.mark.parametrize("seconds", [DEADLINE + A_MOMENT, 2 * TTL, 86_400.0])
    def test_past_its_ttl_detects_the_loss_by_the_local_clock(self, world: World, seconds: float) -> None:
        lease = world.acquire(ttl=TTL)
        world.time.freeze(seconds)
        assert world.kinds() == []
        with pytest.raises(LeaseLost):
            lease.ensure_held()
        assert lease.remaining == 0
        assert bool(lease.lost) is True

    def test_reports_the_loss_before_it_sends_a_request(self, world: World) -> None:
        world.acquire(ttl=TTL)
        world.store.fault = "silent"
        world.time.freeze(2 * TTL)
        world.time.run_for(0)
        assert world.calls == [(2 * TTL, "lost", "thing")]

    def test_reports_the_loss_once(self, world: World) -> None:
        lease = world.acquire(ttl=TTL)
        world.time.freeze(2 * TTL)
        assert lease.state is State.LOST
        world.time.run_for(TTL)
        assert world.kinds() == ["lost"]

    def test_for_less_than_its_ttl_continues(self, world: World) -> None:
        lease = world.acquire(ttl=TTL)
        for _ in range(5):
            world.time.freeze(0.9 * TTL)
            world.time.run_for(A_MOMENT)
            assert lease.state is State.HELD
        assert world.kinds() == []

    def test_with_an_old_answer_in_its_buffer_ignores_it(self, world: World) -> None:
        """A renewal was sent in time and executed, but its answer is read only after the new deadline."""
        lease = world.acquire(ttl=TTL)
        world.store.reply_delay = 0.01
        world.time.run_for(TTL / 3 + 0.005)
        world.time.freeze(2 * TTL)
        world.time.run_for(0.1)
        assert lease.state is State.LOST
        assert world.kinds() == ["lost"]

    def test_with_many_leases_reports_each_at_once(self, world: World) -> None:
        names = [f"thing {number}" for number in range(1000)]
        for name in names:
            world.acquire(name, ttl=TTL)
        world.time.freeze(2 * TTL)
        world.time.run_for(0)
        assert sorted(name for _, what, name in world.calls if what == "lost") == sorted(names)
        sweeps = [name for name in world.time.spawned if name in ("sweep", "clean-up")]
        assert len(sweeps) <= 20, "threads or tasks that clean up after a thousand leases"


class TestTheDeadline:
    def test_counts_from_before_the_request_was_sent(self, world: World) -> None:
        world.store.request_delay = world.store.reply_delay = 0.4
        world.store.grace = 1.0
        lease = world.acquire(ttl=TTL, renew=False)
        assert world.time.now() == START + 0.8
        assert lease.remaining == pytest.approx(DEADLINE - 0.8)
        world.time.run_until(START + DEADLINE + A_MOMENT)
        assert world.kinds() == ["lost"]
        assert world.store.holder("thing") is not None, "the store keeps it a little longer"

    def test_of_a_slow_store_too(self, world: World) -> None:
        """Every answer takes nearly as long as a request may take."""
        world.store.request_delay = world.store.reply_delay = TTL / 14
        world.store.grace = 1.0
        lease = world.acquire(ttl=TTL)
        world.time.run_for(20 * TTL)
        assert lease.state is State.HELD
        assert world.kinds() == []

    def test_of_a_lease_that_begins_during_a_request(self, world: World) -> None:
        """The keepalive waits for an answer about a long lease; a short one is lost meanwhile."""
        world.acquire("long", ttl=30)
        world.time.run_for(9.9)
        world.store.reply_delay = 0.2
        world.store.grace = 1.0
        short = world.locks.lock("thing", ttl=0.5, renew=False, on_lost=world.callback("lost"))
        acquired_at = world.time.now()
        world.time.spawn(lambda: _quietly(short.acquire(timeout=0)), "acquire")
        world.time.run_for(0.05)
        world.store.fault = "silent"
        world.time.run_for(5.5)
        assert any(one.at < acquired_at + 0.2 for one in world.store.renewals("long")), "a request was under way before"
        (lost_at,) = [at for at, what, name in world.calls if (what, name) == ("lost", "thing")]
        assert lost_at + START <= acquired_at + 0.5 + PROMISED

    def test_a_late_answer_does_not_revive_a_lease(self, world: World) -> None:
        lease = world.acquire(ttl=TTL)
        world.store.fault = "deaf"
        world.time.run_for(TTL)
        assert lease.state is State.LOST
        lease._core.renewed(world.time.now(), TTL)
        world.store.fault = "none"
        world.time.run_for(2 * TTL)
        assert lease.state is State.LOST
        assert world.store.holder("thing") is None, "the grant that an unanswered renewal extended is removed"


async def _quietly(work: Any) -> None:
    try:
        await work
    except Exception:
        return


def test_a_release_after_a_reported_loss_sends_nothing(world: World) -> None:
    """A callback may release the lease: the store has already answered that it does not have it."""
    lease = world.acquire(ttl=TTL)
    cleared: list[bool] = []
    report = lease._core.on_change

    def on_change(state: State) -> None:
        cleared.append(lease._core.cleared)
        report(state)

    lease._core.on_change = on_change
    world.store.space.drop("thing")
    world.time.run_for(TTL / 3 + A_MOMENT)
    assert cleared == [True]
    assert world.time.do(lease.release()) is False
    assert [one.kind for one in world.store.requests] == ["acquire", "renew"]
