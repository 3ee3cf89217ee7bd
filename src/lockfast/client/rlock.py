"""`RLock`: a lock that its thread or task may acquire again. A base class has the rules for sync and async.

    the lease is     acquire again                 release one level
    alive            one level deeper, no request  one level less; the outermost releases the lease
    lost             LeaseLost                     one level less; at the outermost nothing is left to release
    released         as if it were new             nothing is held

Rules: the count belongs to one lease and ends with it, so it never says "held" of a lock that another client has. A
lost lease gets no new level, so all levels unwind; the end of each block raises `LeaseLost`, unless an error passes
through it. Each thread or task counts for itself; a forked child and a child task have nothing.
"""

from __future__ import annotations

from collections.abc import Hashable
from types import FrameType
from typing import Any, Unpack

from lockfast.client.lease import AsyncLease, Lease
from lockfast.client.lock import MOST_CALLERS, AsyncLock, BaseLock, LeaseT, Lock
from lockfast.client.options import LockOptions
from lockfast.core.lease_state import ALIVE, State
from lockfast.core.local_handoff import ClaimTerms
from lockfast.core.release import BUDGET
from lockfast.errors import LeaseLost
from lockfast.runtime.base import run
from lockfast.values import MOST_SECONDS, Seconds


class Reentrant(BaseLock[LeaseT]):
    """The rules of a re-entrant lock in both flavours.

    `_levels` maps the key of a caller to its lease and depth, at least 1. Each caller changes only its own entry, so no
    mutex is needed.
    """

    def __init__(self, client: Any, name: str, **options: Unpack[LockOptions[LeaseT]]) -> None:
        super().__init__(client, name, **options)
        self._levels: dict[Hashable, tuple[LeaseT, int]] = {}

    def _key(self, caller: Hashable) -> Hashable:
        return caller

    @property
    def depth(self) -> int:
        """How often the running thread or task has acquired the lock and not released it. Sends nothing."""
        level = self._levels.get(self._key(self._session.runtime.caller()))
        return 0 if level is None else level[1]

    async def _acquire(
        self,
        blocking: bool,
        timeout: Seconds | None,
        frame: FrameType | None = None,
        terms: ClaimTerms | None = None,
    ) -> LeaseT | None:
        caller = self._key(self._session.runtime.caller())
        level = self._levels.get(caller)
        if level is not None:
            self._wait(blocking, timeout)
            held, depth = level
            # Leases of a parent process or of a closed event loop are not ours, so their levels are dropped.
            state = State.RELEASED if held.inherited else held.state
            if state in ALIVE:
                if not self._terms.weight:
                    self._refuse_upgrade()  # after a downgrade
                if frame is not None:
                    self._enter_scope(held, frame)
                self._levels[caller] = held, depth + 1
                return held
            if state is State.LOST:
                raise held._lost_error()
            del self._levels[caller]
        try:
            lease = await super()._acquire(blocking, timeout, frame, terms)
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

    @property
    def _is_entered(self) -> bool:
        return self.depth > 0

    def _count_level(self, lease: LeaseT) -> None:
        self._levels.setdefault(self._key(lease._core.caller), (lease, 1))  # levels count for the lease they began with

    async def _release_lease(self, lease: LeaseT, budget: float = BUDGET) -> bool:
        level = self._levels.get(self._key(lease._core.caller))
        if level is not None and level[0] is lease and not self._leave_level(self._key(lease._core.caller)):
            return lease.state is not State.LOST
        return await super()._release_lease(lease, budget)

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
        caller = self._key(self._session.runtime.caller())
        level = self._levels.get(caller)
        if level is None or level[0].state is State.RELEASED:
            self._levels.pop(caller, None)
            return await self._last_lease()._release()  # again after an error; else it raises NotHeld
        if not self._leave_level(caller):
            return level[0].state is not State.LOST
        return await level[0]._release()

    async def _exit(self, lease: LeaseT) -> LeaseLost | None:
        # Another thread may end a generator's block, so the lease knows the caller that entered it.
        caller = self._key(lease._core.caller)
        level = self._levels.get(caller)
        if level is not None and level[0] is lease and not self._leave_level(caller):
            return lease._lost_error() if lease.state is State.LOST else None
        return await super()._exit(lease)

    def __repr__(self) -> str:
        depth = self.depth
        return f"{super().__repr__()[:-1]}{f', depth {depth}' if depth else ''}>"


class RLock(Reentrant[Lease], Lock):
    """A re-entrant lock, for threads. Threads may share one object; each counts for itself.

    >>> import lockfast
    >>> lock = lockfast.connect("memory://").rlock("doc:re-entrant", ttl=10)
    >>> with lock, lock:
    ...     lock
    <RLock 'doc:re-entrant', ttl 10 s, depth 2>
    >>> lock.locked()
    False
    """

    def release(self) -> bool:
        """Release one level, and with the outermost the lease; False if the lease had already ended."""
        return run(self._release())

    # What `threading.Condition` needs of its lock. A wait ends the lease, and continues with a new one.

    def _is_owned(self) -> bool:
        return self.depth > 0

    def _release_save(self) -> int:
        lease, depth = self._levels.pop(self._session.runtime.caller())
        run(lease._release())
        return depth

    def _acquire_restore(self, depth: int) -> None:
        lease = None
        while lease is None:
            lease = run(self._acquire(True, MOST_SECONDS))
        caller = lease._core.caller
        self._levels[caller] = lease, depth
        for scope in tuple(self._scopes):
            if scope.caller == caller:
                scope.lease = lease


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

    async def release(self) -> bool:
        """Release one level, and with the outermost the lease; False if the lease had already ended."""
        return await self._release()
