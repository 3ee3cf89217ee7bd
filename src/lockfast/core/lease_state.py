"""The state of one lease as its holder sees it, and its local deadline.

    state      can become                because
    HELD       AT_RISK                   a renewal failed
    HELD       LOST, RELEASED            the store lost it or its time ran out; the holder released it
    AT_RISK    HELD                      a renewal succeeded
    AT_RISK    LOST, RELEASED            as for HELD
    LOST       -
    RELEASED   -

A state starts as RELEASED; `begin()` moves it to HELD, once.

Validity counts from the moment the request was sent. The store counts the ttl from the moment it executes the request,
which the client does not know; it comes after sending, so counting from sending is never too late. Two clocks that run
at the right rate still differ a little (`DRIFT`), and the store may round to a millisecond (`MARGIN`).

Rules: a transition that the table lacks does not happen. The local clock alone can lose a lease, so `check()` is right
in the instant in which a stopped process runs again. Each transition that the holder did not cause is reported once.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from lockfast.ports import Runtime

if TYPE_CHECKING:
    from lockfast.core.acquire import Grant


DRIFT = 0.002
MARGIN = 0.002

USEFUL = 0.5
"""The share of its ttl that a notified grant must have left. With less, a request confirms it first."""


def valid_until(sent_at: float, ttl: float) -> float:
    """Return the last moment at which a grant or renewal requested at `sent_at` is certainly valid.

    >>> round(valid_until(100.0, 10.0), 3)
    109.978
    """
    return sent_at + ttl * (1 - DRIFT) - MARGIN


def useful(left: float, ttl: float) -> bool:
    """Whether `left` seconds of a ttl are enough to start with, without confirmation.

    >>> useful(left=7.0, ttl=10.0), useful(left=4.0, ttl=10.0)
    (True, False)
    """
    return left >= ttl * USEFUL


class State(enum.Enum):
    """The state of a lease.

    >>> State.HELD.value
    'held'
    """

    HELD = "held"
    AT_RISK = "at risk"
    LOST = "lost"
    RELEASED = "released"

    __hash__ = object.__hash__  # the hash of Enum is computed in Python, and every lease uses it


HELD, AT_RISK, LOST, RELEASED = State
"""Module globals, because looking up a member of an enum is slow."""
ALIVE = frozenset({HELD, AT_RISK})
TRANSITIONS = {
    HELD: frozenset({AT_RISK, LOST, RELEASED}),
    AT_RISK: frozenset({HELD, LOST, RELEASED}),
    LOST: frozenset[State](),
    RELEASED: frozenset[State](),
}


class LeaseState:
    """Invariant: while the state is alive and the clock is before `valid_until`, the store has the grant.

    `cleared` is True once the store holds nothing of this claim as far as known, so a release need not send a request.
    `caller` is the thread or task that acquired it. `last_fence` is the last fence that the grant reserved. `weight`
    and `limit` are those of the claim, and `slots` those of the grant. `downgrading` is True while the store may
    not have carried out a downgrade.
    `held_since` is when the caller got the lease, measured only for an observer; `sent_at` may be long before it.
    """

    # The values of every new state stand in the class, which makes construction cheap.
    name = holder = owner = reason = ""
    fence = last_fence = reasserted = weight = limit = 0
    slots: tuple[int, ...] = ()
    ttl = sent_at = valid_until = next_renewal = held_since = 0.0
    acknowledged: int | None = None
    ends_at: float | None = None
    state = RELEASED
    cleared = True
    downgrading = False
    on_change: Callable[[State], None] | None = None

    def __init__(self, runtime: Runtime, renews: bool, max_hold: float | None) -> None:
        """Construct it before the claim is sent: every step after the answer delays the caller."""
        self._mutex = runtime.mutex()
        self._max_hold = max_hold
        self.renews = renews
        self.caller: Hashable = runtime.caller()

    def begin(self, grant: Grant, on_change: Callable[[State], None] | None = None) -> None:
        """Start the lease of `grant`. Called once, before another thread sees this object."""
        claim, self.fence, sent_at, until, self.acknowledged, _, last, _, slots = grant
        self.name, self.holder, self.ttl, self.owner, _, _, weight, limit = claim
        if weight:
            self.weight, self.limit, self.slots = weight, limit, slots
        self.last_fence = last or self.fence
        self.sent_at = sent_at
        self.valid_until = until
        if self._max_hold is not None:
            self.ends_at = sent_at + self._max_hold
            self.valid_until = min(until, self.ends_at)
        self.next_renewal = sent_at + self.ttl / 3
        self.on_change = on_change
        self.cleared = False
        self.state = HELD

    def _move(self, state: State, reason: str = "", *, cleared: bool = False) -> bool:
        with self._mutex:
            if state not in TRANSITIONS[self.state]:
                return False
            self.cleared = self.cleared or cleared  # before another thread sees the state
            self.state = state
            self.reason = reason
            callback = self.on_change
            if state is LOST:
                self.on_change = None  # the last change: break the reference cycle with the lease
        if callback is not None:
            callback(state)
        return True

    def check(self, now: float) -> State:
        """Return the state at `now`, by the local clock alone."""
        if now >= self.valid_until and self.state in ALIVE:
            if self.ends_at is not None and now >= self.ends_at:
                self._move(LOST, "max_hold, the longest time it may be held, is over")
            elif self.renews:
                self._move(LOST, "its time ran out before a renewal succeeded")
            else:
                self._move(LOST, "its ttl ran out and it is not renewed (renew=False)")
        return self.state

    def renewal_ttl(self, now: float) -> float | None:
        """Return the ttl to request now; None if `max_hold` allows no more."""
        if self.ends_at is None:
            return self.ttl
        left = self.ends_at - now
        # The last stretch is requested in full: the store may free the lock a little late, never early.
        return None if self.valid_until >= self.ends_at or left <= 0 else min(self.ttl, left * 1.01 + 0.01)

    def change_ttl(self, now: float, ttl: float) -> None:
        """Use another ttl for renewals from now on. Stores never shorten the current grant."""
        self.ttl = ttl
        self.next_renewal = min(self.next_renewal, now + ttl / 3)

    def renewed(self, sent_at: float, ttl: float) -> None:
        """The store extended the grant by a request sent at `sent_at`."""
        until = valid_until(sent_at, ttl)
        with self._mutex:
            # A renewal that is answered after the deadline must not revive the lease: the holder may know of the loss.
            if self.state not in ALIVE:
                return
            self.valid_until = max(self.valid_until, until if self.ends_at is None else min(until, self.ends_at))
            self.next_renewal = sent_at + self.ttl / 3
        if self.state is AT_RISK:
            self._move(HELD)

    def reassert(self, sent_at: float, ttl: float) -> bool:
        """The store had lost the grant and restored it. False if the lease ended in the meantime."""
        self.renewed(sent_at, ttl)
        if self.state not in ALIVE:
            return False
        self.reasserted += 1
        return True

    def renewal_failed(self, retry_at: float) -> None:
        self.next_renewal = retry_at
        if self.state is HELD:
            self._move(AT_RISK, "the last renewal got no answer")

    def lose(self, reason: str) -> None:
        """The store reports that another holder, or nobody, has the lock."""
        self._move(LOST, reason, cleared=True)

    def release(self, *, handed_off: bool = False) -> bool:
        """The holder ends the lease; True if it was alive. This is not reported to callbacks.

        `handed_off`: the next holder uses the same holder id, so this side must never ask the store to free it.
        """
        with self._mutex:
            if self.state not in ALIVE:
                return False
            if handed_off:
                self.cleared = True  # before another thread sees the state
            self.state = RELEASED
            self.on_change = None  # break the reference cycle with the lease
            return True
