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
    "an expired lock stays taken": rule("_live", "or expires_at <= tx.now", "or False", contract.expiry_hand_off),
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
    "a position counts all waiters": sql("position", "ticket < ?", "? IS NOT NULL", contract.tickets),
    "a repeated claim gets a new fence": rule(
        "acquire",
        "return Granted(lock.fence)",
        "return Granted(_grant(tx, claim, lock.fence))",
        contract.repeated_acquire,
    ),
    "a release does not hand off": rule(
        "release", "if _grant_to_head(tx, name, lock.fence).holder is None:", "if True:", contract.hand_off
    ),
    "anybody adopts": rule("adopt", "or lock.holder != old_holder", "", contract.adoption),
    "an adoption keeps the fence": rule(
        "adopt",
        "Granted(_grant(tx, claim, lock.fence))",
        "Granted(_grant(tx, claim, lock.fence) and lock.fence)",
        contract.adoption,
    ),
    "anybody is forced out": rule("force_release", "or lock.holder != holder", "", contract.force_release),
    "a forced release keeps the fence": rule(
        "force_release", "fence = _next_fence(tx, lock.fence)", "fence = lock.fence", contract.force_release
    ),
    "a dead waiter stops the queue": rule(
        "_grant_to_head",
        "            if channel is None:\n                continue",
        "            if channel is None:\n                break",
        contract.unreachable_waiter,
    ),
    "the next waiter is not notified": rule(
        "_grant_to_head", "_notify_head(tx, name, head.ttl)", "pass", contract.first_notification
    ),
    "an earlier ticket is ignored": sql(
        "enqueue", "ticket = min(ticket, excluded.ticket)", "ticket = ticket", contract.tickets
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
