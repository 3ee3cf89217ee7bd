"""A table of locks, for a terminal or a file: the same columns in `ls` and `top`.

Rules kept here: on a terminal a row is one line, so the two columns that strangers fill are clipped first; in a file
nothing is clipped.
"""

from __future__ import annotations

from collections.abc import Sequence

from lockfast.cli.common import shown_holder, shown_name, shown_times
from lockfast.cli.terminal import Line, Terminal
from lockfast.values import LockInfo

HEADINGS = ("LOCK", "HOLDER", "HELD FOR", "TTL LEFT", "FENCE", "WAITING")
RIGHT = {"WAITING"}
GAP = "  "
NARROWEST = 12
SORTS = {
    "name": lambda info: (info.name,),
    "age": lambda info: (-(info.held_for or 0.0), info.name),
    "waiting": lambda info: (-info.waiting, -(info.held_for or 0.0), info.name),
}


def sorted_by(infos: Sequence[LockInfo], order: str) -> list[LockInfo]:
    return sorted(infos, key=SORTS[order])


def lock_table(terminal: Terminal, infos: Sequence[LockInfo]) -> list[Line]:
    """The heading and a line for each lock."""
    rows = [_row(info) for info in infos]
    widths = [max(map(len, column)) for column in zip(HEADINGS, *rows, strict=True)]
    if terminal.live:
        _narrow(widths, terminal.width - 1)
    heading: Line = [(_padded(HEADINGS, widths), "dim")]
    return [heading, *(_line(info, row, widths) for info, row in zip(infos, rows, strict=True))]


def _row(info: LockInfo) -> tuple[str, ...]:
    fence = "" if info.fence is None else str(info.fence)
    return (shown_name(info), shown_holder(info), *shown_times(info), fence, str(info.waiting))


def _narrow(widths: list[int], room: int) -> None:
    """Take from the wider of the first two columns until a row fits."""
    while sum(widths) + len(GAP) * (len(widths) - 1) > room:
        wider = 0 if widths[0] > widths[1] else 1
        if widths[wider] <= NARROWEST:
            return
        widths[wider] -= 1


def _cell(text: str, width: int, heading: str) -> str:
    cut = text if len(text) <= width else text[: width - 1] + "…"
    return cut.rjust(width) if heading in RIGHT else cut.ljust(width)


def _padded(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (_cell(text, width, head) for text, width, head in zip(cells, widths, HEADINGS, strict=True))
    return GAP.join(padded).rstrip()


def _line(info: LockInfo, row: Sequence[str], widths: Sequence[int]) -> Line:
    cells = [_cell(text, width, head) for text, width, head in zip(row, widths, HEADINGS, strict=True)]
    styles = ["bold", "" if info.locked else "dim", "", _urgency(info), "dim", "yellow" if info.waiting else "dim"]
    pieces = [piece for cell, style in zip(cells, styles, strict=True) for piece in ((cell, style), (GAP, ""))]
    return pieces[:-1]


def _urgency(info: LockInfo) -> str:
    """A lock without a ttl is one that nobody frees if its holder dies."""
    return "red" if info.locked and info.ttl_left is None else ""
