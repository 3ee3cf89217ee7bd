"""How long a grant may be relied on: the one place that does this arithmetic.

The store counts the ttl from the moment it executed the request. We do not know that moment, only that it came
after the request was sent; counting from the sending is therefore never too late. Two clocks that both claim
to run at the right rate still differ a little (`DRIFT`), and the store may round to a millisecond (`MARGIN`).
"""

from __future__ import annotations

DRIFT = 0.002
MARGIN = 0.002
WORTH = 0.5
"""The share of its ttl that a pushed grant must still be good for; less is confirmed by a request first."""


def valid_until(sent_at: float, ttl: float) -> float:
    """The last moment at which a grant or renewal asked for at `asked_at` is surely ours.

    >>> round(valid_until(100.0, 10.0), 3)
    109.978
    """
    return sent_at + ttl * (1 - DRIFT) - MARGIN


def worth(left: float, ttl: float) -> bool:
    """Whether so many seconds of a ttl are enough to begin with unasked.

    >>> worth(left=7.0, ttl=10.0), worth(left=4.0, ttl=10.0)
    (True, False)
    """
    return left >= ttl * WORTH
