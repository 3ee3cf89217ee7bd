"""`python -m holdfast.testing.explore`: every interleaving of the models, a table, and the trace of what broke."""

from __future__ import annotations

import argparse
import sys

from holdfast.testing import models
from holdfast.testing.explorer import Explorer, Report


def main(arguments: list[str] | None = None) -> int:
    """0 when every model was searched to its end and no rule was broken."""
    parser = argparse.ArgumentParser(prog="python -m holdfast.testing.explore", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the short version that the tests run")
    parser.add_argument("--most-states", type=int, default=2_000_000, help="give up on a model beyond this")
    parser.add_argument("names", nargs="*", help="models whose names begin so; all when left out")
    chosen = parser.parse_args(arguments)
    reports = []
    for model in models.quick() if chosen.quick else models.full():
        if chosen.names and not model.name.startswith(tuple(chosen.names)):
            continue
        report = Explorer(model).run(most_states=chosen.most_states)
        print(row(report), flush=True)
        if report.story is not None:
            print(f"\n{report.story}\n")
        reports.append(report)
    print(total(reports))
    return 0 if all(report.complete for report in reports) else 1


def row(report: Report) -> str:
    return (
        f"{report.model:<26}{report.states:>10,} states {report.schedules:>9.2e} schedules  "
        f"{report.depth:>3} steps {report.seconds:>6.1f} s  {report.verdict}"
    )


def total(reports: list[Report]) -> str:
    states = sum(report.states for report in reports)
    schedules = sum(report.schedules for report in reports)
    complete = sum(report.complete for report in reports)
    seconds = sum(report.seconds for report in reports)
    broken = sum(report.violation is not None for report in reports)
    return (
        f"\n{complete} of {len(reports)} models complete, {states:,} states standing for {schedules:.2e} schedules, "
        f"{broken} violations, {seconds:.0f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
