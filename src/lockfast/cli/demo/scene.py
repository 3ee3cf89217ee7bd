"""The state of one act, computed from the workers' messages.

WORKING ─did→ WORKING                                  without a lock
WAITING ─holds→ HOLDING ─did→ WAITING                  with it
HOLDING ─stalls→ HOLDING ─killed→ KILLED               the victim
any ─done→ FINISHED
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from lockfast.cli.demo.worker import DID, DONE, HOLDS, STALLS, Round

WORKING, WAITING, HOLDING, FINISHED, KILLED = "working", "waiting", "holding", "done", "killed"


@dataclass
class Scene:
    """One act. `stalled_at`, `killed_at` and `succeeded_at` are None until then; `successor` is the first worker that
    held the lock after the kill."""

    size: int
    rounds_each: int
    locked: bool
    states: list[str] = field(init=False)
    rounds: list[tuple[int, Round]] = field(default_factory=list)
    fence: int = 0
    victim: int | None = None
    stalled_at: float | None = None
    killed_at: float | None = None
    successor: int | None = None
    succeeded_at: float | None = None

    def __post_init__(self) -> None:
        self.states = [WAITING if self.locked else WORKING] * self.size

    def update(self, index: int, kind: str, value: Any, now: float) -> None:
        """Apply a message of worker `index`."""
        if kind == HOLDS:
            self.states[index] = HOLDING
            self.fence = max(self.fence, value)
            if self.killed_at is not None and self.succeeded_at is None:
                self.successor, self.succeeded_at = index, now
        elif kind == DID:
            self.states[index] = WAITING if self.locked else WORKING
            self.rounds.append((index, Round(*value)))
        elif kind == STALLS:
            self.victim, self.stalled_at = index, now
        elif kind == DONE:
            self.states[index] = FINISHED

    def kill(self, now: float) -> None:
        """Mark the victim as killed."""
        if self.victim is not None:
            self.states[self.victim] = KILLED
            self.killed_at = now

    @property
    def over(self) -> bool:
        return all(state in (FINISHED, KILLED) for state in self.states)

    def count(self, index: int) -> int:
        """How many rounds worker `index` has finished."""
        return sum(worker == index for worker, _ in self.rounds)

    def seconds(self) -> float:
        """From the start of the first round to the end of the last."""
        return max(one.released_at for _, one in self.rounds) - min(one.held_at for _, one in self.rounds)

    def handoff(self) -> float:
        """Median seconds between the end of a round and the start of the next."""
        rounds = sorted(one for _, one in self.rounds)
        return statistics.median(later.held_at - one.released_at for one, later in pairwise(rounds))

    def counts_at_first_finish(self) -> list[int]:
        """How many rounds the other workers had started when the first finished: a measure of fairness."""
        ends = [max(one.released_at for worker, one in self.rounds if worker == index) for index in range(self.size)]
        first = ends.index(min(ends))
        return [
            sum(worker == index and one.held_at < ends[first] for worker, one in self.rounds)
            for index in range(self.size)
            if index != first
        ]

    def fences(self) -> tuple[int, int, bool]:
        """The smallest and the greatest fence, and whether the fence grew with every round."""
        fences = [one.fence for _, one in self.rounds]
        return min(fences), max(fences), all(one.rose for _, one in self.rounds) and len(set(fences)) == len(fences)
