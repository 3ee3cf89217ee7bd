"""`RLock`: a lock that its thread or task may take again; the rules once, the two colours below them.

Rules kept here (`core/reentry.py` decides):

- Taking it again asks nobody and gives the same lease, with the same fence; only the outermost release gives it back.
- The count lives here and ends with the lease. Once the lease is lost, taking it again raises `LeaseLost`, and so does
  the end of each block up to the outermost, unless an error is on its way through already: one error comes out.
- Who may go deeper is the thread or task that has the lease. A forked child and a child task have nothing.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from lockfast.client.base_lock import MOST_CALLERS, BaseLock, LeaseT
from lockfast.client.lease import AsyncLease, Lease
from lockfast.client.lock import AsyncLock, Lock
from lockfast.core.lease_state import State
from lockfast.core.reentry import Levels, Step
from lockfast.errors import LeaseLost
from lockfast.runtime.runner import run
from lockfast.values import Seconds


class Reentrant(BaseLock[LeaseT]):
    """What a re-entrant lock is in both colours."""

    _reenters = True

    def __init__(self, client: Any, name: str, **chosen: Any) -> None:
        super().__init__(client, name, **chosen)
        self._levels: Levels[LeaseT] = Levels()

    @property
    def depth(self) -> int:
        """How many times the running thread or task has taken the lock and not given it back; asks nobody."""
        return self._levels.depth_of(self._client.runtime.caller())

    async def _acquire(self, blocking: bool, timeout: Seconds | None, frame: int = 0) -> LeaseT | None:
        self._wait_of(blocking, timeout)
        caller = self._client.runtime.caller()
        lease = self._levels.lease_of(caller)
        # What a parent process or an ended event loop held is not ours, and its levels are not to be unwound here.
        state = None if lease is None or lease.inherited else lease.state
        step = self._levels.take(caller, state)
        if lease is not None and step is Step.DEEPER:
            if frame:
                self._begin_block(lease, frame)
            return lease
        if lease is not None and step is Step.REFUSE:
            raise lease._lost_error()
        try:
            lease = await super()._acquire(blocking, timeout, frame)
        except BaseException:
            caller = None  # a task keeps its error, and that this frame: it must not keep the task
            raise
        if lease is not None:
            self._begin(caller, lease)
        return lease

    def _begin(self, caller: Hashable, lease: LeaseT) -> None:
        if len(self._levels) >= MOST_CALLERS:  # callers that let their leases expire and never came back
            self._levels.reset([one for one, held in self._levels.items() if not held.remaining])
        self._levels.begin(caller, lease)

    async def _give_back(self) -> bool:
        """Give one level back; whether the lease was still ours."""
        caller = self._client.runtime.caller()
        lease = self._levels.lease_of(caller)
        if lease is None or lease.state is State.RELEASED:
            self._levels.reset([caller])
            return await self._last()._release()  # again after an error; else it says that nothing is held
        if self._levels.leave(caller) is Step.OUT:
            return lease.state is not State.LOST
        return await lease._release()

    async def _exit(self, lease: LeaseT, error: BaseException | None) -> LeaseLost | None:
        # A generator may be ended by another than began it, so it is the lease that knows whose levels these are.
        caller = lease._lease_state.caller
        if self._levels.lease_of(caller) is lease and self._levels.leave(caller) is Step.OUT:
            return lease._lost_error() if lease.state is State.LOST else None
        return await super()._exit(lease, error)

    def __repr__(self) -> str:
        depth = self.depth
        return f"{super().__repr__()[:-1]}{f', {depth} deep here' if depth else ''}>"


class RLock(Reentrant[Lease], Lock):
    """A re-entrant lock, for threads. One object may be shared by many; each thread counts for itself.

    >>> import lockfast
    >>> lock = lockfast.connect("memory://").rlock("doc:re-entrant", ttl=10)
    >>> with lock, lock:
    ...     lock
    <RLock 'doc:re-entrant', ttl 10 s, 2 deep here>
    >>> lock.locked()
    False
    """

    def release(self) -> bool:
        """Give one level back, and with the outermost the lease; False when it had gone already."""
        return run(self._give_back())


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
        """Give one level back, and with the outermost the lease; False when it had gone already."""
        return await self._give_back()
