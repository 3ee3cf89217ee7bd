"""`Lock`: a named resource that clients compete for. A base class has the rules for sync and async.

A grant belongs to its lease. A `Lock` object only remembers, per thread or task, the leases that it returned there, so
that `release()` and the end of a `with` block find theirs and never another's.

Rules of blocks:

- Each `with` block that is entered has a `Scope`, identified by its stack frame or its `ExitStack`. Leaving a block
  ends the scope with the same identity, never that of a suspended generator in the same thread.
- A context manager of the user may enter the lock in one function and leave it in another. Then no scope has the same
  identity, and another scope ends, never that of a generator or an `ExitStack`. Scopes of functions that have returned
  are preferred, then those of the same thread or task, then the innermost.
- When the lease of an `async with` is lost, its body is cancelled, in the way of `asyncio.timeout`. The cancellation is
  always scheduled on the event loop, never called directly, for two reasons. If the task itself notices the loss, a
  direct call would cancel its own clean-up. If another thread notices it, a direct call could come just as the body
  ends.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from types import CodeType, FrameType, TracebackType
from typing import Any, ClassVar, Generic, ParamSpec, TypeVar, Unpack, cast

from lockfast.client.guard import check_function, guarded, guarded_async
from lockfast.client.lease import AsyncLease, BaseLease, Lease
from lockfast.client.options import LockOptions, chosen_wait
from lockfast.client.session import NotPickled, Session, session_of
from lockfast.core import local_handoff
from lockfast.core.acquire import Grant
from lockfast.core.lease_state import ALIVE, LOST, RELEASED
from lockfast.core.local_handoff import ClaimTerms
from lockfast.core.release import BUDGET, clean_up, force_release
from lockfast.core.retry import retry
from lockfast.errors import (
    AcquireTimeout,
    LeaseLost,
    LockError,
    NotHeld,
    WouldDeadlock,
    closed_error,
    shown,
)
from lockfast.runtime.base import run
from lockfast.values import LockInfo, Seconds, clean, lock_name

log = logging.getLogger("lockfast")

MOST_CALLERS = 1000
"""Threads or tasks that a lock remembers before it drops those whose leases have ended."""

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
LeaseT = TypeVar("LeaseT", bound=BaseLease)

_cached_name = functools.lru_cache(maxsize=4096)(lock_name)
"""Programs make locks with the same few names again and again."""

_CONTEXTLIB = vars(contextlib)
_GENERATOR = 0x20 | 0x200
"""The flags of generator and async generator functions, as in `inspect`, which is slow to load."""


class Scope(Generic[T]):
    """One `with` block: the caller that entered it, its frame or `ExitStack`, and its lease.

    `block` is an id, so that the frame is not kept alive. `_code` is the function that entered the block; None for an
    `ExitStack`. `_cancelling` counts the task's cancellations before the body; -1 if it is not cancelled on loss.
    """

    __slots__ = ("_cancelled", "_cancelling", "_code", "block", "caller", "lease")

    def __init__(self, caller: Hashable, frame: FrameType, lease: T) -> None:
        self.caller = caller
        self.block = id(frame)
        self._code: CodeType | None = frame.f_code
        self.lease = lease
        if frame.f_globals is _CONTEXTLIB:
            self.block = block_id(frame)
            self._code = self._code if self.block == id(frame) else None
        self._cancelling = -1
        self._cancelled = False

    def cancel_on_loss(self, lease: BaseLease) -> None:
        """Cancel the body when `lease` is lost."""
        task: Any = self.caller
        self._cancelling = 0 if task is None else task.cancelling()
        lease._scope = self
        if lease._core.state not in ALIVE:  # lost before the body began
            self.cancel_body()

    def cancel_body(self) -> None:
        """The lease is lost. May be called from any thread."""
        task: Any = self.caller
        try:
            if task is not None:
                task.get_loop().call_soon_threadsafe(self._cancel)
        except RuntimeError:
            pass  # the event loop is closed, and the body ended with it

    def _cancel(self) -> None:
        if self._cancelling >= 0 and not self._cancelled:
            self._cancelled = True
            task: Any = self.caller
            task.cancel("the lease was lost")

    def end(self, error: BaseException | None) -> bool:
        """The body has ended. True if `cancel_body()` caused `error`, and nobody else cancelled the task."""
        before, self._cancelling = self._cancelling, -1
        if not self._cancelled:
            return False
        import asyncio  # loaded already: the body ran in a task

        task: Any = self.caller
        return task.uncancel() <= before and isinstance(error, asyncio.CancelledError)

    @property
    def needs_own_exit(self) -> bool:
        """True for a block in a generator or an `ExitStack`: only its own exit ends it."""
        return self._code is None or bool(self._code.co_flags & _GENERATOR)


def block_id(frame: FrameType) -> int:
    """Identify the block that `frame` enters or leaves.

    The list of callbacks identifies an `ExitStack`, because `pop_all()` moves that list to another stack.
    """
    if frame.f_globals is _CONTEXTLIB:
        callbacks = getattr(frame.f_locals.get("self"), "_exit_callbacks", None)
        if callbacks is not None:
            return id(callbacks)
    return id(frame)


def pop_scope(scopes: list[Scope[T]], caller: Hashable, frame: FrameType) -> Scope[T] | None:
    """Remove and return the scope of the block that ends in `frame`; None if there is none."""
    seen = tuple(scopes)  # other threads change the list
    block = block_id(frame)
    found = [scope for scope in seen if scope.block == block]
    if not found:
        others = [scope for scope in seen if not scope.needs_own_exit]
        running = _running(frame)
        found = [scope for scope in others if scope.block not in running] or others
    found = [scope for scope in found if scope.caller == caller] or found
    if not found:
        return None
    scopes.remove(found[-1])
    return found[-1]


def _running(frame: FrameType | None) -> set[int]:
    """The ids of the frame and its callers."""
    running = set()
    while frame is not None:
        running.add(id(frame))
        frame = frame.f_back
    return running


class BaseLock(NotPickled, Generic[LeaseT]):
    """The rules of a lock in both flavours.

    `_scopes` are the active `with` blocks, innermost last. `_leases` maps a thread or task to the leases that
    `acquire()` returned there and that are not released.
    """

    _lease_class: type[LeaseT]
    _is_async: ClassVar[bool]

    def __init__(self, client: Any, name: str, **options: Unpack[LockOptions[LeaseT]]) -> None:
        """Make a lock on a client of redis-py or valkey-py, or on a connection; options as for `locks.lock()`."""
        self._client = client  # must outlive the lock: it owns the session
        session = getattr(client, "session", None)
        if type(session) is not Session or session.is_async is not self._is_async:
            session = session_of(client, is_async=self._is_async)
        try:
            name = _cached_name(name)
        except TypeError:  # not hashable
            name = lock_name(name)
        chosen = session.options(options) if options else session.default_options
        self._session = session
        self._name = name
        self._options = chosen
        self._terms = tuple.__new__(ClaimTerms, (name, chosen.ttl, chosen.owner, 0, 0))
        self._leases: dict[Hashable, list[BaseLease]] = {}
        self._scopes: list[Scope[LeaseT]] = []

    @property
    def name(self) -> str:
        """The lock's name, which is also its key in the store."""
        return self._name

    def _wait(self, blocking: bool, timeout: Seconds | None) -> float | None:
        return chosen_wait(blocking, timeout, self._options.timeout)

    def _check_claim(self) -> None:
        """Raise if the caller would wait for itself."""
        if self._session.reading:
            self._refuse_upgrade()

    @property
    def _is_entered(self) -> bool:
        """Whether the caller holds the lock already and may acquire it again."""
        return False

    async def _acquire(
        self,
        blocking: bool,
        timeout: Seconds | None,
        frame: FrameType | None = None,
        terms: ClaimTerms | None = None,
    ) -> LeaseT | None:
        """Acquire a lease, on other `terms` if given; None if the lock stays taken.

        For a `with` block, `frame` is the frame that enters it. Then a timeout is an error.
        """
        session, options = self._session, self._options
        wait = options.timeout if blocking is True and timeout is None else self._wait(blocking, timeout)
        if session.closed or self._is_async:
            session.ensure_open()
        if session.reading:
            self._refuse_upgrade()
        queue = session.local_queues.queue(self._name)
        lease = self._lease_class(self)  # made before the request: work after the reply delays the caller
        acquiring = session.acquiring
        acquiring[lease] = None
        try:
            grant = await local_handoff.acquire(
                session.ports,
                queue,
                terms or self._terms,
                session.no_deadline if wait is None else session.deadline(wait),
                blocking=wait != 0.0,
                local=options.local_handoff,
            )
            if grant is None:
                lease._not_acquired()
                if frame is None:
                    return None
                raise self._timeout_error()
            try:
                lease._begin(grant)
                if not grant.claim.weight:
                    queue.last_lease = lease._core
                if not session.closed:
                    if frame is not None:
                        self._enter_scope(lease, frame)
                    return lease
            except BaseException:  # interrupted: nobody would release it
                await self._undo(grant, lease)
                raise
            await lease._release()  # closed during the wait: `close()` may not have seen this lease
            raise closed_error()
        except BaseException as error:
            lease._not_acquired(error)
            raise
        finally:
            del acquiring[lease]

    def _refuse_upgrade(self) -> None:
        """Raise if the caller reads this lock: it would wait for itself."""
        level = self._session.reading.get((self._name, self._session.runtime.caller()))
        if level is not None and level[0].state in ALIVE:
            raise WouldDeadlock(
                f"This thread or task already reads {shown(self._name)}, so it would wait for itself to write. Nothing "
                "was sent. Release the read lease first; or start as the writer, and downgrade() when you only read."
            )

    async def _undo(self, grant: Grant, lease: LeaseT) -> None:
        """Release a grant after an interrupt, because nobody has its lease."""
        self._session.keepalive.unwatch(lease._core)
        lease._core.release()
        self._drop_scopes(lease)
        await local_handoff.return_grant(self._session.ports, grant)

    async def _abandon(self, lease: BaseLease) -> None:
        """After an interrupt: release a lease whose block was left, or that never reached the caller."""
        core, session = lease._core, self._session
        session.keepalive.unwatch(core)
        self._drop_scopes(lease)
        self._forget(lease)
        core.release()
        if core.state is RELEASED and not core.cleared:
            if lease._pooled_grant is not None:
                lease._pooled_grant.end()
            await clean_up(session.ports, core.name, core.holder, core.ttl, inline=False)

    def _drop_scopes(self, lease: BaseLease) -> None:
        for scope in tuple(self._scopes):  # change it in place: other threads add to it
            if scope.lease is lease:
                self._scopes.remove(scope)

    def _enter_scope(self, lease: LeaseT, frame: FrameType) -> Scope[LeaseT]:
        scope = Scope(lease._core.caller, frame, lease)
        self._scopes.append(scope)
        return scope

    def _exit_scope(self, frame: FrameType) -> LeaseT:
        """End the scope of the block that ends, and return its lease."""
        scopes = self._scopes
        if len(scopes) == 1 and scopes[0].block == id(frame):  # nearly always; others only append, so it stays first
            scope: Scope[LeaseT] | None = scopes.pop(0)
        else:
            scope = pop_scope(scopes, self._session.runtime.caller(), frame)
        if scope is None:
            raise self._not_held()
        return scope.lease

    def _remember(self, lease: LeaseT | None) -> LeaseT | None:
        """Let `release()` find the lease."""
        if lease is not None and not self._has(lease):
            table, caller = self._leases, lease._core.caller
            if len(table) >= MOST_CALLERS:  # callers that let their leases expire
                for one in [one for one, leases in list(table.items()) if not any(held.remaining for held in leases)]:
                    table.pop(one, None)
            table.setdefault(caller, []).append(lease)
        return lease

    def _has(self, lease: BaseLease) -> bool:
        return any(one is lease for one in self._leases.get(lease._core.caller, ()))

    def _forget(self, lease: BaseLease) -> None:
        """The lease has ended: `release()` must not find it."""
        lease._ended = True
        reading = self._session.reading
        if reading:
            key = self._name, lease._core.caller
            if reading.get(key, (None,))[0] is lease:
                del reading[key]
        if not self._leases:
            return
        leases = self._leases.get(lease._core.caller, [])
        try:
            leases.remove(lease)
        except ValueError:
            return  # it came from a block, or another thread releases it too
        if not leases:
            self._leases.pop(lease._core.caller, None)

    def _lease(self, grant: Grant) -> LeaseT:
        """Return a lease on a grant that was not made by `_acquire()`."""
        lease = self._lease_class(self)
        try:
            lease._begin(grant)
            if not grant.claim.weight:
                self._session.local_queues.queue(self._name).last_lease = lease._core
            self._count_level(lease)
        except BaseException:  # interrupted: the caller removes the grant
            self._session.keepalive.unwatch(lease._core)
            lease._core.release()
            raise
        return lease

    def _count_level(self, lease: LeaseT) -> None:
        """A re-entrant lock counts the levels of the lease from now on."""

    async def _release_lease(self, lease: LeaseT, budget: float = BUDGET) -> bool:
        """Release a lease of this lock, or one level of it; False if it had ended."""
        return lease.state is not LOST if self._session.reads_on(lease) else await lease._release(budget)

    def _timeout_error(self) -> AcquireTimeout:
        return AcquireTimeout(
            f"Lock {shown(self._name)} stayed taken for {self._options.timeout:g} s, so the block was not entered. "
            "Nothing was left behind. lock.inspect() shows who holds it and who waits.",
            name=self._name,
            timeout=self._options.timeout,
        )

    def _last_lease(self) -> LeaseT:
        """The lease that this thread or task acquired last and has not released, in a `with` block or not."""
        caller = self._session.runtime.caller()
        leases = self._leases.get(caller, [])[-1:]
        leases += [scope.lease for scope in tuple(self._scopes) if scope.caller == caller and not scope.lease._ended]
        if not leases:
            raise self._not_held()
        return cast(LeaseT, max(leases, key=lambda lease: (lease.state in ALIVE, lease.fence)))

    def _not_held(self) -> NotHeld:
        return NotHeld(
            f"This thread or task acquired no lease of lock {shown(self._name)} from this object, so there is nothing "
            "to release. To release from elsewhere, call release() on the lease."
        )

    async def _release(self) -> bool:
        return await self._release_lease(self._last_lease())

    async def _exit(self, lease: LeaseT) -> LeaseLost | None:
        """End a `with` block. Return the loss to raise, if there was one."""
        core = lease._core
        if self._session.reading and self._session.reads_on(lease):
            return lease._lost_error() if lease.state is LOST else None
        try:
            if core.cleared and core.state is RELEASED:
                return None  # released or exported inside the block, or let in without a permit
            if core.state is not LOST:
                if await lease._release():
                    return None
                core.reason = core.reason or "the store no longer had it on release"
        except LockError as failure:
            # The body ran to its end under a valid lease, so the block did not fail.
            log.warning(
                "Could not release lock %s; retrying in the background. It expires in at most %g s: %s",
                shown(self._name),
                core.ttl,
                failure,
            )
            return None
        finally:
            if not lease._ended:
                self._forget(lease)
        return lease._lost_error()

    async def _inspect(self) -> LockInfo:
        session = self._session
        session.ensure_open()
        return await retry(
            session.runtime, lambda until: session.store.inspect(self._name, until), session.store_timeout
        )

    async def _force_release(self, holder: str | None) -> LockInfo | None:
        self._session.ensure_open()
        return await force_release(self._session.ports, self._name, holder, self._session.store_timeout)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {clean(self._name)!r}, ttl {self._options.ttl:g} s>"


class Lock(BaseLock[Lease]):
    """A named lock, for threads. Threads may share one object.

    >>> import lockfast
    >>> lock = lockfast.connect("memory://").lock("doc:lock", ttl=10)
    >>> with lock as lease:
    ...     lease.state.value, lock.locked()
    ('held', True)
    >>> lock.locked()
    False
    """

    _lease_class = Lease
    _is_async = False

    def acquire(self, blocking: bool = True, timeout: Seconds | None = None) -> Lease | None:
        """Return a lease; None if the lock is still taken after `timeout` seconds, or at once if not `blocking`."""
        return self._acquire_now(blocking, timeout, None)

    def _acquire_now(self, blocking: bool, timeout: Seconds | None, terms: ClaimTerms | None) -> Lease | None:
        lease = None
        try:
            lease = run(self._acquire(blocking, timeout, None, terms))
            return self._remember(lease)
        except LockError:
            self._session.wait_for_exit()
            raise
        except BaseException:
            if lease is not None:
                run(self._abandon(lease))
            raise

    def release(self) -> bool:
        """Release the lease that this thread acquired from this object; False if it had already ended."""
        return run(self._release())

    def locked(self) -> bool:
        """Whether anybody holds the lock now."""
        return self.inspect().locked

    def inspect(self) -> LockInfo:
        """Show the holder, since when and for how long, the fence, and the waiters in order."""
        return run(self._inspect())

    def force_release(self, holder: str | None = None) -> LockInfo | None:
        """End the lease of every holder, or only of `holder` as `inspect()` shows it, and grant the next waiters.

        The fence advances, and the old holder's lease is reported as lost. Return the lock as it was just before; None
        if nobody held it. The old holder may still be working: only a resource that checks fences is safe from it.

        >>> import lockfast
        >>> lock = lockfast.connect("memory://", label="stuck").lock("doc:force-release")
        >>> lease = lock.acquire()
        >>> lock.force_release(lock.inspect().holder).owner.label
        'stuck'
        >>> lock.locked()
        False
        """
        return run(self._force_release(holder))

    def __enter__(self) -> Lease:
        try:
            lease = run(self._acquire(True, None, sys._getframe(1)))
        except LockError:
            self._session.wait_for_exit()
            raise
        if lease is None:
            raise self._timeout_error()
        return lease

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        scopes = self._scopes[:]
        try:
            self._leave(self._exit_scope(sys._getframe(1)), error)
        except KeyboardInterrupt:  # perhaps before the release began: then the lease would be renewed for ever
            ended = [scope for scope in scopes if scope not in self._scopes] or scopes
            if len(ended) == 1:  # else other threads ended theirs at the same time
                run(self._abandon(ended[0].lease))
            raise

    def _leave(self, lease: Lease, error: BaseException | None) -> None:
        """End the block of `lease`; never masks the body's own error."""
        lost = run(self._exit(lease))
        if lost is not None and error is None:
            raise lost

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function: every call runs under the lock."""
        check_function(function, is_async=False)
        return guarded(function, lambda *_, **__: self)


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
    _is_async = True

    async def acquire(self, blocking: bool = True, timeout: Seconds | None = None) -> AsyncLease | None:
        """Return a lease; None if the lock is still taken after `timeout` seconds, or at once if not `blocking`."""
        return self._remember(await self._acquire(blocking, timeout))

    async def release(self) -> bool:
        """Release the lease that this task acquired from this object; False if it had already ended."""
        return await self._release()

    async def locked(self) -> bool:
        """Whether anybody holds the lock now."""
        return (await self.inspect()).locked

    async def inspect(self) -> LockInfo:
        """Show the holder, since when and for how long, the fence, and the waiters in order."""
        return await self._inspect()

    async def force_release(self, holder: str | None = None) -> LockInfo | None:
        """End the lease of every holder, or only of `holder`; see `Lock.force_release`."""
        return await self._force_release(holder)

    def _enter_scope(self, lease: AsyncLease, frame: FrameType) -> Scope[AsyncLease]:
        scope = super()._enter_scope(lease, frame)
        # Blocks of a re-entrant lock share a lease: the outermost watches for its loss.
        lease._blocks += 1
        if lease._scope is None and self._options.cancel_on_loss:
            scope.cancel_on_loss(lease)
        return scope

    def __aenter__(self) -> Coroutine[Any, Any, AsyncLease]:
        return self._acquire(True, None, sys._getframe(1))  # type: ignore[return-value] # a frame excludes None

    def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Coroutine[Any, Any, None]:
        return self._leave(self._exit_scope(sys._getframe(1)), error)

    async def _leave(self, lease: AsyncLease, error: BaseException | None) -> None:
        """End the block of `lease`; never masks the body's own error."""
        our_cancel = False
        lease._blocks -= 1
        watching = lease._scope
        if watching is not None and not lease._blocks:
            lease._scope = None
            our_cancel = watching.end(error)
        lost = await self._exit(lease)
        if lost is not None and (error is None or our_cancel):
            raise lost from error

    def __call__(self, function: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[Any, Any, R]]:
        """Decorate a coroutine function: every call runs under the lock."""
        check_function(function, is_async=True)
        return guarded_async(function, lambda *_, **__: self)
