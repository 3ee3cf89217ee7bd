"""`Locks`: what `connect()` returns. Makes locks on one store; a sync and an async shell over one `Session`.

`RLock`, below, is a lock that its thread or task may acquire again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Hashable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, Generic, Literal, Never, ParamSpec, Self, TypeVar, Unpack, cast, overload

from lockfast.client.guard import NameOf, check_function, guarded, guarded_async, name_function
from lockfast.client.lease import AsyncLease, ExportedLease, Lease
from lockfast.client.lock import MOST_CALLERS, AsyncLock, BaseLock, LeaseT, Lock
from lockfast.client.options import LockOptions, OnceOptions, SessionOptions
from lockfast.client.session import Session
from lockfast.core.acquire import Grant, adopt
from lockfast.core.lease_state import ALIVE, State, valid_until
from lockfast.core.retry import retry
from lockfast.errors import LeaseLost, shown
from lockfast.ports import Ports, Runtime, Store
from lockfast.runtime.base import run
from lockfast.values import Claim, LockInfo, Page, Seconds, is_plain, lock_name, name_pattern

if TYPE_CHECKING:
    from lockfast.client.guarantees import Guarantees
    from lockfast.client.once import AsyncOnce, Busy, Once, Skipped

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


class BaseLocks(Generic[LeaseT]):
    """The rules of `Locks` in both flavours. `session` is the seam for extensions."""

    _lock_class: type[BaseLock[LeaseT]]

    def __init__(self, store: Store, runtime: Runtime, **options: Unpack[SessionOptions]) -> None:
        self.session = Session(store, runtime, is_async=self._lock_class._is_async, **options)

    async def _adopt(self, text: str, options: LockOptions[LeaseT]) -> LeaseT:
        session = self.session
        session.ensure_open()
        exported = ExportedLease.decode(text)
        lock = self._lock_class(self, exported.name, **cast("LockOptions[LeaseT]", {"ttl": exported.ttl, **options}))
        claim = Claim(lock.name, session.runtime.new_holder_id(), lock._options.ttl, lock._options.owner)
        grant = await adopt(session.ports, claim, exported.holder)
        if grant is None:
            raise LeaseLost(
                f"The exported lease on {shown(exported.name)} has ended: it expired, was released, or was adopted "
                "before. Acquire the lock again.",
                name=exported.name,
            )
        return lock._lease(grant)

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
        return RLock(self, name, **options)

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
        return AsyncRLock(self, name, **options)

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


class Reentrant(BaseLock[LeaseT]):
    """The rules of a re-entrant lock in both flavours.

    the lease is     acquire again                 release one level
    alive            one level deeper, no request  one level less; the outermost releases the lease
    lost             LeaseLost                     one level less; at the outermost nothing is left to release
    released         as if it were new             nothing is held

    The count belongs to one lease and ends with it, so it never says "held" of a lock that another client has. A lost
    lease gets no new level, so all levels unwind; the end of each block raises `LeaseLost`, unless an error passes
    through it. Each thread or task counts for itself; a forked child and a child task have nothing.

    `_levels` maps a caller to its lease and depth, at least 1. Each caller changes only its own entry, so no mutex is
    needed.
    """

    def __init__(self, client: Any, name: str, **options: Unpack[LockOptions[LeaseT]]) -> None:
        super().__init__(client, name, **options)
        self._levels: dict[Hashable, tuple[LeaseT, int]] = {}

    @property
    def depth(self) -> int:
        """How often the running thread or task has acquired the lock and not released it. Sends nothing."""
        level = self._levels.get(self._session.runtime.caller())
        return 0 if level is None else level[1]

    async def _acquire(self, blocking: bool, timeout: Seconds | None, frame: FrameType | None = None) -> LeaseT | None:
        caller = self._session.runtime.caller()
        level = self._levels.get(caller)
        if level is not None:
            self._wait(blocking, timeout)
            held, depth = level
            # Leases of a parent process or of a closed event loop are not ours, so their levels are dropped.
            state = State.RELEASED if held.inherited else held.state
            if state in ALIVE:
                if frame is not None:
                    self._enter_scope(held, frame)
                self._levels[caller] = held, depth + 1
                return held
            if state is State.LOST:
                raise held._lost_error()
            del self._levels[caller]
        try:
            lease = await super()._acquire(blocking, timeout, frame)
        except BaseException:
            caller = None  # a task keeps its error, and that this frame: it must not keep the task
            raise
        if lease is not None:
            self._levels[caller] = lease, 1
            try:
                if len(self._levels) > MOST_CALLERS:  # callers that let their leases expire
                    for one in [one for one, (held, _) in list(self._levels.items()) if not held.remaining]:
                        self._levels.pop(one, None)
            except BaseException:  # interrupted: the caller does not get the lease
                self._levels.pop(caller, None)
                await self._abandon(lease)
                raise
        return lease

    def _leave_level(self, caller: Hashable) -> bool:
        """Leave one level; True if it was the outermost."""
        lease, depth = self._levels[caller]
        if depth > 1:
            self._levels[caller] = lease, depth - 1
            return False
        del self._levels[caller]
        return True

    async def _release(self) -> bool:
        """Release one level; whether the lease was still valid."""
        caller = self._session.runtime.caller()
        level = self._levels.get(caller)
        if level is None or level[0].state is State.RELEASED:
            self._levels.pop(caller, None)
            return await super()._release()  # again after an error; else it raises NotHeld
        if not self._leave_level(caller):
            return level[0].state is not State.LOST
        return await level[0]._release()

    async def _exit(self, lease: LeaseT) -> LeaseLost | None:
        # Another thread may end a generator's block, so the lease knows the caller that entered it.
        caller = lease._core.caller
        level = self._levels.get(caller)
        if level is not None and level[0] is lease and not self._leave_level(caller):
            return lease._lost_error() if lease.state is State.LOST else None
        return await super()._exit(lease)

    def __repr__(self) -> str:
        depth = self.depth
        return f"{super().__repr__()[:-1]}{f', depth {depth}' if depth else ''}>"


class RLock(Reentrant[Lease], Lock):
    """A re-entrant lock, for threads. Threads may share one object; each counts for itself.

    `release()` releases one level, and with the outermost the lease.

    >>> import lockfast
    >>> lock = lockfast.connect("memory://").rlock("doc:re-entrant", ttl=10)
    >>> with lock, lock:
    ...     lock
    <RLock 'doc:re-entrant', ttl 10 s, depth 2>
    >>> lock.locked()
    False
    """


class AsyncRLock(Reentrant[AsyncLease], AsyncLock):
    """A re-entrant lock, for asyncio: the same names, awaited; each task counts for itself.

    >>> import asyncio, lockfast.aio
    >>> async def main():
    ...     async with lockfast.aio.connect("memory://") as locks:
    ...         lock = locks.rlock("doc:async-re-entrant")
    ...         async with lock, lock:
    ...             return lock.depth
    >>> asyncio.run(main())
    2
    """
