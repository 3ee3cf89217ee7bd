"""The parts that every claim uses: interleaved rounds, figures, reports.

Rules:

- Peers take turns within a round (A B C, B C A …), so other load on the machine affects all of them.
- A ratio is the median of the ratios of single rounds. Figures of different runs are never compared.
- A figure is a median with its quartiles. No outlier is dropped.
- A missing or failing peer is named in the report.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from random import Random
from typing import Any, NamedTuple, TypeVar

from tests.support.servers import Server

T = TypeVar("T")
Cell = str | int | float
NOT_MEASURED = "not measured"
LEAST_ROUNDS = 3
ORDER_SEED = 1


class Spread(NamedTuple):
    """A median and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        ordered = sorted(values)
        if len(ordered) < 2:
            return cls(ordered[0], ordered[0], ordered[0])
        low, median, high = statistics.quantiles(ordered, n=4, method="inclusive")
        return cls(median, low, high)

    def __str__(self) -> str:
        return f"{number(self.median)} [{number(self.low)}–{number(self.high)}]"


class Verdict(NamedTuple):
    """One target and the measured value; None if it was not measured."""

    what: str
    measured: float | None
    limit: float
    unit: str
    at_least: bool

    @property
    def word(self) -> str:
        if self.measured is None:
            return NOT_MEASURED
        kept = self.measured >= self.limit if self.at_least else self.measured <= self.limit
        return "ok" if kept else "MISSED"

    @property
    def wanted(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {number(self.limit)}{self.unit}"

    @property
    def shown(self) -> str:
        return "—" if self.measured is None else f"{number(self.measured)}{self.unit}"


class Table(NamedTuple):
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


class Figure(NamedTuple):
    """One number per peer, drawn as bars."""

    title: str
    unit: str
    values: Mapping[str, float]
    less_is_better: bool


class Report:
    """The result of one claim."""

    def __init__(self, name: str, title: str) -> None:
        self.name = name
        self.title = title
        self.tables: list[Table] = []
        self.verdicts: list[Verdict] = []
        self.figures: list[Figure] = []
        self.notes: list[str] = []
        self.missing: dict[str, str] = {}

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> None:
        self.tables.append(Table(title, columns, [list(row) for row in rows]))

    def figure(self, title: str, unit: str, values: Mapping[str, float], *, less_is_better: bool = True) -> None:
        self.figures.append(Figure(title, unit, dict(values), less_is_better))

    def target(
        self, what: str, measured: float | None, limit: float, unit: str = "×", *, at_least: bool = False
    ) -> None:
        self.verdicts.append(Verdict(what, measured, limit, unit, at_least))

    def text(self) -> str:
        """The report as plain text."""
        parts = [f"## {self.name}: {self.title}"]
        parts += [f"{table.title}\n{laid_out(table.columns, table.rows)}" for table in self.tables]
        if self.missing:
            parts.append("\n".join(f"missing: {peer} ({why})" for peer, why in self.missing.items()))
        if self.notes:
            parts.append("\n".join(f"note: {note}" for note in self.notes))
        if self.verdicts:
            parts.append("\n".join(f"{v.word}: {v.what}: {v.shown} (wanted {v.wanted})" for v in self.verdicts))
        return "\n\n".join(parts) + "\n"

    def as_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "tables": [table._asdict() for table in self.tables],
            "figures": [figure._asdict() for figure in self.figures],
            "targets": [{**v._asdict(), "verdict": v.word} for v in self.verdicts],
            "notes": self.notes,
            "missing": self.missing,
        }


class Bench:
    """One run: its server, started at the first use, and whether it is a quick run."""

    def __init__(self, kind: str = "valkey9", *, quick: bool = False) -> None:
        self.kind = kind
        self.quick = quick
        self._stack = ExitStack()

    @cached_property
    def server(self) -> Server:
        return self._stack.enter_context(Server(self.kind))

    def pick(self, full: T, quick: T) -> T:
        return quick if self.quick else full

    def close(self) -> None:
        self._stack.close()


def in_turns(cases: Mapping[str, Callable[[], T]], rounds: int, seconds: float = math.inf) -> dict[str, list[T]]:
    """Run each case once per round; stop after `seconds`, but not before three rounds.

    Each round has another order: a case is up to a tenth faster after a case that kept the core busy than after a case
    that let it sleep.
    """
    results: dict[str, list[T]] = {name: [] for name in cases}
    order, randomness = list(cases), Random(ORDER_SEED)
    end = time.monotonic() + seconds
    for number_of_round in range(rounds):
        if number_of_round >= LEAST_ROUNDS and time.monotonic() > end:
            break
        randomness.shuffle(order)
        for name in order:
            results[name].append(cases[name]())
    return results


def is_ours(name: str) -> bool:
    """Whether a row or bar shows lockfast."""
    return name.startswith(("lockfast", "import lockfast"))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """The ratio of ours to theirs: the median over the rounds."""
    pairs = [(mine, other) for mine, other in zip(ours, theirs, strict=False) if other]
    return statistics.median(mine / other for mine, other in pairs) if pairs else None


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least a `share` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, min(len(ordered) - 1, -int(-share * len(ordered) // 1) - 1))]


def jain(counts: Sequence[float]) -> float:
    """Jain's fairness index: 1 if all got the same share, 1/n if one got everything."""
    squares = sum(count * count for count in counts)
    return sum(counts) ** 2 / (len(counts) * squares) if squares else 0.0


def number(value: float) -> str:
    """Three significant digits, with thousands separators; integers in full."""
    if isinstance(value, int) or value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 1 else f"{value:.{1 if abs(value) >= 10 else 2}f}"


def multiple(value: float | None) -> str:
    """A ratio as text."""
    return "—" if value is None else f"{value:.2f}×"


def laid_out(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """A Markdown table, padded so that it is readable as plain text."""
    cells = [[cell if isinstance(cell, str) else number(cell) for cell in row] for row in rows]
    widths = [max(len(row[at]) for row in [list(columns), *cells]) for at in range(len(columns))]

    def line(row: Sequence[str]) -> str:
        padded = [cell.ljust(width) if at == 0 else cell.rjust(width) for at, (cell, width) in _numbered(row, widths)]
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join("-" * (width + 1) + ("-" if at == 0 else ":") for at, width in enumerate(widths)) + "|"
    return "\n".join([line(columns), rule, *map(line, cells)])


def _numbered(row: Sequence[str], widths: Sequence[int]) -> enumerate[tuple[str, int]]:
    return enumerate(zip(row, widths, strict=True))
