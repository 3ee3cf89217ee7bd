"""`lockfast top`: a live view of the locks.

If the store stops answering, the view keeps the last sample, shows the error in one line and polls again. Without a
terminal it prints the table once and exits.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import lockfast
from lockfast.cli.arguments import add_store, connect, in_range
from lockfast.cli.terminal import Keys, Line, Screen, Terminal
from lockfast.cli.view import SORTS, lock_table
from lockfast.errors import StoreError
from lockfast.values import LockInfo, clean

HEADER_AND_FOOTER = 5
SORT_KEYS = {"w": "waiting", "a": "age", "n": "name"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Watch the locks: holders, hold times, queues, and the rate of hand-offs.\n\n"
        "keys: w a n  sort by waiters, age, name    /  filter by name\n"
        "      f      include free locks            q  quit"
    )
    parser.epilog = "examples:\n  $ lockfast top\n  $ lockfast top 'report:*' --sort age --every 0.5"
    parser.add_argument("pattern", nargs="?", default="*", help="a name, or a quoted pattern with * ? [ab]")
    parser.add_argument("--sort", choices=list(SORTS), default="waiting", help="by name, age or number of waiters")
    every = in_range(0.1, 3600)
    parser.add_argument("--every", type=every, default=1.0, metavar="SECONDS", help="time between samples")
    add_store(parser, as_json=False)


def handoffs(before: Sequence[LockInfo], after: Sequence[LockInfo]) -> int:
    """Hand-offs from one sample to the next: a lower bound, since a lock may be granted several times in between.

    >>> old = [LockInfo("a", fence=1), LockInfo("b", fence=5)]
    >>> handoffs(old, [LockInfo("a", fence=9), LockInfo("b", fence=5)])
    1
    """
    fences = {info.name: info.fence for info in before}
    return sum(info.name in fences and info.fence != fences[info.name] for info in after)


class View:
    """State of the screen. `filter_input` is the filter while the user types it, else None."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.pattern: str = args.pattern
        self.sort: str = args.sort
        self.free = False
        self.filter_input: str | None = None
        self.error = ""
        self.rate = 0.0
        self.sample: list[LockInfo] = []
        self.sampled_at = time.monotonic()

    def refresh(self, locks: lockfast.Locks) -> None:
        """Take a new sample; if the store does not answer, keep the old one."""
        try:
            infos = list(locks.list(self.pattern, free=True))
        except StoreError as error:
            self.error = str(error)
            return
        now = time.monotonic()
        self.error = ""
        self.rate = handoffs(self.sample, infos) / max(1e-6, now - self.sampled_at)
        self.sample, self.sampled_at = infos, now

    def press(self, key: str) -> bool:
        """Handle a key; return False to quit."""
        if self.filter_input is not None:
            self._edit_filter(self.filter_input, key)
            return True
        if key in SORT_KEYS:
            self.sort = SORT_KEYS[key]
        elif key == "f":
            self.free = not self.free
        elif key == "/":
            self.filter_input = "" if self.pattern == "*" else self.pattern
        return key not in ("q", "\x1b", "\x03")

    def _edit_filter(self, text: str, key: str) -> None:
        if key in ("\r", "\n"):
            plain = text and not any(char in "*?[" for char in text)
            self.pattern = f"*{text}*" if plain else text or "*"
            self.filter_input = None
        elif key == "\x1b":
            self.filter_input = None
        elif key in ("\x7f", "\b"):
            self.filter_input = text[:-1]
        elif key.isprintable():
            self.filter_input = text + key

    def drawing(self, terminal: Terminal, height: int | None = None) -> list[Line]:
        """The heading and the table, in at most `height` lines."""
        infos = [info for info in self.sample if self.free or info.locked or info.waiting]
        rows = lock_table(terminal, sorted(infos, key=SORTS[self.sort]))
        limit = len(rows) if height is None else max(1, height - HEADER_AND_FOOTER)
        hidden = len(rows) - limit
        if hidden > 0:
            rows[limit - 1 :] = [[(f"and {hidden + 1} more", "dim")]]
        held = sum(info.locked for info in infos)
        waiting = sum(info.waiting for info in infos)
        heading = [
            ("lockfast", "bold"),
            (f"  {held} held, {waiting} waiting, ", ""),
            (f"at least {self.rate:.1f} hand-offs/s", "cyan"),
            (f"  by {self.sort}", "dim"),
            ("" if self.pattern == "*" else f"  only {clean(self.pattern)}", "yellow"),
        ]
        return [heading, [], *rows]

    def footer(self) -> Line:
        if self.filter_input is not None:
            return [("filter: ", "bold"), (clean(self.filter_input) + "_", "")]
        if self.error:
            return [(clean(self.error), "red")]
        return [("w a n sort   / filter   f include free locks   q quit", "dim")]


def run(args: argparse.Namespace) -> int:
    terminal = Terminal()
    with connect(args) as locks:
        view = View(args)
        if terminal.live and sys.stdin.isatty():
            with Keys(sys.stdin) as keys, Screen(terminal) as screen:
                return _live(args.every, view, locks, keys, screen)
        for _ in range(2):  # the hand-off rate needs two samples
            view.refresh(locks)
            if view.error:
                raise StoreError(view.error)
            time.sleep(0.2)
        terminal.lines(view.drawing(terminal))
        return 0


def _live(every: float, view: View, locks: lockfast.Locks, keys: Keys, screen: Screen) -> int:
    refresh_at = 0.0
    while True:
        if time.monotonic() >= refresh_at:
            view.refresh(locks)
            refresh_at = time.monotonic() + every
        screen.draw([*view.drawing(screen.terminal, screen.terminal.height), [], view.footer()])
        for key in keys.pressed(refresh_at - time.monotonic()):
            if not view.press(key):
                return 0
            if key in "\r\n":
                refresh_at = 0.0
