"""What all guards share: which values are fences, and how a refusal is told."""

from __future__ import annotations

from typing import Protocol

from lockfast.errors import ConfigurationError, StaleFence
from lockfast.values import shown

MOST_FENCE = 2**53 - 1
"""Fences are microseconds of wall time or a little more: exact in a Lua number and in any BIGINT."""


class Fenced(Protocol):
    """A lease, as far as a guard is concerned."""

    @property
    def fence(self) -> int: ...


def fence_of(given: Fenced | int) -> int:
    """The fence of a lease, or the number itself.

    >>> fence_of(7)
    7
    """
    fence = given if isinstance(given, int) else getattr(given, "fence", None)
    if not isinstance(fence, int) or isinstance(fence, bool) or not 0 < fence <= MOST_FENCE:
        raise ConfigurationError(f"A fence is the lease that a lock gave, or its fence number, not {shown(given)}.")
    return fence


def refused(what: str, fence: int, newest: int) -> StaleFence:
    """What to raise when a later holder has been there."""
    return StaleFence(
        f"The write to {shown(what)} was refused: it came with fence {fence}, and fence {newest} has been there. The "
        "lock was lost and another has had it since; nothing was changed. Take the lock again and start from what is "
        "there now.",
        name=what,
        fence=fence,
        newest=newest,
    )
