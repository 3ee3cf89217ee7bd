"""`lockfast top`: a live view of the locks.

Rules kept here: the terminal is left as it was found, however it ends; a store that stops answering is said in one line
and asked again; without a terminal one picture is printed and that is all.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import lockfast
from lockfast.cli.common import add_store, connect
from lockfast.cli.keys import Keys, Screen
from lockfast.cli.table import SORTS, lock_table, sorted_by
from lockfast.cli.terminal import Line, Terminal, clipped
from lockfast.errors import StoreError
from lockfast.values import LockInfo, clean

EVERY = 1.0
HEADER_AND_FOOTER = 5
SORT_KEYS = {"w": "waiting", "a": "age", "n": "name"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Watch the locks: who holds them, for how long, who waits, and how often they change hands.\n\n"
        "keys: w a n  sort by waiters, age, name    /  filter by name    f  free ones too    q  quit"
    )
    parser.epilog = "examples:\n  $ lockfast top\n  $ lockfast top 'report:*' --sort age --every 0.5"
    parser.add_argument("pattern", nargs="?", default="*", help="a name, or a pattern with * ? [ab]")
    parser.add_argument("--sort", choices=list(SORTS), default="waiting", help="by name, age or number of waiters")
    parser.add_argument("--every", type=_interval, default=EVERY, metavar="SECONDS", help="time between two looks")
    add_store(parser, as_json=False)


def _interval(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 3600:
        raise ValueError(text)
    return value


class Sample(NamedTuple):
    """The locks at one moment."""

    infos: list[LockInfo]
    at: float


def changes_per_second(before: Sample, after: Sample) -> float:
    """How often locks changed hands at the least: between two looks a lock may have done so more than once.

    >>> old = Sample([LockInfo("a", "x", fence=1), LockInfo("b", "y", fence=5)], 10.0)
    >>> changes_per_second(old, Sample([LockInfo("a", "z", fence=9), LockInfo("b", "y", fence=5)], 12.0))
    0.5
    """
    fences = {info.name: info.fence for info in before.infos}
    changed = sum(info.name in fences and info.fence != fences[info.name] for info in after.infos)
    return changed / max(1e-6, after.at - before.at)


class View:
    """What is shown, and how. `typing` is the filter while somebody types it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.pattern: str = args.pattern
        self.sort: str = args.sort
        self.free = False
        self.typing: str | None = None
        self.trouble = ""
        self.rate = 0.0
        self.sample = Sample([], time.monotonic())

    def look(self, locks: lockfast.Locks) -> None:
        """Take a new sample; a store that does not answer leaves the old one."""
        try:
            infos = list(locks.list(self.pattern, free=True))
        except StoreError as error:
            self.trouble = str(error)
            return
        sample = Sample(infos, time.monotonic())
        self.trouble = ""
        self.rate = changes_per_second(self.sample, sample)
        self.sample = sample

    def press(self, key: str) -> bool:
        """Act on a key; False to quit."""
        if self.typing is not None:
            self._type(key)
            return True
        if key in SORT_KEYS:
            self.sort = SORT_KEYS[key]
        elif key == "f":
            self.free = not self.free
        elif key == "/":
            self.typing = "" if self.pattern == "*" else self.pattern
        return key not in ("q", "\x1b", "\x03")

    def _type(self, key: str) -> None:
        text = self.typing or ""
        if key in ("\r", "\n"):
            plain = text and not any(char in "*?[" for char in text)
            self.pattern = f"*{text}*" if plain else text or "*"
            self.typing = None
        elif key == "\x1b":
            self.typing = None
        elif key in ("\x7f", "\b"):
            self.typing = text[:-1]
        elif key.isprintable():
            self.typing = text + key

    def drawing(self, terminal: Terminal, height: int | None = None) -> list[Line]:
        """The picture, no more than `height` lines of it."""
        infos = [info for info in self.sample.infos if self.free or info.locked or info.waiting]
        rows = lock_table(terminal, sorted_by(infos, self.sort))
        room = len(rows) if height is None else max(1, height - HEADER_AND_FOOTER)
        hidden = len(rows) - room
        lines = [self._heading(infos), [], *rows[:room]]
        if hidden > 0:
            lines[-1] = [(f"and {hidden + 1} more", "dim")]
        return lines

    def _heading(self, infos: Sequence[LockInfo]) -> Line:
        held = sum(info.locked for info in infos)
        waiting = sum(info.waiting for info in infos)
        heading: list[tuple[str, str]] = [
            ("lockfast", "bold"),
            (f"  {held} held, {waiting} waiting, ", ""),
            (f"{self.rate:.1f} hand-overs/s or more", "cyan"),
            (f"  by {self.sort}", "dim"),
        ]
        if self.pattern != "*":
            heading.append((f"  only {clean(self.pattern)}", "yellow"))
        return heading

    def footer(self) -> Line:
        if self.typing is not None:
            return [("filter: ", "bold"), (clean(self.typing) + "_", "")]
        if self.trouble:
            return [(clean(self.trouble), "red")]
        return [("w a n sort   / filter   f free ones too   q quit", "dim")]


def run(args: argparse.Namespace) -> int:
    terminal = Terminal()
    with connect(args) as locks:
        view = View(args)
        if not (terminal.live and sys.stdin.isatty()):
            terminal.lines(_one(view, locks, terminal))
            return 0
        with Keys(sys.stdin) as keys, Screen(terminal) as screen:
            return _live(args, view, locks, keys, screen)


def _one(view: View, locks: lockfast.Locks, terminal: Terminal) -> list[Line]:
    """One picture, from two looks."""
    for _ in range(2):
        view.look(locks)
        if view.trouble:
            raise StoreError(view.trouble)
        time.sleep(0.2)
    return view.drawing(terminal)


def _live(args: argparse.Namespace, view: View, locks: lockfast.Locks, keys: Keys, screen: Screen) -> int:
    next_look = 0.0
    while True:
        if time.monotonic() >= next_look:
            view.look(locks)
            next_look = time.monotonic() + args.every
        width, height = screen.size
        lines = [*view.drawing(screen.terminal, height), [], view.footer()]
        screen.draw([clipped(line, width - 1) for line in lines])
        for key in keys.pressed(next_look - time.monotonic()):
            if not view.press(key):
                return 0
            if key in "\r\n":
                next_look = 0.0
