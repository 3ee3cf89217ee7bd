"""Locks as text, as table rows and as JSON: the same words in every command.

Names and labels come from other programs: text output cleans them, JSON escapes them. On a terminal a table row is one
line, so the columns LOCK and HOLDER are cut to fit; in a file nothing is cut.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockfast.values import LockInfo, Owner, clean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockfast.cli.terminal import Line, Terminal

HEADINGS = ("LOCK", "HOLDER", "HELD FOR", "TTL LEFT", "FENCE", "WAITING")
GAP = "  "
MIN_COLUMN = 12
SORTS = {
    "name": lambda info: (info.name,),
    "age": lambda info: (-(info.held_for or 0.0), info.name),
    "waiting": lambda info: (-info.waiting, -(info.held_for or 0.0), info.name),
}


def duration(seconds: float) -> str:
    """Format a time with at most two units.

    >>> duration(0.034), duration(7.26), duration(75), duration(7300), duration(200_000)
    ('34 ms', '7.3 s', '1 min 15 s', '2 h 1 min', '2 d 7 h')
    """
    if seconds < 0.9995:
        return f"{max(0.0, seconds) * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, unit, part, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size} {unit} {rest} {smaller}" if rest else f"{whole // size} {unit}"
    return f"{whole} s"


def owner_text(owner: Owner | None) -> str:
    """Describe a holder or waiter.

    >>> owner_text(Owner("web1", 4711, "checkout")), owner_text(None)
    ('checkout (web1, pid 4711)', 'another program')
    """
    return "another program" if owner is None else clean(str(owner))


def times(info: LockInfo) -> tuple[str, str]:
    """How long the lock has been held, and how much of its ttl is left."""
    if not info.locked:
        return "", ""
    held = "?" if info.held_for is None else duration(info.held_for)
    return held, "none" if info.ttl_left is None else duration(info.ttl_left)


def as_dict(info: LockInfo, *, waiters: bool) -> dict[str, Any]:
    """The JSON form of a lock; times in seconds."""
    found: dict[str, Any] = {
        "name": info.name,
        "locked": info.locked,
        "holder": info.holder,
        "owner": info.owner and info.owner._asdict(),
        "fence": info.fence,
        "held_for": _rounded(info.held_for),
        "ttl_left": _rounded(info.ttl_left),
        "waiting": info.waiting,
    }
    if waiters:
        found["waiters"] = [
            {"holder": one.holder, "owner": one.owner and one.owner._asdict(), "waiting_for": _rounded(one.waiting_for)}
            for one in info.waiters
        ]
    return found


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def lock_table(terminal: Terminal, infos: Sequence[LockInfo]) -> list[Line]:
    rows = [_row(info) for info in infos]
    widths = [max(map(len, column)) for column in zip(HEADINGS, *rows, strict=True)]
    if terminal.live:
        _shrink(widths, terminal.width - 1)
    heading: Line = [(GAP.join(_cells(HEADINGS, widths)).rstrip(), "dim")]
    return [heading, *(_line(info, _cells(row, widths)) for info, row in zip(infos, rows, strict=True))]


def _row(info: LockInfo) -> tuple[str, ...]:
    holder = owner_text(info.owner) if info.locked else "free"
    fence = "" if info.fence is None else str(info.fence)
    return (clean(info.name), holder, *times(info), fence, str(info.waiting))


def _shrink(widths: list[int], limit: int) -> None:
    """Narrow the wider of the first two columns until a row fits into `limit` columns."""
    while sum(widths) + len(GAP) * (len(widths) - 1) > limit:
        wider = 0 if widths[0] > widths[1] else 1
        if widths[wider] <= MIN_COLUMN:
            return
        widths[wider] -= 1


def _cells(texts: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Cut and pad texts to their columns; the last column is aligned right."""
    cut = [text if len(text) <= width else text[: width - 1] + "…" for text, width in zip(texts, widths, strict=True)]
    return [*(text.ljust(width) for text, width in zip(cut[:-1], widths, strict=False)), cut[-1].rjust(widths[-1])]


def _line(info: LockInfo, cells: list[str]) -> Line:
    endless = info.locked and info.ttl_left is None  # if the holder dies, it never expires
    styles = ("bold", "" if info.locked else "dim", "", "red" if endless else "", "dim")
    line = [piece for cell, style in zip(cells, styles, strict=False) for piece in ((cell, style), (GAP, ""))]
    return [*line, (cells[-1], "yellow" if info.waiting else "dim")]
