"""`Locks`: what `connect()` returns. Makes locks on one store; a sync and an async shell over one `Session`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, Generic, Literal, Never, ParamSpec, Self, TypeVar, Unpack, cast, overload

from lockfast.client.guard import NameOf, check_function, guarded, guarded_async, name_function
from lockfast.client.lease import AsyncLease, ExportedLease, Lease
from lockfast.client.lock import AsyncLock, BaseLock, LeaseT, Lock
from lockfast.client.options import LockOptions, OnceOptions, SessionOptions
from lockfast.client.session import NotPickled, Session
from lockfast.core.acquire import Grant, adopt
from lockfast.core.lease_state import valid_until
from lockfast.core.retry import retry
from lockfast.errors import LeaseLost, shown
from lockfast.ports import Ports, Runtime, Store
from lockfast.runtime.base import run
from lockfast.values import Claim, LockInfo, Page, Seconds, is_plain, lock_name, name_pattern

if TYPE_CHECKING:
    from lockfast.client.all_of import AllOf, AsyncAllOf
    from lockfast.client.guarantees import Guarantees
    from lockfast.client.once import AsyncOnce, Busy, Once, Skipped
    from lockfast.client.rlock import AsyncRLock, RLock
    from lockfast.client.rwlock import AsyncRWLock, RWLock
    from lockfast.client.semaphore import AsyncPermit, AsyncSemaphore, Permit, Semaphore, Unavailable

P = ParamSpec("P")
R = TypeVar("R")
V = TypeVar("V", bound="bytes | str | int | float | None")


class Listing:
    """One listing, page by page; `done` after the last page.

    No name appears twice, though a store may report it twice. A pattern without `*?[` is inspected instead of searched,
    so it also finds a lock that another program took. Locks without holder and waiters are left out unless requested.
    """

    def __init__(self, ports: Ports, pattern: object, *, free: bool, patience: float) -> None:
        self._ports = ports
        self._pattern = name_pattern(pattern)
        self._free = free
        self._patience = patience
        self._cursor = ""
        self._seen: set[str] = set()
        self.done = False
        if is_plain(self._pattern):
            lock_name(self._pattern)

    async def next_page(self) -> list[LockInfo]:
        """Return more locks; the list can be empty before the end."""
        page = await retry(self._ports.runtime, self._request, self._patience)
        self._cursor = page.cursor
        self.done = not page.cursor
        fresh = [info for info in page.infos if info.name not in self._seen and self._matches(info)]
        if not self.done:
            self._seen.update(info.name for info in fresh)
        return fresh

    async def _request(self, until: float) -> Page:
        if is_plain(self._pattern):
            info = await self._ports.store.inspect(self._pattern, until)
            return Page((info._replace(waiters=()),), "")
        return await self._ports.store.listing(self._pattern, self._cursor, until)

    def _matches(self, info: LockInfo) -> bool:
        return info.locked or info.waiting > 0 or (self._free and info.fence is not None)


class BaseLocks(NotPickled, Generic[LeaseT]):
    """The rules of `Locks` in both flavours. `session` is the seam for extensions."""

    _lock_class: type[BaseLock[LeaseT]]

    def __init__(self, store: Store, runtime: Runtime, **options: Unpack[SessionOptions]) -> None:
        self.session = Session(store, runtime, is_async=self._lock_class._is_async, **options)

    async def _adopt(self, text: str, options: LockOptions[LeaseT]) -> LeaseT:
        session = self.session
        session.ensure_open()
        exported = ExportedLease.decode(text)
        lock = self._lock_for(exported, cast("LockOptions[LeaseT]", {"ttl": exported.ttl, **options}))
        holder, chosen = session.runtime.new_holder_id(), lock._options
        weight, limit = exported.weight, exported.limit
        claim = Claim(lock.name, holder, chosen.ttl, chosen.owner, weight=weight, limit=limit)
        grant = await adopt(session.ports, claim, exported.holder)
        if grant is None:
            raise LeaseLost(
                f"The exported lease on {shown(exported.name)} has ended: it expired, was released, or was adopted "
                "before. Acquire the lock again.",
                name=exported.name,
            )
        return lock._lease(grant)

    def _lock_for(self, exported: ExportedLease, options: LockOptions[LeaseT]) -> BaseLock[LeaseT]:
        """The lock, the reader or the semaphore that an exported lease belongs to."""
        shell: Any = self
        if exported.limit:
            made = shell.semaphore(exported.name, exported.limit, permits=exported.weight, **options)
        elif exported.weight:
            made = shell.rwlock(exported.name, **options).reader
        else:
            made = shell.lock(exported.name, **options)
        return cast("BaseLock[LeaseT]", made)

    def _resume(
        self, name: str, holder: str, fence: int, sent_at: float, **options: Unpack[LockOptions[LeaseT]]
    ) -> LeaseT:
        """Return a lease on a grant that was made, by a request sent at `sent_at`, before this session existed."""
        self.session.ensure_open()
        lock = self._lock_class(self, name, **options)
        claim = Claim(lock.name, holder, lock._options.ttl, lock._options.owner)
        return lock._lease(Grant(claim, fence, sent_at, valid_until(sent_at, claim.ttl)))

    def _guard(self, name: NameOf, options: LockOptions[LeaseT], wrap: Callable[..., Any]) -> Callable[..., Any]:
        self.session.options(options)  # report wrong options here, not at the first call

        def decorate(function: Callable[..., Any]) -> Any:
            check_function(function, is_async=self._lock_class._is_async)
            name_of = name_function(name, function)
            return wrap(function, lambda *args, **kwargs: self._lock_class(self, name_of(*args, **kwargs), **options))

        return decorate

    def _listing(self, pattern: str, free: bool) -> Listing:
        self.session.ensure_open()
        return Listing(self.session.ports, pattern, free=free, patience=self.session.store_timeout)

    def _update(self, key: str, *change_and_limits: Any) -> Any:
        from lockfast.client import update

        lock = self._lock_class(self, f"update:{key}", ttl=update.LOCK_TTL)
        return update.Update(lock, key, *change_and_limits).run()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} on {self.session.address}{', closed' if self.session.closed else ''}>"


class Locks(BaseLocks[Lease]):
    """Locks on one store, for threads; made by `lockfast.connect()`.

    >>> import lockfast
    >>> with lockfast.connect("memory://") as locks:
    ...     lease = locks.lock("doc:locks").acquire(timeout=0)
    ...     lease is not None
    True
    """

    _lock_class = Lock

    def lock(self, name: str, **options: Unpack[LockOptions[Lease]]) -> Lock:
        """Return the lock of that name. Options, all by keyword:

        `ttl` (30): seconds that the store keeps a grant without a renewal, and so the longest that a crashed holder
        blocks others. `timeout` (None): seconds that `with` waits; None for no limit. `renew` (True): renew the lease
        while this process lives. `max_hold` (None): seconds after which it ends in any case. `label`: who you are, for
        operators. `on_risk`, `on_lost`: called with the lease. `local_handoff` (True): threads of this connection may
        hand the lock to each other without a round trip, for up to 50 ms.

        >>> import lockfast
        >>> lockfast.connect("memory://").lock("report", ttl=10)
        <Lock 'report', ttl 10 s>
        """
        return Lock(self, name, **options)

    def rlock(self, name: str, **options: Unpack[LockOptions[Lease]]) -> RLock:
        """Return a lock that the thread that holds it may acquire again, at no cost; options as for `lock`.

        >>> import lockfast
        >>> lock = lockfast.connect("memory://").rlock("doc:rlock")
        >>> with lock as outer, lock as inner:
        ...     inner.fence == outer.fence
        True
        """
        from lockfast.client.rlock import RLock

        return RLock(self, name, **options)

    def rwlock(self, name: str, **options: Unpack[LockOptions[Lease]]) -> RWLock:
        """Return a read/write lock: `with rwlock.reader:` or `with rwlock.writer:`; options as for `lock`.

        >>> import lockfast
        >>> config = lockfast.connect("memory://").rwlock("doc:locks-rwlock")
        >>> with config.reader, config.reader:
        ...     config.reader.depth
        2
        """
        from lockfast.client.rwlock import ReadLock, RWLock

        return RWLock(ReadLock(self, name, **options), Lock(self, name, **options))

    def semaphore(
        self,
        name: str,
        limit: int,
        *,
        permits: int = 1,
        unavailable: Unavailable = "raise",
        **options: Unpack[LockOptions[Permit]],
    ) -> Semaphore:
        """Return a semaphore of `limit` permits, of which `with` takes `permits`; other options as for `lock`.

        `unavailable="allow"` lets the caller in without a permit if the store does not answer.

        >>> import lockfast
        >>> with lockfast.connect("memory://").semaphore("gpu", 4) as permit:
        ...     permit.slot
        0
        """
        from lockfast.client.semaphore import Semaphore

        chosen = cast("LockOptions[Lease]", options)
        return Semaphore(self, name, limit, permits=permits, unavailable=unavailable, **chosen)

    def all_of(self, *locks: str | Lock, **options: Unpack[LockOptions[Lease]]) -> AllOf:
        """Return several locks as one: all are acquired, or none. Takes names and locks of this connection.

        `timeout` is for all of them together. The other options are for those given by name, as for `lock`.

        >>> import lockfast
        >>> locks = lockfast.connect("memory://")
        >>> with locks.all_of("doc:source", locks.rwlock("doc:config").reader, timeout=5) as leases:
        ...     sorted(leases.fences)
        ['doc:config', 'doc:source']
        """
        from lockfast.client.all_of import AllOf

        made = [lock if isinstance(lock, BaseLock) else Lock(self, lock, **options) for lock in locks]
        return AllOf(self.session, made, options.get("timeout"))

    @overload
    def once(
        self, name: str, *, busy: Literal["skip"] = "skip", **options: Unpack[OnceOptions[Lease]]
    ) -> Once[Skipped]: ...

    @overload
    def once(
        self, name: str, *, busy: Literal["wait", "raise"], **options: Unpack[OnceOptions[Lease]]
    ) -> Once[Never]: ...

    def once(self, name: str, *, busy: Busy = "skip", **options: Unpack[OnceOptions[Lease]]) -> Once[Any]:
        """Return a job that many start and one runs: `with locks.once("report") as run: if run: ...`, or a decorator.

        `at_least` (0): seconds from its start during which nobody else starts it. `every` (None): the same after a
        successful run, for nine tenths of that period. `at_most` (None): seconds after which a run loses its lease.
        `busy`: what the others do: "skip" (and learn who runs it), "wait" or "raise" (`AcquireTimeout`). The rest as
        for `lock`.

        >>> import lockfast
        >>> locks = lockfast.connect("memory://")
        >>> with locks.once("doc:once", at_least=60) as run:
        ...     bool(run)
        True
        >>> with locks.once("doc:once", at_least=60) as run:
        ...     bool(run)
        False
        """
        from lockfast.client.once import Once, split_options

        chosen, lock_options = split_options(busy, options)
        return Once(Lock(self, name, **lock_options), chosen)

    def guard(self, name: NameOf, **options: Unpack[LockOptions[Lease]]) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Return a decorator: each call runs under the lock that its arguments name.

        >>> import lockfast
        >>> locks = lockfast.connect("memory://")
        >>> @locks.guard("account:{account_id}")
        ... def deposit(account_id, amount):
        ...     return locks.lock(f"account:{account_id}").locked()
        >>> deposit(7, amount=100)
        True
        """
        return self._guard(name, options, guarded)

    def update(
        self,
        key: str,
        change: Callable[[bytes | None], V],
        *,
        attempts: int = 100,
        timeout: Seconds = 10.0,
        adaptive: bool = True,
    ) -> V:
        """Change the value of a key on the server: `locks.update("stock:7", lambda old: int(old or 0) - 1)`.

        `change` gets the value as bytes, None if there is none, and returns the new one, or None to leave it unchanged.
        It is called again after a conflict, up to `attempts` times and `timeout` seconds, then `UpdateConflict` is
        raised. Returns the last result of `change`. `adaptive`: use a lock while conflicts are frequent.

        >>> import lockfast
        >>> lockfast.connect("memory://").update("stock:7", lambda old: 1)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        lockfast.errors.ConfigurationError: memory:// holds locks and no values, ...
        """
        return cast(V, run(self._update(key, change, attempts, timeout, adaptive)))

    def adopt(self, text: str, **options: Unpack[LockOptions[Lease]]) -> Lease:
        """Take over the lease that `lease.export()` wrote into `text`; exactly one client gets it.

        >>> import lockfast
        >>> locks = lockfast.connect("memory://")
        >>> text = locks.lock("doc:adopt").acquire().export()
        >>> lease = locks.adopt(text)
        >>> lease.release()
        True
        """
        return run(self._adopt(text, options))

    def guarantees(self) -> Guarantees:
        """Describe what this connection promises and what not, from what its store reveals. Dangers are logged, once.

        >>> import lockfast
        >>> print(lockfast.connect("memory://").guarantees().about("one holder").text)
        At most one valid lease per name, within this process.
        """
        return run(self.session.guarantees())

    def list(self, pattern: str = "*", *, free: bool = False) -> Iterator[LockInfo]:
        """Iterate over the locks that match `pattern` and have a holder or waiters, in no order.

        With `free` also those that are free and were used within a day. In a pattern `*` is any text, `?` any
        character, `[ab]` one of them. Locks are found page by page while you iterate, so a busy server is not blocked,
        and locks that change meanwhile may be missing. `waiters` is left out: see `lock.inspect()`. A lock that another
        program took is found only by its full name.

        >>> import lockfast
        >>> locks = lockfast.connect("memory://doc-list")
        >>> with locks.lock("report:nightly"), locks.lock("invoice:7"):
        ...     [info.name for info in locks.list("report:*")]
        ['report:nightly']
        """
        return self._pages(self._listing(pattern, free))

    def _pages(self, listing: Listing) -> Iterator[LockInfo]:
        while not listing.done:
            yield from run(listing.next_page())

    def close(self) -> None:
        """Release all leases, within two seconds, and close the connections."""
        run(self.session.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncLocks(BaseLocks[AsyncLease]):
    """Locks on one store, for asyncio; made by `lockfast.aio.connect()`. Belongs to one event loop.

    >>> import asyncio, lockfast.aio
    >>> async def main():
    ...     async with lockfast.aio.connect("memory://") as locks:
    ...         lease = await locks.lock("doc:async-locks").acquire(timeout=0)
    ...         return lease is not None
    >>> asyncio.run(main())
    True
    """

    _lock_class = AsyncLock

    def lock(self, name: str, **options: Unpack[LockOptions[AsyncLease]]) -> AsyncLock:
        """Return the lock of that name; options as for `Locks.lock`, and `cancel_on_loss` (True): cancel the body of
        the `async with` when the lease is lost.

        >>> import lockfast.aio
        >>> lockfast.aio.connect("memory://").lock("report", ttl=10)
        <AsyncLock 'report', ttl 10 s>
        """
        return AsyncLock(self, name, **options)

    def rlock(self, name: str, **options: Unpack[LockOptions[AsyncLease]]) -> AsyncRLock:
        """Return a lock that the task that holds it may acquire again, at no cost; options as for `lock`."""
        from lockfast.client.rlock import AsyncRLock

        return AsyncRLock(self, name, **options)

    def rwlock(self, name: str, **options: Unpack[LockOptions[AsyncLease]]) -> AsyncRWLock:
        """Return a read/write lock: `async with rwlock.reader:` or `async with rwlock.writer:`; see `Locks.rwlock`."""
        from lockfast.client.rwlock import AsyncReadLock, AsyncRWLock

        return AsyncRWLock(AsyncReadLock(self, name, **options), AsyncLock(self, name, **options))

    def semaphore(
        self,
        name: str,
        limit: int,
        *,
        permits: int = 1,
        unavailable: Unavailable = "raise",
        **options: Unpack[LockOptions[AsyncPermit]],
    ) -> AsyncSemaphore:
        """Return a semaphore of `limit` permits, of which `async with` takes `permits`; see `Locks.semaphore`."""
        from lockfast.client.semaphore import AsyncSemaphore

        chosen = cast("LockOptions[AsyncLease]", options)
        return AsyncSemaphore(self, name, limit, permits=permits, unavailable=unavailable, **chosen)

    def all_of(self, *locks: str | AsyncLock, **options: Unpack[LockOptions[AsyncLease]]) -> AsyncAllOf:
        """Return several locks as one: all are acquired, or none; see `Locks.all_of`."""
        from lockfast.client.all_of import AsyncAllOf

        made = [lock if isinstance(lock, BaseLock) else AsyncLock(self, lock, **options) for lock in locks]
        return AsyncAllOf(self.session, made, options.get("timeout"))

    @overload
    def once(
        self, name: str, *, busy: Literal["skip"] = "skip", **options: Unpack[OnceOptions[AsyncLease]]
    ) -> AsyncOnce[Skipped]: ...

    @overload
    def once(
        self, name: str, *, busy: Literal["wait", "raise"], **options: Unpack[OnceOptions[AsyncLease]]
    ) -> AsyncOnce[Never]: ...

    def once(self, name: str, *, busy: Busy = "skip", **options: Unpack[OnceOptions[AsyncLease]]) -> AsyncOnce[Any]:
        """Return a job that many start and one runs, for `async with` or coroutine functions; see `Locks.once`."""
        from lockfast.client.once import AsyncOnce, split_options

        chosen, lock_options = split_options(busy, options)
        return AsyncOnce(AsyncLock(self, name, **lock_options), chosen)

    def guard(
        self, name: NameOf, **options: Unpack[LockOptions[AsyncLease]]
    ) -> Callable[[Callable[P, Awaitable[R]]], Callable[P, Coroutine[Any, Any, R]]]:
        """Return a decorator for coroutine functions: each call runs under the lock that its arguments name."""
        return self._guard(name, options, guarded_async)

    async def update(
        self,
        key: str,
        change: Callable[[bytes | None], V | Awaitable[V]],
        *,
        attempts: int = 100,
        timeout: Seconds = 10.0,
        adaptive: bool = True,
    ) -> V:
        """Change the value of a key on the server; `change` may be a coroutine function. See `Locks.update`."""
        return cast(V, await self._update(key, change, attempts, timeout, adaptive))

    async def adopt(self, text: str, **options: Unpack[LockOptions[AsyncLease]]) -> AsyncLease:
        """Take over the lease that `lease.export()` wrote into `text`; exactly one client gets it."""
        return await self._adopt(text, options)

    async def guarantees(self) -> Guarantees:
        """Describe what this connection promises and what not; see `Locks.guarantees`."""
        return await self.session.guarantees()

    def list(self, pattern: str = "*", *, free: bool = False) -> AsyncIterator[LockInfo]:
        """Iterate over the locks that match `pattern`, with `async for`; see `Locks.list`."""
        return self._pages(self._listing(pattern, free))

    async def _pages(self, listing: Listing) -> AsyncIterator[LockInfo]:
        while not listing.done:
            for info in await listing.next_page():
                yield info

    async def close(self) -> None:
        """Release all leases, within two seconds, and close the connections."""
        await self.session.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
