"""`Semaphore`: at most `limit` permits at once. A base class has the rules for sync and async.

Rules:

- A claim takes one permit or several, all or none. The queue is strictly first come, first served: nobody overtakes a
  claim for many permits.
- Every lease has its own ttl, so the permits of a crashed holder are free again when it expires.
- A permit has a slot: the lowest index that no other live permit has, from 0 up to `limit - 1`. The slot belongs to the
  lease for as long as it lives.
- The limit belongs to the claim; the store has no setting for it. While a new limit is rolled out, the store applies
  to each claim the limit of that claim. A lease keeps its slots until it ends, even if a lower limit excludes them.
- `unavailable="allow"`: if the store does not answer, the caller is let in without a permit, which is logged. Use it
  if the work must continue while the store is down.
"""

from __future__ import annotations

import logging
from collections.abc import Coroutine
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, Unpack, cast

from lockfast.client.lease import AsyncLease, BaseLease, Lease
from lockfast.client.lock import AsyncLock, BaseLock, LeaseT, Lock
from lockfast.client.options import LockOptions
from lockfast.core.lease_state import State
from lockfast.core.local_handoff import ClaimTerms
from lockfast.core.release import BUDGET
from lockfast.errors import ConfigurationError, NotHeld, StoreUnavailable, shown
from lockfast.events import EventKind
from lockfast.values import LockInfo, Mode, Seconds, clean

log = logging.getLogger("lockfast")

MOST_PERMITS = 100_000

Unavailable = Literal["raise", "allow"]


class BasePermit(BaseLease):
    """The rules of the lease of one permit or several, in both flavours."""

    _let_in = False

    @property
    def name(self) -> str:
        """The semaphore's name."""
        return self._lock.name

    @property
    def slots(self) -> tuple[int, ...]:
        """The indexes of the permits, in order; none if the caller was let in without a permit."""
        return self._core.slots

    @property
    def slot(self) -> int:
        """The index of the first permit: which of the `limit` devices or workers to use."""
        if not self._core.slots:
            raise self._no_permit("There is no slot")
        return self._core.slots[0]

    @property
    def enforced(self) -> bool:
        """False if the store was unavailable, and `unavailable="allow"` let this caller in without a permit."""
        return not self._let_in

    @property
    def state(self) -> State:
        """Held, at risk, lost or released, by the local clock; held until its release if there is no permit."""
        if self._let_in:
            return State.RELEASED if self._ended else State.HELD
        return super().state

    def ensure_held(self) -> None:
        """Raise `LeaseLost` unless the lease is valid. Sends nothing, so it costs next to nothing."""
        if not self._let_in:
            super().ensure_held()

    def export(self) -> str:
        """Return a string with which `locks.adopt()` takes the lease over, as for every lease."""
        if self._let_in:
            raise self._no_permit("There is nothing to export")
        return super().export()

    async def _renew(self, ttl: float | None) -> None:
        if not self._let_in:
            await super()._renew(ttl)

    async def _downgrade(self) -> None:
        raise NotHeld(f"{shown(self.name)} is a semaphore; only the writer of a read/write lock can become a reader.")

    async def _release(self, budget: float = BUDGET) -> bool:
        if not self._let_in:
            return await super()._release(budget)
        self._lock._forget(self)
        return True

    def _no_permit(self, what: str) -> NotHeld:
        return NotHeld(
            f'{what} of semaphore {shown(self.name)}: the store was unavailable, and unavailable="allow" let this '
            "caller in without a permit. Check permit.enforced first."
        )


class Permit(BasePermit, Lease):
    """The lease of one permit or several, for threads.

    >>> import lockfast
    >>> with lockfast.connect("memory://").semaphore("doc:permit", 4, permits=2) as permit:
    ...     permit.slot, permit.slots
    (0, (0, 1))
    """


class AsyncPermit(BasePermit, AsyncLease):
    """The lease of one permit or several, for asyncio."""


class BaseSemaphore(BaseLock[LeaseT]):
    """The rules of a semaphore in both flavours."""

    def __init__(
        self,
        client: Any,
        name: str,
        limit: int,
        *,
        permits: int = 1,
        unavailable: Unavailable = "raise",
        **options: Unpack[LockOptions[LeaseT]],
    ) -> None:
        super().__init__(client, name, **options)
        self._session.ensure_mode(Mode.PERMITS)
        if unavailable not in ("raise", "allow"):
            raise ConfigurationError(f'unavailable must be "raise" or "allow", not {shown(unavailable)}.')
        self._limit = _checked_count(limit, "limit", MOST_PERMITS)
        self._unavailable = unavailable
        self._terms = self._on_terms(permits)

    @property
    def limit(self) -> int:
        """How many permits may be taken at once."""
        return self._limit

    def _on_terms(self, permits: int) -> ClaimTerms:
        weight = _checked_count(permits, "permits", self._limit)
        return self._terms._replace(weight=weight, limit=self._limit)

    async def _acquire(
        self,
        blocking: bool,
        timeout: Seconds | None,
        frame: FrameType | None = None,
        terms: ClaimTerms | None = None,
    ) -> LeaseT | None:
        try:
            return await super()._acquire(blocking, timeout, frame, terms)
        except StoreUnavailable as error:
            if self._unavailable == "raise":
                raise
            log.warning(
                "Semaphore %s let its caller in without a permit, because the store is unavailable: %s",
                shown(self._name),
                error,
            )
        lease = self._lease_class(self)
        cast(BasePermit, lease)._let_in = True
        lease._event(EventKind.LET_IN, lease._started)
        if frame is not None:
            # Not the override in AsyncLock: it watches for the loss of the lease, and there is no grant to lose.
            BaseLock._enter_scope(self, lease, frame)
        return lease

    def _is_full(self, info: LockInfo) -> bool:
        return info.waiting > 0 or info.permits >= self._limit or info.mode is Mode.EXCLUSIVE

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {clean(self._name)!r}, limit {self._limit}, ttl {self._options.ttl:g} s>"


def _checked_count(value: object, what: str, most: int) -> int:
    if type(value) is not int or not 1 <= value <= most:
        raise ConfigurationError(f"{what} must be a whole number from 1 to {most}, not {shown(value)}.")
    return value


class Semaphore(BaseSemaphore[Lease], Lock):
    """At most `limit` permits at once, for threads. Threads may share one object.

    >>> import lockfast
    >>> gpus = lockfast.connect("memory://").semaphore("doc:semaphore", 2)
    >>> with gpus as permit, gpus as other:
    ...     permit.slot, other.slot, gpus.acquire(timeout=0)
    (0, 1, None)
    """

    _lease_class = Permit

    def acquire(
        self, blocking: bool = True, timeout: Seconds | None = None, *, permits: int | None = None
    ) -> Permit | None:
        """Return a lease of that many permits; None if they are still taken after `timeout` seconds.

        Without `permits`, take as many as the semaphore was made with.
        """
        terms = None if permits is None else self._on_terms(permits)
        lease = self._acquire_now(blocking, timeout, terms)
        return cast("Permit | None", lease)

    if TYPE_CHECKING:

        def __enter__(self) -> Permit: ...

    def locked(self) -> bool:
        """Whether a claim for one permit would have to wait now."""
        return self._is_full(self.inspect())


class AsyncSemaphore(BaseSemaphore[AsyncLease], AsyncLock):
    """At most `limit` permits at once, for asyncio: the same names, awaited.

    >>> import asyncio, lockfast.aio
    >>> async def main():
    ...     async with lockfast.aio.connect("memory://") as locks:
    ...         async with locks.semaphore("doc:async-semaphore", 2) as permit:
    ...             return permit.slot
    >>> asyncio.run(main())
    0
    """

    _lease_class = AsyncPermit

    if TYPE_CHECKING:

        def __aenter__(self) -> Coroutine[Any, Any, AsyncPermit]: ...

    async def acquire(
        self, blocking: bool = True, timeout: Seconds | None = None, *, permits: int | None = None
    ) -> AsyncPermit | None:
        """Return a lease of that many permits; None if they are still taken after `timeout` seconds.

        Without `permits`, take as many as the semaphore was made with.
        """
        terms = None if permits is None else self._on_terms(permits)
        return cast("AsyncPermit | None", self._remember(await self._acquire(blocking, timeout, None, terms)))

    async def locked(self) -> bool:
        """Whether a claim for one permit would have to wait now."""
        return self._is_full(await self.inspect())
