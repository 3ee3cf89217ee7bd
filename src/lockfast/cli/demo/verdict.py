"""What is said after an act, and after them all. Says what was measured, also when it is not what was expected."""

from __future__ import annotations

from typing import NamedTuple

from lockfast.cli.demo.acts import Act
from lockfast.cli.demo.scene import Scene
from lockfast.cli.terminal import NBSP, Line, Terminal

CODE = """\
import lockfast
locks = lockfast.connect("sqlite:///locks.db")  # or redis://localhost
with locks.lock("counter", ttl=30) as lease:    # renewed while you work
    add_one()                                   # lease.fence: who is newer"""

UNEVEN = 0.1
"""Part of its turns by which a worker may be behind the first one before turns are not called fair."""
LATE = 1.5
"""Seconds after the ttl from which on a dead holder's lock came late; a busy machine needs some."""


class Result(NamedTuple):
    """One act when it is over; `kept` is false where the lock did not keep what it promises."""

    title: str
    made: int
    found: int
    kept: bool

    @property
    def lost(self) -> int:
        return self.made - self.found


def judge(act: Act, scene: Scene, found: int) -> Result:
    """What came of an act."""
    made = len(scene.turns)
    kept = not scene.locked or (made == found and scene.fences()[2])
    return Result(act.title, made, found, kept)


def tell(terminal: Terminal, act: Act, scene: Scene, result: Result) -> None:
    """Say what came of an act."""
    if scene.killed_at is not None:
        _tell_of_kill(terminal, act, scene)
    _tell_of_updates(terminal, result)
    if scene.killed_at is not None:
        _point(terminal, "The turn in which it was killed was never written, so it counts on neither side.")
    if not scene.locked:
        why = "Whenever two workers read the same number, one of their two updates is overwritten."
        luck = "That was luck, and nothing more: run it again."
        _point(terminal, why if result.lost else luck)
        return
    if scene.killed_at is None:
        _tell_of_turns(terminal, act, scene)
    _tell_of_fence(terminal, scene)


def _tell_of_updates(terminal: Terminal, result: Result) -> None:
    lost = f"{result.lost} were lost" if result.lost > 1 else "1 was lost" if result.lost == 1 else "none was lost"
    if result.lost < 0:
        lost = f"{-result.lost} too many"
    _mark(terminal, result.lost == 0, f"{result.made} updates were made and the file says {result.found}: {lost}.")


def _tell_of_turns(terminal: Terminal, act: Act, scene: Scene) -> None:
    turns, seconds = len(scene.turns), scene.seconds()
    thinking, passing_on = act.orders[0].pause * 1000, scene.hand_over() * 1000
    *most, last = sorted(scene.when_first_was_done(), reverse=True)
    _point(
        terminal,
        f"{turns} turns took {seconds:.1f}{NBSP}s, {turns / seconds:.0f} a second. Of each, {thinking:g}{NBSP}ms are "
        f"thinking; passing the lock to the next worker took {passing_on:.1f}{NBSP}ms (median).",
    )
    fair = "Turns are fair" if scene.times - last <= max(2, scene.times * UNEVEN) else "Turns were uneven this time"
    _point(
        terminal,
        f"{fair}: when the first worker had made its {scene.times}, the others had made "
        f"{', '.join(map(str, most))} and {last}.",
    )


def _tell_of_kill(terminal: Terminal, act: Act, scene: Scene) -> None:
    if scene.victim is None or scene.killed_at is None or scene.follower is None or scene.followed_at is None:
        return
    after = scene.followed_at - scene.killed_at
    _mark(
        terminal,
        after <= (act.orders[0].ttl or 0.0) + LATE,
        f"{after:.2f}{NBSP}s after worker {scene.victim + 1} was killed, worker {scene.follower + 1} held the lock, "
        "and all went on: what a dead process holds is free when its ttl is over.",
    )


def _tell_of_fence(terminal: Terminal, scene: Scene) -> None:
    first, last, rose = scene.fences()
    if rose:
        _point(terminal, f"The fence rose with each of the {len(scene.turns)} turns, from {first} to {last}.")
    else:
        _mark(terminal, False, f"The fence did not rise with each turn (from {first} to {last}).")


def table(terminal: Terminal, results: list[Result]) -> None:
    """The three acts side by side."""
    lines: list[Line] = [[(f"  {'act':<26}{'updates':>9}{'in the file':>14}{'lost':>7}", "dim")]]
    for number, result in enumerate(results, 1):
        row = f"  {number}  {result.title:<23}{result.made:>9}{result.found:>14}"
        lines.append([(row, ""), (f"{result.lost:>7}", "red" if result.lost else "green")])
    terminal.lines(lines)


def farewell(terminal: Terminal) -> None:
    """What to write, and where to read on."""
    terminal.say("What you would write:", indent="  ")
    terminal.say()
    terminal.lines([[("    " + line, "cyan")] for line in CODE.splitlines()])
    terminal.say()
    terminal.say("Read on in README.md and in docs/, or with `python -m pydoc lockfast`.", indent="  ")


def _mark(terminal: Terminal, good: bool, text: str) -> None:
    sign = ("✓" if good else "✗") if terminal.symbols else ("+" if good else "!")
    terminal.say(f"{sign} {text}", "green" if good else "red", indent="  ", hang="    ")


def _point(terminal: Terminal, text: str) -> None:
    terminal.say(f"{'·' if terminal.symbols else '-'} {text}", indent="  ", hang="    ")
