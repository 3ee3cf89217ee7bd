"""redis-py's `Lock`, with lockfast behind it: the same signature, methods, attributes and exceptions.

    from lockfast.compat.redis_py import Lock

    lock = Lock(client, "report", timeout=10)                   # or, where the code has it already:
    lock = client.lock("report", timeout=10, lock_class=Lock)

Old and new exclude one another on one key, so a fleet may change one service at a time. What is better, and so what is
different, is listed in `docs/migrating.md`. For new code, `lockfast.Lock` says more.
"""

from __future__ import annotations

from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Literal, Self

from lockfast.compat.redis_py import errors
from lockfast.compat.redis_py.errors import LockError, LockNotOwnedError
from lockfast.compat.redis_py.rules import BaseLock, Number
from lockfast.compat.redis_py.tokens import TaskToken, ThreadToken
from lockfast.runtime.asyncio import AsyncioRuntime
from lockfast.runtime.runner import run
from lockfast.runtime.threads import ThreadRuntime

__all__ = ["AsyncLock", "Lock", "LockError", "LockNotOwnedError", "errors"]


class Lock(BaseLock):
    """`redis.lock.Lock`.

    `timeout` is the longest hold in seconds; without one the lock is renewed while this process lives. The limit of
    the wait is `blocking_timeout`. `sleep` is accepted; who waits is told, and need not look again and again.
    """

    _colour = "threads"
    _local_class = ThreadToken
    _runtime_class = ThreadRuntime

    def acquire(
        self,
        sleep: Number | None = None,
        blocking: bool | None = None,
        blocking_timeout: Number | None = None,
        token: str | bytes | None = None,
    ) -> bool:
        """True once the lock is ours; False when it stayed taken."""
        return run(self._acquire(sleep, blocking, blocking_timeout, token))

    def do_acquire(self, token: str | bytes) -> bool:
        """One try with that token."""
        return run(self._try(self._encoded(token)))

    def release(self) -> None:
        """Give the lock back; `LockError` when it is not ours, `LockNotOwnedError` when it no longer is."""
        run(self._release())

    def do_release(self, expected_token: bytes) -> None:
        """Give it back if it is that token's."""
        run(self._release_token(expected_token))

    def extend(self, additional_time: Number, replace_ttl: bool = False) -> Literal[True]:
        """Add to the time that the lock has left, or with `replace_ttl` set it."""
        return run(self._extend(self._timed("extend"), additional_time, replace_ttl))

    def do_extend(self, additional_time: Number, replace_ttl: bool) -> Literal[True]:
        """`extend` without its checks."""
        return run(self._extend(self.local.token, additional_time, replace_ttl))

    def reacquire(self) -> Literal[True]:
        """Set the time that the lock has left back to its timeout."""
        return run(self._reacquire(self._timed("reacquire")))

    def do_reacquire(self) -> Literal[True]:
        """`reacquire` without its checks."""
        return run(self._reacquire(self.local.token))

    def locked(self) -> bool:
        """Whether anybody holds the lock."""
        return run(self._locked())

    def owned(self) -> bool:
        """Whether we hold it."""
        return run(self._owned())

    def __enter__(self) -> Self:
        run(self._enter())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        run(self._exit())


class AsyncLock(BaseLock):
    """`redis.asyncio.lock.Lock`: the same, awaited."""

    _colour = "asyncio"
    _local_class = TaskToken
    _runtime_class = AsyncioRuntime

    async def acquire(
        self,
        blocking: bool | None = None,
        blocking_timeout: Number | None = None,
        token: str | bytes | None = None,
    ) -> bool:
        """True once the lock is ours; False when it stayed taken."""
        return await self._acquire(None, blocking, blocking_timeout, token)

    async def do_acquire(self, token: str | bytes) -> bool:
        """One try with that token."""
        return await self._try(self._encoded(token))

    async def release(self) -> None:
        """Give the lock back; `LockError` when it is not ours, `LockNotOwnedError` when it no longer is."""
        await self._release()

    async def do_release(self, expected_token: bytes) -> None:
        """Give it back if it is that token's."""
        await self._release_token(expected_token)

    def extend(self, additional_time: Number, replace_ttl: bool = False) -> Coroutine[Any, Any, Literal[True]]:
        """Add to the time that the lock has left, or with `replace_ttl` set it."""
        return self._extend(self._timed("extend"), additional_time, replace_ttl)

    async def do_extend(self, additional_time: Number, replace_ttl: bool) -> Literal[True]:
        """`extend` without its checks."""
        return await self._extend(self.local.token, additional_time, replace_ttl)

    def reacquire(self) -> Coroutine[Any, Any, Literal[True]]:
        """Set the time that the lock has left back to its timeout."""
        return self._reacquire(self._timed("reacquire"))

    async def do_reacquire(self) -> Literal[True]:
        """`reacquire` without its checks."""
        return await self._reacquire(self.local.token)

    async def locked(self) -> bool:
        """Whether anybody holds the lock."""
        return await self._locked()

    async def owned(self) -> bool:
        """Whether we hold it."""
        return await self._owned()

    async def __aenter__(self) -> Self:
        await self._enter()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._exit()
