"""What SQLite's errors mean for a lock, each with what to do about it.

Only an I/O error leaves open whether a change was made: every other one comes with a rollback.
"""

from __future__ import annotations

import sqlite3

from lockfast.errors import (
    ConfigurationError,
    LockError,
    Outcome,
    StoreError,
    StoreProtocolError,
    StoreRefused,
    StoreUnavailable,
)

BUSY = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL})
"""Another connection is writing, or recovering the log of a process that was killed: soon over."""

SPOILED = frozenset({sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
"""After these a connection is not used any further: a new one reads the file anew."""

REFUSED = frozenset({sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH})


def primary_code(error: sqlite3.Error) -> int:
    """The kind of error, without SQLite's finer distinctions; 0 for one that Python's module raised itself."""
    code: int = getattr(error, "sqlite_errorcode", None) or 0
    return code & 0xFF


def explained(error: sqlite3.Error, path: str) -> LockError:
    """`error` as one of ours."""
    code = primary_code(error)
    if code == sqlite3.SQLITE_NOTADB:
        return ConfigurationError(f"{path} is no SQLite database. Choose another path for the lock file.")
    if code == sqlite3.SQLITE_CORRUPT:
        return StoreProtocolError(
            f"The lock file {path} is damaged. Stop the processes that use it and remove it together with its "
            "-wal and -shm files: it is made anew, without the locks."
        )
    if code in REFUSED:
        return StoreRefused(
            f"The lock file {path} may not be written: {error}. Give this user the right to, or choose another path."
        )
    if code == sqlite3.SQLITE_FULL:
        return StoreUnavailable(f"The disk of the lock file {path} is full; nothing was changed. Free some space.")
    if code == sqlite3.SQLITE_CANTOPEN:
        return StoreUnavailable(
            f"The lock file {path} cannot be opened: {error}. Is its folder still there, and has this process too "
            "many files open?"
        )
    if code == sqlite3.SQLITE_IOERR:
        return StoreUnavailable(
            f"The disk of the lock file {path} failed ({error}); whether the change was made is not known.",
            outcome=Outcome.UNKNOWN,
        )
    return StoreError(f"SQLite refused to work on the lock file {path}: {error}.")


def still_busy(path: str) -> StoreUnavailable:
    """Another process did not end its transaction while we could wait."""
    return StoreUnavailable(
        f"The lock file {path} stayed busy and nothing was changed: another process keeps a transaction open. "
        f"If this lasts, one is stopped in the middle of it; fuser {path} lists them."
    )
