"""Time arithmetic of the core: how long a grant is valid, and how long an operation may take.

The store counts the ttl from the moment it executes a request. The client does not know that moment, only that it comes
after sending, so counting from sending is never too late. Two clocks that run at the right rate still differ a little
(`DRIFT`), and the store may round to a millisecond (`MARGIN`).
"""

from __future__ import annotations

from typing import NamedTuple

DRIFT = 0.002
MARGIN = 0.002

USEFUL = 0.5
"""The share of its ttl that a notified grant must have left. With less, a request confirms it first."""

REQUEST_TIMEOUT = 5.0
"""Seconds after which an unanswered request is sent again, if the caller's deadline leaves more."""


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


class Deadline(NamedTuple):
    """One deadline for a whole operation, passed down so that no budget is spent twice.

    `at` is the end of the caller's timeout, None for no limit. `store_timeout` is how many seconds the store may stay
    silent.

    >>> Deadline(at=110.0, store_timeout=10.0).passed(now=109.0)
    False
    """

    at: float | None
    store_timeout: float

    def passed(self, now: float) -> bool:
        return self.at is not None and now >= self.at

    def earliest(self, moment: float) -> float:
        """Return `moment`, or the deadline if that is earlier."""
        return moment if self.at is None else min(moment, self.at)

    def request_until(self, now: float, grace: float) -> float:
        """Return how long one request, sent now, may stay unanswered."""
        # Without min(), which costs more than the rest: every request without a deadline comes here.
        until = now + (self.store_timeout if self.store_timeout < REQUEST_TIMEOUT else REQUEST_TIMEOUT)  # noqa: FURB136
        return until if self.at is None else min(until, max(self.at, now) + grace)

    def gives_up(self, now: float, silent_since: float) -> bool:
        """Whether a store that has been silent since `silent_since` must be reported now."""
        return self.passed(now) or now - silent_since >= self.store_timeout
