"""`python -m verify.simulate --seeds 10000`: run many seeds; shrink the first failing seed and print its trace."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from verify.scenario import Scenario
from verify.simulator import Outcome, shrink, simulate

MOST_LINES = 60
"""Lines printed from the end of a failing trace."""


def main(arguments: list[str] | None = None) -> int:
    """Return 0 if no seed failed."""
    parser = argparse.ArgumentParser(prog="python -m verify.simulate", description=__doc__)
    parser.add_argument("--seeds", type=int, default=500, help="number of seeds")
    parser.add_argument("--first", type=int, default=0, help="first seed; with --seeds 1, run only this seed")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes")
    options = parser.parse_args(arguments)
    seeds = range(options.first, options.first + options.seeds)
    started = time.monotonic()
    if options.jobs > 1:
        with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
            totals = summary(pool.map(simulate, seeds, chunksize=20))
    else:
        totals = summary(map(simulate, seeds))
    events, grants, virtual, failed = totals
    print(
        f"{len(seeds):,} seeds, {events:,} events, {grants:,} grants, {virtual / 3600:.1f} virtual hours "
        f"in {time.monotonic() - started:.0f} s: {len(failed)} failed"
    )
    for scenario in failed[:1]:
        print_shrunk(scenario)
    return 1 if failed else 0


def summary(outcomes: Iterable[Outcome]) -> tuple[int, int, float, list[Scenario]]:
    events = grants = 0
    seconds = 0.0
    failed = []
    for outcome in outcomes:
        events += outcome.events
        grants += outcome.grants
        seconds += outcome.seconds
        if outcome.violation:
            print(f"seed {outcome.scenario.seed}: {outcome.violation}", flush=True)
            failed.append(outcome.scenario)
    return events, grants, seconds, failed


def print_shrunk(scenario: Scenario) -> None:
    """Print the shortest trace found for a failing seed."""
    small = shrink(scenario)
    print(f"\nSeed {scenario.seed}, shrunk to {small.scenario}:\n")
    for line in small.trace[-MOST_LINES:]:
        print(f"  {line}")
    print(f"\n  {small.violation}")


if __name__ == "__main__":
    sys.exit(main())
