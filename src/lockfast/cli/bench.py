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
from lockfast.cli.arguments import add_store, connect, in_range, print_json
from lockfast.cli.terminal import Block, Terminal
from lockfast.errors import LockError

MIN_SAMPLES = 20
TTL = 10.0
WAIT = 3.0  # seconds that a waiter waits for a hand-off


class Result(NamedTuple):
    """One measurement; times in seconds."""

    what: str
    samples: int
    median: float
    slowest: float
    per_second: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measure a store as a program uses it: a round trip, acquiring and releasing a\n"
        "free lock, and a hand-off to another connection. `make bench` compares it with\n"
        "other libraries."
    )
    parser.epilog = "examples:\n  $ lockfast bench --url redis://localhost:6379\n  $ lockfast bench --seconds 10 --json"
    seconds = in_range(0.05, 600)
    parser.add_argument("--seconds", type=seconds, default=2.0, help="for each of the three parts (default 2)")
    add_store(parser)


def run(args: argparse.Namespace) -> int:
    terminal = Terminal()
    results: list[Result] = []
    with connect(args) as locks, connect(args) as other:
        name = f"lockfast-bench:{token_hex(8)}"
        lock = locks.lock(name, ttl=TTL)
        lock.inspect()

        def cycle() -> None:
            with lock:
                pass

        parts: dict[str, Callable[[], float]] = {
            "one request (inspect)": lambda: timed(lock.inspect),
            "acquire and release a free lock": lambda: timed(cycle),
            "hand off to a waiter": lambda: handoff(locks, other, name),
        }
        with Block(terminal) as block:
            for number, (what, sample) in enumerate(parts.items(), 1):
                if not args.json:
                    block.draw([[(f"measuring {number} of {len(parts)} ...", "dim")]])
                results.append(_measured(what, args.seconds, sample))
            block.draw([])
    if args.json:
        print_json([result._asdict() for result in results])
    else:
        lines = [[(f"{'':<42}{'median':>10}{'99 %':>10}{'per second':>12}", "dim")]]
        for what, _, middle, slowest, rate in results:
            times = f"{middle * 1000:>7.3f} ms{slowest * 1000:>7.3f} ms"
            lines.append([(f"{what:<42}", ""), (times, "bold"), (f"{rate:>12,.0f}", "")])
        terminal.lines(lines)
    return 0


def _measured(what: str, seconds: float, sample: Callable[[], float]) -> Result:
    """Call `sample`, which returns the seconds to count, for `seconds` and at least MIN_SAMPLES times."""
    samples: list[float] = []
    started = time.perf_counter()
    while time.perf_counter() - started < seconds or len(samples) < MIN_SAMPLES:
        samples.append(sample())
    elapsed = time.perf_counter() - started
    samples.sort()
    count = len(samples)
    return Result(what, count, median(samples), samples[min(count - 1, count * 99 // 100)], count / elapsed)


def timed(operation: Callable[[], object]) -> float:
    started = time.perf_counter()
    operation()
    return time.perf_counter() - started


def acquired(locks: lockfast.Locks, name: str) -> lockfast.Lease:
    """Acquire an unused lock, or raise `LockError`."""
    lease = locks.lock(name, ttl=TTL).acquire(timeout=WAIT)
    if lease is None:
        raise LockError(f"{name} is held by another client; use an unused lock name.")
    return lease


def handoff(locks: lockfast.Locks, other: lockfast.Locks, name: str) -> float:
    """Seconds from the release on one connection until a waiter on another connection holds the lock."""
    acquired_at: list[float] = []

    def wait() -> None:
        try:
            with other.lock(name, ttl=TTL, timeout=2 * WAIT):
                acquired_at.append(time.perf_counter())
        except LockError:
            pass  # reported below

    lease = acquired(locks, name)
    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    give_up_at = time.perf_counter() + WAIT
    while not locks.lock(name).inspect().waiting and time.perf_counter() < give_up_at:
        time.sleep(0.0005)
    released_at = time.perf_counter()
    lease.release()
    waiter.join(3 * WAIT)
    if not acquired_at:
        raise LockError("The waiter did not get the lock: no notification arrived. Allow SUBSCRIBE and PUBLISH.")
    return acquired_at[0] - released_at
