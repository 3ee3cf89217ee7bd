"""`Lock`: a named thing that one can try to hold, in two colours; what they have in common is in `locking.py`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, cast

from lockfast.client.base_lock import BaseLock
from lockfast.client.guard import check_function
from lockfast.client.lease import AsyncLease, Lease
from lockfast.errors import LockError
from lockfast.runtime.runner import run
from lockfast.values import LockInfo, Seconds

P = ParamSpec("P")
R = TypeVar("R")


class Lock(BaseLock[Lease]):
    """A named lock, for threads. One object may be shared by many.

    >>> import lockfast
    >>> lock = lockfast.connect("memory://").lock("doc:lock", ttl=10)
    >>> with lock as lease:
    ...     lease.state.value, lock.locked()
    ('held', True)
    >>> lock.locked()
    False
    """

    _lease_class = Lease
    _awaited = False

    def acquire(self, blocking: bool = True, timeout: Seconds | None = None) -> Lease | None:
        """A lease, or None when the lock stayed taken: for `timeout` seconds, or at all if not `blocking`."""
        try:
            return self._remember(run(self._acquire(blocking, timeout)))
        except LockError:
            self._client._closed_under_us()
            raise

    def release(self) -> bool:
        """Give back the lease that this thread got from this object; False when it had gone already."""
        return cast(Lease, self._last()).release()

    def locked(self) -> bool:
        """Whether anyone holds the lock right now."""
        return self.inspect().locked

    def inspect(self) -> LockInfo:
        """Who holds the lock, since when and how long, its fence, and who waits, in order."""
        return run(self._inspect())

    def force_release(self, holder: str | None = None) -> LockInfo | None:
        """Take the lock away from whoever holds it, or only from `holder` as `inspect()` told it, and hand it on.

        The fence moves on, and the old holder is told that its lease is lost. What it hit, as it was just before;
        None when there was nobody to take it from. The old holder may still be at work: only a resource that
        checks fences is safe from it.

        >>> import lockfast
        >>> lock = lockfast.connect("memory://", label="stuck").lock("doc:break")
        >>> lease = lock.acquire()
        >>> lock.break_(lock.inspect().holder).owner.label
        'stuck'
        >>> lock.locked()
        False
        """
        return run(self._break(holder))

    def __enter__(self) -> Lease:
        try:
            return run(self._acquire(True, None, id(sys._getframe(1))))  # type: ignore[return-value]
        except LockError:
            self._client._closed_under_us()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        blocks = self._blocks
        # Nearly always there is but one; who begins another meanwhile stands behind it.
        block = blocks.pop(0) if len(blocks) == 1 else self._find_block(id(sys._getframe(1)))
        self._leave(block.lease, error)

    def _leave(self, lease: Lease, error: BaseException | None) -> None:
        if lease._shared_grant is not None and not self._reenters and lease._pass_on(lease._shared_grant):
            return
        lost = run(self._exit(lease, error))
        if lost is not None and error is None:
            raise lost

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """As a decorator: every call of `function` runs under the lock."""
        check_function(function, awaited=False)

        @functools.wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return function(*args, **kwargs)

        return guarded


class AsyncLock(BaseLock[AsyncLease]):
    """A named lock, for asyncio: the same names, awaited.

    >>> import asyncio, lockfast.aio
    >>> async def main():
    ...     async with lockfast.aio.connect("memory://") as locks:
    ...         async with locks.lock("doc:async-lock") as lease:
    ...             return lease.state.value
    >>> asyncio.run(main())
    'held'
    """

    _lease_class = AsyncLease
    _awaited = True

    def __init__(self, client: Any, name: str, **chosen: Any) -> None:
        super().__init__(client, name, **chosen)
        if self._options.cancel_on_loss:
            from lockfast.client.cancel_scope import open_scope  # here, so that threads need not load asyncio

            self._open_scope = open_scope

    async def acquire(
        self,
        blocking: bool = True,
        timeout: Seconds | None = None,
    ) -> AsyncLease | None:
        """A lease, or None when the lock stayed taken: for `timeout` seconds, or at all if not `blocking`."""
        return self._remember(await self._acquire(blocking, timeout))

    async def release(self) -> bool:
        """Give back the lease that this task got from this object; False when it had gone already."""
        return await self._last()._release()

    async def locked(self) -> bool:
        """Whether anyone holds the lock right now."""
        return (await self.inspect()).locked

    async def inspect(self) -> LockInfo:
        """Who holds the lock, since when and how long, its fence, and who waits, in order."""
        return await self._inspect()

    async def force_release(self, holder: str | None = None) -> LockInfo | None:
        """Take the lock away from whoever holds it, or only from `holder`, and hand it on; as for `Lock.break_`."""
        return await self._break(holder)

    def __aenter__(self) -> Coroutine[Any, Any, AsyncLease]:
        return self._acquire(True, None, id(sys._getframe(1)))  # type: ignore[return-value]

    def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Coroutine[Any, Any, None]:
        blocks = self._blocks
        block = blocks.pop(0) if len(blocks) == 1 else self._find_block(id(sys._getframe(1)))
        return self._leave(block.lease, error)

    async def _leave(self, lease: AsyncLease, error: BaseException | None) -> None:
        # A re-entrant lock's blocks share a lease; the outermost ends the scope.
        our_cancel = False
        if lease._cancelling >= 0 and not (self._blocks and any(block.lease is lease for block in self._blocks)):
            if lease._cancelled:
                from lockfast.client.cancel_scope import close_scope  # loaded by whoever has set `_cancelled`

                our_cancel = close_scope(lease, error)
            else:
                lease._cancelling = -1
        if lease._shared_grant is not None and not self._reenters and lease._pass_on(lease._shared_grant):
            return
        lost = await self._exit(lease, error)
        if lost is not None and (error is None or our_cancel):
            raise lost from error

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """As a decorator on a coroutine function: every call runs under the lock."""
        check_function(function, awaited=True)

        @functools.wraps(function)
        async def guarded(*args: P.args, **kwargs: P.kwargs) -> Any:
            async with self:
                return await function(*args, **kwargs)  # type: ignore[misc]

        return guarded  # type: ignore[return-value]
