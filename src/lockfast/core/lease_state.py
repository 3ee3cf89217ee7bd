"""One lease as its holder sees it: a small state machine, and the local deadline.

    state      may become               by
    HELD       AT_RISK                  a renewal failed
    HELD       LOST, RELEASED           found not ours or time ran out; given back
    AT_RISK    HELD                     a renewal got through
    AT_RISK    LOST, RELEASED
    LOST       —
    RELEASED   —

One begins as released, since nothing is held; what is granted to it, once, makes it held.

Rules kept here: a move that the table does not have is not made; the clock alone suffices to lose a lease, so
`check` is right in the very instant a stopped process runs again; each change that is not the holder's own doing is
told once.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable

from lockfast.core.acquire import Grant
from lockfast.core.validity import valid_until
from lockfast.ports import Runtime


class State(enum.Enum):
    """What a lease is worth.

    >>> State.HELD.value
    'held'
    """

    HELD = "held"
    AT_RISK = "at risk"
    LOST = "lost"
    RELEASED = "released"

    __hash__ = object.__hash__  # an enum's own is computed in Python, and a lease asks often


HELD, AT_RISK, LOST, RELEASED = State
"""By names of their own, since Python looks up a member of an enum slowly, and a lease asks often."""
ALIVE = frozenset({HELD, AT_RISK})
MOVES = {
    HELD: frozenset({AT_RISK, LOST, RELEASED}),
    AT_RISK: frozenset({HELD, LOST, RELEASED}),
    LOST: frozenset[State](),
    RELEASED: frozenset[State](),
}


class LeaseState:
    """Invariant: while the state is alive and the clock is before `valid_until`, the store has our grant.

    `settled` is true once the store holds nothing of ours as far as we know, so a release need not ask again.
    `caller` is the thread or task that got it.
    """

    __slots__ = (
        "_max_hold",
        "_mutex",
        "acknowledged",
        "caller",
        "ends_at",
        "fence",
        "holder",
        "last_fence",
        "name",
        "next_renewal",
        "on_change",
        "owner",
        "reason",
        "reasserted",
        "renewing",
        "settled",
        "state",
        "ttl",
        "valid_until",
    )

    # Set by `begin`, and not before: until then nobody uses a holding.
    name: str
    holder: str
    owner: str
    fence: int
    last_fence: int
    ttl: float
    valid_until: float
    next_renewal: float
    acknowledged: int | None

    def __init__(self, runtime: Runtime, renewing: bool, max_hold: float | None) -> None:
        """Of nothing yet: it is made before a grant is asked for, so that `begin` is soon done."""
        self._mutex = runtime.mutex()
        self._max_hold = max_hold
        self.renewing = renewing
        self.reason = ""
        self.reasserted = 0
        self.ends_at: float | None = None
        self.state = RELEASED
        self.settled = True
        self.caller: Hashable = runtime.caller()
        self.on_change: Callable[[State], None] | None = None

    def begin(self, grant: Grant, on_change: Callable[[State], None] | None = None) -> None:
        """The store granted it. Called once, before anybody else knows of this holding."""
        claim, self.fence, sent_at, until, self.acknowledged, _, last, _ = grant
        self.name, self.holder, self.ttl, self.owner, _, _ = claim
        self.last_fence = last or self.fence
        self.valid_until = until
        if self._max_hold is not None:
            self.ends_at = sent_at + self._max_hold
            self.valid_until = min(until, self.ends_at)
        self.next_renewal = sent_at + self.ttl / 3
        self.on_change = on_change
        self.settled = False
        self.state = HELD

    def _move(self, state: State, reason: str = "", *, settled: bool = False) -> bool:
        with self._mutex:
            if state not in MOVES[self.state]:
                return False
            self.settled = self.settled or settled  # before anybody sees the state or is told of it
            self.state = state
            self.reason = reason
            tell = self.on_change
            if state is LOST:
                self.on_change = None  # the last change: let go of the lease, so that nothing is left to collect
        if tell is not None:
            tell(state)
        return True

    def check(self, now: float) -> State:
        """The state at `now`, by the local clock alone."""
        if now >= self.valid_until and self.state in ALIVE:
            if self.ends_at is not None and now >= self.ends_at:
                self._move(LOST, "its longest hold (max_hold) is over")
            elif self.renewing:
                self._move(LOST, "its time ran out before a renewal got through")
            else:
                self._move(LOST, "its ttl ran out and it is not renewed (renew=False)")
        return self.state

    def renewal_ttl(self, now: float) -> float | None:
        """The ttl to ask for now; None when the longest hold allows no more."""
        if self.ends_at is None:
            return self.ttl
        left = self.ends_at - now
        # The last stretch is asked for in full: the store may free the lock a little late, never early.
        return None if self.valid_until >= self.ends_at or left <= 0 else min(self.ttl, left * 1.01 + 0.01)

    def change_ttl(self, now: float, ttl: float) -> None:
        """From now on renew by another ttl. What was granted already stays: stores never shorten."""
        self.ttl = ttl
        self.next_renewal = min(self.next_renewal, now + ttl / 3)

    def renewed(self, sent_at: float, ttl: float) -> None:
        """The store prolonged the grant by a request sent at `asked_at`."""
        until = valid_until(sent_at, ttl)
        with self._mutex:
            # A renewal that comes back after the deadline passed must not bring the lease back: its holder
            # may have been told already that it is lost.
            if self.state not in ALIVE:
                return
            self.valid_until = max(self.valid_until, until if self.ends_at is None else min(until, self.ends_at))
            self.next_renewal = sent_at + self.ttl / 3
        if self.state is AT_RISK:
            self._move(HELD)

    def reassert(self, sent_at: float, ttl: float) -> bool:
        """The store had forgotten the grant, and has it again by a request sent at `asked_at`; False when the lease
        had ended by then."""
        self.renewed(sent_at, ttl)
        if self.state not in ALIVE:
            return False
        self.reasserted += 1
        return True

    def failing(self, retry_at: float) -> None:
        """A renewal got no answer; try again at `retry_at`."""
        self.next_renewal = retry_at
        if self.state is HELD:
            self._move(AT_RISK, "the last renewal got no answer")

    def refused(self, reason: str) -> None:
        """The store says that the grant is not ours."""
        self._move(LOST, reason, settled=True)

    def give_back(self, *, to_another: bool = False) -> bool:
        """The holder is done with it; True when it was alive until now. Its doing, so nobody is told. `to_another`: who
        has it from now on has it under the same holder id, so this side is never to ask the store to free it."""
        with self._mutex:
            if self.state not in ALIVE:
                return False
            if to_another:
                self.settled = True  # before anybody sees the state
            self.state = RELEASED
            self.on_change = None  # let go of the lease, so that nothing is left to collect
            return True
