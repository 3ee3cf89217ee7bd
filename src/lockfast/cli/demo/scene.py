"""One act: its state, computed from the workers' messages, its live view, and the findings after it.

Findings state the measured values, also when they are not the expected ones.

WORKING ─did→ WORKING                                  without a lock
WAITING ─holds→ HOLDING ─did→ WAITING                  with it
HOLDING ─stalls→ HOLDING ─killed→ KILLED               the victim
any ─done→ FINISHED
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from lockfast.cli.demo.worker import DID, DONE, HOLDS, STALLS, Order, Round
from lockfast.cli.terminal import NBSP, Line, Terminal

WORKING, WAITING, HOLDING, FINISHED, KILLED = "working", "waiting", "holding", "done", "killed"

CODE = """\
import lockfast
locks = lockfast.connect("sqlite:///locks.db")  # or redis://localhost
with locks.lock("counter", ttl=30) as lease:    # renewed inside the block
    add_one()                                   # lease.fence only grows"""

STATE_STYLES = {WORKING: "cyan", WAITING: "dim", HOLDING: "green", FINISHED: "", KILLED: "red"}
MAX_BAR = 48
AROUND_BAR = 34
"""Columns of a worker's line besides the bar."""
UNFAIR = 0.1
"""Part of its rounds by which the last worker may be behind the first."""
LATE = 1.5
"""Seconds after the ttl within which a dead holder's lock must be granted again, on a loaded machine."""


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
        fences = [one.fence for one in sorted(one for _, one in self.rounds)]
        return min(fences), max(fences), all(fence < later for fence, later in pairwise(fences))


class Result(NamedTuple):
    """The result of an act; `kept` is false if the lock broke a promise."""

    title: str
    made: int
    found: int
    kept: bool

    @property
    def lost(self) -> int:
        return self.made - self.found


def judge(title: str, scene: Scene, total: int) -> Result:
    made = len(scene.rounds)
    return Result(title, made, total, not scene.locked or (made == total and scene.fences()[2]))


def drawing(terminal: Terminal, scene: Scene, total: int) -> list[Line]:
    """The scene as lines; after its end only the workers, since the findings follow."""
    workers = [_worker(terminal, scene, index) for index in range(scene.size)]
    return workers if scene.over else [*workers, _file(scene, total), _event(scene)]


def _worker(terminal: Terminal, scene: Scene, index: int) -> Line:
    state, count = scene.states[index], scene.count(index)
    width = max(4, min(MAX_BAR, terminal.width - AROUND_BAR))
    full = round(width * count / scene.rounds_each)
    done, left = ("█", "░") if terminal.symbols else ("#", ".")
    style = STATE_STYLES[state]
    return [
        (f"  worker {index + 1}  ", ""),
        (f"{state:<9}", style),
        (done * full, style if state in (HOLDING, KILLED) else "cyan"),
        (left * (width - full), "dim"),
        (f"  {count:>3}/{scene.rounds_each}", ""),
    ]


def _file(scene: Scene, total: int) -> Line:
    made = max(len(scene.rounds), total)  # the file may be ahead of the reports
    missing = made - total
    line = [(f"  {made} updates made, {total} in the file, ", ""), (f"{missing} lost", "red" if missing else "green")]
    if scene.locked:
        line.append((f", fence {scene.fence}", "dim"))
    return line


def _event(scene: Scene) -> Line:
    if scene.victim is None:
        return []
    victim = f"  worker {scene.victim + 1}"
    if scene.killed_at is None:
        return [(f"{victim} holds the lock and is about to be killed.", "yellow")]
    if scene.succeeded_at is None or scene.successor is None:
        return [(f"{victim} was killed {time.monotonic() - scene.killed_at:.1f} s ago; the others wait.", "yellow")]
    after = scene.succeeded_at - scene.killed_at
    return [(f"{victim} was killed; worker {scene.successor + 1} held the lock {after:.2f} s later.", "green")]


def explain(terminal: Terminal, order: Order, scene: Scene, result: Result) -> None:
    """Print the findings of an act."""
    if scene.killed_at is not None:
        _explain_kill(terminal, order, scene)
    _explain_updates(terminal, result)
    if scene.killed_at is not None:
        _point(terminal, "The interrupted round was never written, so it counts on neither side.")
    if not scene.locked:
        race = "Whenever two workers read the same number, one of the two updates is overwritten."
        luck = "That was luck: run it again."
        _point(terminal, race if result.lost else luck)
        return
    if scene.killed_at is None:
        _explain_speed(terminal, order, scene)
    _explain_fences(terminal, scene)


def _explain_updates(terminal: Terminal, result: Result) -> None:
    lost = f"{result.lost} were lost" if result.lost > 1 else "1 was lost" if result.lost == 1 else "none was lost"
    if result.lost < 0:
        lost = f"{-result.lost} too many"
    _check(terminal, result.lost == 0, f"{result.made} updates were made and the file says {result.found}: {lost}.")


def _explain_speed(terminal: Terminal, order: Order, scene: Scene) -> None:
    count, seconds = len(scene.rounds), scene.seconds()
    *most, last = sorted(scene.counts_at_first_finish(), reverse=True)
    _point(
        terminal,
        f"{count} rounds took {seconds:.1f}{NBSP}s, {count / seconds:.0f} per second. Each waited "
        f"{order.pause * 1000:g}{NBSP}ms between read and write; a hand-off took {scene.handoff() * 1000:.1f}{NBSP}ms "
        "(median).",
    )
    fair = scene.rounds_each - last <= max(2, scene.rounds_each * UNFAIR)
    _point(
        terminal,
        f"{'The queue is fair' if fair else 'The order was uneven this time'}: when the first worker had finished its "
        f"{scene.rounds_each} rounds, the others had done {', '.join(map(str, most))} and {last}.",
    )


def _explain_kill(terminal: Terminal, order: Order, scene: Scene) -> None:
    if scene.victim is None or scene.killed_at is None or scene.successor is None or scene.succeeded_at is None:
        return
    after = scene.succeeded_at - scene.killed_at
    _check(
        terminal,
        after <= (order.ttl or 0.0) + LATE,
        f"{after:.2f}{NBSP}s after worker {scene.victim + 1} was killed, worker {scene.successor + 1} held the lock: "
        "the lock of a dead process expires at the end of its ttl.",
    )


def _explain_fences(terminal: Terminal, scene: Scene) -> None:
    first, last, rose = scene.fences()
    if rose:
        _point(terminal, f"The fence grew with each of the {len(scene.rounds)} rounds, from {first} to {last}.")
    else:
        _check(terminal, False, f"The fence did not grow with each round (from {first} to {last}).")


def print_table(terminal: Terminal, results: list[Result]) -> None:
    """Print the three acts side by side."""
    lines: list[Line] = [[], [(f"  {'act':<26}{'updates':>9}{'in the file':>14}{'lost':>7}", "dim")]]
    for number, result in enumerate(results, 1):
        row = f"  {number}  {result.title:<23}{result.made:>9}{result.found:>14}"
        lines.append([(row, ""), (f"{result.lost:>7}", "red" if result.lost else "green")])
    terminal.lines([*lines, []])


def print_code(terminal: Terminal) -> None:
    """Print the code to write, and where to read more."""
    terminal.say("The code for this:", indent="  ")
    terminal.lines([[], *([("    " + line, "cyan")] for line in CODE.splitlines()), []])
    terminal.say("Read more in README.md and docs/, or run `python -m pydoc lockfast`.", indent="  ")


def _check(terminal: Terminal, good: bool, text: str) -> None:
    sign = ("✓" if good else "✗") if terminal.symbols else ("+" if good else "!")
    terminal.say(f"{sign} {text}", "green" if good else "red", indent="  ", hang="    ")


def _point(terminal: Terminal, text: str) -> None:
    terminal.say(f"{'·' if terminal.symbols else '-'} {text}", indent="  ", hang="    ")
