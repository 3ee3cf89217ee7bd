"""`SqliteStore`: `ports.Store` on a file that the processes of one user share; the embedded default.

Not guaranteed: exclusion between machines, or between users. Rules kept here: the common case is one statement,
and everything else is one transaction of `rules.py`; a grant handed over is told after its commit, and one that
cannot be told goes on to the next.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from lockfast.errors import ConfigurationError, StoreError
from lockfast.facts import Facts, Persistence
from lockfast.ports import Capabilities, Mailbox, Runtime, Store
from lockfast.stores.sqlite import forks, rules
from lockfast.stores.sqlite import statements as sql
from lockfast.stores.sqlite.boot import boot_id
from lockfast.stores.sqlite.database import Database
from lockfast.stores.sqlite.folder import checked_path
from lockfast.stores.sqlite.inbox import Inbox, SqliteMailbox
from lockfast.stores.sqlite.opening import in_transaction
from lockfast.values import Answer, Claim, Enqueue, Granted, LockInfo, Page, Renewal, shown

log = logging.getLogger("lockfast")

T = TypeVar("T")

LEAVE_WITHIN = 0.3
"""Seconds that a closing store gives to those who wait, to leave the queue."""
SWEEP_EVERY = 256
"""Requests between two sweeps, each of which looks at twice as many locks: so it keeps up with any use."""


def _wall_us() -> int:
    return time.time_ns() // 1000


class SqliteStore(Store):
    """Locks in the file at `path`. `colour` must be the runtime's: "threads" or "asyncio"."""

    grace = 0.08
    capabilities = Capabilities(fence_blocks=True)

    def __init__(
        self,
        path: str | os.PathLike[str],
        runtime: Runtime,
        *,
        flavour: str = "threads",
        wall_us: Callable[[], int] = _wall_us,
        boot_id: Callable[[], str] = boot_id,
    ) -> None:
        path = checked_path(path)
        self._runtime = runtime
        self._now = runtime.now
        self._wall_us = wall_us
        self._database = Database(path, runtime, boot_id)
        # All names of the file must lead to one folder, or its processes could not reach each other.
        self._inbox = _inbox(flavour, f"{Path(path).resolve()}-inbox", runtime)
        self._asks = 0
        self._colour = flavour
        self._finalizer = self._finalize()
        forks.remember(self)

    def _finalize(self) -> weakref.finalize[[Database, Inbox, int], SqliteStore]:
        finalizer = weakref.finalize(self, _shut, self._database, self._inbox, os.getpid())
        # On threads a connection is closed when the program ends, and then gives back what it holds. This must not come
        # before: whoever waits would be told that it was closed, as if the program had done that.
        finalizer.atexit = self._colour != "threads"
        return finalizer

    @property
    def inbox_open(self) -> bool:
        return self._inbox.ready

    def mailbox(self, holder: str) -> Mailbox:
        return SqliteMailbox(self._inbox, holder)

    async def acquire(self, claim: Claim, enqueue: Enqueue | None, until: float) -> Answer:
        if self._asks % SWEEP_EVERY == 0:
            await self._sweep()
        self._asks += 1
        if enqueue is None or enqueue.ticket is None:
            fence = await self._take(claim, until)
            if fence is not None:
                return Granted(fence)
        return await self._transact(lambda scene: rules.acquire(scene, claim, enqueue), until)

    async def _take(self, claim: Claim, until: float) -> int | None:
        """The fence, when the lock was free and nobody waited for it."""

        def work(connection: sqlite3.Connection) -> int | None:
            now, fence = self._now(), self._wall_us()
            row = (claim.name, fence, claim.holder, claim.owner, now, now + claim.ttl, claim.fences)
            return fence if connection.execute(sql.TAKE, row).rowcount else None

        return await self._database.run(work, until)

    async def _sweep(self) -> None:
        try:
            await self._transact(rules.sweep, until=0.0)  # at once or not at all: it has time
        except StoreError as error:
            log.debug("Old rows of the lock file were left for later: %s", error)

    async def renew(self, renewals: Sequence[Renewal], until: float) -> list[bool]:
        def work(connection: sqlite3.Connection) -> list[bool]:
            return in_transaction(connection, lambda: [prolonged(connection, line) for line in renewals])

        def prolonged(connection: sqlite3.Connection, line: Renewal) -> bool:
            now = self._now()
            statement = sql.END_AT if line.final else sql.RENEW
            return connection.execute(statement, (now + line.ttl, line.name, line.holder, now)).rowcount > 0

        return await self._database.run(work, until)

    async def release(self, name: str, holder: str, until: float) -> bool:
        def work(connection: sqlite3.Connection) -> int:
            now = self._now()
            return connection.execute(sql.GIVE, (now, name, holder, now, name)).rowcount

        # Also after `close`: whoever waited then still has a place to give back.
        if await self._database.run(work, until, though_closed=True):
            return True
        return await self._transact(lambda scene: rules.release(scene, name, holder), until, though_closed=True)

    async def adopt(self, claim: Claim, old_holder: str, until: float) -> Granted | None:
        return await self._transact(lambda scene: rules.adopt(scene, claim, old_holder), until)

    async def inspect(self, name: str, until: float) -> LockInfo:
        return await self._transact(lambda scene: rules.inspect(scene, name), until, begin="BEGIN")

    async def facts(self, until: float) -> Facts:
        version = sqlite3.sqlite_version
        return Facts("sqlite", reach="host", version=version, persistence=Persistence.FILE, clock_offset=0.0)

    async def listing(self, pattern: str, cursor: str, until: float) -> Page:
        return await self._transact(lambda scene: rules.listing(scene, pattern, cursor), until, begin="BEGIN")

    async def force_release(self, name: str, holder: str, until: float) -> bool:
        return await self._transact(lambda scene: rules.force_release(scene, name, holder), until)

    async def _transact(
        self,
        step: Callable[[rules.Scene], T],
        until: float,
        *,
        begin: str = "BEGIN IMMEDIATE",
        though_closed: bool = False,
    ) -> T:
        """What `step` decided, after it is committed and told to whom it concerns."""
        answer, letters = await self._commit(step, until, begin, though_closed)
        while letters:
            letter = letters.pop(0)
            if not letter.outlet.send(letter.holder, letter.news):
                letters += await self._give_back_for(letter, until)
        return answer

    async def _give_back_for(self, letter: rules.Letter, until: float) -> list[rules.Letter]:
        """Give back the grant or the place of a waiter that went away after the commit; whom to tell now."""
        try:
            step = partial(rules.release, name=letter.name, holder=letter.holder)
            return (await self._commit(step, until, though_closed=True))[1]
        except StoreError as error:
            # What was asked for is done all the same; what the waiter left ends with its ttl.
            log.warning("A waiter for the lock %s is gone and could not be removed: %s", shown(letter.name), error)
            return []

    async def _commit(
        self,
        step: Callable[[rules.Scene], T],
        until: float,
        begin: str = "BEGIN IMMEDIATE",
        though_closed: bool = False,
    ) -> tuple[T, list[rules.Letter]]:
        def work(connection: sqlite3.Connection) -> tuple[T, list[rules.Letter]]:
            return in_transaction(connection, lambda: self._play(step, connection), begin)

        return await self._database.run(work, until, though_closed=though_closed)

    def _play(self, step: Callable[[rules.Scene], T], connection: sqlite3.Connection) -> tuple[T, list[rules.Letter]]:
        inbox = self._inbox
        scene = rules.Scene(connection.execute, self._now(), self._wall_us(), inbox.reach, inbox.address, [])
        return step(scene), scene.letters

    def disconnect(self) -> None:
        """The database is closed once nobody can use the store any more (`_finalizer`)."""

    async def cancel_waits(self) -> None:
        """Send away who waits, and give them a moment to leave the queue."""
        self._inbox.close()
        give_up_at = self._runtime.now() + LEAVE_WITHIN
        while self._inbox.in_use and self._runtime.now() < give_up_at:
            await self._runtime.sleep(0.002)

    async def close(self) -> None:
        self._finalizer()

    def pause(self) -> None:
        """Before a fork."""
        self._database.pause()

    def resume(self) -> None:
        """After a fork, in the parent."""
        self._database.resume()

    def reset(self, *, forked: bool) -> None:
        """Once more after a fork it changes nothing: `forks.py` may have been first."""
        self._inbox.reset(forked=forked)
        if forked and self._database.reset():
            self._finalizer.detach()
            self._finalizer = self._finalize()


def _inbox(flavour: str, folder: str, runtime: Runtime) -> Inbox:
    if flavour == "threads":
        from lockfast.stores.sqlite.leading import LeadingInbox

        return LeadingInbox(folder, runtime)
    if flavour == "asyncio":
        from lockfast.stores.sqlite.looping import LoopingInbox

        return LoopingInbox(folder, runtime)
    raise ConfigurationError(f"A store's colour is threads or asyncio, not {shown(flavour)}.")


def _shut(database: Database, inbox: Inbox, pid: int) -> None:
    """Close everything, unless this is a forked child: then it is the parent's."""
    if os.getpid() == pid:
        inbox.close()
        database.close()
