"""What votes mean: majorities, fences, split votes and how much a grant is worth. Nothing here asks anyone.

Why a majority's grants exclude one another: any two majorities share a node, and a node grants to one at a time.

Why fences increase across majorities: a fence is used only once a majority of the nodes holds it as their last. The
next grant's majority shares a node with that one, which gives more than its last; and the next fence is the largest
given. That nodes agree at once is the rule (see `Floor`); else the largest is written to those that have less before
it is used.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from lockfast.core.validity import valid_until

LEAD_US = 5_000
"""How far ahead of the nodes' clocks a fence is proposed: more than a request takes to arrive, as a rule."""
LEAST_WORTH = 0.25
"""The share of its ttl that a grant must still be good for when the last vote has been counted."""


def majority(count: int) -> int:
    """How many of `count` nodes are more than half.

    >>> [majority(count) for count in (1, 2, 3, 4, 5)]
    [1, 2, 2, 3, 3]
    """
    return count // 2 + 1


def is_worth_it(now: float, sent_at: float, ttl: float) -> bool:
    """Whether enough is left of a grant whose first request was sent at `asked_at`.

    >>> is_worth_it(now=101.0, asked_at=100.0, ttl=10.0), is_worth_it(now=108.0, asked_at=100.0, ttl=10.0)
    (True, False)
    """
    return valid_until(sent_at, ttl) - now >= ttl * LEAST_WORTH


class Standing(enum.Enum):
    """Where a contender stands who has some votes, but no majority."""

    TAKEN = "another has a majority"
    AHEAD = "nobody has a majority, and nobody more votes than we"
    BEHIND = "nobody has a majority, and another has more votes, or as many and the better id"


def standing(holders: Iterable[str | None], me: str, count: int) -> Standing:
    """Who of several contenders should give way: all but one, and all of them judge alike.

    >>> standing(["a", "a", "b"], "b", 3).name, standing(["a", "b", None], "a", 3).name
    ('TAKEN', 'BEHIND')
    """
    votes = Counter(holder for holder in holders if holder is not None)
    mine = votes.pop(me, 0)
    if not votes:
        return Standing.AHEAD
    most, best = max((number, holder) for holder, number in votes.items())
    if most >= majority(count):
        return Standing.TAKEN
    return Standing.BEHIND if (most, best) > (mine, me) else Standing.AHEAD


def highest(fences: Mapping[int, int], count: int, before: int = 0) -> tuple[int, list[int]]:
    """The fence to use, given what each node gave; and the nodes that must be raised to it first.

    `before` is what the same request got before: it stays so if a majority still has it. If not, the lock was another's
    meanwhile, and only a greater one will do.

    >>> highest({0: 7, 1: 7, 2: 5}, count=3), highest({0: 7, 1: 6}, count=3)
    ((7, []), (7, [1]))
    >>> highest({0: 7, 1: 7, 2: 9}, count=3, before=7), highest({0: 7, 1: 9}, count=3, before=7)
    ((7, []), (9, [0]))
    """
    if before and sum(fence == before for fence in fences.values()) >= majority(count):
        return before, []
    most = max(fences.values())
    behind = [node for node, fence in fences.items() if fence < most]
    return most, behind if len(fences) - len(behind) < majority(count) else []


def time_to_majority(lefts: Sequence[float | None], votes: int, count: int) -> float | None:
    """When the nodes that others hold will have freed enough for a majority, going by their holders' ttls.

    >>> time_to_majority([3.0, 1.0, None], votes=0, count=3), time_to_majority([None, None, 1.0], votes=0, count=3)
    (3.0, None)
    """
    known = sorted(left for left in lefts if left is not None)
    missing = majority(count) - votes
    return known[missing - 1] if 0 < missing <= len(known) else None


class Floor:
    """The fence to propose to all nodes, so that they give the same one and nothing has to be written back.

    It follows the nodes' own clocks, as seen in the fences that they gave when they did not agree; ours does not
    matter.
    """

    def __init__(self) -> None:
        self._ahead_us: int | None = None

    def propose(self, now: float) -> int:
        """0 while nothing is known: then each node gives its own."""
        return 0 if self._ahead_us is None else int(now * 1e6) + self._ahead_us + LEAD_US

    def see(self, now: float, clock: float | None) -> None:
        """A node's clock shows `clock` seconds at `now`."""
        if clock is not None:
            ahead_us = int((clock - now) * 1e6)
            self._ahead_us = ahead_us if self._ahead_us is None else max(self._ahead_us, ahead_us)

    def learn(self, sent_at: float, fences: Iterable[int]) -> None:
        """The nodes gave these to a request of `asked_at`."""
        found = set(fences)
        if len(found) > 1:
            self._ahead_us = max(found) - int(sent_at * 1e6)
