"""Shorten SQLite's write-ahead log, at moments of our choice.

SQLite does this by itself when a commit finds the log long, while others go on writing. Up to version 3.51.2 it can
then forget what was committed: a checkpoint that follows closely upon another may take no notice that a writer has
just started the log anew, and marks frames as copied that were not. A lock store that forgets a grant has granted
twice. So the automatic checkpoint is off, and ours keeps writers out: it holds the write lock on one connection and
copies the log through another. It also syncs the disk once per round, where SQLite lets every writer try.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

LONGEST_LOG_BYTES = 4_000_000
"""Of the log, before it is copied into the database; that takes some milliseconds."""


def log_is_long(path: Path) -> bool:
    """Whether it is time; the log is cut when it is started anew (`journal_size_limit`), so that its size tells."""
    try:
        return path.with_name(path.name + "-wal").stat().st_size > LONGEST_LOG_BYTES
    except OSError:
        return False


def shorten_log(connection: sqlite3.Connection, path: Path) -> bool:
    """Copy the log into the database; False when another was writing, and it has to be tried again."""
    try:
        connection.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError:
        return False
    try:
        helper = sqlite3.connect(path, timeout=0, isolation_level=None)
        try:
            helper.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        finally:
            helper.close()
    finally:
        connection.execute("ROLLBACK")
    return True
