"""Whether to change a value optimistically, or under a lock: decided by how often others came in between.

    mode          becomes         when
    OPTIMISTIC    LOCKING         the heat has risen to `GO_OVER`: a conflict adds one, a change without one takes one
    LOCKING       OPTIMISTIC      the heat has sunk to 0: a lock that was free takes one, one that was taken adds one

Rules kept here: the two thresholds are apart, so that the mode does not flicker; heat is bounded, so that it is
forgotten as quickly as it came; who loses a race waits longer each time and for a random part of that, so that those
who lost together do not come back together.
"""

from __future__ import annotations

GO_OVER = 4
MOST_HEAT = 12
FIRST_PAUSE = 0.0005
LONGEST_PAUSE = 0.05


class Heat:
    """What one client has lately seen of one value."""

    __slots__ = ("_degrees", "locking")

    def __init__(self) -> None:
        self._degrees = 0
        self.locking = False

    def disputed(self) -> None:
        """Somebody else came in between, or had the lock."""
        self._degrees = min(MOST_HEAT, self._degrees + 1)
        if self._degrees >= GO_OVER:
            self.locking = True

    def undisputed(self) -> None:
        """Nobody came in between, or the lock was free."""
        self._degrees = max(0, self._degrees - 1)
        if self._degrees == 0:
            self.locking = False


def pause(conflicts: int, randomness: float) -> float:
    """Seconds to wait after so many conflicts in a row; `chance` is from 0 up to 1.

    >>> pause(1, 0.5), pause(3, 1.0), pause(50, 1.0)
    (0.00025, 0.002, 0.05)
    """
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(conflicts - 1, 16)) * randomness
