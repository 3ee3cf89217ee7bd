"""What is known of the act that is on: who does what, who made how many turns, who was killed and who followed.

Pure: it is told what the workers said and what time it is, and touches neither of them.

    AT_WORK ─did→ AT_WORK                                  without a lock
    WAITING ─holds→ HOLDING ─did→ WAITING                  with it
    HOLDING ─stalls→ HOLDING ─killed→ KILLED               the victim
    any ─done→ DONE
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from lockfast.cli.demo.messages import DID, DONE, HOLDS, STALLS, Turn

AT_WORK, WAITING, HOLDING, FINISHED, KILLED = "at work", "waiting", "holding", "done", "killed"


@dataclass
class Scene:
    """One act under way. `stalled_at`, `killed_at` and `followed_at` are None until it happens; `follower` is who
    first held the lock after the kill."""

    size: int
    times: int
    locked: bool
    states: list[str] = field(init=False)
    turns: list[tuple[int, Turn]] = field(default_factory=list)
    fence: int = 0
    victim: int | None = None
    stalled_at: float | None = None
    killed_at: float | None = None
    follower: int | None = None
    followed_at: float | None = None

    def __post_init__(self) -> None:
        self.states = [WAITING if self.locked else AT_WORK] * self.size

    def hear(self, index: int, word: str, what: Any, now: float) -> None:
        """A worker said something."""
        if word == HOLDS:
            self.states[index] = HOLDING
            self.fence = max(self.fence, what)
            if self.killed_at is not None and self.followed_at is None:
                self.follower, self.followed_at = index, now
        elif word == DID:
            self.states[index] = WAITING if self.locked else AT_WORK
            self.turns.append((index, Turn(*what)))
        elif word == STALLS:
            self.victim, self.stalled_at = index, now
        elif word == DONE:
            self.states[index] = FINISHED

    def kill(self, now: float) -> None:
        """The victim was killed."""
        if self.victim is not None:
            self.states[self.victim] = KILLED
            self.killed_at = now

    @property
    def over(self) -> bool:
        return all(state in (FINISHED, KILLED) for state in self.states)

    def did(self, index: int) -> int:
        """How many turns this worker made."""
        return sum(who == index for who, _ in self.turns)

    def seconds(self) -> float:
        """From the first turn's beginning to the last one's end."""
        return max(turn.let_go_at for _, turn in self.turns) - min(turn.held_at for _, turn in self.turns)

    def hand_over(self) -> float:
        """Median seconds between one turn's end and the next one's beginning."""
        turns = sorted(turn for _, turn in self.turns)
        return statistics.median(later.held_at - turn.let_go_at for turn, later in pairwise(turns))

    def when_first_was_done(self) -> list[int]:
        """What the others had made when the first worker was done: a measure of fairness."""
        ends = [max(turn.let_go_at for who, turn in self.turns if who == index) for index in range(self.size)]
        first = ends.index(min(ends))
        made = [
            sum(who == index and turn.held_at < ends[first] for who, turn in self.turns) for index in range(self.size)
        ]
        return made[:first] + made[first + 1 :]

    def fences(self) -> tuple[int, int, bool]:
        """The first and the last fence, and whether each was above the one before it."""
        fences = [turn.fence for _, turn in self.turns]
        return min(fences), max(fences), all(turn.rose for _, turn in self.turns) and len(set(fences)) == len(fences)
