"""`Once`: a job that several machines start and one runs. A base class has the rules for sync and async.

Rules:

- One machine runs the job. The others skip it at once and learn who runs it, or wait, or raise, as `busy` says.
- `at_least`: seconds from the start during which nobody else starts the job, however soon the run ends. So a quick job
  does not run again on a machine whose clock is a little behind. The grant stays in the store for that time and is not
  renewed; no client's wall clock is used.
- `every`: after a successful run nobody starts the job for nine tenths of that period. The last tenth is for early
  schedulers, clocks that differ, and the hour that daylight saving time skips. A failed run may be repeated sooner.
- `at_most`: a run that takes longer loses its lease, like any lease past its `max_hold`; another machine may run then.
- A machine that crashes blocks the others for its ttl and no longer, even if `at_least` is longer.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Generic, Literal, NamedTuple, ParamSpec, TypeVar, cast

from lockfast.client.guard import check_function, guarded, guarded_async
from lockfast.client.lease import AsyncLease, Lease
from lockfast.client.lock import AsyncLock, BaseLock, LeaseT, Lock, Scope, pop_scope
from lockfast.client.options import L, LockOptions, OnceOptions
from lockfast.errors import AcquireTimeout, ConfigurationError, StoreError, shown
from lockfast.runtime.base import run
from lockfast.values import LEAST_TTL, LockInfo, Owner, seconds

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
"""The result for a busy job: `Skipped`, or `Never` if it waits or raises."""

Busy = Literal["skip", "wait", "raise"]
SHARE = 0.9
"""The part of a period during which a successful run prevents another."""
INSPECT_WITHIN = 1.0
"""Seconds that finding out who runs the job may take."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """The job was not run, because another machine runs it or has just run it. False in a condition.

    `held_for` and `ttl_left` are seconds; None if the store could not tell.

    >>> skipped = Skipped("report", Owner("web2", 77, "nightly"), 12.0, 18.0)
    >>> bool(skipped), str(skipped)
    (False, "'report' was skipped: nightly (web2, pid 77) started it 12.0 s ago")
    """

    name: str
    owner: Owner | None = None
    held_for: float | None = None
    ttl_left: float | None = None

    def __bool__(self) -> Literal[False]:
        return False

    def __str__(self) -> str:
        who = "another client" if self.owner is None else str(self.owner)
        since = "" if self.held_for is None else f" {self.held_for:.1f} s ago"
        return f"{shown(self.name)} was skipped: {who} started it{since}"


class Schedule(NamedTuple):
    """Seconds from its start in which a run prevents another: `at_least` always, `kept` if it was successful."""

    at_least: float
    kept: float
    busy: Busy


def split_options(busy: Busy, options: OnceOptions[L]) -> tuple[Schedule, LockOptions[L]]:
    """Split the options of `locks.once()`, checked, into the schedule and the options of the job's lock."""
    rest: dict[str, Any] = dict(options)
    for option in ("max_hold", "renew"):
        if option in rest:
            raise ConfigurationError(f"once() has no option {option}: at_most limits how long a run may take.")
    least = seconds(rest.pop("at_least", 0.0), "at_least")
    limits = {option: rest.pop(option, None) for option in ("every", "at_most")}
    for option, value in limits.items():
        if value is not None:
            limits[option] = seconds(value, option, least=LEAST_TTL)
            if least > limits[option]:
                raise ConfigurationError(
                    f"at_least ({least:g} s) must not be more than {option} ({limits[option]:g} s)."
                )
    if busy not in ("skip", "wait", "raise"):
        raise ConfigurationError(f"busy must be 'skip', 'wait' or 'raise', not {shown(busy)}.")
    if limits["at_most"] is not None:
        rest["max_hold"] = limits["at_most"]
    kept = max(least, SHARE * (limits["every"] or 0.0))
    return Schedule(least, kept, busy), cast(LockOptions[L], rest)


class BaseOnce(Generic[LeaseT]):
    """The rules of a job in both flavours. `_scopes` are the active `with` blocks, skipping ones included."""

    def __init__(self, lock: BaseLock[LeaseT], chosen: Schedule) -> None:
        self._session = lock._session
        self._lock = lock
        self._schedule = chosen
        self._scopes: list[Scope[LeaseT | Skipped]] = []

    @property
    def name(self) -> str:
        """The job's name, which is also the name of its lock."""
        return self._lock.name

    async def _begin(self, frame: FrameType) -> Scope[LeaseT | Skipped]:
        waits, runtime = self._schedule.busy == "wait", self._session.runtime
        lease = await self._lock._acquire(waits, None)
        if lease is None and waits:
            raise self._lock._timeout_error()
        try:
            if lease is not None:
                lease._keep_until = runtime.now() + self._schedule.at_least
            scope: Scope[LeaseT | Skipped] = Scope(runtime.caller(), frame, lease or await self._skip())
            self._scopes.append(scope)
            return scope
        except BaseException:
            if lease is not None:
                await self._lock._abandon(lease)
            raise

    async def _skip(self) -> Skipped:
        try:
            info = await self._session.store.inspect(self.name, self._session.runtime.now() + INSPECT_WITHIN)
        except StoreError:
            info = LockInfo(self.name)
        skipped = Skipped(self.name, info.owner, info.held_for, info.ttl_left)
        if self._schedule.busy == "raise":
            raise AcquireTimeout(f"{skipped}. Nothing was left behind.", name=self.name, timeout=0.0)
        return skipped

    def _end(self, frame: FrameType, error: BaseException | None) -> LeaseT | None:
        """Return the lease of the run, if there was one, with the time that the name stays taken after it."""
        scope = pop_scope(self._scopes, self._session.runtime.caller(), frame)
        if scope is None or isinstance(scope.lease, Skipped):
            return None
        lease = scope.lease
        if error is None or (isinstance(error, SystemExit) and not error.code):
            lease._keep_until += self._schedule.kept - self._schedule.at_least
        return lease

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {shown(self.name)}, busy: {self._schedule.busy}>"


class Once(BaseOnce[Lease], Generic[S]):
    """A job that one of many runs, for threads: a context manager and a decorator.

    >>> import lockfast
    >>> locks = lockfast.connect("memory://")
    >>> @locks.once("doc:report", at_least=60)
    ... def report():
    ...     return "written"
    >>> report()
    'written'
    >>> report().name
    'doc:report'
    """

    _lock: Lock

    def __enter__(self) -> Lease | S:
        """Return the lease of the run; or `Skipped`, which is false and names who runs it."""
        return cast("Lease | S", run(self._begin(sys._getframe(1))).lease)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lease = self._end(sys._getframe(1), error)
        if lease is not None:
            self._lock._leave(lease, error)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R | S]:
        """Decorate a function: a call runs it, or returns `Skipped`."""
        check_function(function, is_async=False)
        return guarded(function, lambda *_, **__: self)


class AsyncOnce(BaseOnce[AsyncLease], Generic[S]):
    """A job that one of many runs, for asyncio: the same, awaited.

    >>> import asyncio, lockfast.aio
    >>> async def main():
    ...     async with lockfast.aio.connect("memory://") as locks:
    ...         async with locks.once("doc:async-report") as run:
    ...             return run.fence > 0 if run else f"{run.owner} runs it"
    >>> asyncio.run(main())
    True
    """

    _lock: AsyncLock

    async def __aenter__(self) -> AsyncLease | S:
        """Return the lease of the run; or `Skipped`, which is false and names who runs it."""
        scope = await self._begin(sys._getframe(1))
        if isinstance(scope.lease, AsyncLease):
            scope.lease._blocks += 1
            if self._lock._options.cancel_on_loss:
                scope.cancel_on_loss(scope.lease)
        return cast("AsyncLease | S", scope.lease)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lease = self._end(sys._getframe(1), error)
        if lease is not None:
            await self._lock._leave(lease, error)

    def __call__(self, function: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[Any, Any, R | S]]:
        """Decorate a coroutine function: a call runs it, or returns `Skipped`."""
        check_function(function, is_async=True)
        return guarded_async(function, lambda *_, **__: self)
