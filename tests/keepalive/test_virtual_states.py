"""Every state change by a manual clock: when it comes, how often it is told, and what can never happen."""

from collections.abc import Iterator
from typing import Any

import pytest

from lockfast import LeaseLost, State
from lockfast.core.acquire import Grant
from lockfast.core.lease_state import ALIVE, TRANSITIONS, LeaseState
from lockfast.errors import StoreProtocolError, StoreRefused
from lockfast.values import Claim
from tests.keepalive.virtual import START, Trouble, VirtualRuntime, World

TTL = 3.0
DEADLINE = 0.998 * TTL - 0.002
"""How long a grant is good for after it was asked for, without a renewal."""

TROUBLES: tuple[Trouble, ...] = ("refused", "silent", "deaf", "late")
A_MOMENT = 0.001
PROMISED = 0.05
"""Seconds after which a holder knows that its lease is lost."""


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.time.close()


class TestTheTable:
    """Each change that is possible, and each that is not."""

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
    def test_moves_only_as_it_says(self, lease_state: LeaseState, before: State, cause: State) -> None:
        for step in self.WAYS[before]:
            self.CAUSES[step](lease_state)
        told: list[State] = []
        lease_state.on_change = told.append
        self.CAUSES[cause](lease_state)
        expected = cause if cause in TRANSITIONS[before] else before
        assert lease_state.state is expected
        assert told == ([expected] if expected not in (before, State.RELEASED) else [])  # that is the holder's doing

    @pytest.mark.parametrize("before", State)
    def test_the_clock_ends_what_is_alive(self, lease_state: LeaseState, before: State) -> None:
        for step in self.WAYS[before]:
            self.CAUSES[step](lease_state)
        told: list[State] = []
        lease_state.on_change = told.append
        assert lease_state.check(START + DEADLINE - A_MOMENT) is before
        expected = State.LOST if before in ALIVE else before
        for _ in range(3):
            assert lease_state.check(START + DEADLINE) is expected
        assert told == ([State.LOST] if before in ALIVE else [])


class TestAStoreThatFails:
    @pytest.mark.parametrize("ttl", [0.6, 3.0, 3.7, 30.0])
    @pytest.mark.parametrize("trouble", TROUBLES)
    def test_for_good_leads_over_risk_to_loss_at_the_deadline(self, world: World, trouble: Trouble, ttl: float) -> None:
        lease = world.acquire(ttl=ttl)
        world.time.run_for(2.5 * ttl)  # renewals get through for a while
        assert lease.state is State.HELD
        last = world.store.renewals()[-1].at
        deadline = last + 0.998 * ttl - 0.002
        world.store.trouble = trouble
        world.time.run_until(last + ttl / 3 - A_MOMENT)
        assert lease.state is State.HELD
        world.time.run_until(last + ttl / 3 + ttl / 6 + 2 * PROMISED)
        assert lease.state.value == "at risk"
        world.time.run_until(deadline - A_MOMENT)
        assert lease.state.value == "at risk"
        assert 0 < lease.remaining < 2 * A_MOMENT
        assert world.words() == ["risk"]
        world.time.run_until(deadline + PROMISED)
        assert world.words() == ["risk", "lost"], "told by the clock, not by whoever asks"
        assert deadline - A_MOMENT < world.told[-1][0] + START
        assert lease.state.value == "lost"
        assert lease.remaining == 0
        with pytest.raises(LeaseLost, match="ran out"):
            lease.ensure_held()
        world.time.run_for(3 * ttl)
        assert world.words() == ["risk", "lost"]

    @pytest.mark.parametrize("trouble", TROUBLES)
    def test_for_a_while_leads_to_risk_and_back(self, world: World, trouble: Trouble) -> None:
        lease = world.acquire(ttl=TTL)
        for spell in (1, 2):
            last = world.store.renewals()[-1].at if world.store.renewals() else START
            world.store.trouble = trouble
            world.time.run_until(last + 0.7 * TTL)
            assert lease.state is State.AT_RISK
            assert world.words() == ["risk"] * spell
            world.store.trouble = "none"
            world.time.run_until(last + 0.9 * TTL)
            assert lease.state.value == "held"
            world.time.run_for(2 * TTL)
        assert lease.state is State.HELD
        assert world.words() == ["risk", "risk"]
        assert world.time.do(lease.release()) is True

    @pytest.mark.parametrize("error", [StoreRefused("NOPERM"), StoreProtocolError("odd"), ValueError("a bug")])
    def test_in_ways_that_no_one_thought_of_is_told_as_well(
        self, world: World, error: Exception, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lease = world.acquire(ttl=TTL)

        async def renew(*_: Any) -> list[bool]:
            raise error

        monkeypatch.setattr(world.store, "renew", renew)
        world.time.run_for(TTL + A_MOMENT)
        assert lease.state is State.LOST
        assert world.words()[-1] == "lost"
        monkeypatch.undo()
        again = world.acquire("another", ttl=TTL)
        world.time.run_for(3 * TTL)
        assert again.state is State.HELD, "the keeper lives on"

    def test_does_not_hurry_the_keeper(self, world: World) -> None:
        """Ten thousand leases and a server that refuses: a retry now and then, not a loop."""
        for number in range(1500):
            world.acquire(f"thing {number}", ttl=30)
        world.store.trouble = "refused"
        world.time.run_for(10.5)
        before = len(world.store.renewals())
        world.time.run_for(5)
        assert len(world.store.renewals()) - before <= 5 * 4 * 3, "tries in five seconds, for three batches"

    def test_puts_every_lease_at_risk_however_many(self, world: World) -> None:
        leases = [world.acquire(f"thing {number}", ttl=30) for number in range(1500)]
        world.store.trouble = "refused"
        world.time.run_for(20)
        assert {lease.state for lease in leases} == {State.AT_RISK}
        world.time.run_for(10)
        assert {lease.state for lease in leases} == {State.LOST}
        assert sorted(what for _, what, _ in world.told) == ["lost"] * 1500 + ["risk"] * 1500


class TestTheft:
    def test_is_found_at_the_next_renewal_at_the_latest(self, world: World) -> None:
        lease = world.acquire(ttl=TTL)
        world.time.run_for(TTL)
        world.store.space.drop("thing")
        stolen_at = world.time.now()
        world.time.run_for(TTL / 3 + A_MOMENT)
        assert world.words() == ["lost"]
        assert world.told[0][0] + START - stolen_at <= TTL / 3 + A_MOMENT
        with pytest.raises(LeaseLost, match="took or deleted it"):
            lease.ensure_held()
        assert world.time.do(lease.release()) is False

    def test_is_found_at_once_where_the_store_tells(self, world: World) -> None:
        world.store.capabilities = world.store.capabilities._replace(change_events=True)
        world.acquire(ttl=TTL)
        world.acquire("another", ttl=TTL)
        world.time.run_for(1.1)
        world.store.space.drop("thing")
        world.store.tell("thing")
        world.time.run_for(A_MOMENT)
        assert world.words() == ["lost"]
        assert world.words("another") == []

    def test_a_false_alarm_costs_one_renewal(self, world: World) -> None:
        world.store.capabilities = world.store.capabilities._replace(change_events=True)
        lease = world.acquire(ttl=30)
        world.time.run_for(2)
        before = len(world.store.renewals())
        world.store.tell("thing")
        world.store.tell(None)
        world.time.run_for(0.5)
        assert len(world.store.renewals()) == before + 1
        assert lease.state is State.HELD

    def test_many_alarms_cost_little(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        """Every key expires or is deleted at once: the server names them one by one."""
        world.store.capabilities = world.store.capabilities._replace(change_events=True)
        names = [f"thing {number}" for number in range(4000)]
        for name in names:
            world.acquire(name, ttl=30)
        world.time.run_for(2)
        looked = 0
        held = world.locks.session.keepalive.held

        def counted() -> list[LeaseState]:
            nonlocal looked
            found = held()
            looked += len(found)
            return found

        monkeypatch.setattr(world.locks.session.keepalive, "held", counted)
        for name in names:
            world.store.tell(name)
        assert looked < 20 * len(names), "leases looked at, for as many alarms"

    def test_the_next_holder_is_left_alone(self, world: World) -> None:
        lease = world.acquire(ttl=TTL)
        world.store.space.drop("thing")
        other = world.locks.lock("thing", ttl=TTL, renew=False)
        theirs = world.time.do(other.acquire(timeout=0))
        world.time.run_for(TTL / 2)
        assert lease.state is State.LOST
        assert world.time.do(lease.release()) is False
        assert world.store.holder("thing") == theirs.holder


class TestAProcessThatStoodStill:
    @pytest.mark.parametrize("seconds", [DEADLINE + A_MOMENT, 2 * TTL, 86_400.0])
    def test_past_its_ttl_knows_it_by_its_own_clock(self, world: World, seconds: float) -> None:
        lease = world.acquire(ttl=TTL)
        world.time.freeze(seconds)
        assert world.words() == []
        with pytest.raises(LeaseLost):
            lease.ensure_held()
        assert lease.remaining == 0
        assert bool(lease.lost) is True

    def test_is_told_before_it_asks_the_store(self, world: World) -> None:
        world.acquire(ttl=TTL)
        world.store.trouble = "silent"
        world.time.freeze(2 * TTL)
        world.time.run_for(0)
        assert world.told == [(2 * TTL, "lost", "thing")]

    def test_is_told_once_by_whoever_finds_out_first(self, world: World) -> None:
        lease = world.acquire(ttl=TTL)
        world.time.freeze(2 * TTL)
        assert lease.state is State.LOST
        world.time.run_for(TTL)
        assert world.words() == ["lost"]

    def test_for_a_while_goes_on(self, world: World) -> None:
        lease = world.acquire(ttl=TTL)
        for _ in range(5):
            world.time.freeze(0.9 * TTL)
            world.time.run_for(A_MOMENT)
            assert lease.state is State.HELD
        assert world.words() == []

    def test_with_an_answer_in_its_buffer_does_not_believe_it(self, world: World) -> None:
        """A renewal was sent in time and executed, and its answer read only after the deadline it gives."""
        lease = world.acquire(ttl=TTL)
        world.store.back = 0.01
        world.time.run_for(TTL / 3 + 0.005)
        world.time.freeze(2 * TTL)
        world.time.run_for(0.1)
        assert lease.state is State.LOST
        assert world.words() == ["lost"]

    def test_with_many_leases_tells_of_each_at_once(self, world: World) -> None:
        names = [f"thing {number}" for number in range(1000)]
        for name in names:
            world.acquire(name, ttl=TTL)
        world.time.freeze(2 * TTL)
        world.time.run_for(0)
        assert sorted(name for _, what, name in world.told if what == "lost") == sorted(names)
        sweeps = [name for name in world.time.spawned if name in ("sweep", "clean-up")]
        assert len(sweeps) <= 20, "threads or tasks that clean up after a thousand leases"


class TestTheDeadline:
    def test_counts_from_before_the_request_was_sent(self, world: World) -> None:
        world.store.there = world.store.back = 0.4
        world.store.grace = 1.0
        lease = world.acquire(ttl=TTL, renew=False)
        assert world.time.now() == START + 0.8
        assert lease.remaining == pytest.approx(DEADLINE - 0.8)
        world.time.run_until(START + DEADLINE + A_MOMENT)
        assert world.words() == ["lost"]
        assert world.store.holder("thing") is not None, "the store keeps it a little longer"

    def test_of_a_slow_store_too(self, world: World) -> None:
        """Every answer takes nearly all the time that a request may take."""
        world.store.there = world.store.back = TTL / 14
        world.store.grace = 1.0
        lease = world.acquire(ttl=TTL)
        world.time.run_for(20 * TTL)
        assert lease.state is State.HELD
        assert world.words() == []

    def test_of_a_lease_that_came_while_a_request_was_under_way(self, world: World) -> None:
        """The keeper waits for an answer about a long lease; a short one is lost meanwhile."""
        world.acquire("long", ttl=30)
        world.time.run_for(9.9)
        world.store.back = 0.2
        world.store.grace = 1.0
        short = world.locks.lock("thing", ttl=0.5, renew=False, on_lost=world.teller("lost"))
        acquired_at = world.time.now()
        world.time.spawn(lambda: _quietly(short.acquire(timeout=0)), "acquire")
        world.time.run_for(0.05)
        world.store.trouble = "silent"
        world.time.run_for(5.5)
        assert any(one.at < acquired_at + 0.2 for one in world.store.renewals("long")), "a request was under way before"
        (lost_at,) = [at for at, what, name in world.told if (what, name) == ("lost", "thing")]
        assert lost_at + START <= acquired_at + 0.5 + PROMISED

    def test_nobody_can_be_revived_by_a_late_answer(self, world: World) -> None:
        lease = world.acquire(ttl=TTL)
        world.store.trouble = "deaf"
        world.time.run_for(TTL)
        assert lease.state is State.LOST
        lease._core.renewed(world.time.now(), TTL)
        world.store.trouble = "none"
        world.time.run_for(2 * TTL)
        assert lease.state is State.LOST
        assert world.store.holder("thing") is None, "what a deaf renewal prolonged is swept away"


async def _quietly(work: Any) -> None:
    try:
        await work
    except Exception:
        return


def test_who_is_told_of_a_refusal_need_not_ask_the_store_again(world: World) -> None:
    """A callback that gives the lease back sends nothing: the store has said already that it has it no more."""
    lease = world.acquire(ttl=TTL)
    settled: list[bool] = []
    tell = lease._core.on_change

    def look(state: State) -> None:
        settled.append(lease._core.cleared)
        tell(state)

    lease._core.on_change = look
    world.store.space.drop("thing")
    world.time.run_for(TTL / 3 + A_MOMENT)
    assert settled == [True]
    assert world.time.do(lease.release()) is False
    assert [one.kind for one in world.store.requests] == ["acquire", "renew"]
