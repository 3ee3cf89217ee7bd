"""The explorer: every interleaving of a small model, breadth first, so that a violation's trace is the shortest one.

Equal states merge, so the search ends; `Report.complete` says whether it did, or ran into its limit. The number of
schedules is the number of paths through the graph of states from the first to the last ones, found by adding up, not
by walking them.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from verify.invariants import Rules, Violation
from verify.moves import Move, Moves
from verify.quiet import quiet
from verify.trace_report import Story
from verify.world import Model, State, World


@dataclass(frozen=True)
class Report:
    """What a search found out."""

    model: str
    complete: bool
    states: int
    moves: int
    schedules: int
    seconds: float
    depth: int
    violation: Violation | None = None
    trace: Story | None = None

    @property
    def verdict(self) -> str:
        if self.violation is not None:
            return f"VIOLATED {self.violation.rule}"
        return "complete" if self.complete else "limit reached"


class Explorer:
    """One search through one model."""

    def __init__(self, model: Model) -> None:
        self.world = World(model)
        self.moves = Moves(self.world)
        self.rules = Rules(self.world, self.moves)
        self._states: list[State] = []
        self._numbers: dict[State, int] = {}
        self._cause: list[tuple[int, Move] | None] = []
        self._edges_from = array("q")
        self._edges_to = array("q")

    def run(self, *, most_states: int = 2_000_000, most_seconds: float = 600.0) -> Report:
        """Search until all is seen, a rule is broken, or a limit is reached."""
        started = time.monotonic()
        with quiet():
            first = self.world.first()
            self._add(first, None)
            violation = self.rules.in_state(first)
            at = 0
            while at < len(self._states) and violation is None:
                if len(self._states) > most_states or (at % 256 == 0 and time.monotonic() - started > most_seconds):
                    break
                violation = self._expand(at)
                at += 1
        complete = violation is None and at == len(self._states)
        last = len(self._states) - 1
        return Report(
            model=self.world.model.name,
            complete=complete,
            states=len(self._states),
            moves=len(self._edges_to),
            schedules=self._schedules() if complete else 0,
            seconds=time.monotonic() - started,
            depth=len(self._path(last)),
            violation=violation,
            trace=Story(self.world, self._path(last), violation) if violation is not None else None,
        )

    def _add(self, state: State, cause: tuple[int, Move] | None) -> int:
        self._numbers[state] = number = len(self._states)
        self._states.append(state)
        self._cause.append(cause)
        return number

    def _expand(self, at: int) -> Violation | None:
        for move, after, broken in self._successors(self._states[at]):
            number = self._numbers.get(after)
            if number is None or broken is not None:
                number = self._add(after, (at, move))
                broken = broken or self.rules.in_state(after)
                if broken is not None:
                    return broken
            self._edges_from.append(at)
            self._edges_to.append(number)
        return None

    def _successors(self, state: State) -> Iterator[tuple[Move, State, Violation | None]]:
        for move, after in self.moves.of(state):
            yield move, *self.rules.newly_believed(state, after)
        for at, number, server, request, rest in self.moves.executions(state):
            after = self.moves.executed(rest, at, number, server, request)
            after, broken = self.rules.after_request(state, at, request, after)
            yield Move("execute", at, (server, request, number)), after, broken

    def _schedules(self) -> int:
        """Paths from the first state to the last ones. Moves only lead on, so a topological order exists."""
        size = len(self._states)
        missing = array("l", bytes(8 * size))
        for to in self._edges_to:
            missing[to] += 1
        starts = array("q", bytes(8 * (size + 1)))
        for origin in self._edges_from:
            starts[origin + 1] += 1
        for at in range(size):
            starts[at + 1] += starts[at]
        paths: list[int] = [0] * size
        paths[0] = 1
        ready = [0]
        total = 0
        while ready:
            at = ready.pop()
            begin, end = starts[at], starts[at + 1]
            if begin == end:
                total += paths[at]
            for edge in range(begin, end):
                to = self._edges_to[edge]
                paths[to] += paths[at]
                missing[to] -= 1
                if missing[to] == 0:
                    ready.append(to)
        return total

    def _path(self, number: int) -> list[tuple[State, Move, State]]:
        """The moves that led to a state."""
        path: list[tuple[State, Move, State]] = []
        while (cause := self._cause[number]) is not None:
            path.append((self._states[cause[0]], cause[1], self._states[number]))
            number = cause[0]
        return path[::-1]
