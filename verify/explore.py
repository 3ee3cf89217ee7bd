"""`python -m verify.explore`: explore every interleaving of the models; print a table, and traces of violations."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import NamedTuple

from verify import claim_models, local_handoff_models, models, thread_models
from verify.explorer import Explorer
from verify.world import Model

MOST_SECONDS = 7200.0
"""Per model; even on a busy machine only a runaway search takes as long."""


class Row(NamedTuple):
    """One line of the table; unlike a `Report` it can be pickled."""

    model: str
    complete: bool
    states: int
    schedules: int
    depth: int
    seconds: float
    verdict: str
    trace: str

    def __str__(self) -> str:
        return (
            f"{self.model:<36}{self.states:>10,} states {self.schedules:>9.2e} schedules  "
            f"{self.depth:>3} steps {self.seconds:>6.1f} s  {self.verdict}"
        )


def main(arguments: list[str] | None = None) -> int:
    """Return 0 if every model was explored completely without a violation."""
    parser = argparse.ArgumentParser(prog="python -m verify.explore", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="explore the small models that the tests use")
    parser.add_argument("--most-states", type=int, default=2_000_000, help="stop a model beyond this many states")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes")
    parser.add_argument("names", nargs="*", help="only models whose names start with one of these")
    options = parser.parse_args(arguments)
    prefixes = tuple(options.names) or ("",)
    names = [model.name for model in all_models(quick=options.quick) if model.name.startswith(prefixes)]
    explore = partial(row_of, quick=options.quick, most_states=options.most_states)
    started = time.monotonic()
    if options.jobs > 1:
        with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
            rows = printed(pool.map(explore, names))
    else:
        rows = printed(map(explore, names))
    print(summary(rows, time.monotonic() - started))
    return 0 if rows and all(row.complete for row in rows) else 1


def all_models(*, quick: bool) -> list[Model]:
    modules = (models, claim_models, local_handoff_models, thread_models)
    return [model for module in modules for model in (module.quick() if quick else module.full())]


def row_of(name: str, *, quick: bool, most_states: int) -> Row:
    """Explore the model of that name."""
    (model,) = (one for one in all_models(quick=quick) if one.name == name)
    report = Explorer(model).run(most_states=most_states, most_seconds=MOST_SECONDS)
    return Row(
        report.model,
        report.complete,
        report.states,
        report.schedules,
        report.depth,
        report.seconds,
        report.verdict,
        "" if report.trace is None else str(report.trace),
    )


def printed(rows: Iterable[Row]) -> list[Row]:
    """Print each row as soon as it is known."""
    found = []
    for row in rows:
        print(row, flush=True)
        if row.trace:
            print(f"\n{row.trace}\n", flush=True)
        found.append(row)
    return found


def summary(rows: list[Row], seconds: float) -> str:
    states = sum(row.states for row in rows)
    schedules = sum(row.schedules for row in rows)
    complete = sum(row.complete for row in rows)
    violations = sum(bool(row.trace) for row in rows)
    return (
        f"\n{complete} of {len(rows)} models complete, {states:,} states for {schedules:.2e} schedules, "
        f"{violations} violations, {seconds:.0f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
