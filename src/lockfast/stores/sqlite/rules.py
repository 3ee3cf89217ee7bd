"""What happens to a lock and its queue, each function one transaction's work.

Rules kept here:

- A free lock goes to the first in its queue who can be reached; whoever finds it free sees to that. A waiter that
  has not asked for its whole ttl, or whose process has gone, loses its place.
- A grant that is handed over is told only after the commit: until then nobody may believe it. Whether the waiter
  can be told is found out before. So a transaction leaves `Letter`s for its caller to send.
- Whoever becomes the first in the queue is told for how long the holder may hold.
- fence = max(last + 1, wall time in µs): it grows even if the file is lost, or the wall clock is set back.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from lockfast.stores.sqlite import statements as sql
from lockfast.values import (
    Answer,
    Claim,
    Enqueue,
    FirstNotification,
    Granted,
    GrantNotification,
    LockInfo,
    Owner,
    Page,
    Queued,
    Taken,
    WaiterInfo,
    fits,
)

MOST_SHOWN = 1000
SLICE = 512
PAGE = 500
KEPT_FOR = 86_400.0
"""Seconds after its last use for which a lock's fence is remembered."""


class Outlet(Protocol):
    """An open way to one waiter."""

    def send(self, holder: str, news: GrantNotification | FirstNotification) -> bool:
        """Tell `holder`; False when it has gone."""


class Letter(NamedTuple):
    """What to tell a waiter, once it is committed."""

    name: str
    holder: str
    news: GrantNotification | FirstNotification
    outlet: Outlet


class Scene(NamedTuple):
    """What one transaction works with. `reach` opens the way to a waiter, or finds it gone; `here` is the address
    of our own inbox; `letters` are to be sent after the commit, in that order."""

    execute: Callable[..., sqlite3.Cursor]
    now: float
    wall_us: int
    reach: Callable[[str, str], Outlet | None]
    here: str
    letters: list[Letter]


class Waiting(NamedTuple):
    """One place in a queue."""

    holder: str
    address: str
    attempt: int
    ttl: float
    owner: str
    fences: int
    dead_at: float


class Held(NamedTuple):
    """The state of one lock; `holder` is None when it is free. `fence` is the last one, 0 for none."""

    fence: int
    holder: str | None
    ttl_left: float
    owner: str
    since: float


def look(scene: Scene, name: str) -> Held:
    row = scene.execute(sql.READ, (name,)).fetchone()
    return Held(0, None, 0.0, "", 0.0) if row is None else _held(scene, *row)


def _held(scene: Scene, fence: int, holder: str | None, expires_at: float, owner: str, since: float) -> Held:
    if holder is None or expires_at <= scene.now:
        return Held(fence, None, 0.0, "", 0.0)
    return Held(fence, holder, expires_at - scene.now, owner, since)


def acquire(scene: Scene, claim: Claim, enqueue: Enqueue | None) -> Answer:
    held = look(scene, claim.name)
    if held.holder is None:
        if enqueue is not None:  # it may come back with a ticket that is before all others
            _join(scene, claim, enqueue)
        held = _hand_over(scene, claim.name, held.fence, claim.holder)
        if held.holder is None:
            return Granted(_grant(scene, claim, held.fence))
    elif held.holder == claim.holder:
        _prolong(scene, claim)
    if held.holder == claim.holder:
        return Granted(held.fence)
    if enqueue is None:
        return Taken(held.ttl_left)
    ticket = _join(scene, claim, enqueue)
    position: int = scene.execute(sql.POSITION, (claim.name, ticket)).fetchone()[0]
    return Queued(ticket, position, held.ttl_left)


def release(scene: Scene, name: str, holder: str) -> bool:
    held = look(scene, name)
    if held.holder == holder:
        if _hand_over(scene, name, held.fence, None).holder is None:
            scene.execute(sql.FREE, (scene.now, name))
        return True
    head = _head(scene, name)
    scene.execute(sql.LEAVE, (name, holder))
    if held.holder is None:
        _hand_over(scene, name, held.fence, None)
    elif head is not None and head.holder == holder:
        _tell_next(scene, name, held.ttl_left)
    return False


def adopt(scene: Scene, claim: Claim, old_holder: str) -> Granted | None:
    held = look(scene, claim.name)
    if held.holder == claim.holder:
        _prolong(scene, claim)
        return Granted(held.fence)
    if held.holder is None or held.holder != old_holder:
        return None
    return Granted(_grant(scene, claim, held.fence))


def force_release(scene: Scene, name: str, holder: str) -> bool:
    held = look(scene, name)
    if held.holder is None or held.holder != holder:
        return False
    fence = _next_fence(scene, held.fence)
    scene.execute(sql.MOVE_ON, (fence, scene.now, name))
    _hand_over(scene, name, fence, None)
    return True


def listing(scene: Scene, pattern: str, cursor: str) -> Page:
    rows = scene.execute(sql.PAGE, (scene.now, cursor, PAGE)).fetchall()
    chosen = [(name, _held(scene, *row), waiting) for name, *row, waiting in rows if fits(name, pattern)]
    infos = (_info(scene, held, LockInfo(name, waiting=waiting)) for name, held, waiting in chosen)
    return Page(tuple(infos), rows[-1][0] if len(rows) == PAGE else "")


def inspect(scene: Scene, name: str) -> LockInfo:
    held = look(scene, name)
    rows = scene.execute(sql.WAITERS, (name, scene.now, MOST_SHOWN)).fetchall()
    waiters = tuple(WaiterInfo(holder, Owner.decode(owner), scene.now - since) for holder, owner, since in rows)
    waiting = len(rows)
    if waiting == MOST_SHOWN:
        waiting = scene.execute(sql.WAITING, (name, scene.now)).fetchone()[0]
    return _info(scene, held, LockInfo(name, waiters=waiters, waiting=waiting))


def _info(scene: Scene, held: Held, info: LockInfo) -> LockInfo:
    """`info` with what is known of the holder."""
    if held.holder is None:
        return info._replace(fence=held.fence or None)
    return info._replace(
        fence=held.fence,
        holder=held.holder,
        owner=Owner.decode(held.owner),
        held_for=scene.now - held.since,
        ttl_left=held.ttl_left,
    )


def sweep(scene: Scene) -> None:
    """Forget what has long been of no use among the next few names."""
    start: str = scene.execute(sql.STATE).fetchone()[1]
    end: str | None = scene.execute(sql.SLICE_END, (start, SLICE)).fetchone()[0]
    if end is not None:
        scene.execute(sql.FORGET_WAITERS, (start, end, scene.now))
        scene.execute(sql.FORGET_LOCKS, (start, end, scene.now - KEPT_FOR))
    if start or end:
        scene.execute(sql.SWEPT, (end or "",))


def _head(scene: Scene, name: str) -> Waiting | None:
    row = scene.execute(sql.HEAD, (name,)).fetchone()
    return None if row is None else Waiting(*row)


def _hand_over(scene: Scene, name: str, fence: int, asker: str | None) -> Held:
    """Give a free lock to the first who is alive; `asker` is, and needs no letter. Whose it is then."""
    while (head := _head(scene, name)) is not None:
        outlet = None
        if head.holder != asker:
            if head.dead_at <= scene.now:
                scene.execute(sql.LEAVE, (name, head.holder))
                continue
            outlet = _way_to(scene, name, head)
            if outlet is None:
                continue
        scene.execute(sql.LEAVE, (name, head.holder))
        fence = _grant(scene, Claim(name, head.holder, head.ttl, head.owner, head.fences), fence)
        if outlet is not None:
            scene.letters.append(Letter(name, head.holder, GrantNotification(head.attempt, fence), outlet))
        _tell_next(scene, name, head.ttl)
        return Held(fence, head.holder, head.ttl, head.owner, scene.now)
    return Held(fence, None, 0.0, "", 0.0)


def _tell_next(scene: Scene, name: str, ttl_left: float) -> None:
    """Tell whoever is first now; one that cannot be told is dead."""
    while (head := _head(scene, name)) is not None:
        outlet = _way_to(scene, name, head)
        if outlet is not None:
            scene.letters.append(Letter(name, head.holder, FirstNotification(head.attempt, ttl_left), outlet))
            return


def _way_to(scene: Scene, name: str, waiter: Waiting) -> Outlet | None:
    """The open way to a waiter; one that cannot be reached loses its place."""
    outlet = scene.reach(waiter.address, waiter.holder)
    if outlet is None:
        if waiter.address == scene.here:
            scene.execute(sql.LEAVE, (name, waiter.holder))
        else:  # its process is gone, with all who waited there; they may be thousands
            scene.execute(sql.LEAVE_ALL, (name, waiter.address))
    return outlet


def _grant(scene: Scene, claim: Claim, last_fence: int) -> int:
    fence = _next_fence(scene, last_fence, claim.fences)
    row = (claim.name, fence, claim.holder, claim.owner, scene.now, scene.now + claim.ttl)
    scene.execute(sql.GRANT, row)
    return fence


def _next_fence(scene: Scene, last: int, count: int = 1) -> int:
    return max(last + count, scene.wall_us)


def _prolong(scene: Scene, claim: Claim) -> None:
    scene.execute(sql.RENEW, (scene.now + claim.ttl, claim.name, claim.holder, scene.now))


def _join(scene: Scene, claim: Claim, enqueue: Enqueue) -> int:
    """Keep the place, or take one; the ticket."""
    dead_at = scene.now + claim.ttl
    kept = scene.execute(sql.KEEP_PLACE, (enqueue.address, enqueue.attempt, dead_at, claim.name, claim.holder)).rowcount
    if kept:
        ticket: int = scene.execute(sql.TICKET, (claim.name, claim.holder)).fetchone()[0]
        if enqueue.ticket is None or enqueue.ticket >= ticket:
            return ticket
        scene.execute(sql.MOVE_UP, (enqueue.ticket, claim.name, claim.holder))  # the older one counts
        return enqueue.ticket
    # Whoever was passed over while it could not be reached comes back with its ticket, to its old place.
    ticket = _new_ticket(scene, claim.name) if enqueue.ticket is None else enqueue.ticket
    row: tuple[Any, ...] = (
        claim.name,
        ticket,
        claim.holder,
        enqueue.address,
        enqueue.attempt,
        claim.ttl,
        claim.owner,
        claim.fences,
    )
    scene.execute(sql.JOIN, (*row, scene.now, dead_at))
    return ticket


def _new_ticket(scene: Scene, name: str) -> int:
    last: int | None = scene.execute(sql.LAST_TICKET, (name,)).fetchone()[0]
    return max((last or 0) + 1, scene.wall_us)
