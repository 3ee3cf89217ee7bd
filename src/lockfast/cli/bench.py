"""`lockfast bench`: measure a store in a few seconds.

Measures the library as a program uses it, on lock names that no program uses. Reports medians and the 99th percentile,
never a mean, and leaves no lock behind.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from secrets import token_hex
from statistics import median
from typing import NamedTuple

import lockfast
from lockfast.cli.arguments import add_store, connect, print_json
from lockfast.cli.terminal import Block, Terminal

SECONDS = 2.0
MIN_SAMPLES = 20
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
        "Measure a store as a program uses it: a round trip, acquiring and releasing a free lock, and\n"
        "handing a lock off to another connection. `make bench` compares with other libraries."
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
        name = f"lockfast-bench:{token_hex(8)}"
        locks.lock(name).inspect()
        parts = (_round_trips, _cycles, _handoffs)
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
    """Repeat `step`, which returns the seconds to count, for `seconds` and at least MIN_SAMPLES times."""
    samples: list[float] = []
    started = time.perf_counter()
    while time.perf_counter() - started < seconds or len(samples) < MIN_SAMPLES:
        samples.append(step())
    elapsed = time.perf_counter() - started
    samples.sort()
    count = len(samples)
    return Result(what, count, median(samples), samples[min(count - 1, count * 99 // 100)], count / elapsed)


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

    return _measured("acquire and release a free lock", seconds, step)


def _handoffs(locks: lockfast.Locks, other: lockfast.Locks, name: str, seconds: float) -> Result:
    """Time from the release on one connection until a waiter on another connection holds the lock."""
    first, second = locks.lock(name, ttl=TTL), other.lock(name, ttl=TTL)
    acquired: list[float] = []

    def wait() -> None:
        with second:
            acquired.append(time.perf_counter())

    def step() -> float:
        lease = first.acquire()
        if lease is None:
            raise lockfast.AcquireTimeout(f"Could not acquire {name}, so hand-offs were not measured. Try again.")
        waiter = threading.Thread(target=wait, daemon=True)
        waiter.start()
        while not locks.lock(name).inspect().waiting:
            time.sleep(0.0005)
        started = time.perf_counter()
        lease.release()
        waiter.join(10)
        return acquired.pop() - started

    return _measured("hand off to a waiter", seconds, step)
