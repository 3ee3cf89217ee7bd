"""The rules for a lock and its queue. Each public function runs inside one transaction.

- `acquire`, `release` and `force_release` grant a free lock to the first waiter that can be reached. A waiter is
  removed from the queue if its process is dead, or if it did not repeat its claim within its ttl. If it returns with
  its ticket, it gets its old position.
- A grant to a waiter is valid only after the commit. So before the grant a transaction opens the channel to the waiter,
  which proves that the waiter is alive. The code that runs the transaction sends the notifications after the commit.
- The new first waiter is notified how much of the holder's ttl is left.
- fence = max(last + count, wall time in µs), where count is the number of fences that the grant reserves, usually 1. It
  grows if the file is lost, or if the wall clock is set back, but not after both.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import NamedTuple, Protocol

from lockfast import values
from lockfast.stores.sqlite.connection import SQL
from lockfast.values import (
    Answer,
    Claim,
    Enqueue,
    Granted,
    HolderInfo,
    LockInfo,
    Owner,
    Page,
    Queued,
    Renewal,
    Taken,
    WaiterInfo,
)

MOST_SHOWN = 1000
PAGE = 500
SWEEP = 512  # locks that one sweep checks
KEPT_FOR = 86_400.0  # seconds that a fence is kept after the last use of its lock


class Channel(Protocol):
    """An open connection to one client's inbox."""

    def send(self, holder: str, notification: values.Notification) -> bool:
        """False if the client is gone."""


class Outgoing(NamedTuple):
    """A notification to send after the commit."""

    name: str
    holder: str
    notification: values.Notification
    channel: Channel


class Transaction(NamedTuple):
    """The context of one transaction. `channel_to(address, holder)` returns None for a dead waiter; `address` is this
    client's own inbox."""

    execute: Callable[..., sqlite3.Cursor]
    now: float
    wall_us: int
    channel_to: Callable[[str, str], Channel | None]
    address: str
    outgoing: list[Outgoing]


class Head(NamedTuple):
    """The first waiter of a queue."""

    holder: str
    address: str
    attempt: int
    ttl: float
    owner: str
    fences: int
    expires_at: float


class LockRow(NamedTuple):
    """The state of one lock. `holder` is None if it is free; `fence` is the last one, 0 for none."""

    fence: int
    holder: str | None = None
    ttl_left: float = 0.0
    owner: str = ""
    since: float = 0.0


def _read(tx: Transaction, name: str) -> LockRow:
    row = tx.execute(SQL["read"], (name,)).fetchone()
    return LockRow(0) if row is None else _live(tx, *row)


def _live(tx: Transaction, fence: int, holder: str | None, expires_at: float, owner: str, since: float) -> LockRow:
    if holder is None or expires_at <= tx.now:
        return LockRow(fence)
    return LockRow(fence, holder, expires_at - tx.now, owner, since)


def acquire(tx: Transaction, claim: Claim, enqueue: Enqueue | None) -> Answer:
    lock = _read(tx, claim.name)
    if lock.holder is None:
        if enqueue is not None:  # a returning waiter may have the first ticket
            _enqueue(tx, claim, enqueue)
        lock = _grant_to_head(tx, claim.name, lock.fence, claim.holder)
        if lock.holder is None:
            return Granted(_grant(tx, claim, lock.fence))
    elif lock.holder == claim.holder:
        renew(tx, Renewal(claim.name, claim.holder, claim.ttl))
    if lock.holder == claim.holder:
        return Granted(lock.fence)
    if enqueue is None:
        return Taken(lock.ttl_left)
    ticket = _enqueue(tx, claim, enqueue)
    position: int = tx.execute(SQL["position"], (claim.name, ticket)).fetchone()[0]
    return Queued(ticket, position, lock.ttl_left)


def renew(tx: Transaction, renewal: Renewal) -> bool:
    statement = SQL["set_expiry" if renewal.final else "renew"]
    return tx.execute(statement, (tx.now + renewal.ttl, renewal.name, renewal.holder, tx.now)).rowcount > 0


def release(tx: Transaction, name: str, holder: str) -> bool:
    lock = _read(tx, name)
    if lock.holder == holder:
        if _grant_to_head(tx, name, lock.fence).holder is None:
            tx.execute(SQL["release"], (lock.fence, tx.now, name))
        return True
    head = _head(tx, name)
    tx.execute(SQL["remove_waiter"], (name, holder))
    if lock.holder is None:
        _grant_to_head(tx, name, lock.fence)
    elif head is not None and head.holder == holder:
        _notify_head(tx, name, lock.ttl_left)
    return False


def adopt(tx: Transaction, claim: Claim, old_holder: str) -> Granted | None:
    lock = _read(tx, claim.name)
    if lock.holder == claim.holder:
        renew(tx, Renewal(claim.name, claim.holder, claim.ttl))
        return Granted(lock.fence)
    if lock.holder is None or lock.holder != old_holder:
        return None
    return Granted(_grant(tx, claim, lock.fence))


def force_release(tx: Transaction, name: str, holder: str) -> bool:
    lock = _read(tx, name)
    if lock.holder is None or lock.holder != holder:
        return False
    fence = _next_fence(tx, lock.fence)
    tx.execute(SQL["release"], (fence, tx.now, name))
    _grant_to_head(tx, name, fence)
    return True


def listing(tx: Transaction, pattern: str, cursor: str) -> Page:
    rows = tx.execute(SQL["page"], (tx.now, cursor, PAGE)).fetchall()
    found = [(LockInfo(name, waiting=waiting), row) for name, *row, waiting in rows if values.fits(name, pattern)]
    infos = tuple(_with_holder(tx, _live(tx, *row), info) for info, row in found)
    return Page(infos, rows[-1][0] if len(rows) == PAGE else "")


def inspect(tx: Transaction, name: str) -> LockInfo:
    rows = tx.execute(SQL["waiters"], (name, tx.now, MOST_SHOWN)).fetchall()
    waiters = tuple(WaiterInfo(holder, Owner.decode(owner), tx.now - since) for holder, owner, since in rows)
    waiting: int = tx.execute(SQL["waiting"], (name, tx.now)).fetchone()[0]
    return _with_holder(tx, _read(tx, name), LockInfo(name, waiters=waiters, waiting=waiting))


def _with_holder(tx: Transaction, lock: LockRow, info: LockInfo) -> LockInfo:
    if lock.holder is None:
        return info._replace(fence=lock.fence or None)
    holder = HolderInfo(lock.holder, Owner.decode(lock.owner), lock.fence, tx.now - lock.since, lock.ttl_left)
    return info._replace(fence=lock.fence, holders=(holder,))


def sweep(tx: Transaction) -> None:
    """Delete rows without use among the next few names."""
    start: str = tx.execute(SQL["state"]).fetchone()[1]
    end: str | None = tx.execute(SQL["sweep_end"], (start, SWEEP)).fetchone()[0]
    if end is not None:
        tx.execute(SQL["sweep_waiters"], (start, end, tx.now))
        tx.execute(SQL["sweep_locks"], (start, end, tx.now - KEPT_FOR))
    if start or end:
        tx.execute(SQL["set_swept"], (end or "",))


def _head(tx: Transaction, name: str) -> Head | None:
    row = tx.execute(SQL["head"], (name,)).fetchone()
    return None if row is None else Head(*row)


def _grant_to_head(tx: Transaction, name: str, fence: int, caller: str | None = None) -> LockRow:
    """Grant a free lock to the first live waiter. The `caller` is alive, and needs no notification."""
    while (head := _head(tx, name)) is not None:
        channel = None
        if head.holder != caller:
            if head.expires_at <= tx.now:
                tx.execute(SQL["remove_waiter"], (name, head.holder))
                continue
            channel = _channel_to(tx, name, head)
            if channel is None:
                continue
        tx.execute(SQL["remove_waiter"], (name, head.holder))
        fence = _grant(tx, Claim(name, head.holder, head.ttl, head.owner, head.fences), fence)
        if channel is not None:
            tx.outgoing.append(Outgoing(name, head.holder, values.GrantNotification(head.attempt, fence), channel))
        _notify_head(tx, name, head.ttl)
        return LockRow(fence, head.holder, head.ttl, head.owner, tx.now)
    return LockRow(fence)


def _notify_head(tx: Transaction, name: str, ttl_left: float) -> None:
    """Notify the first live waiter that it is first now."""
    while (head := _head(tx, name)) is not None:
        if head.expires_at <= tx.now:
            tx.execute(SQL["remove_waiter"], (name, head.holder))
            continue
        channel = _channel_to(tx, name, head)
        if channel is not None:
            tx.outgoing.append(Outgoing(name, head.holder, values.FirstNotification(head.attempt, ttl_left), channel))
            return


def _channel_to(tx: Transaction, name: str, waiter: Head) -> Channel | None:
    """Open the channel to a waiter. If it is gone, remove it from the queue."""
    channel = tx.channel_to(waiter.address, waiter.holder)
    if channel is None:
        if waiter.address == tx.address:
            tx.execute(SQL["remove_waiter"], (name, waiter.holder))
        else:  # its process is gone with all its waiters, perhaps thousands
            tx.execute(SQL["remove_client"], (name, waiter.address))
    return channel


def _grant(tx: Transaction, claim: Claim, last_fence: int) -> int:
    fence = _next_fence(tx, last_fence, claim.fences)
    tx.execute(SQL["grant"], (claim.name, fence, claim.holder, claim.owner, tx.now, tx.now + claim.ttl))
    return fence


def _next_fence(tx: Transaction, last: int, count: int = 1) -> int:
    return max(last + count, tx.wall_us)


def _enqueue(tx: Transaction, claim: Claim, enqueue: Enqueue) -> int:
    """Add the waiter, or refresh its ticket; return the ticket.

    A waiter that was removed because it was unreachable returns with its ticket, to its old position.
    """
    name, holder, ticket = claim.name, claim.holder, enqueue.ticket
    if ticket is None:
        last: int | None = tx.execute(SQL["last_ticket"], (name,)).fetchone()[0]
        ticket = max((last or 0) + 1, tx.wall_us)
    waiter = (name, ticket, holder, enqueue.address, enqueue.attempt, claim.ttl, claim.owner, claim.fences)
    tx.execute(SQL["enqueue"], (*waiter, tx.now, tx.now + claim.ttl))
    kept: int = tx.execute(SQL["ticket"], (name, holder)).fetchone()[0]
    return kept
