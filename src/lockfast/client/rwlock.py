"""`RWLock`: many readers or one writer. A base class has the rules for sync and async.

Rules:

- The queue is fair: readers that wait enter together, and a writer that waits stops later readers.
- Every reader has its own lease with its own ttl, renewal and fence.
- A thread or task that reads may read again at once, through any `RWLock` of its connection, even if a writer waits.
  It shares its lease, as with `RLock`.
- A reader that wants to write would wait for itself, and so would a writer that wants to read: `WouldDeadlock`, at
  once. `lease.downgrade()` turns a writer into a reader, with the same lease.
- `lock(name)` and the writer of `rwlock(name)` are the same lock.
"""

from __future__ import annotations

from collections.abc import Hashable
from types import FrameType
from typing import Any, Generic, TypeVar, Unpack

from lockfast.client.lease import AsyncLease, Lease
from lockfast.client.lock import AsyncLock, BaseLock, LeaseT, Lock
from lockfast.client.options import LockOptions
from lockfast.client.rlock import AsyncRLock, Reentrant, RLock
from lockfast.core.lease_state import ALIVE
from lockfast.core.local_handoff import ClaimTerms
from lockfast.errors import WouldDeadlock, shown
from lockfast.values import Mode, Seconds, clean

ReaderT = TypeVar("ReaderT", bound=Reentrant[Any])
WriterT = TypeVar("WriterT", bound=BaseLock[Any])


class Reader(Reentrant[LeaseT]):
    """The rules of the reading side. All readers of a session share their levels."""

    def __init__(self, client: Any, name: str, **options: Unpack[LockOptions[LeaseT]]) -> None:
        super().__init__(client, name, **options)
        self._session.ensure_mode(Mode.READ)
        self._levels = self._session.reading
        self._terms = self._terms._replace(weight=1)

    def _key(self, caller: Hashable) -> Hashable:
        return self._name, caller

    def _check_claim(self) -> None:
        session = self._session
        writing = session.local_queues.queue(self._name).last_lease
        is_writing = writing is not None and writing.state in ALIVE and not writing.weight
        if writing is not None and is_writing and writing.caller == session.runtime.caller():
            raise WouldDeadlock(
                f"This thread or task already holds the lock {shown(self._name)} to write, so it would wait for itself "
                "to read. Nothing was sent. Read under the lease that you have, or call its downgrade()."
            )

    async def _acquire(
        self,
        blocking: bool,
        timeout: Seconds | None,
        frame: FrameType | None = None,
        terms: ClaimTerms | None = None,
    ) -> LeaseT | None:
        self._check_claim()
        return await super()._acquire(blocking, timeout, frame, terms)


class ReadLock(Reader[Lease], RLock):
    """The reading side of an `RWLock`, for threads; everything else as for `RLock`."""


class AsyncReadLock(Reader[AsyncLease], AsyncRLock):
    """The reading side of an `RWLock`, for asyncio."""


class BaseRWLock(Generic[ReaderT, WriterT]):
    """The rules of a read/write lock in both flavours."""

    def __init__(self, reader: ReaderT, writer: WriterT) -> None:
        self._reader = reader
        self._writer = writer

    @property
    def name(self) -> str:
        """The lock's name, which is also its key in the store."""
        return self._writer.name

    @property
    def reader(self) -> ReaderT:
        """The lock for reading: shared with other readers, and re-entrant."""
        return self._reader

    @property
    def writer(self) -> WriterT:
        """The lock for writing: exclusive, and the same as `lock(name)`. Its lease has `downgrade()`."""
        return self._writer

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {clean(self.name)!r}>"


class RWLock(BaseRWLock[ReadLock, Lock]):
    """Many readers or one writer, for threads.

    >>> import lockfast
    >>> config = lockfast.connect("memory://").rwlock("doc:rwlock", ttl=10)
    >>> with config.reader:
    ...     config.reader.inspect().mode.value
    'read'
    >>> with config.writer as lease:
    ...     lease.downgrade()
    ...     config.reader.inspect().mode.value
    'read'
    """


class AsyncRWLock(BaseRWLock[AsyncReadLock, AsyncLock]):
    """Many readers or one writer, for asyncio: the same names, awaited.

    >>> import asyncio, lockfast.aio
    >>> async def main():
    ...     async with lockfast.aio.connect("memory://") as locks:
    ...         config = locks.rwlock("doc:async-rwlock")
    ...         async with config.reader as lease:
    ...             return lease.state.value
    >>> asyncio.run(main())
    'held'
    """
