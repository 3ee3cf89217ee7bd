"""The three acts, and how one is played: orders go out, reports come in, the screen follows."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from lockfast.cli.demo import counter
from lockfast.cli.demo.crew import Crew
from lockfast.cli.demo.messages import Order
from lockfast.cli.demo.scene import Scene
from lockfast.cli.terminal import NBSP

SIZE = 4
"""Workers; the texts say "four"."""
VICTIM = 1
"""Index of the worker that is killed in the third act."""
FRAME = 0.05
"""Seconds between two drawings."""


class Pace(NamedTuple):
    """How long it all takes. `times` turns for each worker, `times_3` in the third act, with `pause` seconds between
    read and write; `linger` seconds to see the victim hold the lock; `reading` seconds to read what comes next."""

    times: int
    times_3: int
    pause: float
    ttl: float
    linger: float
    reading: float


FULL = Pace(times=100, times_3=50, pause=0.004, ttl=1.5, linger=0.5, reading=0.8)
QUICK = Pace(times=25, times_3=12, pause=0.004, ttl=1.5, linger=0.1, reading=0.0)
LONG_TTL = 30.0
"""Where nobody is killed, a machine that stands still for a while should cost nobody the lock."""


class Act(NamedTuple):
    """One act: what is said before it, and each worker's order."""

    title: str
    intro: str
    orders: list[Order]
    linger: float = 0.0


def acts(pace: Pace) -> list[Act]:
    """The programme."""
    free = Order(pace.times, pace.pause)
    locked = Order(pace.times, pace.pause, LONG_TTL)
    short = Order(pace.times_3, pace.pause, pace.ttl)
    crash = [short._replace(stall_at=pace.times_3 // 3) if index == VICTIM else short for index in range(SIZE)]
    return [
        Act(
            "Without a lock",
            f"Four worker processes add 1 to the number in one file, {pace.times} times each: read it, think for "
            f"{pace.pause * 1000:g}{NBSP}ms, write it back. Nothing keeps them apart.",
            [free] * SIZE,
        ),
        Act(
            "With the lock",
            'The same work, but each turn is inside `with locks.lock("demo:counter")`. The workers queue, and each '
            "grant carries a fence: a number that only rises.",
            [locked] * SIZE,
        ),
        Act(
            "The holder is killed",
            f"The same again, {pace.times_3} turns each, and worker {VICTIM + 1} gets SIGKILL in the middle of a turn: "
            f"it has read and not yet written, and it cannot give the lock back. The ttl is {pace.ttl:g}{NBSP}s.",
            crash,
            pace.linger,
        ),
    ]


def play(act: Act, crew: Crew, path: Path, draw: Callable[[Scene, int], None]) -> tuple[Scene, int]:
    """Play an act to its end; return what happened and the number that the file has then.

    `draw` is given the same two. It is called by the clock and not when a report comes: turns end and begin together,
    so whoever looks in that moment sees nobody hold the lock.
    """
    counter.write(path, counter.Tally())
    scene = Scene(len(act.orders), act.orders[0].times, act.orders[0].ttl is not None)
    crew.order(act.orders)
    draw_at = time.monotonic()
    while not scene.over:
        for index, word, what in crew.hear(max(0.0, draw_at - time.monotonic())):
            scene.hear(index, word, what, time.monotonic())
        now = time.monotonic()
        if scene.stalled_at is not None and scene.killed_at is None and now - scene.stalled_at >= act.linger:
            crew.kill(VICTIM)
            scene.kill(time.monotonic())
        if now >= draw_at:
            draw(scene, counter.read(path).total)
            draw_at = now + FRAME
    found = counter.read(path).total
    draw(scene, found)
    return scene, found
