"""One connection to the lock file, shared by all threads or tasks of a client.

Rules kept here:

- A transaction holds no await: it is over before anything else runs, so no task can be cancelled inside it, and
  only a killed process leaves one half done, which SQLite then undoes for the others.
- A busy file is asked again after a short pause, up to the caller's `until`; nothing waits inside SQLite.
- Nothing of SQLite is carried across a fork. Its locks belong to the process that took them, and a child inherits
  the belief to have them; even a connection that the child opens itself would share that belief. So the parent
  closes its connection before the fork, and both open a new one when they next need it.
- The file may be removed or replaced while it is open. Locks in a file that nobody else can see exclude nobody, so
  each transaction looks first, and starts anew with what is there now.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from lockfast.errors import ConfigurationError, closed_error
from lockfast.ports import Runtime
from lockfast.stores.sqlite import folder
from lockfast.stores.sqlite.checkpoint import log_is_long, shorten_log
from lockfast.stores.sqlite.faults import BUSY, SPOILED, explained, primary_code, still_busy
from lockfast.stores.sqlite.opening import open_connection

log = logging.getLogger("lockfast")

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]

FIRST_PAUSE = 0.0002
LONGEST_PAUSE = 0.005
LOOK_EVERY = 256
"""Uses of the connection between two looks at the length of the log."""
FORK_PATIENCE = 1.0
"""Seconds for which a fork waits for the transaction of another thread; they take well under a millisecond."""


class Database:
    """Invariants: `_connection` is used only under `_mutex`, and only by the process `_pid` that opened it."""

    def __init__(self, path: str, runtime: Runtime, boot_id: Callable[[], str]) -> None:
        self.path = path
        self._target = Path(path)
        self._runtime = runtime
        self._boot_id = boot_id
        # A true lock also where all tasks share one thread: another thread may fork.
        self._mutex = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._file = (0, 0)
        self._pid = os.getpid()
        self._uses = 0
        self._overdue = False
        self._paused = False
        self._orphaned = False
        self._closed = False

    async def run(self, work: Work[T], until: float, *, though_closed: bool = False) -> T:
        """What `work` returns. It runs once, or again from the start as long as the file is busy.

        `work` gets the connection, either writes in one statement or wraps itself with `in_transaction`, and
        blocks for no longer than the disk does. `though_closed` is for who cleans up after `close`.
        """
        pause = FIRST_PAUSE
        while True:
            try:
                with self._mutex:
                    return self._do(work, though_closed)
            except sqlite3.Error as error:
                if primary_code(error) not in BUSY:
                    raise self._failed(error) from error
            left = until - self._runtime.now()
            if left <= 0:
                raise still_busy(self.path)
            await self._runtime.sleep(min(left, pause * (0.5 + self._runtime.random())))
            pause = min(pause * 2, LONGEST_PAUSE)

    def _do(self, work: Work[T], though_closed: bool) -> T:
        if not self._closed:
            connection = self._usable()
            answer = work(connection)
            self._tidy(connection)
            return answer
        if not though_closed:
            raise closed_error()
        try:
            return work(self._usable())
        finally:
            self._disconnect()

    def _tidy(self, connection: sqlite3.Connection) -> None:
        """Keep the log short; whatever goes wrong here, the work before it is done."""
        self._uses += 1
        if self._uses % LOOK_EVERY and not self._overdue:
            return
        try:
            self._overdue = log_is_long(self._target) and not shorten_log(connection, self._target)
        except sqlite3.Error as error:
            log.warning("The log of the lock file %s could not be shortened: %s", self.path, error)

    def _usable(self) -> sqlite3.Connection:
        if os.getpid() != self._pid:
            self._orphaned = True
        if self._orphaned:
            raise ConfigurationError(
                "This process was forked in a way that Python did not see while the lock file was open, and SQLite "
                "cannot be used across a fork. Nothing was changed. Call connect() after the fork."
            )
        if self._connection is not None and not self._still_there():
            log.warning("The lock file %s was removed or replaced; its locks are gone.", self.path)
            self._disconnect()
        return self._connection or self._connect()

    def _connect(self) -> sqlite3.Connection:
        path = folder.prepare(self.path)
        # Looked at before it is opened: should it be replaced in between, the next transaction notices.
        status = self._target.stat()
        self._file = (status.st_dev, status.st_ino)
        self._connection = open_connection(path, self._boot_id())
        return self._connection

    def _still_there(self) -> bool:
        try:
            status = self._target.stat()
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self._file

    def _failed(self, error: sqlite3.Error) -> Exception:
        if primary_code(error) in SPOILED:
            with self._mutex:
                self._disconnect()
        return explained(error, self.path)

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """Close for good; a second time, and in a forked child, it does nothing."""
        if os.getpid() != self._pid:
            return
        with self._mutex:
            self._closed = True
            self._disconnect()

    def pause(self) -> None:
        """Before a fork: let go of SQLite, and keep other threads away until `resume`."""
        self._paused = self._mutex.acquire(timeout=FORK_PATIENCE)
        if self._paused:
            self._disconnect()

    def resume(self) -> None:
        """After a fork, in the parent."""
        if self._paused:
            self._paused = False
            self._mutex.release()

    def reset(self) -> bool:
        """After a fork, in the child; False when that was done already."""
        if os.getpid() == self._pid:
            return False
        self._pid = os.getpid()
        self._mutex = threading.Lock()
        self._paused = False
        if self._connection is not None:
            _never_close(self._connection)
            self._orphaned = True
        return True


def _never_close(connection: sqlite3.Connection) -> None:
    """Keep a connection of the parent's alive beyond the end of the interpreter, which would close it."""
    import ctypes

    ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))
