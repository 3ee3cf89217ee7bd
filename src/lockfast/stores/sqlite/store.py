"""`ports.Store` on a file that the processes of one user share: the embedded default.

Not guaranteed: exclusion between machines, or between users.

The fast path is one statement; everything else is one transaction of `transactions.py`. A grant to a waiter is notified
after the commit. If the waiter has gone by then, its grant is released to the next one.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from lockfast.errors import ConfigurationError, LockError, StoreError
from lockfast.facts import Facts, Persistence
from lockfast.ports import Capabilities, Mailbox, Runtime, Store
from lockfast.stores.sqlite import transactions
from lockfast.stores.sqlite.connection import SQL, in_transaction
from lockfast.stores.sqlite.database import Database
from lockfast.stores.sqlite.inbox import INBOXES, Inbox, SqliteMailbox
from lockfast.stores.sqlite.location import boot_id, checked_path
from lockfast.stores.sqlite.transactions import Outgoing, Transaction
from lockfast.values import Answer, Claim, Enqueue, Granted, LockInfo, Page, Renewal, shown

log = logging.getLogger("lockfast")

T = TypeVar("T")

LEAVE_WITHIN = 0.3  # seconds that `cancel_waits` gives the waiters to leave the queue
SWEEP_EVERY = 256  # requests between two sweeps; each checks twice as many locks, so it keeps up with any load


class SqliteStore(Store):
    """Locks in the file at `path`. `flavour` must match the runtime: "threads" or "asyncio"."""

    grace = 0.08
    capabilities = Capabilities(fence_blocks=True)

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
        self.pause_for_fork, self.resume_after_fork = self._database.pause, self._database.resume
        # Symbolic links to the file must lead to one inbox folder, or its processes could not notify each other.
        self._inbox = INBOXES[flavour](f"{Path(path).resolve()}-inbox", runtime)
        self._requests = 0
        self._flavour = flavour
        self._finalizer = self._finalize()
        with _fork_mutex:
            _stores.add(self)

    def _finalize(self) -> weakref.finalize[[Database, Inbox, int], SqliteStore]:
        finalizer = weakref.finalize(self, _close, self._database, self._inbox, os.getpid())
        # On threads, the session closes at exit and releases its leases. Closing the store before that would report
        # "closed" to the waiters, as if the program had called close().
        finalizer.atexit = self._flavour != "threads"
        return finalizer

    @property
    def inbox_open(self) -> bool:
        return bool(self._inbox.address)

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

        if enqueue is None or enqueue.ticket is None:  # fast path: the lock is free and has no waiters
            fence = await self._database.run(acquire_free, until)
            if fence is not None:
                return Granted(fence)
        return await self._transact(lambda tx: transactions.acquire(tx, claim, enqueue), until)

    async def _sweep(self) -> None:
        try:
            await self._transact(transactions.sweep, until=0.0)  # one try: it is not urgent
        except LockError as error:  # if it matters, the request itself meets it too
            log.debug("Could not sweep the lock file now: %s", error)

    async def renew(self, renewals: Sequence[Renewal], until: float) -> list[bool]:
        def renewed(connection: sqlite3.Connection, renewal: Renewal) -> bool:
            now = self._now()
            statement = SQL["set_expiry" if renewal.final else "renew"]
            return connection.execute(statement, (now + renewal.ttl, renewal.name, renewal.holder, now)).rowcount > 0

        def work(connection: sqlite3.Connection) -> list[bool]:
            return in_transaction(connection, lambda: [renewed(connection, renewal) for renewal in renewals])

        return await self._database.run(work, until)

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
        result, outgoing = await self._commit(step, until, begin, even_closed)
        while outgoing:
            message = outgoing.pop(0)
            if not message.channel.send(message.holder, message.notification):
                outgoing += await self._release_for(message, until)
        return result

    async def _release_for(self, message: Outgoing, until: float) -> list[Outgoing]:
        """Release the grant or ticket of a waiter that died after the commit; return the next notifications."""
        try:
            step = partial(transactions.release, name=message.name, holder=message.holder)
            return (await self._commit(step, until, "BEGIN IMMEDIATE", even_closed=True))[1]
        except StoreError as error:
            text = "Could not remove a dead waiter; its grant or ticket expires with its ttl: lock %s: %s"
            log.warning(text, shown(message.name), error)
            return []

    async def _commit(
        self, step: Callable[[Transaction], T], until: float, begin: str, even_closed: bool
    ) -> tuple[T, list[Outgoing]]:
        def work(connection: sqlite3.Connection) -> tuple[T, list[Outgoing]]:
            def run_step() -> tuple[T, list[Outgoing]]:
                inbox = self._inbox
                tx = Transaction(connection.execute, self._now(), self._wall_us(), inbox.channel_to, inbox.address, [])
                return step(tx), tx.outgoing

            return in_transaction(connection, run_step, begin)

        return await self._database.run(work, until, even_closed=even_closed)

    async def cancel_waits(self) -> None:
        """Cancel all waits, and give the waiters a moment to leave the queue."""
        self._inbox.close()
        give_up_at = self._runtime.now() + LEAVE_WITHIN
        while self._inbox.in_use and self._runtime.now() < give_up_at:
            await self._runtime.sleep(0.002)

    async def close(self) -> None:
        self._finalizer()

    def reset(self, *, forked: bool) -> None:
        """A second call after a fork changes nothing: the session and `_after_fork_in_child` both call it."""
        self._inbox.reset(forked=forked)
        if forked and self._database.reset():
            self._finalizer.detach()
            self._finalizer = self._finalize()


def _close(database: Database, inbox: Inbox, pid: int) -> None:
    """Close everything, unless this is a forked child: the parent owns it then."""
    if os.getpid() == pid:
        inbox.close()
        database.close()


_stores: weakref.WeakSet[SqliteStore] = weakref.WeakSet()
_fork_mutex = threading.Lock()
"""Held while `_stores` changes, and from before a fork until after it."""


def _before_fork() -> None:
    _fork_mutex.acquire()
    for store in list(_stores):
        store.pause_for_fork()


def _after_fork_in_parent() -> None:
    for store in list(_stores):
        store.resume_after_fork()
    _fork_mutex.release()


def _after_fork_in_child() -> None:
    global _fork_mutex
    _fork_mutex = threading.Lock()
    for store in list(_stores):
        store.reset(forked=True)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
