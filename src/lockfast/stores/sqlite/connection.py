"""Open the lock file, load the SQL of this store, and acquire a free lock for `lockfast run`.

Rules:

- No busy handler (`timeout=0`): SQLite would sleep inside the call and block the event loop. The store retries.
- WAL with `synchronous=NORMAL`: a commit reaches the operating system, and only a checkpoint syncs the disk. A killed
  process loses nothing. A power cut may lose the last commits but never damages the file; the next boot voids the lost
  grants anyway, and fences continue from the wall clock.
- No automatic checkpoint: see `store.checkpoint`.
- A transaction is a `with connection:` block that starts with BEGIN. Any exception rolls it back, interrupts included.
- Small pages: a transaction changes one or two rows, and a commit writes whole pages.
- `_sqlite3` instead of `sqlite3`, and no imports that a healthy file does not need: `lockfast run` uses this module for
  commands that take less time than importing the library.
"""

from __future__ import annotations

import os
import time

from lockfast.stores.sqlite.location import boot_id, check_file, check_folder, checked_path, default_path, refuse

TYPE_CHECKING = False
if TYPE_CHECKING:
    import sqlite3
else:
    import _sqlite3 as sqlite3

APPLICATION_ID = 0x6C6F636B  # "lock": marks the file as ours in SQLite's header
LAYOUT = 2
PAGE_BYTES = 1024
LONG_LOG_BYTES = 262_144  # size of the write-ahead log from which a short command copies it into the file

_left_open: list[sqlite3.Connection] = []


def _text(file_name: str) -> str:
    with open(os.path.join(os.path.dirname(__file__), file_name), encoding="utf-8") as file:
        return file.read()


def _statements() -> dict[str, str]:
    """Each statement of statements.sql, without comments and semicolon, under the name that starts its contract."""
    found = {}
    for part in _text("statements.sql").split("\n\n"):
        lines = part.strip().splitlines()
        body = [line for line in lines if not line.startswith("--")]
        if body:
            found[lines[0].removeprefix("-- ").partition(":")[0]] = "\n".join(body).removesuffix(";")
    return found


SQL = _statements()


class OtherBootInUse(sqlite3.OperationalError):
    """A live process has the file open, under another boot id than ours."""

    sqlite_errorcode = sqlite3.SQLITE_BUSY  # retried: processes that start after a reboot meet for a moment only


def open_or_create(path: str, boot: str) -> sqlite3.Connection:
    """Open the lock file in autocommit mode, create its tables if it is empty, and void grants of earlier boots."""
    connection = _connect(path)
    try:
        with connection:  # another process may create the tables between the reads
            connection.execute("BEGIN")
            has_tables = _is_lock_file(connection, path)
        if not has_tables:
            _create_tables(connection, path, boot)
        if _stored_boot(connection) != boot:
            connection.close()
            _void_earlier_boots(path, boot)
            connection = _connect(path)
        _configure(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def wal_bytes(path: str) -> int:
    """The size of the write-ahead log. SQLite truncates it when it restarts the log (`journal_size_limit`)."""
    try:
        return os.stat(path + "-wal").st_size
    except OSError:
        return 0


def _connect(path: str) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False, cached_statements=64)


def _configure(connection: sqlite3.Connection) -> None:
    """Apply the settings that SQLite does not store in the file."""
    for setting in ("synchronous = NORMAL", "secure_delete = OFF", "wal_autocheckpoint = 0", "journal_size_limit = 0"):
        connection.execute(f"PRAGMA {setting}")


def _is_lock_file(connection: sqlite3.Connection, path: str) -> bool:
    """False for an empty file; `ConfigurationError` for a file of another program or release."""
    application: int = connection.execute("PRAGMA application_id").fetchone()[0]
    layout: int = connection.execute("PRAGMA user_version").fetchone()[0]
    if application == APPLICATION_ID:
        if layout != LAYOUT:
            refuse(
                f"The lock file {path} was made by another release of lockfast (layout {layout}, here {LAYOUT}). "
                "Nothing was locked. Use the same release in all processes, or another path."
            )
        return True
    if application or layout or connection.execute("SELECT 1 FROM sqlite_master").fetchone():
        refuse(f"{path} is the database of another program; it was not changed. Choose another path for the lock file.")
    return False


def _create_tables(connection: sqlite3.Connection, path: str, boot: str) -> None:
    connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
    mode: str = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
    if mode != "wal":
        refuse(
            f"The file system of {path} does not support shared memory, which the lock file needs. Nothing was locked. "
            "Choose a folder on a local disk, or use a Redis or Valkey server."
        )
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        if not _is_lock_file(connection, path):  # another process may have been first
            code = "\n".join(line for line in _text("schema.sql").splitlines() if not line.startswith("--"))
            for statement in filter(None, map(str.strip, code.split(";"))):
                connection.execute(statement)
            connection.execute(SQL["set_boot"], (boot,))
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {LAYOUT}")


def _void_earlier_boots(path: str, boot: str) -> None:
    """Void all grants and tickets if the machine has restarted: their holders and their clock are gone.

    This needs the file for itself. After a restart no process has it open; a process that does is alive, in a container
    with its own boot id.
    """
    connection = _connect(path)
    try:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            if _stored_boot(connection) != boot:
                connection.execute(SQL["void_grants"])
                connection.execute(SQL["void_shared_grants"])
                connection.execute(SQL["void_waiters"])
                connection.execute(SQL["set_boot"], (boot,))
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
            raise
        raise OtherBootInUse(str(error)) from error
    finally:
        connection.close()


def _stored_boot(connection: sqlite3.Connection) -> str:
    boot: str = connection.execute(SQL["state"]).fetchone()[0]
    return boot


class FastGrant:
    """A grant for `ttl` seconds from `sent_at` on the boot-time clock. Nothing renews it."""

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


def fast_acquire(url: str, name: str, ttl: float, owner: str) -> FastGrant | None:
    """Acquire a free lock; None, with nothing changed, in any case that is not the usual one: the store handles it.

    Such cases are another store, no file yet, another boot, a busy file, a taken lock and an unusual name. One call in
    256 also leaves the lock to the store, which then sweeps old rows.
    """
    scheme, _, rest = url.partition("://")
    if scheme != "sqlite" or rest[:1] not in ("", "/") or not 1.0 <= ttl <= 86_400.0:
        return None
    if not (_is_plain(name) and _is_plain(owner)) or name.startswith("lockfast:"):
        return None
    if not hasattr(time, "CLOCK_BOOTTIME") or os.urandom(1) == b"\0":
        return None
    connection = grant = None
    try:
        path = os.path.realpath(checked_path(rest[1:]) if rest else default_path())
        check_folder(os.path.dirname(path))
        check_file(path)
        connection = _connect(path)
        if _is_lock_file(connection, path) and _stored_boot(connection) == boot_id():
            _configure(connection)
            holder, sent_at, fence = os.urandom(15).hex(), _now(), time.time_ns() // 1000
            row = (name, fence, holder, owner, sent_at, sent_at + ttl, 1)
            if connection.execute(SQL["acquire_free"], row).rowcount:
                grant = FastGrant(connection, path, name, holder, ttl, fence, sent_at)
    except (OSError, sqlite3.Error, ValueError):
        pass  # the store meets the same error and explains it
    if connection is not None and grant is None:
        connection.close()
    return grant


def _is_plain(text: str) -> bool:
    return 0 < len(text) <= 200 and text.isascii() and text.isprintable()


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)
