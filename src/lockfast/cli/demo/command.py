"""`lockfast demo`: its options, the three acts, and the clean-up.

Rules:
- No process and no file is left behind, also after Ctrl-C, SIGTERM and SIGHUP.
- The exit code is 0 only if no update was lost under the lock.
"""

from __future__ import annotations

import argparse
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import NamedTuple, NoReturn

import lockfast
from lockfast.cli.arguments import STORE_TIMEOUT
from lockfast.cli.demo.crew import Crew
from lockfast.cli.demo.scene import Result, Scene, drawing, explain, judge, print_code, print_table
from lockfast.cli.demo.worker import NAME, Order, write_counter
from lockfast.cli.terminal import NBSP, Block, Terminal
from lockfast.errors import ConfigurationError

SIZE = 4
"""Workers; the texts say "four"."""
VICTIM = 1
"""Index of the worker that is killed in the third act."""
FRAME = 0.05
"""Seconds between two drawings."""


class Pace(NamedTuple):
    """How long the demo takes: `rounds` per worker (`rounds_3` in the third act), `pause` seconds between read and
    write, `linger` seconds to watch the victim hold the lock, `reading` seconds to read each introduction."""

    rounds: int
    rounds_3: int
    pause: float
    ttl: float
    linger: float
    reading: float


FULL = Pace(rounds=100, rounds_3=50, pause=0.004, ttl=1.5, linger=0.5, reading=0.8)
QUICK = Pace(rounds=25, rounds_3=12, pause=0.004, ttl=1.5, linger=0.1, reading=0.0)
LONG_TTL = 30.0
"""For the second act, in which a slow machine must not lose a lease."""


class Act(NamedTuple):
    """One act: its introduction and an order for each worker."""

    title: str
    intro: str
    orders: list[Order]
    linger: float = 0.0


def acts(pace: Pace) -> list[Act]:
    unlocked = Order(pace.rounds, pace.pause)
    locked = Order(pace.rounds, pace.pause, LONG_TTL)
    short = Order(pace.rounds_3, pace.pause, pace.ttl)
    crash = [short._replace(stall_at=pace.rounds_3 // 3) if index == VICTIM else short for index in range(SIZE)]
    return [
        Act(
            "Without a lock",
            f"Four worker processes add 1 to the number in one file, {pace.rounds} times each: read it, wait "
            f"{pace.pause * 1000:g}{NBSP}ms, write it back. Nothing coordinates them.",
            [unlocked] * SIZE,
        ),
        Act(
            "With the lock",
            'The same work, but each round runs inside `with locks.lock("demo:counter")`. The workers wait in a queue, '
            "and each grant has a fence: a number that only grows.",
            [locked] * SIZE,
        ),
        Act(
            "The holder is killed",
            f"The same again, {pace.rounds_3} rounds each, but worker {VICTIM + 1} gets SIGKILL in the middle of one: "
            f"after the read and before the write, without a chance to release. The ttl is {pace.ttl:g}{NBSP}s.",
            crash,
            pace.linger,
        ),
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Four worker processes share one counter: without a lock, with the lock, and\n"
        "with the lock while one of them is killed. It needs no server: the locks are in\n"
        "an SQLite file in a temporary folder, which is removed at the end."
    )
    parser.epilog = "examples:\n  $ lockfast demo\n  $ lockfast demo --url redis://localhost:6379"
    parser.add_argument("--url", help="use this store instead, for instance redis://localhost:6379")
    parser.add_argument("--quick", action="store_true", help="take about three seconds")


def run(args: argparse.Namespace) -> int:
    with ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT))
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP, and so does the demo then
                stack.callback(signal.signal, number, signal.signal(number, _exit_on_signal))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lockfast-demo-")))
        crew = stack.enter_context(Crew())
        # A second Ctrl-C must not interrupt the clean-up.
        stack.callback(signal.signal, signal.SIGINT, signal.SIG_IGN)
        url = args.url or f"sqlite:///{folder / 'locks.db'}"
        _check_store(url)
        return _perform(Terminal(), crew, folder / "counter", url, QUICK if args.quick else FULL, own=not args.url)


def _exit_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _check_store(url: str) -> None:
    """Fail now if the store cannot be used, not in the middle of the first act."""
    if url.lower().startswith("memory:"):
        raise ConfigurationError(
            "The demo starts several processes, and memory:// exists in one only. Use another store."
        )
    with lockfast.connect(url, store_timeout=STORE_TIMEOUT) as locks:
        locks.lock(NAME).inspect()


def _perform(terminal: Terminal, crew: Crew, path: Path, url: str, pace: Pace, *, own: bool) -> int:
    where = "an SQLite file in a temporary folder; no server is needed" if own else "the store in --url"
    terminal.say(f"lockfast {lockfast.__version__}: what a lock does, in three acts", "bold")
    terminal.say(f"The locks are in {where}.", indent="  ")
    crew.start(SIZE, path, url)
    results = [_perform_act(terminal, number, act, crew, path, pace) for number, act in enumerate(acts(pace), 1)]
    print_table(terminal, results)
    print_code(terminal)
    return 0 if all(result.kept for result in results) else 1


def _perform_act(terminal: Terminal, number: int, act: Act, crew: Crew, path: Path, pace: Pace) -> Result:
    terminal.say()
    terminal.say(f"Act {number}. {act.title}", "bold")
    terminal.say(act.intro, indent="  ")
    terminal.say()
    if terminal.live:
        time.sleep(pace.reading)
    with Block(terminal) as block:
        scene, total = play(act, crew, path, lambda scene, total: block.draw(drawing(terminal, scene, total)))
    result = judge(act.title, scene, total)
    explain(terminal, act.orders[0], scene, result)
    return result


def play(act: Act, crew: Crew, path: Path, draw: Callable[[Scene, int], None]) -> tuple[Scene, int]:
    """Play an act to its end; return the scene and the number in the file.

    `draw` gets the same two values. A timer calls it, not the reports: a report comes at the end of a round, when no
    worker holds the lock.
    """
    write_counter(path, 0)
    scene = Scene(len(act.orders), act.orders[0].rounds, act.orders[0].ttl is not None)
    crew.order(act.orders)
    draw_at = time.monotonic()
    while not scene.over:
        for index, kind, value in crew.receive(max(0.0, draw_at - time.monotonic())):
            scene.update(index, kind, value, time.monotonic())
        now = time.monotonic()
        if scene.stalled_at is not None and scene.killed_at is None and now - scene.stalled_at >= act.linger:
            crew.kill(VICTIM)
            scene.kill(time.monotonic())
        if now >= draw_at:
            draw(scene, int(path.read_text("ascii")))
            draw_at = now + FRAME
    total = int(path.read_text("ascii"))
    draw(scene, total)
    return scene, total
