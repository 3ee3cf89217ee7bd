"""The explorer: search every interleaving of a small model, breadth first: traces of violations are shortest.

Equal states merge, so the search terminates; `Report.complete` says whether it covered every state or reached a limit.
The number of schedules is the number of paths through the state graph, computed by summation, not by enumeration.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from verify.invariants import Invariants, Violation
from verify.process import log_disabled
from verify.trace import Trace
from verify.transitions import Transition, Transitions
from verify.world import Model, State, World


@dataclass(frozen=True)
class Report:
    """The result of a search."""

    model: str
    complete: bool
    states: int
    transitions: int
    schedules: int
    seconds: float
    depth: int
    violation: Violation | None = None
    trace: Trace | None = None

    @property
    def verdict(self) -> str:
        if self.violation is not None:
            return f"VIOLATED {self.violation.rule}"
        return "complete" if self.complete else "limit reached"


class Explorer:
    """One search through one model."""

    def __init__(self, model: Model) -> None:
        self.world = World(model)
        self.transitions = Transitions(self.world)
        self.invariants = Invariants(self.world)
        self._states: list[State] = []
        self._numbers: dict[State, int] = {}
        self._causes: list[tuple[int, Transition] | None] = []
        self._edges_from = array("q")
        self._edges_to = array("q")

    def run(self, *, most_states: int = 2_000_000, most_seconds: float = 600.0) -> Report:
        """Search until every state is covered, an invariant is violated, or a limit is reached."""
        started = time.monotonic()
        with log_disabled():
            first = self.world.initial_state()
            self._add(first, None)
            violation = self.invariants.in_state(first)
            at = 0
            while at < len(self._states) and violation is None:
                if len(self._states) > most_states or (at % 256 == 0 and time.monotonic() - started > most_seconds):
                    break
                violation = self._expand(at)
                at += 1
        complete = violation is None and at == len(self._states)
        path = self._path(len(self._states) - 1)
        return Report(
            model=self.world.model.name,
            complete=complete,
            states=len(self._states),
            transitions=len(self._edges_to),
            schedules=self._schedules() if complete else 0,
            seconds=time.monotonic() - started,
            depth=len(path),
            violation=violation,
            trace=Trace(self.world, path, violation) if violation is not None else None,
        )

    def _add(self, state: State, cause: tuple[int, Transition] | None) -> int:
        self._numbers[state] = number = len(self._states)
        self._states.append(state)
        self._causes.append(cause)
        return number

    def _expand(self, at: int) -> Violation | None:
        for transition, after, violation in self._successors(self._states[at]):
            number = self._numbers.get(after)
            if number is None or violation is not None:
                number = self._add(after, (at, transition))
                violation = violation or self.invariants.in_state(after)
                if violation is not None:
                    return violation
            self._edges_from.append(at)
            self._edges_to.append(number)
        return None

    def _successors(self, state: State) -> Iterator[tuple[Transition, State, Violation | None]]:
        for transition, after in self.transitions.of(state):
            yield transition, *self.invariants.after_belief(state, after)
        for index, number, server, request, rest in self.transitions.executions(state):
            after = self.transitions.executed(rest, index, number, server, request)
            after, violation = self.invariants.after_request(state, index, request, after)
            yield Transition("execute", index, (server, request, number)), after, violation

    def _schedules(self) -> int:
        """Count the paths from the first state to the last ones. The graph has no cycles: every transition uses up
        time, a message or a fault."""
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

    def _path(self, number: int) -> list[tuple[State, Transition, State]]:
        """The transitions that lead to a state."""
        path: list[tuple[State, Transition, State]] = []
        while (cause := self._causes[number]) is not None:
            path.append((self._states[cause[0]], cause[1], self._states[number]))
            number = cause[0]
        return path[::-1]
