"""The voting rules and fences, explored in every interleaving of small models."""

import itertools
from collections import Counter

import pytest

from lockfast.core.quorum import rules
from lockfast.core.quorum.rules import Standing
from lockfast.values import Mode
from tests.quorum.virtual import claim, reading, view
from verify import quorum_models as quorum
from verify.explorer import Explorer
from verify.mutation import lua
from verify.world import Model


def check(model: Model, most_seconds: float) -> None:
    report = Explorer(model).run(most_seconds=most_seconds)
    assert report.violation is None, str(report.trace)
    assert report.complete
    assert report.states > 100


@pytest.mark.parametrize("model", quorum.models(), ids=lambda model: str(model.name))
def test_fences_grow_and_one_client_holds_in_every_interleaving(model: Model) -> None:
    check(model, 60.0)


@pytest.mark.faults
@pytest.mark.parametrize("model", quorum.thorough(), ids=lambda model: str(model.name))
def test_the_same_holds_in_larger_models(model: Model) -> None:
    check(model, 300.0)


@pytest.mark.parametrize("reader", ["", "A", "B"])
def test_a_fence_repeats_if_the_highest_is_not_written_to_a_majority(reader: str) -> None:
    report = Explorer(quorum.broken(reader)).run(most_seconds=60.0)
    assert report.violation is not None
    assert report.violation.rule == "FT"


SHARED_SCRIPT_MUTANTS = {
    "the raised fence of a reader is not remembered": ("if fence_in(call('GET', meta)) < floor then", "if false then"),
    "the fence of a reader is not raised": ("if floor and tonumber(fence_digits) < floor then", "if false then"),
    "a writer enters beside readers": (
        "if weight == '0' then return false end",
        "if weight == '0' then return true end",
    ),
}


@pytest.mark.parametrize("name", SHARED_SCRIPT_MUTANTS)
def test_an_error_in_the_script_for_readers_is_detected(name: str) -> None:
    with lua("acquire", *SHARED_SCRIPT_MUTANTS[name]):
        reports = [Explorer(model).run(most_seconds=60.0) for model in quorum.models() if "reader" in model.name]
    assert any(report.violation is not None for report in reports)


def test_exactly_one_contender_is_ahead_in_a_split_vote() -> None:
    """For every distribution of five votes, the contenders agree on which of them stays."""
    for holders in itertools.product("abc", repeat=5):
        found = {one: rules.standing(map(view, holders), claim(one), 5) for one in set(holders)}
        owner = next((one for one in found if holders.count(one) >= 3), None)
        if owner is None:
            assert sum(where is Standing.AHEAD for where in found.values()) == 1
            assert all(where is not Standing.TAKEN for where in found.values())
        else:
            assert all(where is Standing.TAKEN for one, where in found.items() if one != owner)


def test_exactly_one_party_is_ahead_in_a_split_vote_with_readers() -> None:
    """Each of five members is free, or granted to a writer, to one of two readers or to both."""
    readers = [view(*some, mode=Mode.READ) for some in (("r",), ("s",), ("r", "s"))]
    for views in itertools.product((view(), view("a"), view("b"), *readers), repeat=5):
        names = {one.holder: one.mode for found in views for one in found.holders}
        found = {
            name: rules.standing(views, reading(name) if mode is Mode.READ else claim(name), 5)
            for name, mode in names.items()
        }
        votes = Counter(one.holder for found in views for one in found.holders)
        holding = {name for name in names if votes[name] >= 3}
        ahead = {name for name, where in found.items() if where is Standing.AHEAD}
        if not holding and names:
            assert ahead in ({"a"}, {"b"}, set(names) - {"a", "b"})
        for name in names:
            excluded = any(other != name and not {name, other} <= {"r", "s"} for other in holding)
            assert (found[name] is Standing.TAKEN) == excluded


def test_two_majorities_share_a_member() -> None:
    for count in range(1, 10):
        assert 2 * rules.majority(count) > count


def test_the_fence_floor_follows_the_members_clocks_and_not_itself() -> None:
    floor = rules.FenceFloor()
    assert floor.propose(100.0) == 0
    floor.observe_clock(100.0, 1_000_000.0)
    first = floor.propose(100.0)
    assert first == 1_000_000_000_000 + rules.LEAD_US
    floor.observe_fences(100.0, [first, first, first])  # they agree, so the floor must not creep ahead
    assert floor.propose(100.0) == first
    floor.observe_fences(100.0, [first, first + 500_000])
    assert floor.propose(100.0) == first + 500_000 + rules.LEAD_US
