"""Guards that enforce fencing: they refuse the write of a holder that has lost its lock.

A process can pause between any two lines, past its ttl, and then continue to write. The lock cannot prevent that; the
resource can. Each grant has a greater fence than every earlier one. A guard stores the greatest fence it has seen next
to the data and refuses a smaller one with `StaleFence`.

    fenced.file     a file, replaced atomically
    fenced.redis    keys of Redis or Valkey, by one script
    fenced.sql      rows of SQLite or PostgreSQL, through DB-API or SQLAlchemy

Rules of every guard:

- Check and write are one atomic step.
- A read counts too: after it, no older holder can write between this read and the write that follows.
- The same fence may write any number of times.

>>> from lockfast import fenced
>>> fenced.file.FencedFile("9527.txt", 7).write_text("hello")
>>> fenced.file.FencedFile("9527.txt", 6).write_text("late")  # doctest: +ELLIPSIS
Traceback (most recent call last):
lockfast.errors.StaleFence: The write to '9527.txt' was refused: it has fence 6, ...
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from lockfast.errors import ConfigurationError, StaleFence, shown

if TYPE_CHECKING:
    from lockfast.fenced import file, redis, sql

__all__ = ["file", "redis", "sql"]

MAX_FENCE = 2**53 - 1  # fences are microseconds of wall time or slightly more: exact in a Lua number and in a BIGINT


class Fenced(Protocol):
    """A lease, or any object with a fence."""

    @property
    def fence(self) -> int: ...


def fence_of(given: Fenced | int) -> int:
    """The fence of a lease, or the number itself.

    >>> fence_of(7)
    7
    """
    fence = given if isinstance(given, int) else getattr(given, "fence", None)
    if not isinstance(fence, int) or isinstance(fence, bool) or not 0 < fence <= MAX_FENCE:
        raise ConfigurationError(f"A fence is a lease or its fence number, not {shown(given)}.")
    return fence


def refused(what: str, fence: int, newest: int) -> StaleFence:
    return StaleFence(
        f"The write to {shown(what)} was refused: it has fence {fence}, but fence {newest} was here before. Another "
        "client has held the lock since; nothing was changed. Acquire the lock again and start from the current data.",
        name=what,
        fence=fence,
        newest=newest,
    )


def __getattr__(name: str) -> Any:
    if name in __all__:
        from importlib import import_module

        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
