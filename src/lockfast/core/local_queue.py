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
from lockfast.core.lease_state import ALIVE, HELD, Holding
from lockfast.core.validity import valid_until
from lockfast.errors import closed_error
from lockfast.ports import Runtime
from lockfast.values import Ask

SPAN = 0.05
"""Seconds for which a tenancy is passed on."""
PATIENCE = 0.1
LONG_PATIENCE = 1.0
"""Seconds that one waits in a seat before it asks the store itself: the longer where seats have been served of late."""
FEWEST_FENCES = 16
MOST_FENCES = 8_192
"""A block is about twice what the last tenancy used. A fence is a microsecond of the store's clock: blocks must not run
ahead of it by more than a store takes to start anew, since one that has forgotten the last fence goes on from there."""


class Wish(NamedTuple):
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
class Seat:
    """One who waits in a room; `grant` is set when it is passed the lock, and None again once it has taken that up."""

    __slots__ = ("grant", "patient_until", "sat_down_at", "waker", "wish")

    def __init__(self, runtime: Runtime, wish: Wish, now: float, patience: float) -> None:
        self.wish = wish
        self.sat_down_at = now
        self.patient_until = now + patience
        self.grant: Grant | None = None
        self.waker = runtime.waker()


class Tenancy:
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
        "ask",
        "passes",
        "room",
        "seat",
        "span_ends",
    )

    def __init__(self, room: Room, ask: Ask, grant: Grant, fences: int, now: float) -> None:
        self.room = room
        self.ask = ask
        self.seat: Seat | None = None
        self._granted_at = now
        self.span_ends = now + SPAN
        self.passes = 0
        self._acknowledged = grant.acknowledged
        self._age = now - grant.asked_at
        self._lasts = valid_until(0.0, ask.ttl)  # from whenever a lease was asked for
        self._until = grant.valid_until
        self._last = grant.fence
        self._used = grant.fence - fences + 1

    def first(self, grant: Grant) -> Grant:
        """For the one who asked."""
        until = grant.asked_at + self._lasts
        return grant._replace(ask=self.ask, fence=self._used, valid_until=until, last=self._last, tenancy=self)

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

    def next(self, seat: Seat, now: float) -> Grant:
        """For the one in `seat`: as young now as the first was when it was granted."""
        used = self._used = self._used + 1
        self.passes += 1
        ask, owner, asked_at = self.ask, seat.wish.owner, now - self._age
        until = asked_at + self._lasts
        if until > self._until:
            until = self._until
        if owner != ask.owner:
            ask = ask._replace(owner=owner)
        return tuple.__new__(Grant, (ask, used, asked_at, until, self._acknowledged, False, self._last, self))

    def end(self) -> None:
        """It is about to be given back, is lost or exported: nobody can be passed it any more."""
        self.room.vacate(self)


class Room:
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
        "_mutex",
        "_productive",
        "_seats",
        "_span_began",
        "_spares_until",
        "_tenancy",
        "askers",
        "closed",
        "crowded",
        "home",
        "latest",
    )

    def __init__(self, home: Passing, runtime: Runtime) -> None:
        self.home = home
        self._mutex = runtime.mutex()
        self._seats: deque[Seat] = deque()
        self._leaders: dict[str, bool] = {}
        self._tenancy: Tenancy | None = None
        self._span_began = -math.inf
        self._spares_until = -math.inf
        self._fences = FEWEST_FENCES
        self._productive = False  # whether the last tenancy was passed on at all
        self.askers: dict[str, None] = {}
        self.closed = False
        self.crowded = False
        self.latest: Holding | None = None

    def enter(self, runtime: Runtime, wish: Wish) -> Seat | Lead | None:
        """A seat to wait in, or leave to ask for a tenancy; None for who is alone and asks for a lease."""
        if not (self.askers or self._leaders or self._tenancy or self._productive):
            latest = self.latest
            if latest is None or latest.state not in ALIVE:
                return None  # as nearly always
        now = runtime.now()
        with self._mutex:
            if self.closed:
                raise closed_error()
            if not self._seats and not self._leads(now):
                return self._lead(runtime, now)
            seat = Seat(runtime, wish, now, LONG_PATIENCE if self._serves else PATIENCE)
            self._seats.append(seat)
            return seat

    @property
    def _serves(self) -> bool:
        """Whether seats have been served of late."""
        return self._productive or (self._tenancy is not None and self._tenancy.passes > 0)

    def _leads(self, now: float) -> bool:
        """Whether somebody may yet pass the lock on."""
        return bool(self._leaders) or (self._tenancy is not None and self._tenancy.passable(now))

    def _lead(self, runtime: Runtime, now: float) -> Lead:
        spares = now < self._spares_until
        lead = Lead(runtime.new_holder(), FEWEST_FENCES if self._leaders or spares else self._fences)
        self._leaders[lead.holder] = spares
        return lead

    def look(self, runtime: Runtime, seat: Seat, now: float) -> Grant | Lead | None:
        """What became of a seat whose waker called or whose time is up: a grant; leave to ask for a tenancy; or None to
        wait on."""
        with self._mutex:
            if self.closed:
                raise closed_error()
            if seat.grant is not None:
                return self._taken(seat)
            if self._serves:
                seat.patient_until = seat.sat_down_at + LONG_PATIENCE
            if now < seat.patient_until and self._leads(now):
                return None
            self._seats.remove(seat)
            return self._lead(runtime, now)

    def _taken(self, seat: Seat) -> Grant | None:
        grant, seat.grant = seat.grant, None
        if grant is not None and grant.tenancy is not None:
            grant.tenancy.seat = None
        return grant

    def leave(self, seat: Seat) -> Grant | None:
        """Get up; the grant that came all the same, if one did."""
        with self._mutex:
            if seat in self._seats:
                self._seats.remove(seat)
            grant = self._taken(seat)
            head = self._first_to_ask()  # it may have been us who were called
        if head is not None:
            head.waker.wake()
        return grant

    def _first_to_ask(self) -> Seat | None:
        """Who is to be called when nobody is left who could pass the lock on."""
        return self._seats[0] if self._seats and not self._leaders and self._tenancy is None else None

    def granted(self, tenancy: Tenancy, queued: bool, now: float) -> None:
        """One who led has a tenancy. Having waited for it, others may wait behind it: then not every one of ours is
        passed on, but only the first within two spans; and until those are over, few fences are asked for."""
        with self._mutex:
            spares = self._leaders.pop(tenancy.ask.holder, False)
            self._tenancy = tenancy
            if queued and (spares or now - self._span_began < 2 * SPAN):
                tenancy.span_ends = now
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

    def vacate(self, tenancy: Tenancy) -> None:
        """`tenancy` has ended: if nobody else leads, the first in the seats is to ask the store."""
        with self._mutex:
            if self._tenancy is not tenancy:
                return
            self._tenancy = None
            if tenancy.spanned:
                self._productive = tenancy.passes > 0
                known = self._fences if tenancy.used_up else FEWEST_FENCES
                self._fences = min(MOST_FENCES, max(known, 2 * tenancy.passes))
            head = self._first_to_ask()
        if head is not None:
            head.waker.wake()

    def pass_on(self, tenancy: Tenancy, holding: Holding | None, now: float) -> bool:
        """Hand `tenancy` to the first in the seats; with `holding`, only if that is alive and well until now. False
        when it has to go back to the store."""
        seats = self._seats
        if not seats:
            return False
        ttl = tenancy.ask.ttl
        with self._mutex:
            if not seats or self.closed or not tenancy.passable(now) or seats[0].wish.ttl != ttl:
                return False
            if holding is not None:
                if holding.ttl != ttl or holding.state is not HELD or now >= holding.valid_until:
                    return False
                if not holding.give_back(to_another=True):
                    return False
            seat = seats.popleft()
            seat.grant = tenancy.next(seat, now)
            tenancy.seat = seat
        seat.waker.wake()
        return True

    def close(self) -> Ask | None:
        """Send away who waits; the tenancy that was on its way to one of them and so is to be given back."""
        with self._mutex:
            self.closed = True
            waiting = list(self._seats)
            self._seats.clear()
            tenancy, revoked = self._tenancy, None
            if tenancy is not None and tenancy.seat is not None:
                waiting.append(tenancy.seat)
                self._taken(tenancy.seat)
                revoked = tenancy.ask
        for seat in waiting:
            seat.waker.wake()
        return revoked


class Passing:
    """The rooms of one connection; a room lives as long as someone has a lock or a lease of it."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._mutex = runtime.mutex()
        self._rooms: WeakValueDictionary[str, Room] = WeakValueDictionary()
        self._closed = False

    def room(self, name: str) -> Room:
        with self._mutex:
            room = self._rooms.get(name)
            if room is None:
                self._rooms[name] = room = Room(self, self._runtime)
                room.closed = self._closed
            return room

    def close(self) -> list[Ask]:
        """Close all rooms; what has to be given back to the store because nobody has taken it up."""
        with self._mutex:
            self._closed = True
            rooms = list(self._rooms.values())
        return [ask for ask in [room.close() for room in rooms] if ask is not None]
