"""One deadline for a whole operation, made at the door and passed down: no budget is spent twice."""

from __future__ import annotations

from typing import NamedTuple

from lockfast.ports import Store

ATTEMPT = 5.0
"""Seconds after which an unanswered request is tried anew, when the caller's own limit leaves more."""


class Deadline(NamedTuple):
    """When the caller wants to be back (None: no limit), and how long it bears a store that does not answer.

    >>> Deadline(at=110.0, bears=10.0).passed(now=109.0)
    False
    """

    at: float | None
    bears: float

    def passed(self, now: float) -> bool:
        return self.at is not None and now >= self.at

    def earliest(self, moment: float) -> float:
        """`moment`, or the deadline if that comes first."""
        return moment if self.at is None else min(moment, self.at)

    def attempt(self, now: float, store: Store) -> float:
        """Until when one request, sent now, may go unanswered."""
        # Without min(), which takes longer than all else here: every request without a deadline comes by.
        attempt = now + (self.bears if self.bears < ATTEMPT else ATTEMPT)  # noqa: FURB136
        return attempt if self.at is None else min(attempt, max(self.at, now) + store.grace)

    def out_of_patience(self, now: float, silent_since: float) -> bool:
        """Whether a store that has not answered since `silent_since` has to be reported now."""
        return self.passed(now) or now - silent_since >= self.bears
