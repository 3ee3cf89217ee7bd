"""`lockfast bench`: how fast the store at hand is, in a few seconds.

Rules kept here: what is measured is the library as a program uses it, on locks of names that nobody uses; medians and
the slowest hundredth, never a mean; nothing is left behind.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import lockfast
from lockfast.cli.common import add_store, connect, print_json
from lockfast.cli.terminal import Block, Terminal

SECONDS = 2.0
LEAST = 20
TTL = 30.0


class Result(NamedTuple):
    """One measurement; times in seconds."""

    what: str
    samples: int
    median: float
    slowest: float
    per_second: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measure the store as a program uses it: a round trip, taking and giving back a free lock, and handing a\n"
        "lock from one connection to another. For comparisons with other libraries see make bench."
    )
    parser.epilog = "examples:\n  $ lockfast bench --url redis://localhost:6379\n  $ lockfast bench --seconds 10 --json"
    parser.add_argument("--seconds", type=_seconds, default=SECONDS, help="for each of the three parts (default 2)")
    add_store(parser)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.05 <= value <= 600:
        raise ValueError(text)
    return value


def run(args: argparse.Namespace) -> int:
    terminal = Terminal()
    results: list[Result] = []
    with connect(args) as locks, connect(args) as other:
        name = f"lockfast-bench:{locks.runtime.new_holder_id()}"
        locks.lock(name).inspect()
        parts = (_round_trips, _cycles, _hand_overs)
        with Block(terminal) as block:
            for number, part in enumerate(parts, 1):
                if not args.json:
                    block.draw([[(f"measuring {number} of {len(parts)} ...", "dim")]])
                results.append(part(locks, other, name, args.seconds))
            block.draw([])
    if args.json:
        print_json([result._asdict() for result in results])
    else:
        terminal.lines([[(f"{'':<42}{'median':>10}{'99 %':>10}{'per second':>12}", "dim")], *map(_line, results)])
    return 0


def _line(result: Result) -> list[tuple[str, str]]:
    times = f"{result.median * 1000:>7.3f} ms{result.slowest * 1000:>7.3f} ms"
    return [(f"{result.what:<42}", ""), (times, "bold"), (f"{result.per_second:>12,.0f}", "")]


def _measured(what: str, seconds: float, step: Callable[[], float]) -> Result:
    """Repeat `step`, which gives the seconds that count, for as long as was asked."""
    taken: list[float] = []
    started = time.perf_counter()
    while time.perf_counter() - started < seconds or len(taken) < LEAST:
        taken.append(step())
    elapsed = time.perf_counter() - started
    taken.sort()
    return Result(
        what, len(taken), median(taken), taken[min(len(taken) - 1, len(taken) * 99 // 100)], len(taken) / elapsed
    )


def _round_trips(locks: lockfast.Locks, other: lockfast.Locks, name: str, seconds: float) -> Result:
    lock = locks.lock(name)

    def step() -> float:
        started = time.perf_counter()
        lock.inspect()
        return time.perf_counter() - started

    return _measured("one request (inspect)", seconds, step)


def _cycles(locks: lockfast.Locks, other: lockfast.Locks, name: str, seconds: float) -> Result:
    lock = locks.lock(name, ttl=TTL)

    def step() -> float:
        started = time.perf_counter()
        with lock:
            pass
        return time.perf_counter() - started

    return _measured("take and give back a free lock", seconds, step)


def _hand_overs(locks: lockfast.Locks, other: lockfast.Locks, name: str, seconds: float) -> Result:
    """From the release on one connection until another thread on another connection has the lock."""
    first, second = locks.lock(name, ttl=TTL), other.lock(name, ttl=TTL)
    arrived: list[float] = []

    def take() -> None:
        with second:
            arrived.append(time.perf_counter())

    def step() -> float:
        lease = first.acquire()
        if lease is None:
            raise lockfast.AcquireTimeout(f"{name} stayed taken, so nothing could be measured.")
        waiter = threading.Thread(target=take, daemon=True)
        waiter.start()
        while not locks.lock(name).inspect().waiting:
            time.sleep(0.0005)
        started = time.perf_counter()
        lease.release()
        waiter.join(10)
        return arrived.pop() - started

    return _measured("hand over to who waits", seconds, step)
