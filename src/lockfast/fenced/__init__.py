"""Fencing that is enforced: writes that refuse a holder whose lock has gone to another.

A process can be stopped between any two lines, past its ttl, and then go on writing. No lock can prevent that; what is
written to can. Each grant has a fence greater than all before it, and these guards keep the greatest that they saw next
to the data: who comes with a smaller one is refused with `StaleFence`.

    fenced.file     a file: read, change, write; replaced in one step
    fenced.redis    keys of Redis or Valkey, by one script
    fenced.sql      rows of SQLite or PostgreSQL, through DB-API or SQLAlchemy

Rules kept by all of them:

- The check and the write are one step for everybody else.
- Looking counts: whoever has read under a fence cannot be undercut by an older holder between its read and its write.
- The same fence may write as often as it likes; only a smaller one is refused.

>>> from lockfast import fenced
>>> fenced.file.FencedFile("9527.txt", 7).write_text("hello")
>>> fenced.file.FencedFile("9527.txt", 6).write_text("late")  # doctest: +ELLIPSIS
Traceback (most recent call last):
lockfast.errors.StaleFence: The write to '9527.txt' was refused: it came with fence 6, ...
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockfast.fenced import file, redis, sql

__all__ = ["file", "redis", "sql"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from importlib import import_module

        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
