"""`python -m verify.explore`: every interleaving of the models, a table, and the trace of what broke."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import NamedTuple

from verify import local_handoff_models, models
from verify import thread_models as blocking
from verify.explorer import Explorer
from verify.world import Model

MOST_SECONDS = 7200.0
"""Per model: only a search that goes wrong takes as long, even on a busy machine."""


class Row(NamedTuple):
    """What is told of one search; it can travel between processes, which a `Report` cannot."""

    model: str
    complete: bool
    states: int
    schedules: int
    depth: int
    seconds: float
    verdict: str
    story: str

    def __str__(self) -> str:
        return (
            f"{self.model:<26}{self.states:>10,} states {self.schedules:>9.2e} schedules  "
            f"{self.depth:>3} steps {self.seconds:>6.1f} s  {self.verdict}"
        )


def main(arguments: list[str] | None = None) -> int:
    """0 when every model was searched to its end and no rule was broken."""
    parser = argparse.ArgumentParser(prog="python -m verify.explore", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the short version that the tests run")
    parser.add_argument("--most-states", type=int, default=2_000_000, help="give up on a model beyond this")
    parser.add_argument("--jobs", type=int, default=1, help="processes to spread the models over")
    parser.add_argument("names", nargs="*", help="models whose names begin so; all when left out")
    chosen = parser.parse_args(arguments)
    names = [
        one.name for one in known(quick=chosen.quick) if not chosen.names or one.name.startswith(tuple(chosen.names))
    ]
    one_search = partial(search, quick=chosen.quick, most_states=chosen.most_states)
    started = time.monotonic()
    if chosen.jobs > 1:
        with ProcessPoolExecutor(chosen.jobs, mp_context=get_context("spawn")) as pool:
            rows = shown(pool.map(one_search, names))
    else:
        rows = shown(map(one_search, names))
    print(total(rows, time.monotonic() - started))
    return 0 if rows and all(row.complete for row in rows) else 1


def known(*, quick: bool) -> list[Model]:
    """All models, in the order in which they are searched."""
    kinds = (models, local_handoff_models, blocking)
    return [model for kind in kinds for model in (kind.quick() if quick else kind.full())]


def search(name: str, *, quick: bool, most_states: int) -> Row:
    """Search the model of that name to its end, or up to the limit."""
    (model,) = (one for one in known(quick=quick) if one.name == name)
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


def shown(rows: Iterable[Row]) -> list[Row]:
    """The rows, each printed as it comes."""
    found = []
    for row in rows:
        print(row, flush=True)
        if row.story:
            print(f"\n{row.story}\n", flush=True)
        found.append(row)
    return found


def total(rows: list[Row], seconds: float) -> str:
    states = sum(row.states for row in rows)
    schedules = sum(row.schedules for row in rows)
    complete = sum(row.complete for row in rows)
    broken = sum(bool(row.story) for row in rows)
    return (
        f"\n{complete} of {len(rows)} models complete, {states:,} states standing for {schedules:.2e} schedules, "
        f"{broken} violations, {seconds:.0f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
