"""How people are told of times and holders: the same words in every command. Text of strangers is cleaned here."""

from __future__ import annotations

from lockfast.values import Owner, clean


def ago(seconds: float) -> str:
    """A time as two units at most.

    >>> ago(0.034), ago(7.26), ago(75), ago(7300), ago(200_000)
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


def who(owner: Owner | None) -> str:
    """A holder or waiter, as far as it is known.

    >>> who(Owner("web1", 4711, "checkout")), who(None)
    ('checkout (web1, pid 4711)', 'another program')
    """
    return "another program" if owner is None else clean(str(owner))
