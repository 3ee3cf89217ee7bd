"""Locks as text, as table rows and as JSON: the same words in every command.

Names and labels come from other programs: text output cleans them, JSON escapes them. In a table each holder has a
row, which is one line. On a terminal the columns LOCK and HOLDER are cut to fit, and FENCE is left out if that is not
enough; in a file nothing is cut. There is a column MODE only if a lock in the table is shared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockfast.values import HolderInfo, LockInfo, Mode, Owner, WaiterInfo, clean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockfast.cli.terminal import Line, Terminal

HEADINGS = ("LOCK", "HOLDER", "MODE", "HELD FOR", "TTL LEFT", "FENCE", "WAITING")
MODE, FENCE = HEADINGS.index("MODE"), HEADINGS.index("FENCE")
GAP = "  "
MIN_COLUMN = 12
MAX_HOLDERS = 8  # of each lock in a table
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


def times(holder: HolderInfo) -> tuple[str, str]:
    """How long the holder has had the lock, and how much of its ttl is left."""
    held = "?" if holder.held_for is None else duration(holder.held_for)
    return held, "none" if holder.ttl_left is None else duration(holder.ttl_left)


def holders_text(info: LockInfo) -> str:
    """Name the first holder of a held lock, and say how many more there are.

    >>> holders_text(LockInfo("gpu", (HolderInfo("a", Owner("web1", 7), held_for=3.0), HolderInfo("b"))))
    'web1, pid 7 for 3.0 s and 1 more'
    """
    first, more = info.holders[0], len(info.holders) - 1
    held = "" if first.held_for is None else f" for {duration(first.held_for)}"
    return owner_text(first.owner) + held + (f" and {more} more" if more else "")


def mode_text(one: HolderInfo | WaiterInfo) -> str:
    """The mode of a holder or waiter; for permits, which slots it has or how many it waits for.

    >>> mode_text(HolderInfo("a", mode=Mode.READ)), mode_text(HolderInfo("a", mode=Mode.PERMITS, slots=(0, 1, 2, 5)))
    ('read', 'slots 0-2,5')
    >>> mode_text(WaiterInfo("a", None, 1.0, Mode.PERMITS, 2))
    '2 permits'
    """
    if one.mode is not Mode.PERMITS:
        return str(one.mode.value)
    if isinstance(one, WaiterInfo):
        return f"{one.permits} permit{'s' if one.permits > 1 else ''}"
    runs: list[list[int]] = []
    for slot in one.slots:
        if runs and slot == runs[-1][-1] + 1:
            runs[-1][1:] = [slot]
        else:
            runs.append([slot])
    return f"slot{'s' if one.permits > 1 else ''} " + ",".join("-".join(map(str, run)) for run in runs)


def is_shared(info: LockInfo) -> bool:
    """Whether a holder or a waiter of the lock shares it, so that modes are worth showing."""
    modes = {one.mode for one in info.holders} | {one.mode for one in info.waiters}
    return not modes <= {Mode.EXCLUSIVE}


def as_dict(info: LockInfo, *, waiters: bool) -> dict[str, Any]:
    """The JSON form of a lock; times in seconds. `holder`, `owner` and the times are those of the first holder."""
    found: dict[str, Any] = {
        "name": info.name,
        "locked": info.locked,
        "mode": info.mode and info.mode.value,
        "holder": info.holder,
        "owner": info.owner and info.owner._asdict(),
        "fence": info.fence,
        "held_for": _rounded(info.held_for),
        "ttl_left": _rounded(info.ttl_left),
        "holders": [_holder_dict(one) for one in info.holders],
        "waiting": info.waiting,
    }
    if waiters:
        found["waiters"] = [
            {
                "holder": one.holder,
                "owner": one.owner and one.owner._asdict(),
                "waiting_for": _rounded(one.waiting_for),
                "mode": one.mode.value,
                "permits": one.permits,
            }
            for one in info.waiters
        ]
    return found


def _holder_dict(one: HolderInfo) -> dict[str, Any]:
    return {
        "holder": one.holder,
        "owner": one.owner and one.owner._asdict(),
        "fence": one.fence,
        "held_for": _rounded(one.held_for),
        "ttl_left": _rounded(one.ttl_left),
        "mode": one.mode.value,
        "slots": list(one.slots),
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def lock_table(terminal: Terminal, infos: Sequence[LockInfo]) -> list[Line]:
    styled = [row for info in infos for row in _rows(info)]
    columns = [at for at in range(len(HEADINGS)) if at != MODE or any(map(is_shared, infos))]
    rows = [HEADINGS, *([text for text, _ in row] for row in styled)]
    widths = [max(len(row[at]) for row in rows) for at in columns]
    if terminal.live and not _fits(widths, terminal.width - 1):
        del widths[columns.index(FENCE)]
        columns.remove(FENCE)
    if terminal.live:
        _shrink(widths, terminal.width - 1)
    heading: Line = [(GAP.join(_cells([HEADINGS[at] for at in columns], widths)).rstrip(), "dim")]
    return [heading, *(_line([row[at] for at in columns], widths) for row in styled)]


def _rows(info: LockInfo) -> list[list[tuple[str, str]]]:
    """One row per holder, as cells with their styles. Only the first has the name and the number of waiters."""
    name, waiting = (clean(info.name), "bold"), (str(info.waiting), "yellow" if info.waiting else "dim")
    last_fence = "" if info.fence is None else str(info.fence)
    if not info.locked:
        return [[name, ("free", "dim"), ("", ""), ("", ""), ("", ""), (last_fence, "dim"), waiting]]
    found = []
    for one in info.holders[:MAX_HOLDERS]:
        held, left = times(one)
        fence = last_fence if one.mode is Mode.EXCLUSIVE or one.fence is None else str(one.fence)
        endless = "red" if one.ttl_left is None else ""  # if the holder dies, it never expires
        mode = (mode_text(one), "cyan" if one.mode is not Mode.EXCLUSIVE else "dim")
        found.append([name, (owner_text(one.owner), ""), mode, (held, ""), (left, endless), (fence, "dim"), waiting])
        name, waiting = ("", ""), ("", "")
    hidden = len(info.holders) - MAX_HOLDERS
    if hidden > 0:
        found.append([("", ""), (f"and {hidden} more", "dim"), *[("", "")] * (len(HEADINGS) - 2)])
    return found


def _fits(widths: Sequence[int], limit: int) -> bool:
    """Whether a row fits into `limit` columns once its first two are as narrow as they may be."""
    least = [min(MIN_COLUMN, width) for width in widths[:2]] + list(widths[2:])
    return sum(least) + len(GAP) * (len(least) - 1) <= limit


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


def _line(cells: Sequence[tuple[str, str]], widths: Sequence[int]) -> Line:
    texts = _cells([text for text, _ in cells], widths)
    line = [piece for text, (_, style) in zip(texts, cells, strict=True) for piece in ((text, style), (GAP, ""))]
    while not line[-1][0].strip():
        line.pop()
    return line
