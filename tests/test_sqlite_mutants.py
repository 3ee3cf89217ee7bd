"""Errors planted in the SQL and the rules of the SQLite store: a check of the store contract must detect each."""

from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from lockfast.runtime.base import run
from lockfast.runtime.threads import ThreadRuntime
from lockfast.stores.sqlite import transactions
from lockfast.stores.sqlite.connection import SQL
from lockfast.stores.sqlite.store import SqliteStore
from lockfast.testing import contract
from lockfast.testing import shared_contract as shared
from lockfast.testing.contract import Bench, ContractBroken, run_check
from verify.mutation import python, replaced

Check = Callable[[Bench], Coroutine[Any, Any, None]]
Mutant = tuple[Callable[[], AbstractContextManager[None]], Check]


@contextmanager
def _sql(statement: str, old: str, new: str) -> Iterator[None]:
    before = SQL[statement]
    SQL[statement] = replaced(before, old, new)
    try:
        yield
    finally:
        SQL[statement] = before


def sql(statement: str, old: str, new: str, killed_by: Check) -> Mutant:
    return lambda: _sql(statement, old, new), killed_by


def rule(function: str, old: str, new: str, killed_by: Check) -> Mutant:
    return lambda: python(transactions, function, old, new), killed_by


def method(function: str, old: str, new: str, killed_by: Check) -> Mutant:
    return lambda: python(transactions.Lock, function, old, new), killed_by


MUTANTS: dict[str, Mutant] = {
    "a held lock is granted": sql(
        "acquire_free",
        "(lock.holder IS NULL OR lock.expires_at <= excluded.since)",
        "lock.holder IS NOT excluded.holder",
        contract.denied_without_queueing,
    ),
    "a newcomer overtakes the queue": sql(
        "acquire_free",
        "AND NOT EXISTS (SELECT 1 FROM waiter WHERE waiter.name = excluded.name)",
        "",
        contract.expiry_hand_off,
    ),
    "an expired lock stays taken": method(
        "__init__", "if grant.expires_at > tx.now", "if True", contract.expiry_hand_off
    ),
    "anybody releases": sql("release_uncontended", "AND holder = ?", "AND ? IS NOT NULL", contract.release),
    "a release forgets the queue": sql(
        "release_uncontended",
        "AND NOT EXISTS (SELECT 1 FROM waiter WHERE waiter.name = ?)",
        "AND ? IS NOT NULL",
        contract.hand_off,
    ),
    "anybody renews": sql("renew", "AND holder = ?", "AND ? IS NOT NULL", contract.renewal),
    "a renewal shortens": sql("renew", "max(expires_at, ?)", "?", contract.renewal),
    "an expired grant is renewed": sql("renew", "AND expires_at > ?", "AND ? IS NOT NULL", contract.expiry),
    "a final renewal does not shorten": sql(
        "set_expiry", "SET expires_at = ?", "SET expires_at = max(expires_at, ?)", contract.final_renewal
    ),
    "the queue is last in, first out": sql("head", "ORDER BY ticket", "ORDER BY ticket DESC", contract.queue_order),
    "a position counts all waiters": sql(
        "position", "(ticket, holder) < (?, ?)", "? IS NOT NULL AND ? IS NOT NULL", contract.tickets
    ),
    "a repeated claim gets a new fence": rule(
        "acquire",
        "return lock.renew(claim)\n    if",
        "return lock.grant(claim, ())\n    if",
        contract.repeated_acquire,
    ),
    "a release does not hand off": rule(
        "release", "_serve(lock, notify=ours or head.claim.holder == holder)", "pass", contract.hand_off
    ),
    "anybody adopts": rule(
        "adopt", "lock.grants.get(old_holder)", "next(iter(lock.grants.values()), None)", contract.adoption
    ),
    "an adoption keeps the fence": rule(
        "adopt",
        "return lock.grant(claim, old.slots)",
        "return lock.grant(claim, old.slots) and old.granted",
        contract.adoption,
    ),
    "anybody is forced out": rule(
        "force_release",
        "if holder not in lock.grants:",
        "holder = next(iter(lock.grants), holder)\n    if holder not in lock.grants:",
        contract.force_release,
    ),
    "a forced release keeps the fence": rule(
        "force_release", "lock.fence = _next_fence(tx, lock.fence)", "pass", contract.force_release
    ),
    "a dead waiter stops the queue": rule(
        "_serve",
        "            if channel is None:\n                continue",
        "            if channel is None:\n                break",
        contract.unreachable_waiter,
    ),
    "the next waiter is not notified": rule(
        "_serve", "            notify = True", "            notify = False", contract.first_notification
    ),
    "an earlier ticket is ignored": sql(
        "enqueue", "ticket = min(ticket, excluded.ticket)", "ticket = ticket", contract.tickets
    ),
    "all readers have one ttl": sql("renew_shared", "AND holder = ?", "AND ? IS NOT NULL", shared.shared_renewal),
    "a new reader sets the ttl of all": method(
        "grant",
        "self._add_shared(grant)",
        "self._add_shared(grant), self.tx.execute('UPDATE shared_grant SET expires_at = ?', grant[4:5])",
        shared.shared_expiry,
    ),
    "permits are counted beside the grants": rule(
        "_grants",
        "return [_shared_grant(*shared) for shared in rows]",
        "return vars(_grants).setdefault(name, []).extend(map(_shared_grant, *zip(*rows))) or vars(_grants)[name]",
        shared.permits_and_slots,
    ),
    "a grant is not counted": rule(
        "acquire", "slots = admit(lock.live, claim)", "slots = admit(lock.live[1:], claim)", shared.permits_and_slots
    ),
    "an expired reader is shown": sql("shared_grants", "AND expires_at > ?", "AND ? IS NOT NULL", shared.shared_expiry),
    "a reader overtakes a waiting writer": rule(
        "acquire", "queued_before=lock.queued", "queued_before=False", shared.waiting_writer_stops_readers
    ),
    "several at once overtake a waiting writer": rule(
        "acquire_all",
        "queued_before=lock.queued",
        "queued_before=False",
        shared.several_behind_a_queue,
    ),
    "several at once are granted in part": rule("acquire_all", "return None", "continue", shared.several_at_once),
    "a mutex is granted beside readers": sql(
        "acquire_free",
        "AND NOT EXISTS (SELECT 1 FROM shared_grant WHERE shared_grant.name = excluded.name)",
        "",
        shared.readers_together,
    ),
    "a slot is reused while it is live": method(
        "grant",
        "self._add_shared(grant)",
        "self._add_shared(grant._replace(slots=slots[:1]))",
        shared.permits_and_slots,
    ),
    "a downgrade lets a writer in": rule(
        "_serve", "slots = admit(lock.live, claim)", "slots = admit([], claim)", shared.downgrade_serves_the_queue
    ),
    "a downgrade does not serve the queue": rule(
        "downgrade", "_serve(lock)", "pass", shared.downgrade_serves_the_queue
    ),
    "a downgrade gets a new fence": method(
        "downgrade",
        "grant._replace(mode=Mode.READ",
        "grant._replace(fence=grant.fence + 1, mode=Mode.READ",
        shared.downgrade,
    ),
    "a dead head blocks the readers behind it": rule(
        "acquire",
        "if slots is not None or any(one.mode is not Mode.EXCLUSIVE for one in lock.live):",
        "if not lock.grants:",
        shared.unreachable_head,
    ),
    "the departure of the head admits nobody": rule(
        "release",
        "_serve(lock, notify=ours or head.claim.holder == holder)",
        "_serve(lock) if ours else None",
        shared.departed_head,
    ),
    "one reader is let in at a time": rule(
        "_serve", "if slots is None:\n            return", "return", shared.readers_in_one_batch
    ),
    "a release ends all readers": sql("release_shared", "AND holder = ?", "AND ? IS NOT NULL", shared.shared_release),
    "an adopted permit moves to another slot": rule(
        "adopt", "lock.grant(claim, old.slots)", "lock.grant(claim, (7,))", shared.shared_adoption
    ),
    "readers and permits are granted together": rule(
        "acquire", "refuse_other_mode(lock.live, claim)", "pass", shared.other_mode_refused
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_error_is_detected(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, check = MUTANTS[name]
    runtime = ThreadRuntime()
    monkeypatch.setattr(Bench, "patience", 2.0)

    def check_store() -> None:
        run(run_check(check, lambda: SqliteStore(tmp_path / "locks.db", runtime), runtime))

    check_store()
    with plant(), pytest.raises(ContractBroken):
        check_store()
