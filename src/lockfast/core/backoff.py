"""How long to leave a failing store alone: doubling, jittered, bounded."""

from __future__ import annotations

FIRST = 0.01
MOST = 0.5


def pause(failures: int, randomness: float) -> float:
    """Seconds to wait after the given count of failures in a row; `chance` is from 0 up to 1.

    >>> pause(1, 0.0), pause(1, 1.0), pause(50, 1.0)
    (0.005, 0.01, 0.5)
    """
    full = min(MOST, FIRST * 2.0 ** min(failures - 1, 16))
    return full * (0.5 + 0.5 * randomness)
