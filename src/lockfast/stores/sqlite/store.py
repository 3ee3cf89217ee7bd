"""`ports.Store` on a file that the processes of one user share: the embedded default.

Not guaranteed: exclusion between machines, or between users.

The fast path is one statement; everything else is one transaction of `transactions.py`. A grant to a waiter is notified
after the commit. If the waiter has gone by then, its grant is released to the next one.

Rules for the connection, which all threads or tasks of a client share:

- A transaction contains no await. It ends before other code runs, so no task is cancelled inside it. Only a killed
  process leaves one unfinished, and SQLite rolls it back for the others.
- If the file is busy, the work is retried after a short pause, until the caller's `until`. SQLite itself never waits.
- No SQLite connection survives a fork. SQLite's locks belong to one process, but a child inherits the state that says
  it has them, and even a new connection in the child would share that state. So the parent closes its connection before
  the fork, and both processes open a new one when they need it.
- The file may be removed or replaced while it is open. Locks in a file that nobody else sees exclude nobody, so each
  transaction first compares the open file with the one at the path, and reopens if they differ.
- Only an I/O error leaves the outcome unknown: every other error comes with a rollback.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from lockfast import errors
from lockfast.errors import ConfigurationError, Outcome, StoreError, StoreRefused, StoreUnavailable, closed_error, shown
from lockfast.facts import Facts, Persistence
from lockfast.ports import Capabilities, Mailbox, Runtime, Store
from lockfast.stores.sqlite import transactions
from lockfast.stores.sqlite.connection import SQL, OtherBootInUse, open_or_create, wal_bytes
from lockfast.stores.sqlite.inbox import INBOXES, Inbox, SqliteMailbox
from lockfast.stores.sqlite.location import boot_id, checked_path, prepare
from lockfast.stores.sqlite.transactions import Outgoing, Transaction
from lockfast.values import Answer, Claim, Enqueue, Granted, LockInfo, Page, Renewal

log = logging.getLogger("lockfast")

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]

SWEEP_EVERY = 256  # requests between two sweeps; each checks twice as many locks, so it keeps up with any load
FIRST_PAUSE, LONGEST_PAUSE = 0.0002, 0.005
CHECK_LOG_EVERY = 256  # uses of the connection between two checks of the log's size
LONGEST_LOG_BYTES = 4_000_000  # size of the write-ahead log that triggers a checkpoint, which takes some milliseconds
FORK_PATIENCE = 1.0  # seconds that a fork waits for another thread's transaction, which takes under a millisecond

# BUSY: another connection is writing, or recovering the log of a killed process. SPOILED: a new connection is needed.
BUSY = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL})
SPOILED = frozenset({sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
REFUSED = frozenset({sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH})


class Database:
    """Invariants: `_connection` is used only under `_mutex`, and only by the process `pid` that opened it."""

    def __init__(self, path: str, runtime: Runtime, boot_id: Callable[[], str]) -> None:
        self.path = path
        self._runtime = runtime
        self._boot_id = boot_id
        # A real lock on asyncio too: another thread may fork.
        self._mutex = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._file = (0, 0)
        self.pid = os.getpid()
        self._uses = 0
        self._checkpoint_due = self._paused = self._orphaned = self._closed = False
        with _fork_mutex:
            _databases.add(self)

    async def run(self, work: Work[T], until: float, *, even_closed: bool = False) -> T:
        """Run `work` on the connection and return its result. While the file is busy, run it again from the start.

        `work` executes one statement or one transaction. `even_closed` allows clean-up after `close`.
        """
        pause = FIRST_PAUSE
        while True:
            try:
                with self._mutex:
                    return self._run_once(work, even_closed)
            except sqlite3.Error as error:
                if primary_code(error) in SPOILED:
                    with self._mutex:
                        self._disconnect()
                if primary_code(error) not in BUSY:
                    raise lock_error(error, self.path) from error
                left = until - self._runtime.now()
                if left <= 0:
                    raise _still_busy(error, self.path) from error
            await self._runtime.sleep(min(left, pause * (0.5 + self._runtime.random())))
            pause = min(pause * 2, LONGEST_PAUSE)

    def _run_once(self, work: Work[T], even_closed: bool) -> T:
        if self._closed and not even_closed:
            raise closed_error()
        try:
            connection = self._usable()
            result = work(connection)
            self._limit_log(connection)
            return result
        finally:
            if self._closed:
                self._disconnect()

    def _limit_log(self, connection: sqlite3.Connection) -> None:
        """Checkpoint a long log. A failure here does not affect the finished work."""
        self._uses += 1
        if self._uses % CHECK_LOG_EVERY and not self._checkpoint_due:
            return
        try:
            long = wal_bytes(self.path) > LONGEST_LOG_BYTES
            self._checkpoint_due = long and not checkpoint(connection, self.path)
        except sqlite3.Error as error:
            log.warning("Could not checkpoint the lock file %s; its log keeps growing: %s", self.path, error)

    def _usable(self) -> sqlite3.Connection:
        if os.getpid() != self.pid:
            self._orphaned = True
        if self._orphaned:
            raise ConfigurationError(
                "This process was forked without Python's knowledge while the lock file was open, and SQLite cannot be "
                "used across a fork. Nothing was changed. Call connect() after the fork."
            )
        if self._connection is not None and self._file != self._file_at_path():
            log.warning("The lock file was removed or replaced; its locks are gone: %s", self.path)
            self._disconnect()
        if self._connection is None:
            path = prepare(self.path)
            # Read before opening: if the file is replaced in between, the next transaction notices.
            self._file = self._file_at_path()
            self._connection = open_or_create(path, self._boot_id())
        return self._connection

    def _file_at_path(self) -> tuple[int, int]:
        try:
            status = os.stat(self.path)
        except OSError:
            return (0, 0)
        return (status.st_dev, status.st_ino)

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """Close for good."""
        with self._mutex:
            self._closed = True
            self._disconnect()

    def pause(self) -> None:
        """Before a fork: close the connection, and block other threads until `resume`."""
        self._paused = self._mutex.acquire(timeout=FORK_PATIENCE)
        if self._paused:
            self._disconnect()

    def resume(self) -> None:
        """After a fork, in both processes."""
        if self._paused:
            self._paused = False
            self._mutex.release()

    def reset(self) -> None:
        """After a fork, in the child."""
        self.pid = os.getpid()
        self._mutex = threading.Lock()
        self._paused = False
        if self._connection is not None:
            import ctypes

            # Leak the parent's connection, because the end of the interpreter would close it.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._connection))
            self._orphaned = True


_databases: weakref.WeakSet[Database] = weakref.WeakSet()
_fork_mutex = threading.Lock()  # held while `_databases` changes, and from before a fork until after it


def _before_fork() -> None:
    _fork_mutex.acquire()
    for database in list(_databases):
        database.pause()


def _after_fork() -> None:
    for database in list(_databases):
        database.resume()
    _fork_mutex.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)


def _still_busy(error: sqlite3.Error, path: str) -> errors.LockError:
    if isinstance(error, OtherBootInUse):
        return ConfigurationError(
            f"The lock file {path} is in use by a process with another boot id, probably in another container. The two "
            "disagree on which locks are from before a restart, so they cannot share it. Nothing was locked. Use a "
            "Redis or Valkey server, or let the containers see the boot id of the host."
        )
    return StoreUnavailable(
        f"The lock file {path} stayed busy: another process keeps a transaction open. Nothing was changed. If this "
        f"lasts, a process is stopped inside a transaction; fuser {path} lists them."
    )


def checkpoint(connection: sqlite3.Connection, path: str) -> bool:
    """Copy the write-ahead log into the database. False if another connection was writing: try again later.

    SQLite's automatic checkpoint runs while others write. Up to version 3.51.2, a checkpoint shortly after another can
    miss that a writer has just restarted the log, and marks frames as copied that were not: a committed grant is lost,
    and the lock is granted twice. So this one holds the write lock on one connection while it checkpoints through
    another. It also syncs the disk once per round, where SQLite lets every writer try.
    """
    try:
        connection.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError:
        return False
    try:
        with closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as helper:
            helper.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    finally:
        connection.execute("ROLLBACK")
    return True


def primary_code(error: sqlite3.Error) -> int:
    """SQLite's error code without the extended part; 0 for an error that Python's module raised itself."""
    code: int = getattr(error, "sqlite_errorcode", None) or 0
    return code & 0xFF


def lock_error(error: sqlite3.Error, path: str) -> errors.LockError:
    """Translate an error of SQLite."""
    code = primary_code(error)
    if code == sqlite3.SQLITE_NOTADB:
        return ConfigurationError(f"{path} is not an SQLite database. Choose another path for the lock file.")
    if code == sqlite3.SQLITE_CORRUPT:
        return errors.StoreProtocolError(
            f"The lock file {path} is damaged, so no lock in it can be trusted. Stop the processes that use it, and "
            "remove it with its -wal and -shm files: it is created again, without the locks."
        )
    if code in REFUSED:
        return StoreRefused(
            f"The lock file {path} cannot be written: {error}. Nothing was changed. Give this user the right to write "
            "it, or choose another path."
        )
    if code == sqlite3.SQLITE_FULL:
        return StoreUnavailable(f"The disk of the lock file {path} is full; nothing was changed. Free some space.")
    if code == sqlite3.SQLITE_CANTOPEN:
        return StoreUnavailable(
            f"The lock file {path} cannot be opened: {error}. Nothing was changed. Check that its folder exists, and "
            "that this process has not too many files open."
        )
    if code == sqlite3.SQLITE_IOERR:
        return StoreUnavailable(
            f"The disk of the lock file {path} failed ({error}). The change may or may not have been made.",
            outcome=Outcome.UNKNOWN,
        )
    return StoreError(f"SQLite could not use the lock file {path}: {error}. Nothing was changed.")


class SqliteStore(Store):
    """Locks in the file at `path`. `flavour` must match the runtime: "threads" or "asyncio"."""

    grace = 0.08
    capabilities = Capabilities(fence_blocks=True, readers=True, permits=True, batches=True)

    def __init__(
        self,
        path: str | os.PathLike[str],
        runtime: Runtime,
        *,
        flavour: str = "threads",
        wall_us: Callable[[], int] = lambda: time.time_ns() // 1000,
        boot_id: Callable[[], str] = boot_id,
    ) -> None:
        path = checked_path(path)
        if flavour not in INBOXES:
            raise ConfigurationError(f"A store's flavour is threads or asyncio, not {shown(flavour)}.")
        self._runtime = runtime
        self._now = runtime.now
        self._wall_us = wall_us
        self._database = Database(path, runtime, boot_id)
        # Symbolic links to the file must lead to one inbox folder, or its processes could not notify each other.
        self._inbox = INBOXES[flavour](f"{Path(path).resolve()}-inbox", runtime)
        self._requests = 0
        self._finalizer = weakref.finalize(self, _close, self._database, self._inbox)
        # On threads, the session closes at exit and releases its leases. Closing the store before that would report
        # "closed" to the waiters, as if the program had called close().
        self._finalizer.atexit = flavour != "threads"

    def mailbox(self, holder: str) -> Mailbox:
        return SqliteMailbox(self._inbox, holder)

    async def acquire(self, claim: Claim, enqueue: Enqueue | None, until: float) -> Answer:
        if self._requests % SWEEP_EVERY == 0:
            await self._sweep()
        self._requests += 1

        def acquire_free(connection: sqlite3.Connection) -> int | None:
            now, fence = self._now(), self._wall_us()
            row = (claim.name, fence, claim.holder, claim.owner, now, now + claim.ttl, claim.fences)
            return fence if connection.execute(SQL["acquire_free"], row).rowcount else None

        if not claim.weight and (enqueue is None or enqueue.ticket is None):  # fast path: the lock is free
            fence = await self._database.run(acquire_free, until)
            if fence is not None:
                return Granted(fence)
        return await self._transact(lambda tx: transactions.acquire(tx, claim, enqueue), until)

    async def acquire_all(self, claims: Sequence[Claim], until: float) -> list[Granted] | None:
        return await self._transact(lambda tx: transactions.acquire_all(tx, claims), until)

    async def _sweep(self) -> None:
        try:
            await self._transact(transactions.sweep, until=0.0)  # one try: it is not urgent
        except errors.LockError as error:  # if it matters, the request itself meets it too
            log.debug("Could not sweep the lock file now: %s", error)

    async def renew(self, renewals: Sequence[Renewal], until: float) -> list[bool]:
        return await self._transact(lambda tx: [transactions.renew(tx, renewal) for renewal in renewals], until)

    async def release(self, name: str, holder: str, until: float) -> bool:
        def work(connection: sqlite3.Connection) -> int:
            now = self._now()
            return connection.execute(SQL["release_uncontended"], (now, name, holder, now, name)).rowcount

        # Even after `close`: a waiter of that moment still has a ticket to remove.
        if await self._database.run(work, until, even_closed=True):
            return True
        return await self._transact(lambda tx: transactions.release(tx, name, holder), until, even_closed=True)

    async def adopt(self, claim: Claim, old_holder: str, until: float) -> Granted | None:
        return await self._transact(lambda tx: transactions.adopt(tx, claim, old_holder), until)

    async def downgrade(self, claim: Claim, until: float) -> bool:
        return await self._transact(lambda tx: transactions.downgrade(tx, claim), until)

    async def inspect(self, name: str, until: float) -> LockInfo:
        return await self._transact(lambda tx: transactions.inspect(tx, name), until, begin="BEGIN")

    async def facts(self, until: float) -> Facts:
        version = sqlite3.sqlite_version
        return Facts("sqlite", reach="host", version=version, persistence=Persistence.FILE, clock_offset=0.0)

    async def listing(self, pattern: str, cursor: str, until: float) -> Page:
        return await self._transact(lambda tx: transactions.listing(tx, pattern, cursor), until, begin="BEGIN")

    async def force_release(self, name: str, holder: str, until: float) -> bool:
        return await self._transact(lambda tx: transactions.force_release(tx, name, holder), until)

    async def _transact(
        self, step: Callable[[Transaction], T], until: float, begin: str = "BEGIN IMMEDIATE", even_closed: bool = False
    ) -> T:
        """Commit `step`, send its notifications, and return its result."""

        def work(connection: sqlite3.Connection) -> tuple[T, list[Outgoing]]:
            inbox = self._inbox
            with connection:
                connection.execute(begin)
                now, wall_us = self._now(), self._wall_us()
                tx = Transaction(connection.execute, now, wall_us, inbox.channel_to, inbox.address, [], {})
                return step(tx), tx.outgoing

        result, outgoing = await self._database.run(work, until, even_closed=even_closed)
        for message in outgoing:
            if not message.channel.send(message.holder, message.notification):
                await self._release_for_dead(message, until)
        return result

    async def _release_for_dead(self, message: Outgoing, until: float) -> None:
        """Release the grant or ticket of a waiter that died after the commit, and so notify the next one."""
        try:
            await self.release(message.name, message.holder, until)
        except StoreError as error:
            text = "Could not remove a dead waiter; its grant or ticket expires with its ttl: lock %s: %s"
            log.warning(text, shown(message.name), error)

    async def cancel_waits(self) -> None:
        self._inbox.close()

    async def close(self) -> None:
        self._finalizer()

    def reset(self, *, forked: bool) -> None:
        self._inbox.reset(forked=forked)
        if forked:
            self._database.reset()


def _close(database: Database, inbox: Inbox) -> None:
    """Close everything, except in a forked child that was not reset: the parent owns it then."""
    if os.getpid() == database.pid:
        inbox.close()
        database.close()
