"""`python -m bench.pages`: write docs/benchmarks.md, its plots and the README's table from `bench/results.json`.

Rules: the pages depend only on the results, so the same file gives the same pages. Missed targets and peers that did
better are listed as well.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.harness import Verdict, is_ours, laid_out, number
from bench.plots import bars

HERE = Path(__file__).parent
ROOT = HERE.parent
RESULTS = HERE / "results.json"
PAGE = ROOT / "docs" / "benchmarks.md"
PLOTS = ROOT / "docs" / "assets" / "bench"
README = ROOT / "README.md"
MARKS = ("<!-- bench: begin, written by `make bench` -->", "<!-- bench: end -->")
SHOWN_IN_README = ("handoff", 0)
"""The claim and the index of its figure."""
ROWS_PER_CLAIM = 2
"""Targets of each claim in the README, missed ones not counted: the page has all of them."""
README_NOTE = """\
Each value is a ratio: the side after “against” counts as 1. Lower is better, unless the target is “≥”. **CPU** is the
CPU time of the client, **wall** the elapsed time, **p50** the median. “Two cores”: one for the client, one for the
server. The raw socket is not a lock but a lower limit: it sends `SET` and `DEL` and ignores the replies."""
MORE_FIGURES = "[Benchmarks](docs/benchmarks.md) has all figures, how to read them, and where lockfast loses."
Found = Mapping[str, Any]


def main() -> int:
    found = json.loads(RESULTS.read_text("utf-8"))
    PLOTS.mkdir(parents=True, exist_ok=True)
    for claim, report in found["claims"].items():
        for at, figure in enumerate(report["figures"]):
            (PLOTS / _plot(claim, at)).write_text(bars(figure), "utf-8")
    PAGE.write_text(page(found), "utf-8")
    README.write_text(with_table(README.read_text("utf-8"), found), "utf-8")
    return 0


def _plot(claim: str, at: int) -> str:
    return f"{claim}-{at}.svg"


def page(found: Found) -> str:
    """docs/benchmarks.md."""
    parts = [
        (HERE / "page.md").read_text("utf-8").rstrip(),
        "## The machine and the run",
        "\n".join(f"- {what}: {value}" for what, value in found["circumstances"].items()),
        "## All targets",
        laid_out(("claim", "target", "measured", "wanted", ""), [row for _, row in _targets(found)]),
        "## Where lockfast loses",
        _losses(found),
        *(_section(claim, report) for claim, report in found["claims"].items()),
        "## Optimizations",
        (HERE / "optimizations.md").read_text("utf-8").rstrip(),
    ]
    return "\n\n".join(parts) + "\n"


def _verdict(target: Found) -> Verdict:
    return Verdict(target["what"], target["measured"], target["limit"], target["unit"], target["at_least"])


def _targets(found: Found) -> Iterator[tuple[Verdict, tuple[str, str, str, str, str]]]:
    for claim, report in found["claims"].items():
        for verdict in map(_verdict, report["targets"]):
            yield verdict, (claim, verdict.what, verdict.shown, verdict.wanted, verdict.word)


def _losses(found: Found) -> str:
    missed = [
        f"- The target “{verdict.what}” ({row[0]}) was missed: {verdict.shown}, wanted {verdict.wanted}."
        for verdict, row in _targets(found)
        if verdict.word == "MISSED"
    ]
    better = [line for report in found["claims"].values() for figure in report["figures"] for line in _better(figure)]
    missing = [
        f"- {peer} was not measured in {claim}: {why}."
        for claim, report in found["claims"].items()
        for peer, why in report["missing"].items()
    ]
    lines = missed + better + missing
    return (
        "\n".join(lines)
        if lines
        else "Nowhere in this run: no peer did better in any figure, and no target was missed."
    )


def _better(figure: Found) -> Iterator[str]:
    """Peers that did better than lockfast in a figure. A floor is not a peer."""
    ours = next((value for name, value in figure["values"].items() if is_ours(name)), None)
    if ours is None:
        return
    for name, value in figure["values"].items():
        ahead = value < ours if figure["less_is_better"] else value > ours
        if ahead and not is_ours(name) and not name.startswith("floor"):
            unit = figure["unit"]
            yield f"- {figure['title']}: {name} has {number(value)} {unit}, lockfast {number(ours)} {unit}."


def _section(claim: str, report: Found) -> str:
    parts = [f"## {report['title'][0].upper()}{report['title'][1:]}", f"`python -m bench --only {claim}`"]
    parts += [f"![{figure['title']}](assets/bench/{_plot(claim, at)})" for at, figure in enumerate(report["figures"])]
    for table in report["tables"]:
        parts.append(f"{table['title'][0].upper()}{table['title'][1:]}:")
        parts.append(laid_out(table["columns"], table["rows"]))
    parts += [f"{note[0].upper()}{note[1:]}." for note in report["notes"]]
    return "\n\n".join(parts)


def _readme_rows(found: Found) -> Iterator[tuple[str, str, str, str, str]]:
    """Ratios only: the first targets of each claim, and every missed one."""
    for report in found["claims"].values():
        verdicts = [_verdict(target) for target in report["targets"] if target["unit"] == "×"]
        met = [verdict for verdict in verdicts if verdict.word == "ok"]
        for verdict in verdicts:
            if verdict.word == "MISSED" or verdict in met[:ROWS_PER_CLAIM]:
                word = "**missed**" if verdict.word == "MISSED" else verdict.word
                yield report["title"], verdict.what, verdict.shown, verdict.wanted, word


def with_table(text: str, found: Found) -> str:
    """The README with one plot, one table, and the command that wrote them."""
    claim, at = SHOWN_IN_README
    figure = found["claims"][claim]["figures"][at]
    run = f"{found['circumstances']['system']}; {found['circumstances']['load']}"
    body = "\n\n".join(
        [
            MARKS[0],
            f"![{figure['title']}](docs/assets/bench/{_plot(claim, at)})",
            laid_out(("scenario", "comparison", "ratio", "target", ""), list(_readme_rows(found))),
            README_NOTE,
            f"Measured by `make bench` in one run ({run}).\n{MORE_FIGURES}",
            MARKS[1],
        ]
    )
    pattern = re.compile(re.escape(MARKS[0]) + ".*?" + re.escape(MARKS[1]), re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"README.md lacks the lines {MARKS[0]} and {MARKS[1]}, which mark the table.")
    return pattern.sub(lambda _: body, text)


if __name__ == "__main__":
    sys.exit(main())
