"""Pure decisions of a quorum: majorities, split votes, fences, remaining validity and merged views.

Mutual exclusion: any two majorities share a member, and a member grants a lock to one writer or to readers. So a
majority that granted a read excludes every majority for a writer.

Fences: a fence is used only when a majority has granted it or a higher one. The next majority shares a member with that
one. A member grants only fences above its last, and the new fence is the highest granted, so fences increase. Members
normally grant the same fence (see `FenceFloor`). If they do not, the highest is first written to the others. Readers
that acquire at the same time may meet at the same fence: one member can have it from each of them.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from lockfast.core.lease_state import valid_until
from lockfast.values import Claim, HolderInfo, LockInfo, Mode

LEAD_US = 5_000  # between the members' clocks and a proposed fence: usually more than a request needs to arrive
MIN_VALIDITY = 0.25  # share of the ttl that must be left when the last vote has been counted


def majority(count: int) -> int:
    """Return the smallest number of members that is more than half.

    >>> [majority(count) for count in (1, 2, 3, 4, 5)]
    [1, 2, 2, 3, 3]
    """
    return count // 2 + 1


def has_enough_validity(now: float, sent_at: float, ttl: float) -> bool:
    """Tell whether a grant first requested at `sent_at` is valid for long enough to be used.

    >>> has_enough_validity(101.0, sent_at=100.0, ttl=10.0), has_enough_validity(108.0, sent_at=100.0, ttl=10.0)
    (True, False)
    """
    return valid_until(sent_at, ttl) - now >= ttl * MIN_VALIDITY


class Standing(enum.Enum):
    """Position of a contender that has some votes but no majority."""

    TAKEN = "another contender has a majority"
    AHEAD = "split vote: no other party has more votes"
    BEHIND = "split vote: another party has more votes, or as many and comes first"


def standing(views: Iterable[LockInfo], claim: Claim, count: int) -> Standing:
    """Rank a claim among the contenders for the members' votes. In a split vote exactly one party is AHEAD.

    All readers are one party, because they do not exclude each other; every other claim is its own. With equal votes
    the greater holder id wins, and readers yield.

    >>> a, b, reader = HolderInfo("a"), HolderInfo("b"), HolderInfo("r", mode=Mode.READ)
    >>> def rank(claim, *holders):
    ...     return standing([LockInfo("x", (one,)) for one in holders], claim, 3).name
    >>> rank(Claim("x", "b", 30.0, ""), a, a, b), rank(Claim("x", "a", 30.0, ""), a, b, reader)
    ('TAKEN', 'BEHIND')
    >>> rank(Claim("x", "other reader", 30.0, "", weight=1), a, reader, reader)
    'AHEAD'
    """
    votes: Counter[tuple[bool, str]] = Counter()
    excluding: Counter[str] = Counter()
    for view in views:
        votes.update({_party(one.mode, one.holder) for one in view.holders})
        for one in view.holders:
            if one.holder != claim.holder and not one.mode is claim.mode is Mode.READ:
                excluding[one.holder] += 1
    if max(excluding.values(), default=0) >= majority(count):
        return Standing.TAKEN
    mine = _party(claim.mode, claim.holder)
    behind = any((number, party) > (votes[mine], mine) for party, number in votes.items())
    return Standing.BEHIND if behind else Standing.AHEAD


def _party(mode: Mode, holder: str) -> tuple[bool, str]:
    return (True, holder) if mode is Mode.EXCLUSIVE else (False, mode.value)


def choose_fence(fences: Mapping[int, int], count: int, before: int = 0) -> tuple[int, list[int]]:
    """Return the fence of a majority's grants, and the members whose fence must be raised before it is used.

    `before` is the fence that an earlier request of the same claim got. It stays if a majority still has it. Otherwise
    another client may have held the lock in between, and only a higher fence is safe.

    >>> choose_fence({0: 7, 1: 7, 2: 5}, count=3), choose_fence({0: 7, 1: 6}, count=3)
    ((7, []), (7, [1]))
    >>> choose_fence({0: 7, 1: 7, 2: 9}, count=3, before=7), choose_fence({0: 7, 1: 9}, count=3, before=7)
    ((7, []), (9, [0]))
    """
    if before and sum(fence == before for fence in fences.values()) >= majority(count):
        return before, []
    highest = max(fences.values())
    lower = [member for member, fence in fences.items() if fence < highest]
    return highest, lower if len(fences) - len(lower) < majority(count) else []


def time_to_majority(ttls: Iterable[float | None], missing: int) -> float | None:
    """Return the seconds until `missing` more members are free, by their holders' ttls; None if that is unknown.

    >>> time_to_majority([3.0, 1.0, None], missing=2), time_to_majority([None, None, 1.0], missing=2)
    (3.0, None)
    """
    known = sorted(ttl for ttl in ttls if ttl is not None)
    return known[missing - 1] if 0 < missing <= len(known) else None


def merge_views(name: str, views: Sequence[LockInfo], needed: int) -> LockInfo:
    """Combine the members' views of one lock. Only holders that a majority reports are shown.

    >>> grants = HolderInfo("a", ttl_left=2.0), HolderInfo("a", ttl_left=1.0), HolderInfo("b")
    >>> merge_views("x", [LockInfo("x", (grant,)) for grant in grants], needed=2).holders[0].ttl_left
    1.0
    """
    longest = max(views, key=lambda view: view.waiting)
    votes: dict[str, list[HolderInfo]] = {}
    for view in views:
        for one in view.holders:
            votes.setdefault(one.holder, []).append(one)
    holders = [_merge_votes(grants, needed) for grants in votes.values() if len(grants) >= needed]
    holders.sort(key=lambda one: one.fence or 0)
    fence = _reached((view.fence for view in views), needed)
    return LockInfo(name, tuple(holders), fence, longest.waiters, longest.waiting)


def _merge_votes(grants: list[HolderInfo], needed: int) -> HolderInfo:
    """Combine the grants of one holder. It is exclusive while a majority of them is: a downgrade may be under way."""
    grants.sort(key=lambda one: -(one.ttl_left or 1e18))
    deciding = grants[needed - 1]  # the majority ends with this vote
    held_for = max((one.held_for for one in grants if one.held_for is not None), default=None)
    shared = [one.mode for one in grants if one.mode is not Mode.EXCLUSIVE]
    mode = shared[0] if len(grants) - len(shared) < needed else Mode.EXCLUSIVE
    return deciding._replace(fence=_reached((one.fence for one in grants), needed), held_for=held_for, mode=mode)


def _reached(fences: Iterable[int | None], needed: int) -> int | None:
    """Return the highest fence that a majority has reached; None if no fence is known."""
    known = sorted((fence for fence in fences if fence is not None), reverse=True)
    return known[min(needed, len(known)) - 1] if known else None


class FenceFloor:
    """Proposes a fence slightly ahead of all members' clocks, so that they grant the same one in one round trip.

    It follows the members' clocks, as they report them and as the fences show on which they disagree. The client's own
    clock only measures intervals.
    """

    def __init__(self) -> None:
        self._ahead_us: int | None = None

    def propose(self, now: float) -> int:
        """Return the fence to propose at `now`; 0 while no member's clock is known."""
        return 0 if self._ahead_us is None else int(now * 1e6) + self._ahead_us + LEAD_US

    def observe_clock(self, now: float, clock: float | None) -> None:
        """Record that a member's clock showed `clock` seconds at `now`."""
        if clock is not None:
            ahead_us = int((clock - now) * 1e6)
            self._ahead_us = ahead_us if self._ahead_us is None else max(self._ahead_us, ahead_us)

    def observe_fences(self, sent_at: float, fences: Iterable[int]) -> None:
        """Record the fences that the members granted to a request sent at `sent_at`."""
        found = set(fences)
        if len(found) > 1:
            self._ahead_us = max(found) - int(sent_at * 1e6)
