"""Passing on inside a process, in every interleaving of small models; and what is broken in it is caught."""

from collections.abc import Callable
from typing import Any

import pytest

from holdfast.core import passing
from holdfast.core.acquire import Grant
from holdfast.testing import households
from holdfast.testing.explorer import Explorer, Report

QUICK = {model.name: model for model in households.quick()}


def search(name: str) -> Report:
    return Explorer(QUICK[name]).run(most_seconds=50.0)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Whom the lock was passed to."""
    seen: list[Any] = []
    shipped = passing.Tenancy.next

    def noted(self: passing.Tenancy, seat: passing.Seat, now: float) -> passing.Turn:
        seen.append(seat)
        return shipped(self, seat, now)

    monkeypatch.setattr(passing.Tenancy, "next", noted)
    return seen


@pytest.mark.parametrize("name", QUICK)
def test_passing_on_keeps_the_rules_in_every_interleaving(name: str, passes: list[Any]) -> None:
    report = search(name)
    assert report.violation is None, str(report.story)
    assert report.complete
    assert passes


def _same_fence(self: passing.Tenancy, seat: passing.Seat, now: float) -> passing.Turn:
    grant = Grant(self._used, now, now + self.ask.ttl)
    return passing.Turn(seat.ask._replace(holder=self.ask.holder), grant, self)


def _too_long(shipped: Callable[..., passing.Turn]) -> Callable[..., passing.Turn]:
    def next_turn(self: passing.Tenancy, seat: passing.Seat, now: float) -> passing.Turn:
        turn = shipped(self, seat, now)
        return turn._replace(grant=turn.grant._replace(valid_until=turn.grant.valid_until + 0.06))

    return next_turn


def test_a_fence_that_is_given_out_twice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passing.Tenancy, "next", _same_fence)
    assert _rule(search("household: alone")) == "FT"


def test_a_lock_that_is_passed_on_and_kept_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passing.Room, "_well", lambda *_: True)
    monkeypatch.setattr("holdfast.leases.Tenancy.end", lambda _: None)
    assert _rule(search("household: alone")) is not None


def test_a_lease_that_outlasts_its_tenancy_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passing.Tenancy, "next", _too_long(passing.Tenancy.next))
    monkeypatch.setattr(passing, "EXTRA", 0.0005)
    assert _rule(Explorer(households.overrun()).run(most_seconds=50.0)) is not None


def _rule(report: Report) -> str | None:
    return None if report.violation is None else report.violation.rule
