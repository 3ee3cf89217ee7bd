"""How deep each thread or task is in a re-entrant lock, and what taking or giving it back then means.

    the lease is     take it again                  give one level back
    alive            one deeper, asks nobody        one less; the outermost gives back the lease
    lost             refused                        one less; at the outermost nothing is left to give back
    given back       forgotten: taken as if new     forgotten: nothing is held

Rules kept here: the count is of one lease and ends with it, so it can never say "held" of a lock that another has; no
level is added to a lease that is lost, so all levels unwind; a caller's levels are its own, never another's.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable
from typing import Generic, TypeVar

from lockfast.core.lease_state import ALIVE, State

T = TypeVar("T")


class Step(enum.Enum):
    """What is to be done."""

    NEW = "take a lease"
    DEEPER = "nothing: it is one level deeper now"
    REFUSE = "tell that the lease is lost"
    OUT = "nothing: it is one level less deep now"
    OUTERMOST = "give the lease back"


class Level(Generic[T]):
    """What one caller has. Invariant: `depth` is at least 1."""

    __slots__ = ("depth", "lease")

    def __init__(self, lease: T) -> None:
        self.lease = lease
        self.depth = 1


class Levels(Generic[T]):
    """The levels of all callers. Each caller changes only its own, so no mutex is needed."""

    def __init__(self) -> None:
        self._levels: dict[Hashable, Level[T]] = {}

    def __len__(self) -> int:
        return len(self._levels)

    def lease_of(self, caller: Hashable) -> T | None:
        level = self._levels.get(caller)
        return None if level is None else level.lease

    def depth_of(self, caller: Hashable) -> int:
        level = self._levels.get(caller)
        return 0 if level is None else level.depth

    def begin(self, caller: Hashable, lease: T) -> None:
        """The caller got a lease: the outermost level."""
        self._levels[caller] = Level(lease)

    def take(self, caller: Hashable, state: State | None) -> Step:
        """The caller asks for the lock; `state` is that of the lease it has, None for none."""
        level = self._levels.get(caller)
        if level is None or state is None or state is State.RELEASED:
            self._levels.pop(caller, None)
            return Step.NEW
        if state not in ALIVE:
            return Step.REFUSE
        level.depth += 1
        return Step.DEEPER

    def leave(self, caller: Hashable) -> Step:
        """The caller is done with one level, of which it has at least one."""
        level = self._levels[caller]
        level.depth -= 1
        if level.depth:
            return Step.OUT
        del self._levels[caller]
        return Step.OUTERMOST

    def reset(self, gone: list[Hashable]) -> None:
        for caller in gone:
            self._levels.pop(caller, None)

    def items(self) -> list[tuple[Hashable, T]]:
        return [(caller, level.lease) for caller, level in list(self._levels.items())]
