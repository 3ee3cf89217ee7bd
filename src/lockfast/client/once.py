"""`Once`: a job that several machines start and one runs; the rules once, the two colours below them.

Rules kept here:

- One runs. The others skip at once and are told who runs it, or wait, or raise, as `busy` says.
- `at_least`: seconds from the start for which nobody else starts, however soon the run ends: so a quick job does not
  run again on a machine whose clock is a little behind. The grant stays in the store with that much time left and is
  not renewed; no client's wall clock is asked.
- `every`: after a run that succeeded nobody starts for nine tenths of it. The last tenth is for schedulers that are
  early, clocks that differ and the hour that summer time takes away. A run that failed may be repeated sooner.
- `at_most`: a run that takes longer has lost its lease, as any lease past its `max_hold`; others may run then.
- A runner that crashes blocks the others for its ttl and no longer, whatever it promised to keep.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Literal, NamedTuple, ParamSpec, TypeVar

from lockfast.client.base_lock import BaseLock, LeaseT
from lockfast.client.blocks import Block, leave_block
from lockfast.client.guard import check_function
from lockfast.client.lease import AsyncLease, BaseLease, Lease
from lockfast.client.lock import AsyncLock, Lock
from lockfast.errors import AcquireTimeout, ConfigurationError, StoreError
from lockfast.runtime.runner import run
from lockfast.values import LEAST_TTL, LockInfo, Owner, Seconds, seconds, shown

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
"""What a busy job gives: `Skipped`, or nothing at all where it waits or raises."""

Busy = Literal["skip", "wait", "raise"]
SHARE = 0.9
"""The part of a period for which a successful run keeps the others from starting."""
LOOK_WITHIN = 1.0
"""Seconds that asking who runs it may take; who cannot be told by then is not told."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """The job was not run, because another runs it or has just run it. False in a condition.

    `held_for` and `ttl_left` are seconds; what the store could not tell is None.

    >>> skipped = Skipped("report", Owner("web2", 77, "nightly"), 12.0, 18.0)
    >>> bool(skipped), str(skipped)
    (False, "'report' was skipped: nightly (web2, pid 77) took it 12.0 s ago")
    """

    name: str
    owner: Owner | None = None
    held_for: float | None = None
    ttl_left: float | None = None

    def __bool__(self) -> Literal[False]:
        return False

    def __str__(self) -> str:
        who = "another" if self.owner is None else str(self.owner)
        since = "" if self.held_for is None else f" {self.held_for:.1f} s ago"
        return f"{shown(self.name)} was skipped: {who} took it{since}"


class Terms(NamedTuple):
    """How a job is to be run; checked when built by `terms()`. `kept` is for a run that succeeded."""

    at_least: float
    kept: float
    at_most: float | None
    busy: Busy


def terms(every: Seconds | None, at_least: Seconds, at_most: Seconds | None, busy: str) -> Terms:
    """The options of `locks.once()`, checked."""
    period = None if every is None else seconds(every, "every", least=LEAST_TTL)
    least = seconds(at_least, "at_least")
    most = None if at_most is None else seconds(at_most, "at_most", least=LEAST_TTL)
    if most is not None and least > most:
        raise ConfigurationError(f"at_least ({least:g} s) must not be more than at_most ({most:g} s).")
    if period is not None and least > period:
        raise ConfigurationError(f"at_least ({least:g} s) must not be more than every ({period:g} s).")
    if busy not in ("skip", "wait", "raise"):
        raise ConfigurationError(f"busy must be 'skip', 'wait' or 'raise', not {shown(busy)}.")
    return Terms(least, max(least, SHARE * (period or 0.0)), most, busy)  # type: ignore[arg-type]


def lock_options(chosen: Terms, how: dict[str, Any]) -> dict[str, Any]:
    """The options of the job's lock."""
    for option in ("max_hold", "renew"):
        if option in how:
            raise ConfigurationError(f"once() has no option {option}: at_most bounds how long a run may take.")
    return how if chosen.at_most is None else {**how, "max_hold": chosen.at_most}


class BaseOnce(Generic[LeaseT]):
    """What a job is in both colours. `_blocks` are the `with` blocks under way, those that skip among them."""

    def __init__(self, lock: BaseLock[LeaseT], chosen: Terms) -> None:
        self._client = lock._client
        self._lock = lock
        self._terms = chosen
        self._blocks: list[Block] = []

    @property
    def name(self) -> str:
        """The job's name, which is also the name of its lock."""
        return self._lock.name

    async def _begin(self, frame: int) -> LeaseT | Skipped:
        waits, runtime = self._terms.busy == "wait", self._client.runtime
        lease = await self._lock._acquire(waits, None)
        if lease is None and waits:
            raise self._lock._stayed_taken()
        if lease is not None:
            lease._keep_until = runtime.now() + self._terms.at_least
        outcome = self._skip(await self._look()) if lease is None else lease
        self._blocks.append(Block(runtime.caller(), frame, outcome))
        return outcome

    async def _look(self) -> LockInfo:
        try:
            return await self._client.store.inspect(self.name, self._client.runtime.now() + LOOK_WITHIN)
        except StoreError:
            return LockInfo(self.name)

    def _skip(self, info: LockInfo) -> Skipped:
        skipped = Skipped(self.name, info.owner, info.held_for, info.ttl_left)
        if self._terms.busy == "raise":
            raise AcquireTimeout(f"{skipped}. Nothing was left behind.", name=self.name, timeout=0.0)
        return skipped

    def _end(self, frame: int, error: BaseException | None) -> LeaseT | None:
        """The lease of the run, if there was one; what it leaves in the store is set by how it ended."""
        block = leave_block(self._blocks, self._client.runtime.caller(), frame)
        if block is None or isinstance(block.lease, Skipped):
            return None
        lease: LeaseT = block.lease
        if error is None or (isinstance(error, SystemExit) and not error.code):
            lease._keep_until += self._terms.kept - self._terms.at_least
        return lease

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {shown(self.name)}, busy: {self._terms.busy}>"


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
        """The lease of the run, or what tells who runs it, which is false."""
        return run(self._begin(id(sys._getframe(1))))  # type: ignore[return-value]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lease = self._end(id(sys._getframe(1)), error)
        if lease is not None:
            self._lock._leave(lease, error)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R | S]:
        """As a decorator: a call runs `function`, or gives what tells who runs it."""
        check_function(function, awaited=False)

        @functools.wraps(function)
        def once(*args: P.args, **kwargs: P.kwargs) -> R | S:
            with self as lease:
                return function(*args, **kwargs) if isinstance(lease, BaseLease) else lease

        return once


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
        """The lease of the run, or what tells who runs it, which is false."""
        outcome = await self._begin(id(sys._getframe(1)))
        if isinstance(outcome, AsyncLease) and self._lock._open_scope is not None:
            self._lock._open_scope(outcome)
        return outcome  # type: ignore[return-value]

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lease = self._end(id(sys._getframe(1)), error)
        if lease is not None:
            await self._lock._leave(lease, error)

    def __call__(self, function: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[Any, Any, R | S]]:
        """As a decorator on a coroutine function: a call runs it, or gives what tells who runs it."""
        check_function(function, awaited=True)

        @functools.wraps(function)
        async def once(*args: P.args, **kwargs: P.kwargs) -> R | S:
            async with self as lease:
                return await function(*args, **kwargs) if isinstance(lease, BaseLease) else lease

        return once
