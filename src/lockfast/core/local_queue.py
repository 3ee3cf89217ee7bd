"""Rooms: who asks, who waits in a seat, and which tenancy is passed on, for one name on one connection.

Here is the shared state of what `passing.py` describes, and the rules that it keeps at every step; a room never asks
the store. Threads come at the same time, so each change is made under the room's mutex, and wakers are called outside
it; what is outside it too (`askers`, `latest`, `crowded`) only says which way is likely to be the shorter.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple, final
from weakref import WeakValueDictionary

from lockfast.core.acquire import Grant
from lockfast.core.lease_state import ALIVE, HELD, LeaseState
from lockfast.core.validity import valid_until
from lockfast.errors import closed_error
from lockfast.ports import Runtime
from lockfast.values import Claim

SPAN = 0.05
"""Seconds for which a tenancy is passed on."""
PATIENCE = 0.1
LONG_PATIENCE = 1.0
"""Seconds that one waits in a seat before it asks the store itself: the longer where seats have been served of late."""
FEWEST_FENCES = 16
MOST_FENCES = 8_192
"""A block is about twice what the last tenancy used. A fence is a microsecond of the store's clock: blocks must not run
ahead of it by more than a store takes to start anew, since one that has forgotten the last fence goes on from there."""


class ClaimTerms(NamedTuple):
    """What is wanted, before anybody asks a store for it: who is passed a lock never does, and needs no holder id."""

    name: str
    ttl: float
    owner: str


@final
class Lead(NamedTuple):
    """Leave to ask the store for a tenancy, under this holder id and with so many fences."""

    holder: str
    fences: int


@final
class LocalWaiter:
    """One who waits in a room; `grant` is set when it is passed the lock, and None again once it has taken that up."""

    __slots__ = ("grant", "patient_until", "sat_down_at", "terms", "waker")

    def __init__(self, runtime: Runtime, terms: ClaimTerms, now: float, patience: float) -> None:
        self.terms = terms
        self.sat_down_at = now
        self.patient_until = now + patience
        self.grant: Grant | None = None
        self.waker = runtime.waker()


class SharedGrant:
    """One grant of the store, for several leases in a row. Invariants: the fences above `used` up to `last` are
    nobody's yet; at most one lease of it is alive; `seat` is whom it was passed to and who has not noticed yet."""

    __slots__ = (
        "_acknowledged",
        "_age",
        "_granted_at",
        "_last",
        "_lasts",
        "_until",
        "_used",
        "claim",
        "local_queue",
        "local_waiter",
        "passes",
        "span_ends",
    )

    def __init__(self, local_queue: LocalQueue, claim: Claim, grant: Grant, fences: int, now: float) -> None:
        self.local_queue = local_queue
        self.claim = claim
        self.local_waiter: LocalWaiter | None = None
        self._granted_at = now
        self.span_ends = now + SPAN
        self.passes = 0
        self._acknowledged = grant.acknowledged
        self._age = now - grant.sent_at
        self._lasts = valid_until(0.0, claim.ttl)  # from whenever a lease was asked for
        self._until = grant.valid_until
        self._last = grant.fence
        self._used = grant.fence - fences + 1

    def first(self, grant: Grant) -> Grant:
        """For the one who asked."""
        until = grant.sent_at + self._lasts
        return grant._replace(claim=self.claim, fence=self._used, valid_until=until, last=self._last, shared_grant=self)

    @property
    def spanned(self) -> bool:
        """Whether it was ever allowed to be passed on."""
        return self.span_ends > self._granted_at

    @property
    def used_up(self) -> bool:
        """Whether more fences might have been of use."""
        return self._used == self._last

    def passable(self, now: float) -> bool:
        return now < self.span_ends and self._used < self._last

    def next(self, local_waiter: LocalWaiter, now: float) -> Grant:
        """For the one in `seat`: as young now as the first was when it was granted."""
        used = self._used = self._used + 1
        self.passes += 1
        claim, owner, sent_at = self.claim, local_waiter.terms.owner, now - self._age
        until = sent_at + self._lasts
        if until > self._until:
            until = self._until
        if owner != claim.owner:
            claim = claim._replace(owner=owner)
        return tuple.__new__(Grant, (claim, used, sent_at, until, self._acknowledged, False, self._last, self))

    def end(self) -> None:
        """It is about to be given back, is lost or exported: nobody can be passed it any more."""
        self.local_queue.vacate(self)


class LocalQueue:
    """One name on one connection. Invariants: a seat in `_seats` has no grant; nobody sits in a room that is closed;
    while somebody sits and nobody leads, the first in the seats has been called, or its patience ends.

    `_leaders` are those who ask the store for a tenancy just now, each with whether it asks for few fences because the
    tenancy is not to be passed on; `askers` are those who ask it for a lease alone, and `latest` is the lease that was
    last granted here: whoever comes while there is any of them has company. `crowded` says that who came last had to
    wait for the store's grant."""

    __slots__ = (
        "__weakref__",
        "_fences",
        "_leaders",
        "_local_waiters",
        "_mutex",
        "_productive",
        "_shared_grant",
        "_span_began",
        "_spares_until",
        "askers",
        "closed",
        "crowded",
        "home",
        "latest",
    )

    def __init__(self, home: Passing, runtime: Runtime) -> None:
        self.home = home
        self._mutex = runtime.mutex()
        self._local_waiters: deque[LocalWaiter] = deque()
        self._leaders: dict[str, bool] = {}
        self._shared_grant: SharedGrant | None = None
        self._span_began = -math.inf
        self._spares_until = -math.inf
        self._fences = FEWEST_FENCES
        self._productive = False  # whether the last tenancy was passed on at all
        self.askers: dict[str, None] = {}
        self.closed = False
        self.crowded = False
        self.latest: LeaseState | None = None

    def enter(self, runtime: Runtime, terms: ClaimTerms) -> LocalWaiter | Lead | None:
        """A seat to wait in, or leave to ask for a tenancy; None for who is alone and asks for a lease."""
        if not (self.askers or self._leaders or self._shared_grant or self._productive):
            latest = self.latest
            if latest is None or latest.state not in ALIVE:
                return None  # as nearly always
        now = runtime.now()
        with self._mutex:
            if self.closed:
                raise closed_error()
            if not self._local_waiters and not self._leads(now):
                return self._lead(runtime, now)
            local_waiter = LocalWaiter(runtime, terms, now, LONG_PATIENCE if self._serves else PATIENCE)
            self._local_waiters.append(local_waiter)
            return local_waiter

    @property
    def _serves(self) -> bool:
        """Whether seats have been served of late."""
        return self._productive or (self._shared_grant is not None and self._shared_grant.passes > 0)

    def _leads(self, now: float) -> bool:
        """Whether somebody may yet pass the lock on."""
        return bool(self._leaders) or (self._shared_grant is not None and self._shared_grant.passable(now))

    def _lead(self, runtime: Runtime, now: float) -> Lead:
        spares = now < self._spares_until
        lead = Lead(runtime.new_holder_id(), FEWEST_FENCES if self._leaders or spares else self._fences)
        self._leaders[lead.holder] = spares
        return lead

    def look(self, runtime: Runtime, local_waiter: LocalWaiter, now: float) -> Grant | Lead | None:
        """What became of a seat whose waker called or whose time is up: a grant; leave to ask for a tenancy; or None to
        wait on."""
        with self._mutex:
            if self.closed:
                raise closed_error()
            if local_waiter.grant is not None:
                return self._taken(local_waiter)
            if self._serves:
                local_waiter.patient_until = local_waiter.sat_down_at + LONG_PATIENCE
            if now < local_waiter.patient_until and self._leads(now):
                return None
            self._local_waiters.remove(local_waiter)
            return self._lead(runtime, now)

    def _taken(self, local_waiter: LocalWaiter) -> Grant | None:
        grant, local_waiter.grant = local_waiter.grant, None
        if grant is not None and grant.shared_grant is not None:
            grant.shared_grant.local_waiter = None
        return grant

    def leave(self, local_waiter: LocalWaiter) -> Grant | None:
        """Get up; the grant that came all the same, if one did."""
        with self._mutex:
            if local_waiter in self._local_waiters:
                self._local_waiters.remove(local_waiter)
            grant = self._taken(local_waiter)
            head = self._first_to_ask()  # it may have been us who were called
        if head is not None:
            head.waker.wake()
        return grant

    def _first_to_ask(self) -> LocalWaiter | None:
        """Who is to be called when nobody is left who could pass the lock on."""
        return (
            self._local_waiters[0] if self._local_waiters and not self._leaders and self._shared_grant is None else None
        )

    def granted(self, shared_grant: SharedGrant, queued: bool, now: float) -> None:
        """One who led has a tenancy. Having waited for it, others may wait behind it: then not every one of ours is
        passed on, but only the first within two spans; and until those are over, few fences are asked for."""
        with self._mutex:
            spares = self._leaders.pop(shared_grant.claim.holder, False)
            self._shared_grant = shared_grant
            if queued and (spares or now - self._span_began < 2 * SPAN):
                shared_grant.span_ends = now
                self._spares_until = self._span_began + 2 * SPAN
            else:
                self._spares_until = -math.inf
                self._span_began = self._span_began if spares else now

    def gave_up(self, holder: str) -> None:
        """One who led has no tenancy after all."""
        with self._mutex:
            self._leaders.pop(holder, None)
            head = self._first_to_ask()
        if head is not None:
            head.waker.wake()

    def vacate(self, shared_grant: SharedGrant) -> None:
        """`tenancy` has ended: if nobody else leads, the first in the seats is to ask the store."""
        with self._mutex:
            if self._shared_grant is not shared_grant:
                return
            self._shared_grant = None
            if shared_grant.spanned:
                self._productive = shared_grant.passes > 0
                known = self._fences if shared_grant.used_up else FEWEST_FENCES
                self._fences = min(MOST_FENCES, max(known, 2 * shared_grant.passes))
            head = self._first_to_ask()
        if head is not None:
            head.waker.wake()

    def pass_on(self, shared_grant: SharedGrant, lease_state: LeaseState | None, now: float) -> bool:
        """Hand `tenancy` to the first in the seats; with `holding`, only if that is alive and well until now. False
        when it has to go back to the store."""
        local_waiters = self._local_waiters
        if not local_waiters:
            return False
        ttl = shared_grant.claim.ttl
        with self._mutex:
            if not local_waiters or self.closed or not shared_grant.passable(now) or local_waiters[0].terms.ttl != ttl:
                return False
            if lease_state is not None:
                if lease_state.ttl != ttl or lease_state.state is not HELD or now >= lease_state.valid_until:
                    return False
                if not lease_state.give_back(to_another=True):
                    return False
            local_waiter = local_waiters.popleft()
            local_waiter.grant = shared_grant.next(local_waiter, now)
            shared_grant.local_waiter = local_waiter
        local_waiter.waker.wake()
        return True

    def close(self) -> Claim | None:
        """Send away who waits; the tenancy that was on its way to one of them and so is to be given back."""
        with self._mutex:
            self.closed = True
            waiting = list(self._local_waiters)
            self._local_waiters.clear()
            shared_grant, revoked = self._shared_grant, None
            if shared_grant is not None and shared_grant.local_waiter is not None:
                waiting.append(shared_grant.local_waiter)
                self._taken(shared_grant.local_waiter)
                revoked = shared_grant.claim
        for local_waiter in waiting:
            local_waiter.waker.wake()
        return revoked


class Passing:
    """The rooms of one connection; a room lives as long as someone has a lock or a lease of it."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._mutex = runtime.mutex()
        self._rooms: WeakValueDictionary[str, LocalQueue] = WeakValueDictionary()
        self._closed = False

    def local_queue(self, name: str) -> LocalQueue:
        with self._mutex:
            local_queue = self._rooms.get(name)
            if local_queue is None:
                self._rooms[name] = local_queue = LocalQueue(self, self._runtime)
                local_queue.closed = self._closed
            return local_queue

    def close(self) -> list[Claim]:
        """Close all rooms; what has to be given back to the store because nobody has taken it up."""
        with self._mutex:
            self._closed = True
            rooms = list(self._rooms.values())
        return [claim for claim in [local_queue.close() for local_queue in rooms] if claim is not None]
