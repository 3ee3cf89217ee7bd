"""What a connection makes besides plain locks: one method each, in both colours. What they do is in their own modules,
which are loaded when they are first used.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Literal, Never, TypeVar, overload

from lockfast.runtime.runner import run
from lockfast.values import Seconds

if TYPE_CHECKING:
    from lockfast.client.once import AsyncOnce, Once, Skipped
    from lockfast.client.rlock import AsyncRLock, RLock

V = TypeVar("V", bound="bytes | str | int | float | None")


class Recipes:
    """For threads; `connection.Locks` has these methods."""

    def rlock(self, name: str, **chosen: Any) -> RLock:
        """A lock that the thread which has it may take again, at no cost; options as for `lock`.

        >>> import lockfast
        >>> lock = lockfast.connect("memory://").rlock("doc:rlock")
        >>> with lock as outer, lock as inner:
        ...     inner.fence == outer.fence
        True
        """
        from lockfast.client.rlock import RLock

        return RLock(self, name, **chosen)

    @overload
    def once(
        self,
        name: str,
        *,
        every: Seconds | None = None,
        at_least: Seconds = 0.0,
        at_most: Seconds | None = None,
        busy: Literal["skip"] = "skip",
        **chosen: Any,
    ) -> Once[Skipped]: ...

    @overload
    def once(
        self,
        name: str,
        *,
        every: Seconds | None = None,
        at_least: Seconds = 0.0,
        at_most: Seconds | None = None,
        busy: Literal["wait", "raise"],
        **chosen: Any,
    ) -> Once[Never]: ...

    def once(
        self,
        name: str,
        *,
        every: Seconds | None = None,
        at_least: Seconds = 0.0,
        at_most: Seconds | None = None,
        busy: str = "skip",
        **chosen: Any,
    ) -> Once[Any]:
        """A job that many start and one runs: `with locks.once("report") as run: if run: ...`, or a decorator.

        `at_least`: seconds from its start for which nobody else starts it. `every`: the same, after a run that
        succeeded, for nine tenths of that period. `at_most`: seconds after which a run has lost its lease. `busy`:
        what the others do: "skip" (and be told who runs it), "wait" or "raise" (`AcquireTimeout`). The rest as for
        `lock`.

        >>> import lockfast
        >>> locks = lockfast.connect("memory://")
        >>> with locks.once("doc:once", at_least=60) as run:
        ...     bool(run)
        True
        >>> with locks.once("doc:once", at_least=60) as run:
        ...     bool(run)
        False
        """
        from lockfast.client.lock import Lock
        from lockfast.client.once import Once, lock_options, terms

        how = terms(every, at_least, at_most, busy)
        return Once(Lock(self, name, **lock_options(how, chosen)), how)

    def update(
        self,
        key: str,
        change: Callable[[bytes | None], V],
        *,
        attempts: int = 100,
        timeout: Seconds = 10.0,
        adaptive: bool = True,
    ) -> V:
        """Change the value of a key of the server: `locks.update("stock:7", lambda old: int(old or 0) - 1)`.

        `change` is given the value as bytes (None if there is none) and returns the new one, or None to leave it; it is
        called again when another came in between, up to `attempts` times and `timeout` seconds, then `UpdateConflict`.
        What it returned last is returned. `adaptive`: go over to a lock while conflicts are frequent.

        >>> import lockfast
        >>> lockfast.connect("memory://").update("stock:7", lambda old: 1)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        lockfast.errors.ConfigurationError: <Locks on memory://> holds locks and no values, ...
        """
        from lockfast.client.update import limits, update

        return run(update(self, key, change, limits(attempts, timeout, adaptive)))  # type: ignore[arg-type]


class AsyncRecipes:
    """For asyncio; `connection.AsyncLocks` has these methods."""

    def rlock(self, name: str, **chosen: Any) -> AsyncRLock:
        """A lock that the task which has it may take again, at no cost; options as for `lock`."""
        from lockfast.client.rlock import AsyncRLock

        return AsyncRLock(self, name, **chosen)

    @overload
    def once(
        self,
        name: str,
        *,
        every: Seconds | None = None,
        at_least: Seconds = 0.0,
        at_most: Seconds | None = None,
        busy: Literal["skip"] = "skip",
        **chosen: Any,
    ) -> AsyncOnce[Skipped]: ...

    @overload
    def once(
        self,
        name: str,
        *,
        every: Seconds | None = None,
        at_least: Seconds = 0.0,
        at_most: Seconds | None = None,
        busy: Literal["wait", "raise"],
        **chosen: Any,
    ) -> AsyncOnce[Never]: ...

    def once(
        self,
        name: str,
        *,
        every: Seconds | None = None,
        at_least: Seconds = 0.0,
        at_most: Seconds | None = None,
        busy: str = "skip",
        **chosen: Any,
    ) -> AsyncOnce[Any]:
        """A job that many start and one runs, as `Locks.once` tells; with `async with`, or on a coroutine function."""
        from lockfast.client.lock import AsyncLock
        from lockfast.client.once import AsyncOnce, lock_options, terms

        how = terms(every, at_least, at_most, busy)
        return AsyncOnce(AsyncLock(self, name, **lock_options(how, chosen)), how)

    async def update(
        self,
        key: str,
        change: Callable[[bytes | None], V | Awaitable[V]],
        *,
        attempts: int = 100,
        timeout: Seconds = 10.0,
        adaptive: bool = True,
    ) -> V:
        """Change the value of a key of the server, as `Locks.update` tells; `change` may be a coroutine function."""
        from lockfast.client.update import limits, update

        return await update(self, key, change, limits(attempts, timeout, adaptive))  # type: ignore[arg-type]
