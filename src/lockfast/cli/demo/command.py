"""`lockfast demo` itself: its options, the folder it lives in, and how it ends.

Rules kept here: nothing is left behind, neither a process nor a file, also after Ctrl-C, SIGTERM and SIGHUP; the
exit code is 0 only if nothing was lost where the lock was used.
"""

from __future__ import annotations

import argparse
import signal
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import NoReturn

import lockfast
from lockfast.cli.demo.acts import FULL, QUICK, SIZE, Act, Pace, acts, play
from lockfast.cli.demo.crew import Crew
from lockfast.cli.demo.screen import drawing
from lockfast.cli.demo.verdict import Result, farewell, judge, table, tell
from lockfast.cli.demo.worker import NAME
from lockfast.cli.terminal import Block, Terminal
from lockfast.errors import ConfigurationError

STORE_TIMEOUT = 2.0
"""Seconds until a store that does not answer is called unavailable."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `lockfast demo` can be told."""
    parser.description = (
        "Four worker processes share one counter: without a lock, with the lock, and\n"
        "with the lock while one of them is killed. No server is needed: the locks are in\n"
        "an SQLite file in a temporary folder, which is removed at the end."
    )
    parser.epilog = "examples:\n  $ lockfast demo\n  $ lockfast demo --url redis://localhost:6379"
    parser.add_argument("--url", help="keep the locks in this store instead, for instance redis://localhost:6379")
    parser.add_argument("--quick", action="store_true", help="the same in about three seconds")


def run(args: argparse.Namespace) -> int:
    """Play the three acts."""
    with ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT))
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:  # under nohup it is not, and stays as it is
                stack.callback(signal.signal, number, signal.signal(number, _leave))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lockfast-demo-")))
        crew = stack.enter_context(Crew())
        # Once the end has begun, another Ctrl-C must not break off the cleaning up.
        stack.callback(signal.signal, signal.SIGINT, signal.SIG_IGN)
        url = args.url or f"sqlite:///{folder / 'locks.db'}"
        _try_store(url)
        return _perform(Terminal(), crew, folder / "counter", url, QUICK if args.quick else FULL, own=not args.url)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _try_store(url: str) -> None:
    """Find out now whether the store can be used; a worker could tell us only in the middle of the first act."""
    if url.lower().startswith("memory:"):
        raise ConfigurationError("The demo's workers are processes, and memory:// is known only inside one.")
    with lockfast.connect(url, store_timeout=STORE_TIMEOUT) as locks:
        locks.lock(NAME).inspect()


def _perform(terminal: Terminal, crew: Crew, path: Path, url: str, pace: Pace, *, own: bool) -> int:
    where = "an SQLite file in a temporary folder; no server is needed" if own else "the store that you named"
    terminal.say(f"lockfast {lockfast.__version__}: a lock at work, in three acts", "bold")
    terminal.say(f"The locks are in {where}.", indent="  ")
    crew.start(SIZE, path, url)
    results = [_act(terminal, number, act, crew, path, pace) for number, act in enumerate(acts(pace), 1)]
    terminal.say()
    table(terminal, results)
    terminal.say()
    farewell(terminal)
    return 0 if all(result.kept for result in results) else 1


def _act(terminal: Terminal, number: int, act: Act, crew: Crew, path: Path, pace: Pace) -> Result:
    terminal.say()
    terminal.say(f"Act {number}. {act.title}", "bold")
    terminal.say(act.intro, indent="  ")
    terminal.say()
    if terminal.live:
        time.sleep(pace.reading)
    with Block(terminal) as block:
        scene, found = play(act, crew, path, lambda scene, found: block.draw(drawing(terminal, scene, found)))
    result = judge(act, scene, found)
    tell(terminal, act, scene, result)
    return result
