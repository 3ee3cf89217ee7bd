"""`python -m verify.simulate --seeds 10000`: many seeds; a failing one is shrunk, and its trace shown."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from verify.scenario import Setting
from verify.simulator import Outcome, shrunk, simulate

SHOWN = 60
"""Lines of a failing trace that are shown, from its end."""


def main(arguments: list[str] | None = None) -> int:
    """0 when no seed failed."""
    parser = argparse.ArgumentParser(prog="python -m verify.simulate", description=__doc__)
    parser.add_argument("--seeds", type=int, default=500, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them; with --seeds 1, the one to look at")
    parser.add_argument("--jobs", type=int, default=1, help="processes to spread them over")
    chosen = parser.parse_args(arguments)
    seeds = range(chosen.first, chosen.first + chosen.seeds)
    started = time.monotonic()
    if chosen.jobs > 1:
        with ProcessPoolExecutor(chosen.jobs, mp_context=get_context("spawn")) as pool:
            outcomes = summary(pool.map(simulate, seeds, chunksize=20))
    else:
        outcomes = summary(map(simulate, seeds))
    events, grants, virtual, failed = outcomes
    print(
        f"{len(seeds):,} seeds, {events:,} events, {grants:,} grants, {virtual / 3600:.1f} virtual hours "
        f"in {time.monotonic() - started:.0f} s: {len(failed)} failed"
    )
    for setting in failed[:1]:
        show(setting)
    return 1 if failed else 0


def summary(outcomes: Iterable[Outcome]) -> tuple[int, int, float, list[Setting]]:
    events = grants = 0
    seconds = 0.0
    failed = []
    for outcome in outcomes:
        events += outcome.events
        grants += outcome.grants
        seconds += outcome.seconds
        if outcome.broken:
            print(f"seed {outcome.setting.seed}: {outcome.broken}", flush=True)
            failed.append(outcome.setting)
    return events, grants, seconds, failed


def show(setting: Setting) -> None:
    """The shortest trace that was found for a failing seed."""
    small = shrunk(setting)
    print(f"\nSeed {setting.seed}, shrunk to {small.setting}:\n")
    for line in small.trace[-SHOWN:]:
        print(f"  {line}")
    print(f"\n  {small.broken}")


if __name__ == "__main__":
    sys.exit(main())
