"""Local hand-off in every interleaving of small models, planted errors that the models detect, and blocks of fences."""

from collections.abc import Callable
from threading import Lock
from types import SimpleNamespace
from typing import Any

import pytest

from lockfast.core import local_handoff
from lockfast.core.acquire import Acquisition, Deadline, Grant
from lockfast.ports import Ports
from lockfast.runtime.base import run
from lockfast.runtime.threads import ThreadRuntime
from lockfast.stores.redis.lua.scripts import ACQUIRE
from lockfast.stores.redis.store import acquire_request
from lockfast.values import Claim, Granted
from verify import local_handoff_models
from verify.explorer import Explorer, Report
from verify.models import TTL
from verify.mutation import lua, python
from verify.virtual_server import VirtualRedis

QUICK = {model.name: model for model in local_handoff_models.quick()}


def search(name: str) -> Report:
    return Explorer(QUICK[name]).run(most_seconds=50.0)


@pytest.fixture
def handoffs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the waiters that are handed the lock."""
    seen: list[Any] = []
    shipped = local_handoff.PooledGrant.next

    def recorded(self: local_handoff.PooledGrant, local_waiter: local_handoff.LocalWaiter, now: float) -> Grant:
        seen.append(local_waiter)
        return shipped(self, local_waiter, now)

    monkeypatch.setattr(local_handoff.PooledGrant, "next", recorded)
    return seen


@pytest.mark.parametrize("name", QUICK)
def test_local_handoff_keeps_the_rules_in_every_interleaving(name: str, handoffs: list[Any]) -> None:
    report = search(name)
    assert report.violation is None, str(report.trace)
    assert report.complete
    assert handoffs


def _same_fence(self: local_handoff.PooledGrant, local_waiter: local_handoff.LocalWaiter, now: float) -> Grant:
    return Grant(
        self.claim._replace(owner=local_waiter.terms.owner), self._used, now, now + self.claim.ttl, pooled_grant=self
    )


def _too_long(shipped: Callable[..., Grant]) -> Callable[..., Grant]:
    def next_grant(self: local_handoff.PooledGrant, local_waiter: local_handoff.LocalWaiter, now: float) -> Grant:
        grant = shipped(self, local_waiter, now)
        return grant._replace(valid_until=grant.valid_until + 0.06)

    return next_grant


def test_a_repeated_fence_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_handoff.PooledGrant, "next", _same_fence)
    assert _rule(search("local hand-off: three tasks")) == "FT"


def test_a_lease_that_stays_held_after_its_hand_off_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_handoff.PooledGrant, "end", lambda _: None)
    with python(local_handoff.LocalQueue, "hand_off", "if not lease.release(handed_off=True):", "if False:"):
        assert _rule(search("local hand-off: three tasks")) is not None


def test_a_lease_that_outlasts_its_pooled_grant_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_handoff.PooledGrant, "next", _too_long(local_handoff.PooledGrant.next))
    monkeypatch.setattr(local_handoff, "EXTRA", 0.0005)
    assert _rule(Explorer(local_handoff_models.overrun()).run(most_seconds=50.0)) is not None


def test_a_first_notification_before_the_grant_in_one_inbox_is_detected() -> None:
    """The server lost all data and grants the waiter's next claim before the waiter reads the older grant.

    A client that compares the fences of its grants refuses the older one, so the test removes that rule too.
    """
    with (
        lua("release", "if alive and inbox == other_than then return false end", ""),
        python(Acquisition, "_wait_for_notification", "notification.fence < conflicting_fence", "False"),
    ):
        report = Explorer(local_handoff_models.restart()).run(most_seconds=50.0)
        assert _rule(report) == "FT", f"{report.violation} {report.trace}"


def test_older_fence_after_a_newer_one_is_found() -> None:
    """A notification from before a restart arrives after a grant from after it."""
    rule = "notification.fence < conflicting_fence"
    with python(Acquisition, "_wait_for_notification", rule, "False"):
        report = Explorer(local_handoff_models.restart(first_wait=True)).run(most_seconds=100.0)
    assert _rule(report) == "FT", f"{report.violation} {report.trace}"


def test_a_block_of_fences_after_a_flush_is_above_all_earlier_fences() -> None:
    server = VirtualRedis()
    server.load([ACQUIRE.text])
    server.execute(acquire_request(Claim("door", "A1", TTL, ""), None))
    server.advance(TTL + 1)
    last = server.execute(acquire_request(Claim("door", "A2", TTL, "", fences=5_000), None))
    server.call("FLUSHALL")
    server.now_us += 1
    assert server.execute(acquire_request(Claim("door", "B1", TTL, "", fences=5_000), None)) - 5_000 >= last


class PooledGrants:
    """Pooled grants of one local queue, one after another. `fences` records the sizes of their blocks."""

    def __init__(self) -> None:
        self.local_queue = local_handoff.LocalQueues(ThreadRuntime()).queue("door")
        self.fences: list[int] = []

    def one(self, now: float, *, queued: bool, handoffs: int) -> bool:
        """Grant one, and hand it off that often if it may be. Return whether it may."""
        pooled_claim = self.local_queue._pooled_claim(ThreadRuntime(), now)
        self.fences.append(pooled_claim.fences)
        claim = Claim("door", pooled_claim.holder, TTL, "")
        pooled_grant = local_handoff.PooledGrant(
            self.local_queue, claim, Grant(claim, 1_000_000, now, now + TTL), pooled_claim.fences, now
        )
        self.local_queue.pooled_granted(pooled_grant, queued, now)
        if pooled_grant.had_span:
            pooled_grant.handoffs = handoffs
        self.local_queue.end_pooled(pooled_grant)
        return pooled_grant.had_span


class SlowStore:
    """A store that takes that many seconds for each answer."""

    grace = 0.08

    def __init__(self, runtime: Any, takes: list[float]) -> None:
        self._runtime = runtime
        self.takes = takes

    async def acquire(self, claim: Claim, enqueue: object, until: float) -> Granted:
        self._runtime.time += self.takes.pop(0)
        return Granted(1_000_000, None)


def test_a_pooled_grant_that_arrives_too_late_for_its_first_lease_is_claimed_again() -> None:
    """Its extra time belongs to the leases that it is handed off to."""
    runtime: Any = SimpleNamespace(time=100.0, mutex=Lock, new_holder_id=lambda: "A1")
    runtime.now = lambda: runtime.time
    store: Any = SlowStore(runtime, [TTL + 0.02, 0.001])
    local_queue = local_handoff.LocalQueues(runtime).queue("door")
    pooled_claim = local_queue._pooled_claim(runtime, 100.0)
    claiming = local_handoff._claim_pooled(
        Ports(store, runtime),
        local_queue,
        local_handoff.ClaimTerms("door", TTL, ""),
        Deadline(None, 60.0),
        pooled_claim,
    )
    grant = run(claiming)
    assert grant is not None
    assert store.takes == []
    assert runtime.time < grant.valid_until


def test_no_unused_fences_are_reserved_while_others_wait() -> None:
    """Otherwise fences run ahead of the clock, and a server that lost them would grant lower ones."""
    grants = PooledGrants()
    assert [grants.one(at, queued=True, handoffs=500) for at in (0.0, 0.2, 0.25, 0.26, 0.27)] == [
        True,
        True,
        *[False] * 3,
    ]
    assert grants.one(0.31, queued=True, handoffs=500)
    assert grants.fences == [local_handoff.FEWEST_FENCES, 1000, 1000, *[local_handoff.FEWEST_FENCES] * 2, 1000]


def test_a_block_that_was_too_small_does_not_make_the_next_one_smaller() -> None:
    grants = PooledGrants()
    for at, queued in ((0.0, True), (0.2, True), (0.25, True), (0.26, False), (0.261, False)):
        grants.one(at, queued=queued, handoffs=500)
    assert grants.fences == [local_handoff.FEWEST_FENCES, 1000, 1000, local_handoff.FEWEST_FENCES, 1000]


def _rule(report: Report) -> str | None:
    return None if report.violation is None else report.violation.rule
