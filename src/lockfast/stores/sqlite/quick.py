"""Take a free lock of the embedded store, and give it back, with next to nothing loaded.

A command under a lock is often over in milliseconds, and loading the library would take longer than all the rest.

Rules kept here: only the common case is done, by the statements and under the checks of the store itself. Whatever
is not common (no file yet, another boot, a busy file, a taken lock, a name that needs a closer look) is left to the
store, and nothing has been changed then. Nothing is renewed or tidied up here: who needs the lock for longer loads the
library in time, and one in 256 uses is left to the store, which sweeps.
"""

from __future__ import annotations

import os
import time

from lockfast.stores.sqlite import statements as sql
from lockfast.stores.sqlite.boot import boot_id
from lockfast.stores.sqlite.checks import check_file, check_folder
from lockfast.stores.sqlite.opening import APPLICATION_ID, VERSION, settle

TYPE_CHECKING = False
if TYPE_CHECKING:
    import sqlite3
else:
    import _sqlite3 as sqlite3  # without the conversions of dates, for which the package loads much

MOST_CHARS = 200
LONG_LOG = 262_144
"""Bytes of SQLite's log beyond which it is worth the time to write it into the file."""
LEAST_TTL, MOST_TTL = 1.0, 86_400.0


_left_open: list[sqlite3.Connection] = []


class QuickGrant:
    """The lock is ours for `ttl` seconds from `asked_at` on the boot-time clock."""

    def __init__(
        self, connection: sqlite3.Connection, path: str, name: str, holder: str, ttl: float, owner: str
    ) -> None:
        self._connection = connection
        self._path = path
        self.name = name
        self.holder = holder
        self.ttl = ttl
        self.owner = owner
        self.fence = 0
        self.sent_at = 0.0

    def take(self) -> bool:
        self.sent_at = _now()
        self.fence = time.time_ns() // 1000
        row = (self.name, self.fence, self.holder, self.owner, self.sent_at, self.sent_at + self.ttl, 1)
        return self._connection.execute(sql.TAKE, row).rowcount == 1

    def give_back(self) -> bool:
        """Whether that is done; if not, somebody waits or the lock has gone, and the store has to look."""
        now = _now()
        try:
            given = self._connection.execute(sql.GIVE, (now, self.name, self.holder, now, self.name)).rowcount == 1
        except sqlite3.Error:
            given = False
        if given and not self._log_is_long():
            # The last one to close writes the log into the file and waits for the disk, which takes longer than all
            # the rest. The end of the process closes it too, and leaves the log to the next.
            _left_open.append(self._connection)
        else:
            self.close()
        return given

    def _log_is_long(self) -> bool:
        try:
            return os.stat(self._path + "-wal").st_size > LONG_LOG
        except OSError:
            return False

    def close(self) -> None:
        """Let go of the file; the lock stays as it is."""
        self._connection.close()


def path_in(url: str) -> str | None:
    """The lock file that `url` names; None when it names another store, or the place needs a closer look.

    >>> path_in("sqlite:////var/lib/app/locks.db"), path_in("redis://localhost")
    ('/var/lib/app/locks.db', None)
    """
    scheme, _, rest = url.partition("://")
    if scheme != "sqlite" or (rest and not rest.startswith("/")):
        return None
    if rest:
        return os.path.abspath(rest[1:]) if rest[1:] and not rest.endswith("/") else None
    folder = os.environ.get("XDG_STATE_HOME", "")
    if not folder.startswith("/"):
        home = os.environ.get("HOME", "")
        if not home.startswith("/"):
            return None
        folder = home + "/.local/state"
    return folder + "/lockfast/locks.db"


def take(path: str, name: str, ttl: float, owner: str) -> QuickGrant | None:
    """The lock, if it is free and there is nothing special about anything; else None."""
    if not (_is_plain(name) and _is_plain(owner) and LEAST_TTL <= ttl <= MOST_TTL):
        return None
    if name.startswith("lockfast:") or not hasattr(time, "CLOCK_BOOTTIME") or os.urandom(1) == b"\0":
        return None
    try:
        path = os.path.realpath(path)
        connection = _open(path)
    except (OSError, sqlite3.Error, ValueError, PermissionError):
        return None  # the store finds it too, and says what it means
    grant = QuickGrant(connection, path, name, os.urandom(15).hex(), ttl, owner)
    try:
        if grant.take():
            return grant
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.ProgrammingError):
            raise  # ours; anything else is the file's: busy, or not to be used at all, and not changed in either case
    connection.close()
    return None


def _open(path: str) -> sqlite3.Connection:
    check_folder(os.path.dirname(path))
    check_file(path)
    connection = sqlite3.connect(path, timeout=0, isolation_level=None)
    try:
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if (application, version) != (APPLICATION_ID, VERSION):
            raise ValueError("not ours, or not yet")
        if connection.execute(sql.STATE).fetchone()[0] != boot_id():
            raise ValueError("of another boot")
        settle(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _is_plain(text: str) -> bool:
    return 0 < len(text) <= MOST_CHARS and text.isascii() and text.isprintable()


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)
