"""Open a connection to the lock file: ours, in the right mode, and of this boot.

Rules kept here:

- No busy handler (`timeout=0`): SQLite would sleep inside the call, and with it the event loop. Who finds the
  file busy goes away and comes back (`database.py`).
- WAL with `synchronous=NORMAL`: a commit reaches the operating system, not the disk, and a checkpoint syncs. A
  killed process so loses nothing. A power cut may lose the last commits, but never damages the file; and what it
  loses are grants that the next boot voids anyway, and fences that the wall clock replaces.
- No automatic checkpoint: `checkpoint.py` says why, and does it.
- Small pages: a transaction changes one or two rows, and a commit writes each changed page as a whole.
"""

from __future__ import annotations

from lockfast.stores.sqlite import statements as sql

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    import sqlite3
    from collections.abc import Callable
    from typing import TypeVar

    T = TypeVar("T")

APPLICATION_ID = 0x686F6C64
"""Marks the file as ours in SQLite's own header ("hold")."""
VERSION = 1
PAGE_BYTES = 1024


def in_transaction(connection: sqlite3.Connection, work: Callable[[], T], begin: str = "BEGIN IMMEDIATE") -> T:
    """Do `work` as a whole or not at all."""
    try:
        connection.execute(begin)
        answer = work()
        connection.execute("COMMIT")
    except BaseException:  # an interrupt included: it may come between any two statements
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return answer


def open_connection(path: str | os.PathLike[str], boot: str) -> sqlite3.Connection:
    """A connection on which every statement is a transaction of its own, unless it says BEGIN."""
    import sqlite3

    connection = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False, cached_statements=64)
    try:
        # In one transaction, or another process could make the file ours between two looks at it.
        if not in_transaction(connection, lambda: _is_ours(connection, path), "BEGIN"):
            _make_ours(connection, path)
        settle(connection)
        _void_other_boots(connection, boot)
    except BaseException:
        connection.close()
        raise
    return connection


def settle(connection: sqlite3.Connection) -> None:
    """Set what holds for one connection only."""
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA secure_delete = OFF")
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    connection.execute("PRAGMA journal_size_limit = 0")


def _is_ours(connection: sqlite3.Connection, path: str | os.PathLike[str]) -> bool:
    """False when the file is still empty; an error when it is somebody else's."""
    application: int = connection.execute("PRAGMA application_id").fetchone()[0]
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    if application == APPLICATION_ID:
        if version != VERSION:
            from lockfast.errors import ConfigurationError

            raise ConfigurationError(
                f"The lock file {path} was made by another release of lockfast (layout {version}, here "
                f"{VERSION}). Use the same release in all processes, or another path."
            )
        return True
    if application or version or connection.execute("SELECT 1 FROM sqlite_master").fetchone():
        from lockfast.errors import ConfigurationError

        raise ConfigurationError(
            f"{path} is the database of another program; nothing was changed in it. Choose another path for the "
            "lock file."
        )
    return False


def _make_ours(connection: sqlite3.Connection, path: str | os.PathLike[str]) -> None:
    connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
    mode: str = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
    if mode != "wal":
        from lockfast.errors import ConfigurationError

        raise ConfigurationError(
            f"The file system of {path} cannot do shared memory, which the lock file needs. Choose a folder on a "
            "local disk, or use a Redis or Valkey server."
        )

    def fill() -> None:
        if not _is_ours(connection, path):  # another process may have come first
            for statement in sql.schema():
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {VERSION}")

    in_transaction(connection, fill)


def _void_other_boots(connection: sqlite3.Connection, boot: str) -> None:
    """What an earlier boot of the machine granted is void: its holders are gone, and so is its clock."""
    if _boot_in(connection) == boot:
        return

    def void() -> None:
        if _boot_in(connection) != boot:
            connection.execute(sql.VOID_GRANTS)
            connection.execute(sql.VOID_PLACES)
            connection.execute(sql.NEW_BOOT, (boot,))

    in_transaction(connection, void)


def _boot_in(connection: sqlite3.Connection) -> str:
    boot: str = connection.execute(sql.STATE).fetchone()[0]
    return boot
