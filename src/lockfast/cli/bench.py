"""`lockfast bench`: measure a store in a few seconds.

Measures the library as a program uses it, on lock names that no program uses. Reports medians and the 99th percentile,
never a mean, and leaves no lock behind.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from secrets import token_hex
from statistics import median
from typing import NamedTuple

from lockfast.cli.arguments import add_store, connect, in_range, print_json
from lockfast.cli.measure import TTL, handoff, timed
from lockfast.cli.terminal import Block, Terminal

MIN_SAMPLES = 20


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
    return Result(what, count, median(samples), samples[count * 99 // 100], count / elapsed)
