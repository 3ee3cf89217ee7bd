"""Acquire and release a free lock of the embedded store, with almost nothing imported.

`lockfast run` uses it for commands that take only milliseconds, less than importing the library.

It handles only the fast path, with the statements and checks of the store. In any other case (no file yet, another
boot, a busy file, a taken lock, an unusual name) it returns None and has changed nothing; the caller then uses the
store. It does not renew: a caller that needs the lock for longer loads the library in time. One call in 256 also goes
to the store, which sweeps old rows.
"""

from __future__ import annotations

import os
import time

from lockfast.stores.sqlite.connection import SQL, open_if_current, wal_bytes
from lockfast.stores.sqlite.location import boot_id, check_file, check_folder, checked_path, default_path

TYPE_CHECKING = False
if TYPE_CHECKING:
    import sqlite3
else:
    import _sqlite3 as sqlite3

MOST_CHARS = 200
LONG_LOG_BYTES = 262_144  # size of the write-ahead log from which copying it into the file is worth the time
LEAST_TTL, MOST_TTL = 1.0, 86_400.0

_left_open: list[sqlite3.Connection] = []


class FastGrant:
    """A grant for `ttl` seconds from `sent_at` on the boot-time clock."""

    def __init__(
        self, connection: sqlite3.Connection, path: str, name: str, holder: str, ttl: float, fence: int, sent_at: float
    ) -> None:
        self._connection, self._path = connection, path
        self.name, self.holder, self.ttl, self.fence, self.sent_at = name, holder, ttl, fence, sent_at

    def release(self) -> bool:
        """False if the lock has waiters or is lost: the store must release it then."""
        now = _now()
        row = (now, self.name, self.holder, now, self.name)
        try:
            released = self._connection.execute(SQL["release_uncontended"], row).rowcount == 1
        except sqlite3.Error:
            released = False
        if released and wal_bytes(self._path) <= LONG_LOG_BYTES:
            # Closing the last connection copies the log into the file and syncs the disk, which takes longer than
            # everything else. The end of the process closes it without that.
            _left_open.append(self._connection)
        else:
            self.close()
        return released

    def close(self) -> None:
        """Close the file without releasing the lock."""
        self._connection.close()


def path_of(url: str) -> str | None:
    """The lock file that `url` names; None for another store, or for a path that only the store can explain.

    >>> path_of("sqlite:////var/lib/app/locks.db"), path_of("redis://localhost")
    ('/var/lib/app/locks.db', None)
    """
    scheme, _, rest = url.partition("://")
    if scheme != "sqlite" or (rest and not rest.startswith("/")):
        return None
    try:
        return checked_path(rest[1:]) if rest else default_path()
    except (OSError, ValueError):
        return None


def acquire(path: str, name: str, ttl: float, owner: str) -> FastGrant | None:
    """Acquire the lock if it is free and nothing is unusual."""
    if not (_is_plain(name) and _is_plain(owner) and LEAST_TTL <= ttl <= MOST_TTL):
        return None
    if name.startswith("lockfast:") or not hasattr(time, "CLOCK_BOOTTIME") or os.urandom(1) == b"\0":
        return None
    try:
        path = os.path.realpath(path)
        check_folder(os.path.dirname(path))
        check_file(path)
        connection = open_if_current(path, boot_id())
    except (OSError, sqlite3.Error, ValueError):
        return None  # the store meets the same error and explains it
    if connection is None:
        return None
    holder, sent_at, fence = os.urandom(15).hex(), _now(), time.time_ns() // 1000
    row = (name, fence, holder, owner, sent_at, sent_at + ttl, 1)
    try:
        if connection.execute(SQL["acquire_free"], row).rowcount:
            return FastGrant(connection, path, name, holder, ttl, fence, sent_at)
    except sqlite3.ProgrammingError:
        raise
    except sqlite3.DatabaseError:
        pass  # the file is busy or damaged; nothing was changed
    connection.close()
    return None


def _is_plain(text: str) -> bool:
    return 0 < len(text) <= MOST_CHARS and text.isascii() and text.isprintable()


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)
