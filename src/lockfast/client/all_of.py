"""`AllOf`: acquire several locks together. A base class has the rules for sync and async.

Rules:

- All or none, under one deadline. After a timeout, an error or a cancellation no lock is held.
- If all locks are free, and the store can grant them in one step, that takes one request. Otherwise they are acquired
  one after another in the order of their names, so two callers cannot wait for each other.
- A lease that ends while another lock is awaited is not returned: all are released and acquired again.
- Each lock has its own fence. The loss of one is the loss of all: the body of an `async with` is cancelled, and
  `LeaseLost` names the lock. The others stay held until the block ends.
- At the end every lock is released, even if the release of another one fails.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from types import FrameType, TracebackType
from typing import Any, Generic, ParamSpec, TypeVar

from lockfast.client.guard import check_function, guarded, guarded_async
from lockfast.client.lease import AsyncLease, AsyncLost, Lease, Lost
from lockfast.client.lock import BaseLock, LeaseT, Scope, pop_scope
from lockfast.client.options import checked_timeout, chosen_wait
from lockfast.client.session import Session
from lockfast.core.acquire import Grant, acquire_all, remove
from lockfast.core.lease_state import ALIVE, AT_RISK, HELD, LOST, RELEASED, State
from lockfast.core.release import BUDGET
from lockfast.errors import AcquireTimeout, ConfigurationError, LeaseLost, LockError, NotHeld, closed_error, shown
from lockfast.runtime.base import run
from lockfast.values import MOST_SECONDS, Claim, Seconds, clean

ROLL_BACK_PATIENCE = 0.02
"""Seconds that a rolled back release may take: a cancelled acquisition has already waited for its own clean-up."""

P = ParamSpec("P")
R = TypeVar("R")
SetT = TypeVar("SetT", bound="BaseLeaseSet[Any]")


class BaseLeaseSet(Generic[LeaseT]):
    """The leases of several locks, in both flavours; `lease_set["name"]` is one of them."""

    def __init__(self, held: Sequence[tuple[BaseLock[LeaseT], LeaseT]]) -> None:
        self._held = held

    def __getitem__(self, name: str) -> LeaseT:
        for lock, lease in self._held:
            if lock.name == name:
                return lease
        raise KeyError(name)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the locks, in order."""
        return tuple(lock.name for lock, _ in self._held)

    @property
    def fences(self) -> dict[str, int]:
        """The fence of each lock, by its name."""
        return {lock.name: lease.fence for lock, lease in self._held}

    @property
    def state(self) -> State:
        """Lost if one lease is lost, at risk if one is at risk, held if all are held."""
        states = {lease.state for _, lease in self._held}
        return next(state for state in (LOST, RELEASED, AT_RISK, HELD) if state in states)

    @property
    def remaining(self) -> float:
        """Seconds for which all leases are certainly valid without another renewal; 0 if one has ended."""
        return min(lease.remaining for _, lease in self._held)

    def ensure_held(self) -> None:
        """Raise `LeaseLost` unless all leases are valid. Sends nothing."""
        for _, lease in self._held:
            lease.ensure_held()

    async def _release(self) -> bool:
        """Release every lease; raise the first error after the last attempt. False if one of them had ended."""
        released, failure, budget = True, None, BUDGET
        rest = list(self._held)
        while rest:
            lock, lease = rest.pop()
            try:
                released = await lock._release_lease(lease, budget) and released
            except LockError as error:
                failure, budget = failure or error, 0.0  # the others continue in the background at once
            except GeneratorExit:
                raise
            except BaseException:  # cancelled or interrupted: the others must not stay held
                await _roll_back(rest)
                raise
        if failure is not None:
            raise failure
        return released

    @property
    def _leases(self) -> list[LeaseT]:
        return [lease for _, lease in self._held]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {', '.join(clean(name) for name in self.names)}: {self.state.value}>"


class LeaseSet(BaseLeaseSet[Lease]):
    """The leases of several locks, for threads.

    >>> import lockfast
    >>> with lockfast.connect("memory://").all_of("doc:b", "doc:a") as leases:
    ...     leases.names, leases["doc:a"].fence == leases.fences["doc:a"]
    (('doc:a', 'doc:b'), True)
    """

    @property
    def lost(self) -> Lost:
        """Set when one lease is lost; `leases.lost.wait(timeout)` blocks until then."""
        return Lost(self)

    def release(self) -> bool:
        """Release all leases; False if one of them had already ended."""
        return run(self._release())


class AsyncLeaseSet(BaseLeaseSet[AsyncLease]):
    """The leases of several locks, for asyncio."""

    @property
    def lost(self) -> AsyncLost:
        """Set when one lease is lost; `await leases.lost.wait(timeout)` waits for that."""
        return AsyncLost(self)

    async def release(self) -> bool:
        """Release all leases; False if one of them had already ended."""
        return await self._release()


async def _roll_back(held: Sequence[tuple[BaseLock[LeaseT], LeaseT]]) -> None:
    """Release every lease, even if the caller is cancelled again. A release without a reply is retried later.

    A silent store delays the caller only once, whatever the number of locks.
    """
    interrupted: BaseException | None = None
    budget = ROLL_BACK_PATIENCE
    for lock, lease in reversed(held):
        try:
            await lock._release_lease(lease, budget)
        except LockError:
            budget = 0.0  # the others continue in the background at once
        except GeneratorExit:
            raise
        except BaseException as error:
            interrupted = interrupted or error
    if interrupted is not None:
        raise interrupted


class BaseAllOf(Generic[LeaseT, SetT]):
    """The rules for acquiring several locks together, in both flavours."""

    _set_class: type[SetT]

    def __init__(self, session: Session, locks: Sequence[BaseLock[LeaseT]], timeout: Seconds | None) -> None:
        self._session = session
        self._locks = sorted(locks, key=lambda lock: lock.name)
        self._timeout = checked_timeout(timeout)
        self._scopes: list[Scope[SetT]] = []
        if not locks:
            raise ConfigurationError("all_of() needs at least one lock.")
        for lock, following in zip(self._locks, self._locks[1:], strict=False):
            if lock.name == following.name:
                raise ConfigurationError(f"all_of() got {shown(lock.name)} twice; name each lock once.")
        if any(lock._session is not session for lock in locks):
            raise ConfigurationError("all_of() takes locks of its own connection only.")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the locks, in the order in which they are acquired."""
        return tuple(lock.name for lock in self._locks)

    def _chosen_wait(self, blocking: bool, timeout: Seconds | None) -> float | None:
        """Check the arguments of `acquire()`. Return how long to wait; None for no limit."""
        return chosen_wait(blocking, timeout, self._timeout)

    async def _acquire(self, wait: float | None, frame: FrameType | None = None) -> SetT | None:
        """Acquire all leases; None after a timeout.

        `frame` is the caller's frame if a `with` block begins there. Then a timeout raises `AcquireTimeout`.
        """
        self._session.ensure_open()
        for lock in self._locks:
            lock._check_claim()
        deadline = self._session.runtime.now() + (MOST_SECONDS if wait is None else wait)
        held = await self._acquire_at_once(deadline) or await self._acquire_in_order(wait, deadline)
        while held is not None:
            try:
                if all(lease.state in ALIVE for _, lease in held):
                    lease_set = self._set_class(held)
                    if frame is not None:
                        self._enter_scope(lease_set, frame)
                    return lease_set
            except BaseException:  # interrupted: the caller does not get the leases
                self._drop_scopes(held)
                await _roll_back(held)
                raise
            await _roll_back(held)  # one lease ended while another lock was awaited: start again
            held = await self._acquire_at_once(deadline) or await self._acquire_in_order(wait, deadline)
        if frame is None:
            return None
        raise AcquireTimeout(
            f"The locks {', '.join(map(shown, self.names))} could not all be acquired within {wait:g} s, so the "
            "block was not entered. None of them is held.",
            name=", ".join(self.names),
            timeout=wait,
        )

    async def _acquire_at_once(self, deadline: float) -> list[tuple[BaseLock[LeaseT], LeaseT]] | None:
        """Acquire all leases with one request; None if that is not possible now."""
        session = self._session
        if (
            not session.store.capabilities.batches
            or len(self._locks) < 2
            or any(one._is_entered for one in self._locks)
        ):
            return None
        claims = [
            Claim(name, session.runtime.new_holder_id(), ttl, owner, weight=weight, limit=limit)
            for name, ttl, owner, weight, limit in (lock._terms for lock in self._locks)
        ]
        acquiring, key = session.acquiring, claims[0].holder  # not `self`: threads may share it
        acquiring[key] = None
        held: list[tuple[BaseLock[LeaseT], LeaseT]] = []
        grants: list[Grant] | None = None
        try:
            grants = await acquire_all(session.ports, claims, session.deadline(deadline - session.runtime.now()))
            if grants is None:
                return None
            for lock, grant in zip(self._locks, grants, strict=True):
                held.append((lock, lock._lease(grant)))
            if session.closed:
                raise closed_error()
            return held
        except BaseException:
            await remove(session.ports, claims[len(held) :] if grants else (), inline=False)
            await _roll_back(held)
            raise
        finally:
            del acquiring[key]  # no call, which an interrupt could follow

    async def _acquire_in_order(
        self, wait: float | None, deadline: float
    ) -> list[tuple[BaseLock[LeaseT], LeaseT]] | None:
        held: list[tuple[BaseLock[LeaseT], LeaseT]] = []
        try:
            for lock in self._locks:
                left = max(0.0, deadline - self._session.runtime.now())
                lease = await lock._acquire(wait != 0.0, left if wait != 0.0 else None)
                if lease is None:
                    break
                held.append((lock, lease))
            else:
                return held
        except GeneratorExit:
            raise  # the coroutine is being destroyed: it cannot await any more
        except BaseException:
            await _roll_back(held)
            raise
        await _roll_back(held)
        return None

    def _enter_scope(self, lease_set: SetT, frame: FrameType) -> Scope[SetT]:
        scope = Scope(self._session.runtime.caller(), frame, lease_set)
        self._scopes.append(scope)
        return scope

    def _drop_scopes(self, held: Sequence[tuple[BaseLock[LeaseT], LeaseT]]) -> None:
        for scope in tuple(self._scopes):  # the list stays the same: other threads add to it
            if scope.lease._held is held:
                self._scopes.remove(scope)

    def _exit_scope(self, frame: FrameType) -> Scope[SetT]:
        scope = pop_scope(self._scopes, self._session.runtime.caller(), frame)
        if scope is None:
            raise NotHeld("This thread or task is not in a block of these locks, so there is nothing to release.")
        return scope

    async def _exit(self, lease_set: SetT) -> LeaseLost | None:
        """End a `with` block: release every lease. Return the first loss, if there was one."""
        lost: LeaseLost | None = None
        rest = list(lease_set._held)
        runtime = self._session.runtime
        slow_at = runtime.now() + BUDGET / 2
        try:
            while rest and runtime.now() < slow_at:
                lock, lease = rest.pop()
                lost = await lock._exit(lease) or lost
            await _roll_back(rest)  # none, unless the store has become silent
        except GeneratorExit:
            raise
        except BaseException:  # cancelled or interrupted: the others must not stay held
            await _roll_back(rest)
            raise
        return lost

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {', '.join(clean(name) for name in self.names)}>"


class AllOf(BaseAllOf[Lease, LeaseSet]):
    """Several locks that are acquired together, for threads.

    >>> import lockfast
    >>> locks = lockfast.connect("memory://")
    >>> transfer = locks.all_of("account:7", "account:9", timeout=5)
    >>> with transfer as leases:
    ...     locks.lock("account:7").locked(), locks.lock("account:9").locked()
    (True, True)
    """

    _set_class = LeaseSet

    def acquire(self, blocking: bool = True, timeout: Seconds | None = None) -> LeaseSet | None:
        """Return the leases; None if one of the locks is still taken after `timeout` seconds."""
        return run(self._acquire(self._chosen_wait(blocking, timeout)))

    def __enter__(self) -> LeaseSet:
        lease_set = run(self._acquire(self._timeout, sys._getframe(1)))
        if lease_set is None:
            raise closed_error()
        return lease_set

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        scopes = self._scopes[:]
        try:
            lost = run(self._exit(self._exit_scope(sys._getframe(1)).lease))
        except KeyboardInterrupt:  # perhaps before the release began: then the leases would be renewed for ever
            ended = [scope for scope in scopes if scope not in self._scopes] or scopes
            if len(ended) == 1:  # else other threads ended theirs at the same time
                self._drop_scopes(ended[0].lease._held)
                for lock, lease in ended[0].lease._held:
                    run(lock._abandon(lease))
            raise
        if lost is not None and error is None:
            raise lost

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function: every call runs under all the locks."""
        check_function(function, is_async=False)
        return guarded(function, lambda *_, **__: self)


class AsyncAllOf(BaseAllOf[AsyncLease, AsyncLeaseSet]):
    """Several locks that are acquired together, for asyncio: the same names, awaited.

    >>> import asyncio, lockfast.aio
    >>> async def main():
    ...     async with lockfast.aio.connect("memory://") as locks:
    ...         async with locks.all_of("a", "b") as leases:
    ...             return leases.state.value
    >>> asyncio.run(main())
    'held'
    """

    _set_class = AsyncLeaseSet

    async def acquire(self, blocking: bool = True, timeout: Seconds | None = None) -> AsyncLeaseSet | None:
        """Return the leases; None if one of the locks is still taken after `timeout` seconds."""
        return await self._acquire(self._chosen_wait(blocking, timeout))

    def _enter_scope(self, lease_set: AsyncLeaseSet, frame: FrameType) -> Scope[AsyncLeaseSet]:
        scope = super()._enter_scope(lease_set, frame)
        for lock, lease in lease_set._held:
            lease._blocks += 1
            if lease._scope is None and lock._options.cancel_on_loss:
                scope.cancel_on_loss(lease)
        return scope

    def __aenter__(self) -> Coroutine[Any, Any, AsyncLeaseSet]:
        return self._acquire(self._timeout, sys._getframe(1))  # type: ignore[return-value] # a frame excludes None

    def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Coroutine[Any, Any, None]:
        return self._leave(self._exit_scope(sys._getframe(1)), error)

    async def _leave(self, scope: Scope[AsyncLeaseSet], error: BaseException | None) -> None:
        """End the block; never masks the body's own error."""
        for _, lease in scope.lease._held:
            lease._blocks -= 1
            if lease._scope is scope:
                lease._scope = None
        our_cancel = scope.end(error)
        lost = await self._exit(scope.lease)
        if lost is not None and (error is None or our_cancel):
            raise lost from error

    def __call__(self, function: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[Any, Any, R]]:
        """Decorate a coroutine function: every call runs under all the locks."""
        check_function(function, is_async=True)
        return guarded_async(function, lambda *_, **__: self)
