"""The rules for a lock and its queue. Each public function runs inside one transaction.

- `admission.py` decides whether a claim is admitted. After each change the queue is served: the head is granted while
  it is admitted. A waiter is removed from the queue if its process is dead, or if it did not repeat its claim within
  its ttl. If it returns with its ticket, it gets its old position.
- An exclusive grant is in the row of its lock, so that the fast path is one statement. Shared grants have rows of their
  own. Expired grants do not count; a transaction that may write deletes them before it decides.
- A dead waiter must not get a grant, but a waiter can be notified only after the commit. So a transaction opens the
  channel to the waiter before the grant, which proves that the waiter is alive. The code that runs the transaction
  sends the notifications after the commit.
- A waiter that becomes first is notified too. The notification says when to poll: when enough grants may have expired.
- fence = max(last + count, wall time in µs), where count is the number of fences that the grant reserves, usually 1.
  Fences still grow after the file is lost, or after the wall clock is set back, but not after both.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from lockfast import values
from lockfast.admission import LiveGrant, admit, free_at, refuse_other_mode
from lockfast.stores.sqlite.connection import SQL
from lockfast.values import (
    Answer,
    Claim,
    Enqueue,
    Granted,
    HolderInfo,
    LockInfo,
    Mode,
    Owner,
    Page,
    Queued,
    Renewal,
    Taken,
)

MOST_SHOWN = 1000
MOST_LISTED = 100  # holders of one lock in a listing
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
    client's own inbox. `channels` has the open ones to other clients by address, because one transaction may grant
    many readers of one client."""

    execute: Callable[..., sqlite3.Cursor]
    now: float
    wall_us: int
    channel_to: Callable[[str, str], Channel | None]
    address: str
    outgoing: list[Outgoing]
    channels: dict[str, Channel]


class Waiter(NamedTuple):
    """The first waiter of a queue."""

    claim: Claim
    address: str
    attempt: int
    expires_at: float


class Grant(NamedTuple):
    """One live grant."""

    fence: int
    holder: str
    owner: str
    since: float
    expires_at: float
    mode: Mode = Mode.EXCLUSIVE
    slots: tuple[int, ...] = ()

    @property
    def granted(self) -> Granted:
        return Granted(self.fence, slots=self.slots)


class Lock:
    """One lock in a transaction that may write. `fence` is the last one, 0 for none.

    Invariants: `grants` has the live grants by holder id, in the order of their fences, and the methods that change it
    write to the file too. `queued` says whether the lock had waiters when it was read or last served.
    """

    def __init__(self, tx: Transaction, name: str) -> None:
        self.tx, self.name = tx, name
        row = tx.execute(SQL["read"], (name,)).fetchone()
        self.fence: int = 0 if row is None else row[0]
        self.queued: bool = row is not None and row[5] == 1
        grants = [] if row is None else _grants(tx, name, row)
        self.grants = {grant.holder: grant for grant in grants if grant.expires_at > tx.now}
        if len(self.grants) < len(grants) and row[1] is None:
            tx.execute(SQL["drop_expired"], (name, tx.now))
            tx.execute(SQL["release"], (self.fence, tx.now, name))  # records the time of the last use

        self._live: list[LiveGrant] | None = None

    @property
    def live(self) -> list[LiveGrant]:
        """The grants as admission sees them; kept until they change, because there may be a thousand."""
        if self._live is None:
            self._live = [LiveGrant(one.mode, one.slots, one.expires_at) for one in self.grants.values()]
        return self._live

    def _put(self, grant: Grant) -> None:
        self.grants[grant.holder] = grant
        self._live = None

    def ttl_left(self, claim: Claim) -> float | None:
        """Seconds until enough grants may have expired to admit the claim; None if that never happens."""
        ends = free_at(self.live, claim)
        return None if ends is None else ends - self.tx.now

    def head(self) -> Waiter | None:
        row = self.tx.execute(SQL["head"], (self.name,)).fetchone()
        if row is None:
            return None
        holder, address, attempt, ttl, owner, fences, weight, limit, expires_at = row
        claim = Claim(self.name, holder, ttl, owner, fences, weight=weight, limit=limit)
        return Waiter(claim, address, attempt, expires_at)

    def grant(self, claim: Claim, slots: tuple[int, ...]) -> Granted:
        now = self.tx.now
        self.fence = _next_fence(self.tx, self.fence, claim.fences)
        grant = Grant(self.fence, claim.holder, claim.owner, now, now + claim.ttl, claim.mode, slots)
        exclusive = grant.mode is Mode.EXCLUSIVE
        holder, owner = (claim.holder, claim.owner) if exclusive else (None, "")
        self.tx.execute(SQL["grant"], (self.name, self.fence, holder, owner, now, grant.expires_at))
        if not exclusive:
            self._add_shared(grant)
        self._put(grant)
        return grant.granted

    def _add_shared(self, grant: Grant) -> None:
        slots = ",".join(map(str, grant.slots))
        self.tx.execute(SQL["grant_shared"], (self.name, *grant[:5], slots))

    def end(self, holder: str) -> None:
        """End a grant and write the fence."""
        grant, self._live = self.grants.pop(holder), None
        if grant.mode is not Mode.EXCLUSIVE:
            self.tx.execute(SQL["release_shared"], (self.name, holder))
        self.tx.execute(SQL["release"], (self.fence, self.tx.now, self.name))

    def downgrade(self, claim: Claim) -> None:
        """Turn the exclusive grant of the claim's holder into the grant of a reader, with the full ttl."""
        grant = self.grants[claim.holder]
        ends = max(grant.expires_at, self.tx.now + claim.ttl)
        self.end(claim.holder)
        reader = grant._replace(mode=Mode.READ, expires_at=ends)
        self._add_shared(reader)
        self._put(reader)

    def renew(self, claim: Claim) -> Granted:
        """Extend the grant of the claim's holder to the full ttl."""
        grant = self.grants[claim.holder]
        renew(self.tx, Renewal(self.name, claim.holder, claim.ttl, shared=grant.mode is not Mode.EXCLUSIVE))
        ends = max(grant.expires_at, self.tx.now + claim.ttl)
        self._put(grant._replace(expires_at=ends))
        return grant.granted


def _grants(tx: Transaction, name: str, row: Any, after: float = 0.0, most: int = -1) -> list[Grant]:
    """The grants of a lock that end later than `after`, in the order of their fences, from the row of the lock.

    At most `most` of them, unless that is negative.
    """
    fence, holder, owner, since, expires_at, _ = row
    if holder is not None:
        return [Grant(fence, holder, owner, since, expires_at)] if expires_at > after else []
    rows = tx.execute(SQL["shared_grants"], (name, after, most)).fetchall()
    return [_shared_grant(*shared) for shared in rows]


def _shared_grant(fence: int, holder: str, owner: str, since: float, expires_at: float, slots: str) -> Grant:
    if not slots:
        return Grant(fence, holder, owner, since, expires_at, Mode.READ)
    return Grant(fence, holder, owner, since, expires_at, Mode.PERMITS, tuple(map(int, slots.split(","))))


def acquire(tx: Transaction, claim: Claim, enqueue: Enqueue | None) -> Answer:
    lock, ticket = Lock(tx, claim.name), None
    if claim.holder in lock.grants:
        return lock.renew(claim)
    if not lock.queued or _ticket(tx, claim) is None:  # a claim that is queued already waits instead
        refuse_other_mode(lock.live, claim)
    slots = admit(lock.live, claim)
    if lock.queued:
        if enqueue is not None:  # first, because a waiter that returns may be the new head
            ticket = _enqueue(tx, claim, enqueue)
        if slots is not None or any(one.mode is not Mode.EXCLUSIVE for one in lock.live):
            # If only the queue keeps the claim out, the head may be dead. If a shared grant expired, the head may be
            # admitted.
            _serve(lock, claim.holder, notify=slots is not None)
        if claim.holder in lock.grants:
            return lock.renew(claim)
        slots = admit(lock.live, claim, queued_before=lock.queued)
    if slots is not None:
        return lock.grant(claim, slots)
    if enqueue is None:
        return Taken(lock.ttl_left(claim))
    if ticket is None:
        ticket = _enqueue(tx, claim, enqueue)
    position: int = tx.execute(SQL["position"], (claim.name, ticket, claim.holder)).fetchone()[0]
    return Queued(ticket, position, lock.ttl_left(claim))


def acquire_all(tx: Transaction, claims: Sequence[Claim]) -> list[Granted] | None:
    found: list[tuple[Lock, Claim, tuple[int, ...] | None]] = []
    for claim in claims:
        lock = Lock(tx, claim.name)
        slots = admit(lock.live, claim, queued_before=lock.queued)
        if claim.holder in lock.grants:
            slots = None  # a repeated request
        elif slots is None:
            return None
        found.append((lock, claim, slots))
    return [lock.renew(claim) if slots is None else lock.grant(claim, slots) for lock, claim, slots in found]


def renew(tx: Transaction, renewal: Renewal) -> bool:
    """Extend a grant. `renewal.shared` only says where to look first: a downgrade may be under way."""
    statement = "set_expiry" if renewal.final else "renew"
    tables = (f"{statement}_shared", statement) if renewal.shared else (statement, f"{statement}_shared")
    row = (tx.now + renewal.ttl, renewal.name, renewal.holder, tx.now)
    return any(tx.execute(SQL[table], row).rowcount for table in tables)


def release(tx: Transaction, name: str, holder: str) -> bool:
    lock = Lock(tx, name)
    ours = holder in lock.grants
    if ours:
        lock.end(holder)
    head = lock.head() if lock.queued else None
    if head is not None:
        tx.execute(SQL["remove_waiter"], (name, holder))
        _serve(lock, notify=ours or head.claim.holder == holder)
    return ours


def adopt(tx: Transaction, claim: Claim, old_holder: str) -> Granted | None:
    lock = Lock(tx, claim.name)
    if claim.holder in lock.grants:
        return lock.renew(claim)
    old = lock.grants.get(old_holder)
    if old is None or old.mode is not claim.mode:
        return None
    lock.end(old.holder)
    return lock.grant(claim, old.slots)


def downgrade(tx: Transaction, claim: Claim) -> bool:
    lock = Lock(tx, claim.name)
    own = lock.grants.get(claim.holder)
    if own is None or own.mode is Mode.PERMITS:
        return False
    if own.mode is Mode.EXCLUSIVE:
        lock.downgrade(claim)
    else:
        lock.renew(claim)
    _serve(lock)
    return True


def force_release(tx: Transaction, name: str, holder: str) -> bool:
    lock = Lock(tx, name)
    if holder not in lock.grants:
        return False
    lock.fence = _next_fence(tx, lock.fence)
    lock.end(holder)
    _serve(lock)
    return True


def listing(tx: Transaction, pattern: str, cursor: str) -> Page:
    rows = tx.execute(SQL["page"], (tx.now, cursor, PAGE)).fetchall()
    infos = tuple(
        LockInfo(name, _holders(tx, name, row, MOST_LISTED), row[0], waiting=row[5])
        for name, *row in rows
        if values.fits(name, pattern)
    )
    return Page(infos, rows[-1][0] if len(rows) == PAGE else "")


def inspect(tx: Transaction, name: str) -> LockInfo:
    row = tx.execute(SQL["read"], (name,)).fetchone()
    if row is None:
        return LockInfo(name)
    waiters = tuple(
        values.waiter_info(
            Claim(name, holder, 0.0, owner, weight=weight, limit=limit), Owner.decode(owner), tx.now - since
        )
        for holder, owner, weight, limit, since in tx.execute(SQL["waiters"], (name, tx.now, MOST_SHOWN)).fetchall()
    )
    waiting: int = tx.execute(SQL["waiting"], (name, tx.now)).fetchone()[0]
    return LockInfo(name, _holders(tx, name, row, MOST_SHOWN), row[0], waiters, waiting)


def _holders(tx: Transaction, name: str, row: Any, most: int) -> tuple[HolderInfo, ...]:
    return tuple(
        HolderInfo(
            one.holder,
            Owner.decode(one.owner),
            one.fence,
            tx.now - one.since,
            one.expires_at - tx.now,
            one.mode,
            one.slots,
        )
        for one in _grants(tx, name, row, tx.now, most)
    )


def sweep(tx: Transaction) -> None:
    """Delete rows without use among the next few names."""
    start: str = tx.execute(SQL["state"]).fetchone()[1]
    end: str | None = tx.execute(SQL["sweep_end"], (start, SWEEP)).fetchone()[0]
    if end is not None:
        tx.execute(SQL["sweep_waiters"], (start, end, tx.now))
        tx.execute(SQL["sweep_shared_grants"], (start, end, tx.now - KEPT_FOR))
        tx.execute(SQL["sweep_locks"], (start, end, tx.now - KEPT_FOR))
    if start or end:
        tx.execute(SQL["set_swept"], (end or "",))


def _serve(lock: Lock, caller: str | None = None, *, notify: bool = True) -> None:
    """Grant from the head of the queue while it is admitted; remove dead waiters.

    The waiter that is first then is notified, if `notify` or if there was a grant. The `caller` is alive, and gets no
    notification.
    """
    tx, name = lock.tx, lock.name
    while (head := lock.head()) is not None:
        claim, channel = head.claim, None
        if claim.holder != caller and head.expires_at <= tx.now:
            tx.execute(SQL["remove_waiter"], (name, claim.holder))
            continue
        slots = admit(lock.live, claim)
        if slots is None and (claim.holder == caller or not notify):
            return
        if claim.holder != caller:
            channel = _channel_to(tx, head)
            if channel is None:
                continue
        notification: values.Notification
        if slots is None:
            notification = values.FirstNotification(head.attempt, lock.ttl_left(claim))
        else:
            tx.execute(SQL["remove_waiter"], (name, claim.holder))
            notification = values.GrantNotification(head.attempt, lock.grant(claim, slots).fence, slots)
            notify = True
        if channel is not None:
            tx.outgoing.append(Outgoing(name, claim.holder, notification, channel))
        if slots is None:
            return
    lock.queued = False


def _channel_to(tx: Transaction, waiter: Waiter) -> Channel | None:
    """Open the channel to a waiter. If it is gone, remove it from the queue."""
    name, holder, address = waiter.claim.name, waiter.claim.holder, waiter.address
    channel = tx.channels.get(address) or tx.channel_to(address, holder)
    if channel is not None and address != tx.address:
        tx.channels[address] = channel
    elif channel is None and address == tx.address:
        tx.execute(SQL["remove_waiter"], (name, holder))
    elif channel is None:  # its process is gone with all its waiters, perhaps thousands
        tx.execute(SQL["remove_client"], (name, address))
    return channel


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
    request = (name, ticket, holder, enqueue.address, enqueue.attempt, claim.ttl, claim.owner, claim.fences)
    tx.execute(SQL["enqueue"], (*request, claim.weight, claim.limit, tx.now, tx.now + claim.ttl))
    return _ticket(tx, claim) or ticket


def _ticket(tx: Transaction, claim: Claim) -> int | None:
    """The ticket of a claim that is in the queue."""
    row = tx.execute(SQL["ticket"], (claim.name, claim.holder)).fetchone()
    return None if row is None else row[0]
