"""`Locks`: what `connect()` returns. Makes locks on one store, keeps their leases, and closes it all.

The rules are in `basis.py`; here are the two colours, and what happens at a fork and when the program ends.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

from lockfast.client.guard import NameOf, check_function, name_function
from lockfast.client.lock import AsyncLock, Lock
from lockfast.client.options import options
from lockfast.client.recipes import AsyncRecipes, Recipes
from lockfast.client.session import BaseLocks, everyone, exiting
from lockfast.core.lease_state import LeaseState
from lockfast.core.listing import Listing
from lockfast.core.release import BUDGET
from lockfast.errors import closed_error
from lockfast.ports import Waker
from lockfast.runtime.runner import run
from lockfast.values import LockInfo

if TYPE_CHECKING:
    from lockfast.client.guarantees import Guarantees
    from lockfast.client.lease import AsyncLease, Lease

log = logging.getLogger("lockfast")

CLOSES_WITHIN = BUDGET + 1.0
"""Seconds that `close()` takes at most: the budget for giving back, and a moment to hang up."""

P = ParamSpec("P")
R = TypeVar("R")


class Locks(BaseLocks["Lease"], Recipes):
    """Locks on one store, for threads; made by `lockfast.connect()`.

    >>> import lockfast
    >>> with lockfast.connect("memory://") as locks:
    ...     lease = locks.lock("doc:locks").acquire(timeout=0)
    ...     lease is not None
    True
    """

    _lock_class = Lock

    def lock(self, name: str, **chosen: Any) -> Lock:
        """The lock of that name. Options, all by keyword:

        `ttl` (30): seconds that the store keeps a grant without renewal, and so the longest that a crashed
        holder blocks the others. `timeout` (None): seconds that `with` waits, None for as long as it takes.
        `renew` (True): keep the lease alive while this process lives. `max_hold` (None): seconds after which
        it ends all the same. `label`: who we are, for operators. `on_risk`, `on_lost`: called with the lease.
        `passing` (True): threads of this connection may hand the lock to one another, for 50 ms at a time.

        >>> import lockfast
        >>> lockfast.connect("memory://").lock("report", ttl=10)
        <Lock 'report', ttl 10 s>
        """
        return Lock(self, name, **chosen)

    def guard(self, name: NameOf, **chosen: Any) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """A decorator: each call runs under the lock that its arguments name.

        >>> import lockfast
        >>> locks = lockfast.connect("memory://")
        >>> @locks.guard("account:{account_id}")
        ... def deposit(account_id, amount):
        ...     return locks.lock(f"account:{account_id}").locked()
        >>> deposit(7, amount=100)
        True
        """

        options(self._owner, chosen)  # what does not fit is said here, not at the first call

        def decorate(function: Callable[P, R]) -> Callable[P, R]:
            check_function(function, awaited=False)
            name_of = name_function(name, function)

            @functools.wraps(function)
            def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
                with self.lock(name_of(*args, **kwargs), **chosen):
                    return function(*args, **kwargs)

            return guarded

        return decorate

    def adopt(self, text: str, **chosen: Any) -> Lease:
        """Take over the lease that `lease.export()` wrote into `text`; exactly one taker gets it.

        >>> import lockfast
        >>> locks = lockfast.connect("memory://")
        >>> text = locks.lock("doc:adopt").acquire().export()
        >>> lease = locks.adopt(text)
        >>> lease.release()
        True
        """
        return run(self._adopt(text, chosen))

    def guarantees(self) -> Guarantees:
        """What this connection promises and what not, from what its store tells: `print` it, or look at its lines. What
        is dangerous is logged as a warning too, once.

        >>> import lockfast
        >>> print(lockfast.connect("memory://").guarantees().about("one holder").text)
        At most one valid lease per name, within this process.
        """
        return run(self._guarantees())

    def list(self, pattern: str = "*", *, free: bool = False) -> Iterator[LockInfo]:
        """The locks whose names fit `pattern` and that somebody holds or waits for, in no order; with `free` also those
        that are free now and were used within a day. In a pattern `*` is any text, `?` any character, `[ab]` either.

        Found part by part while you iterate, so a busy server is not held up and what changes meanwhile may be
        missing. `waiters` is left out: `lock.inspect()` has them. A lock that something else than lockfast took is
        found only by its full name.

        >>> import lockfast
        >>> locks = lockfast.connect("memory://doc-list")
        >>> with locks.lock("report:nightly"), locks.lock("invoice:7"):
        ...     [info.name for info in locks.list("report:*")]
        ['report:nightly']
        """
        return self._parts(self._survey(pattern, free))

    def _parts(self, listing: Listing) -> Iterator[LockInfo]:
        while not listing.done:
            yield from run(listing.next_part())

    def close(self) -> None:
        """Give back what is held, within two seconds, and close the connections."""
        run(self._close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncLocks(BaseLocks["AsyncLease"], AsyncRecipes):
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

    _ends_with_loop = False
    """Whether nobody will close this, so that the end of the event loop has to (see `sharing.py`)."""
    _loop_end: Waker | None = None

    def _abandon(self) -> None:
        self.runtime.spawn(self._close, "close")

    def ensure_open(self) -> None:
        if self._closed:
            raise closed_error()
        if self.runtime.attach():
            for lease_state in self._left_behind():
                self.keepalive.sweep(lease_state)
        if self._ends_with_loop and self._loop_end is None:
            self._loop_end = self.runtime.waker()
            self.runtime.spawn(self._await_loop_end, "connection")

    async def _await_loop_end(self) -> None:
        """A loop that shuts down cancels its tasks: the last moment to hang up. A later loop may dial anew."""
        try:
            if self._loop_end is not None:
                await self._loop_end.wait(None)
        except GeneratorExit:
            raise
        except BaseException:
            give_up_at = self.runtime.now() + BUDGET
            while self.keepalive.held() and self.runtime.now() < give_up_at:
                await self.runtime.sleep(0.002)  # the keeper was cancelled too, and is giving it back
            self.store.disconnect()
            raise

    async def _close(self) -> None:
        try:
            await super()._close()
        finally:
            if self._loop_end is not None:
                self._loop_end.wake()

    def _bind(self) -> list[LeaseState]:
        """Belong to the running loop. What was held in another, which is closed and all that lived in it gone."""
        return self._left_behind() if self.runtime.attach() else []

    def _left_behind(self) -> list[LeaseState]:
        left = self.keepalive.held()
        for lease_state in left:
            lease_state.give_back()
        self._start_clean(forked=False)
        return left

    def _start_clean(self, *, forked: bool) -> None:
        if forked:
            self.runtime.after_fork()
        super()._start_clean(forked=forked)
        self._loop_end = None

    @property
    def _is_stranded(self) -> bool:
        """Whether something is held, and the event loop closed in which it could have been given back."""
        return bool(self.keepalive.held()) and self.runtime.loop_closed

    def lock(self, name: str, **chosen: Any) -> AsyncLock:
        """The lock of that name; options as for `Locks.lock`, and `cancel_on_loss` (True): cancel the body of
        the `async with` when the lease is lost.

        >>> import lockfast.aio
        >>> lockfast.aio.connect("memory://").lock("report", ttl=10)
        <AsyncLock 'report', ttl 10 s>
        """
        return AsyncLock(self, name, **chosen)

    def guard(self, name: NameOf, **chosen: Any) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """A decorator for coroutine functions: each call runs under the lock that its arguments name."""

        options(self._owner, chosen)  # what does not fit is said here, not at the first call

        def decorate(function: Callable[P, R]) -> Callable[P, R]:
            check_function(function, awaited=True)
            name_of = name_function(name, function)

            @functools.wraps(function)
            async def guarded(*args: P.args, **kwargs: P.kwargs) -> Any:
                async with self.lock(name_of(*args, **kwargs), **chosen):
                    return await function(*args, **kwargs)  # type: ignore[misc]

            return guarded  # type: ignore[return-value]

        return decorate

    async def adopt(self, text: str, **chosen: Any) -> AsyncLease:
        """Take over the lease that `lease.export()` wrote into `text`; exactly one taker gets it."""
        return await self._adopt(text, chosen)

    async def guarantees(self) -> Guarantees:
        """What this connection promises and what not, from what its store tells; see `Locks.guarantees`."""
        return await self._guarantees()

    def list(self, pattern: str = "*", *, free: bool = False) -> AsyncIterator[LockInfo]:
        """The locks whose names fit `pattern`, for `async for`; as `Locks.list`."""
        return self._parts(self._survey(pattern, free))

    async def _parts(self, listing: Listing) -> AsyncIterator[LockInfo]:
        while not listing.done:
            for info in await listing.next_part():
                yield info

    async def close(self) -> None:
        """Give back what is held, within two seconds, and close the connections."""
        if not self._closed:
            self._stranded = self._bind()
        await self._close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _after_fork() -> None:
    for client in list(everyone):
        client._start_clean(forked=True)


def _at_exit() -> None:
    exiting.append(True)
    for client in list(everyone):
        if isinstance(client, Locks):
            client.close()
        elif isinstance(client, AsyncLocks) and client._is_stranded:  # a loop that is open is its owner's to finish
            _close_in_a_loop_of_its_own(client)


def _close_in_a_loop_of_its_own(client: AsyncLocks) -> None:
    import asyncio

    try:
        asyncio.run(client.close())
    except Exception as error:
        log.debug("What a closed event loop left behind frees itself later: %s", error)


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
