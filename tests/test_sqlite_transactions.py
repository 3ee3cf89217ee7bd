"""The rules of the embedded store for a lock and its queue, in both flavours, on a virtual clock."""

import random
from collections.abc import Callable, Coroutine, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from lockfast.errors import ConfigurationError
from lockfast.stores.memory import Space
from lockfast.stores.sqlite import transactions
from lockfast.stores.sqlite.store import SqliteStore
from lockfast.values import (
    Claim,
    Enqueue,
    FirstNotification,
    Granted,
    GrantNotification,
    LockInfo,
    Notification,
    Owner,
    Queued,
    Renewal,
    Taken,
)
from tests.sqlite_kit import FLAVOURS, LONG, Bed, Waiter, claim


@pytest.fixture(params=FLAVOURS)
def bed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bed]:
    with Bed(request.param, tmp_path) as bed:
        yield bed


@pytest.fixture
def store(bed: Bed) -> SqliteStore:
    return bed.store()


def take(bed: Bed, store: SqliteStore, holder: str, **choices: Any) -> Any:
    return bed.run(store.acquire(claim(holder, **choices), None, LONG))


def sweep_all(bed: Bed, store: SqliteStore) -> None:
    for _ in range(2):  # the second one starts again at the first name
        bed.run(store._sweep())


def test_free_lock_is_granted_with_the_wall_time_as_fence(bed: Bed, store: SqliteStore) -> None:
    assert take(bed, store, "one") == Granted(bed.wall_us)


def test_repeated_claim_renews_and_keeps_the_fence(bed: Bed, store: SqliteStore) -> None:
    granted = take(bed, store, "one")
    bed.clock += 9
    bed.wall_us += 9_000_000
    assert take(bed, store, "one") == granted
    assert bed.run(store.inspect("report", LONG)).ttl_left == 10.0


def test_taken_lock_reports_its_remaining_ttl(bed: Bed, store: SqliteStore) -> None:
    take(bed, store, "one")
    bed.clock += 4
    assert take(bed, store, "two") == Taken(6.0)


def test_released_lock_is_free_and_its_fences_continue(bed: Bed, store: SqliteStore) -> None:
    take(bed, store, "one")
    assert bed.run(store.release("report", "one", LONG)) is True
    assert bed.run(store.release("report", "one", LONG)) is False
    assert take(bed, store, "two") == Granted(bed.wall_us + 1)


def test_release_by_another_holder_changes_nothing(bed: Bed, store: SqliteStore) -> None:
    take(bed, store, "one")
    assert bed.run(store.release("report", "two", LONG)) is False
    assert take(bed, store, "two") == Taken(10.0)


def test_expired_lock_is_free(bed: Bed, store: SqliteStore) -> None:
    take(bed, store, "one")
    bed.clock += 10
    assert bed.run(store.release("report", "one", LONG)) is False
    assert take(bed, store, "two") == Granted(bed.wall_us + 1)


def test_waiters_are_granted_in_order_with_their_own_ttl(bed: Bed, store: SqliteStore) -> None:
    take(bed, store, "one")
    second, third = Waiter(bed, store, "two", ttl=20.0, label="b"), Waiter(bed, store, "three")
    assert second.request() == Queued(bed.wall_us, 0, 10.0)
    assert third.request() == Queued(bed.wall_us + 1, 1, 10.0)
    second.request()
    assert bed.run(store.release("report", "one", LONG)) is True
    assert second.notification() == GrantNotification(2, bed.wall_us + 1)
    assert third.notification() == FirstNotification(1, 20.0)
    info = bed.run(store.inspect("report", LONG))
    assert (info.holder, info.ttl_left, info.owner) == ("two", 20.0, Owner("host", 7, "b"))
    assert [waiter.holder for waiter in info.waiters] == ["three"]


def test_repeated_claim_of_a_granted_waiter_has_the_same_fence(bed: Bed, store: SqliteStore) -> None:
    take(bed, store, "one")
    second = Waiter(bed, store, "two")
    second.request()
    bed.run(store.release("report", "one", LONG))
    assert second.request() == Granted(bed.wall_us + 1)


def test_release_removes_a_ticket(bed: Bed, store: SqliteStore) -> None:
    take(bed, store, "one")
    second = Waiter(bed, store, "two")
    second.request()
    assert bed.run(store.release("report", "two", LONG)) is False
    assert bed.run(store.inspect("report", LONG)).waiting == 0
    assert take(bed, store, "one") == Granted(bed.wall_us)


def test_new_first_waiter_is_notified_of_the_remaining_ttl(bed: Bed, store: SqliteStore) -> None:
    take(bed, store, "one")
    second, third, fourth = (Waiter(bed, store, holder) for holder in ("two", "three", "four"))
    for waiter in (second, third, fourth):
        waiter.request()
    bed.clock += 4
    third.box.close()
    bed.run(store.release("report", "two", LONG))
    assert (second.notification(), third.notification(), fourth.notification()) == (
        None,
        None,
        FirstNotification(1, 6.0),
    )
    assert bed.run(store.inspect("report", LONG)).waiting == 1  # the unreachable waiter is removed


def test_any_claim_grants_an_expired_lock_to_the_first_waiter(bed: Bed, store: SqliteStore) -> None:
    take(bed, store, "one", ttl=1.0)
    second = Waiter(bed, store, "two")
    second.request()
    bed.clock += 1
    assert take(bed, store, "three") == Taken(10.0)
    assert second.notification() == GrantNotification(1, bed.wall_us + 1)


def test_removing_a_ticket_grants_an_expired_lock(bed: Bed, store: SqliteStore) -> None:
    take(bed, store, "one", ttl=1.0)
    second, third = Waiter(bed, store, "two"), Waiter(bed, store, "three")
    second.request(), third.request()
    bed.clock += 1
    assert bed.run(store.release("report", "two", LONG)) is False
    assert third.notification() == GrantNotification(1, bed.wall_us + 1)


def test_first_waiter_gets_an_expired_lock_by_its_own_claim(bed: Bed, store: SqliteStore) -> None:
    take(bed, store, "one", ttl=1.0)
    second, third = Waiter(bed, store, "two"), Waiter(bed, store, "three")
    second.request(), third.request()
    bed.clock += 1
    assert third.request() == Queued(bed.wall_us + 1, 0, 10.0)
    assert second.request() == Granted(bed.wall_us + 1)


def test_waiter_silent_for_its_ttl_is_skipped(bed: Bed, store: SqliteStore) -> None:
    take(bed, store, "one", ttl=100.0)
    second, third = Waiter(bed, store, "two", ttl=5.0), Waiter(bed, store, "three", ttl=50.0)
    second.request(), third.request()
    bed.clock += 5
    assert [one.holder for one in bed.run(store.inspect("report", LONG)).waiters] == ["three"]
    bed.run(store.release("report", "one", LONG))
    assert (second.notification(), third.notification()) == (None, GrantNotification(1, bed.wall_us + 1))


def test_skipped_waiter_returns_to_its_position(bed: Bed, store: SqliteStore) -> None:
    take(bed, store, "one", ttl=100.0)
    second, third = Waiter(bed, store, "two", ttl=5.0), Waiter(bed, store, "three", ttl=50.0)
    second.request(), third.request()
    fourth = Waiter(bed, store, "four", ttl=50.0)
    fourth.request()
    bed.clock += 5
    bed.run(store.release("report", "one", LONG))
    assert second.request() == Queued(bed.wall_us, 0, 50.0)
    assert fourth.request().position == 1


def test_returning_waiter_with_the_first_ticket_gets_a_free_lock(bed: Bed, store: SqliteStore) -> None:
    take(bed, store, "one", ttl=1.0)
    second, third = Waiter(bed, store, "two"), Waiter(bed, store, "three")
    second.request(), third.request()
    bed.run(store.release("report", "two", LONG))
    bed.clock += 1
    assert second.request() == Granted(bed.wall_us + 1)


def test_waiter_with_a_closed_mailbox_is_skipped_at_once(bed: Bed, store: SqliteStore) -> None:
    take(bed, store, "one")
    second, third = Waiter(bed, store, "two"), Waiter(bed, store, "three")
    second.request(), third.request()
    second.box.close()
    bed.run(store.release("report", "one", LONG))
    assert third.notification() == GrantNotification(1, bed.wall_us + 1)


def test_each_renewal_has_its_own_answer(bed: Bed, store: SqliteStore) -> None:
    take(bed, store, "one")
    take(bed, store, "two", name="other", ttl=3.0)
    bed.clock += 3
    lines = [Renewal("report", "one", 20.0), Renewal("report", "two", 20.0), Renewal("other", "two", 20.0)]
    assert bed.run(store.renew(lines, LONG)) == [True, False, False]
    assert take(bed, store, "three") == Taken(20.0)


def test_no_request_shortens_a_grant(bed: Bed, store: SqliteStore) -> None:
    take(bed, store, "one", ttl=60.0)
    assert bed.run(store.renew([Renewal("report", "one", 5.0)], LONG)) == [True]
    take(bed, store, "one", ttl=5.0)
    assert bed.run(store.inspect("report", LONG)).ttl_left == 60.0


def test_adopt_changes_the_holder_once(bed: Bed, store: SqliteStore) -> None:
    take(bed, store, "one")
    adopted = bed.run(store.adopt(claim("two", label="heir"), "one", LONG))
    assert adopted == Granted(bed.wall_us + 1)
    assert bed.run(store.adopt(claim("two", label="heir"), "one", LONG)) == adopted
    assert bed.run(store.adopt(claim("three"), "one", LONG)) is None
    assert bed.run(store.inspect("report", LONG)).owner == Owner("host", 7, "heir")


def test_unknown_lock_is_free_without_a_fence(bed: Bed, store: SqliteStore) -> None:
    assert bed.run(store.inspect("never", LONG)) == LockInfo("never")


def test_held_for_uses_the_boot_time_clock(bed: Bed, store: SqliteStore) -> None:
    take(bed, store, "one")
    bed.clock += 2
    bed.wall_us -= 86_400_000_000
    assert bed.run(store.inspect("report", LONG)).held_for == 2.0


def test_long_queue_is_counted_but_not_listed_in_full(bed: Bed, store: SqliteStore) -> None:
    take(bed, store, "one")
    for number in range(transactions.MOST_SHOWN + 5):
        bed.run(store.acquire(claim(f"h{number}"), Enqueue("inbox-x", 1, None), LONG))
    info = bed.run(store.inspect("report", LONG))
    assert (len(info.waiters), info.waiting) == (transactions.MOST_SHOWN, transactions.MOST_SHOWN + 5)
    assert info.waiters[0].holder == "h0"


@pytest.mark.parametrize("step_s", [-86_400, 86_400])
def test_wall_clock_step_moves_no_deadline(bed: Bed, store: SqliteStore, step_s: int) -> None:
    first = take(bed, store, "one")
    bed.wall_us += step_s * 1_000_000
    bed.clock += 9.5
    assert take(bed, store, "two") == Taken(0.5)
    bed.clock += 0.5
    assert take(bed, store, "two").fence > first.fence


def test_reboot_voids_grants_and_tickets_but_keeps_fences(bed: Bed, store: SqliteStore) -> None:
    first = take(bed, store, "one")
    Waiter(bed, store, "two").request()
    bed.run(store.close())
    bed.boot, bed.clock, bed.wall_us = "the next boot", 5.0, bed.wall_us - 1_000_000
    after = bed.store()
    assert bed.run(after.inspect("report", LONG)) == LockInfo("report", fence=first.fence)
    assert bed.run(after.renew([Renewal("report", "one", 10.0)], LONG)) == [False]
    assert take(bed, after, "three") == Granted(first.fence + 1)


def test_reboot_voids_shared_grants_but_keeps_their_fence(bed: Bed, store: SqliteStore) -> None:
    take(bed, store, "one", weight=1, limit=2)
    last = take(bed, store, "two", weight=1, limit=2)
    bed.run(store.close())
    bed.boot, bed.clock, bed.wall_us = "the next boot", 5.0, bed.wall_us - 1_000_000
    after = bed.store()
    assert bed.run(after.inspect("report", LONG)) == LockInfo("report", fence=last.fence)
    assert bed.run(after.renew([Renewal("report", "one", 10.0, shared=True)], LONG)) == [False]
    assert take(bed, after, "three") == Granted(last.fence + 1)


def test_grants_survive_within_one_boot(bed: Bed, store: SqliteStore) -> None:
    take(bed, store, "one")
    bed.run(store.close())
    assert take(bed, bed.store(), "two") == Taken(10.0)


def test_fences_are_deleted_a_day_after_the_last_use(bed: Bed, store: SqliteStore) -> None:
    for number in range(3 * transactions.SWEEP):
        take(bed, store, "one", name=f"old{number}", ttl=1.0)
    bed.clock += transactions.KEPT_FOR + 2
    for _ in range(8 * 256):
        take(bed, store, "one", name="new")
        bed.run(store.release("new", "one", LONG))
    known = [f"old{number}" for number in range(3 * transactions.SWEEP)]
    assert [name for name in known if bed.run(store.inspect(name, LONG)).fence] == []
    assert bed.run(store.inspect("new", LONG)).fence


def _answer(operation: Callable[[], Any]) -> Any:
    """The answer to an operation; the text of the error if it is refused."""
    try:
        return operation()
    except ConfigurationError as error:
        return str(error)


@pytest.mark.parametrize("end", ["release", "expiry"])
def test_fence_of_a_reader_that_held_for_days_is_kept(bed: Bed, store: SqliteStore, end: str) -> None:
    granted = take(bed, store, "one", weight=1, ttl=transactions.KEPT_FOR)
    for _ in range(3):
        bed.clock += 0.9 * transactions.KEPT_FOR
        bed.run(store.renew([Renewal("report", "one", transactions.KEPT_FOR, shared=True)], LONG))
        sweep_all(bed, store)
    assert bed.run(store.inspect("report", LONG)).holder == "one"
    if end == "expiry":
        bed.clock += transactions.KEPT_FOR
    assert bed.run(store.release("report", "one", LONG)) is (end == "release")
    sweep_all(bed, store)
    assert bed.run(store.inspect("report", LONG)) == LockInfo("report", fence=granted.fence)
    bed.clock += transactions.KEPT_FOR + 1
    sweep_all(bed, store)
    assert bed.run(store.inspect("report", LONG)) == LockInfo("report")


def test_expired_readers_do_not_stay_in_the_file(bed: Bed, store: SqliteStore) -> None:
    for number in range(20):
        take(bed, store, f"reader{number}", weight=1, ttl=1.0)
        bed.clock += 1
    rows = bed.run(store._database.run(lambda file: file.execute("SELECT holder FROM shared_grant").fetchall(), LONG))
    assert rows == [("reader19",)]


class Twin:
    """The same operations on the embedded store and on the memory store; the answers must be equal."""

    HOLDERS = ("a", "b", "c", "d", "e", "f", "g")
    NAMES = ("x", "y")
    READERS = ((0, 0), (1, 0), (1, 0))
    PERMITS = ((0, 0), (1, 1), (1, 2), (2, 3), (3, 4), (1, 4))
    """Weights and limits."""

    def __init__(self, bed: Bed, seed: int) -> None:
        self.bed = bed
        self.store = bed.store()
        self.randomness = random.Random(seed)
        self.weights_and_limits = self.randomness.choice((self.READERS, self.PERMITS, self.READERS + self.PERMITS))
        self.notifications: dict[str, list[Notification]] = {}
        self.space = Space(self._deliver, lambda: bed.wall_us)
        self.boxes: dict[str, Any] = {}
        self.claims: dict[tuple[str, str], Claim] = {}
        self.tickets: dict[tuple[str, str], int] = {}
        self.fences: dict[tuple[str, int], int] = {}
        self.attempt = 0

    def _deliver(self, holder: str, notification: Notification) -> bool:
        if holder in self.boxes:
            self.notifications.setdefault(holder, []).append(notification)
        return holder in self.boxes

    def step(self) -> None:
        self.bed.clock += self.randomness.choices((0.0, 0.5, 3.0, 11.0), (9, 4, 1, 1))[0]
        self.bed.wall_us += self.randomness.choice((0, 1, 2_000_000, -500_000))
        name, other = self.randomness.choice(self.NAMES), self.randomness.choice(self.HOLDERS)
        held = [one.holder for one in self.space.inspect(name, self.bed.clock).holders]
        holder = self.randomness.choice(held if held and self.randomness.random() < 0.4 else self.HOLDERS)
        if self.randomness.random() < 0.2:
            holder, other = other, holder
        operation = self.randomness.choice(
            (
                *(self.acquire,) * 8,
                *(self.release,) * 4,
                self.acquire_all,
                self.renew,
                self.adopt,
                self.downgrade,
                self.force_release,
                self.close_mailbox,
            )
        )
        operation(name, holder, other)
        now = self.bed.clock
        for each in self.NAMES:
            self.agree(each, self.bed.run(self.store.inspect(each, LONG)), self.space.inspect(each, now))
        for one, box in self.boxes.items():
            for ours, theirs in zip_longest(box.notifications, self.notifications.pop(one, [])):
                self.agree(name, ours, theirs)
            box.notifications.clear()
        assert self.notifications == {}

    def agree(self, name: str, ours: Any, theirs: Any) -> None:
        assert self._with_their_fences(name, ours, theirs) == theirs

    def _with_their_fences(self, name: str, ours: Any, theirs: Any) -> Any:
        """Fences must only correspond: the memory store spends one on a dead waiter."""
        if type(ours) is not type(theirs) or getattr(theirs, "fence", None) is None:
            return ours
        assert ours.fence == self.fences.setdefault((name, theirs.fence), ours.fence)
        if isinstance(ours, LockInfo):
            pairs = zip_longest(ours.holders, theirs.holders)
            ours = ours._replace(holders=tuple(self._with_their_fences(name, *pair) for pair in pairs))
        return ours._replace(fence=theirs.fence)

    def compare(self, name: str, work: Coroutine[Any, Any, Any], reference: Callable[[], Any]) -> Any:
        """Run an operation on both stores; return its answer."""
        ours = _answer(lambda: self.bed.run(work))
        self.agree(name, ours, _answer(reference))
        return ours

    def claim(self, name: str, holder: str) -> Claim:
        """The claim of a holder, which stays the same until its release."""
        if (name, holder) not in self.claims:
            weight, limit = self.randomness.choice(self.weights_and_limits)
            ttl = 2.0 if holder in "ab" else 10.0
            self.claims[name, holder] = claim(holder, name=name, ttl=ttl, weight=weight, limit=limit)
        return self.claims[name, holder]

    def acquire(self, name: str, holder: str, other: str) -> None:
        request, enqueue = self.claim(name, holder), None
        if self.randomness.random() < 0.7:
            if holder not in self.boxes:
                self.boxes[holder] = self.store.mailbox(holder)
                self.bed.run(self.boxes[holder].open(LONG))
            self.attempt += 1
            enqueue = Enqueue(self.boxes[holder].address, self.attempt, self.tickets.get((name, holder)))
        as_in_memory = None if enqueue is None else enqueue._replace(address=holder)
        answer = self.compare(
            name,
            self.store.acquire(request, enqueue, LONG),
            lambda: self.space.acquire(request, as_in_memory, self.bed.clock),
        )
        if isinstance(answer, Queued):
            self.tickets[name, holder] = answer.ticket

    def acquire_all(self, name: str, holder: str, other: str) -> None:
        requests = [self.claim(each, holder) for each in self.NAMES]
        ours = _answer(lambda: self.bed.run(self.store.acquire_all(requests, LONG)))
        theirs = _answer(lambda: self.space.acquire_all(requests, self.bed.clock))
        if not isinstance(ours, list) or not isinstance(theirs, list):
            assert ours == theirs
            return
        for each, one, another in zip(self.NAMES, ours, theirs, strict=True):
            self.agree(each, one, another)

    def release(self, name: str, holder: str, other: str) -> None:
        self.compare(
            name,
            self.store.release(name, holder, LONG),
            lambda: self.space.release(name, holder, self.bed.clock),
        )
        self.claims.pop((name, holder), None)
        if self.randomness.random() < 0.8:  # else a request may come late, with the old ticket
            self.tickets.pop((name, holder), None)

    def renew(self, name: str, holder: str, other: str) -> None:
        shared, final = self.randomness.random() < 0.5, self.randomness.random() < 0.3
        lines = [Renewal(name, holder, 10.0, shared=shared), Renewal(name, other, 1.0, final=final, shared=shared)]
        answers = self.bed.run(self.store.renew(lines, LONG))
        assert answers == [self.space.renew(line, self.bed.clock) for line in lines]

    def adopt(self, name: str, holder: str, other: str) -> None:
        if (name, holder) in self.tickets:
            return  # a holder id that adopts is new, so it is not in the queue
        if (name, holder) not in self.claims and self.randomness.random() < 0.8:
            self.claims[name, holder] = self.claim(name, other)._replace(holder=holder)
        request = self.claim(name, holder)
        self.compare(
            name, self.store.adopt(request, other, LONG), lambda: self.space.adopt(request, other, self.bed.clock)
        )

    def downgrade(self, name: str, holder: str, other: str) -> None:
        request = claim(holder, name=name, weight=1)
        done = self.compare(
            name, self.store.downgrade(request, LONG), lambda: self.space.downgrade(request, self.bed.clock)
        )
        if done:
            self.claims[name, holder] = request

    def force_release(self, name: str, holder: str, other: str) -> None:
        answer = self.bed.run(self.store.force_release(name, holder, LONG))
        assert answer == self.space.force_release(name, holder, self.bed.clock)

    def close_mailbox(self, name: str, holder: str, other: str) -> None:
        box = self.boxes.pop(holder, None)
        if box is not None:
            box.close()


@pytest.mark.parametrize("seed", range(20))
def test_random_histories_match_the_memory_store(bed: Bed, seed: int) -> None:
    twin = Twin(bed, seed)
    for _ in range(300):
        twin.step()
