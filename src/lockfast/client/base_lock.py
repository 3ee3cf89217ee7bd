"""What a lock is in both colours: the rules; the colours are in `locks.py`.

What is held belongs to the lease. A `Lock` object only remembers, per thread or task, which leases it handed
out there, so that `release()` and the end of a `with` block find theirs and never another's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from lockfast.client.blocks import Block, leave_block
from lockfast.client.lease import BaseLease
from lockfast.client.options import limit, options
from lockfast.core import local_handoff as passing
from lockfast.core.acquire import Grant
from lockfast.core.deadline import Deadline
from lockfast.core.force_release import force_release_lock
from lockfast.core.lease_state import ALIVE, LOST, RELEASED
from lockfast.core.local_queue import ClaimTerms, LocalQueue
from lockfast.core.retry import retry
from lockfast.errors import AcquireTimeout, ConfigurationError, LeaseLost, LockError, NotHeld, closed_error
from lockfast.values import LockInfo, Seconds, clean, lock_name, shown

if TYPE_CHECKING:
    from lockfast.client.session import BaseLocks

log = logging.getLogger("lockfast")

MOST_CALLERS = 1000
"""Threads or tasks that a lock object remembers before it looks for those that need not be remembered."""

P = ParamSpec("P")
R = TypeVar("R")
LeaseT = TypeVar("LeaseT", bound=BaseLease)


class BaseLock(Generic[LeaseT]):
    """What a lock is in both colours. `_blocks` are the `with` blocks under way, innermost last; `_taken` maps a thread
    or task to the leases that it got here otherwise and has not given back."""

    _lease_class: type[LeaseT]
    _awaited: bool
    _reenters = False
    """Whether the end of a block need not be the end of its lease."""
    _open_scope: Callable[[BaseLease], None] | None = None
    """What is to be done when the body of a block begins, if anything."""

    def __init__(self, client: Any, name: str, **chosen: Any) -> None:
        """On `client`, a client of redis-py or valkey-py, or a connection; options as for `locks.lock()`."""
        from lockfast.client.shared_session import locks_of

        self._origin = client
        self._client: BaseLocks[Any] = locks_of(client, awaited=self._awaited)
        self._name = lock_name(name)
        self._options = options(self._client._owner, chosen)
        self._wish = ClaimTerms(self._name, self._options.ttl, self._options.owner)
        self._taken: dict[Hashable, list[BaseLease]] = {}
        self._blocks: list[Block] = []
        self._local_queue: LocalQueue | None = None

    @property
    def name(self) -> str:
        """The lock's name, which is also its key in the store."""
        return self._name

    def _wait_of(self, blocking: bool, timeout: Seconds | None) -> float | None:
        """How long to wait, None for as long as it takes; what was asked for is checked."""
        if not isinstance(blocking, bool):
            raise ConfigurationError(f"blocking must be True or False, not {shown(blocking)}.")
        if not blocking and timeout is not None:
            raise ConfigurationError("A timeout makes no sense with blocking=False: give one or the other.")
        return self._options.timeout if timeout is None else limit(timeout)

    async def _acquire(self, blocking: bool, timeout: Seconds | None, frame: int = 0) -> LeaseT | None:
        """With the id of a `frame`, a `with` block begins there, and then there is a lease or an error."""
        client, chosen = self._client, self._options
        wait = chosen.timeout if blocking is True and timeout is None else self._wait_of(blocking, timeout)
        if client._closed or self._awaited:
            client.ensure_open()
        runtime = client.runtime
        if wait is None and blocking:
            deadline = client.no_deadline
        else:
            blocking = blocking and wait != 0
            deadline = Deadline(runtime.now() + (wait if wait and blocking else 0.0), client.store_timeout)
        local_queue = self._local_queue
        if (
            local_queue is None or local_queue.home is not client.passing
        ):  # the first time, or the first in a forked process
            local_queue = self._find_room()
        lease = self._lease_class(self)  # before the answer, since every step after it is waited for
        try:
            grant = await passing.acquire(local_queue, client.store, runtime, self._wish, deadline, blocking)
        except BaseException:
            lease._lease_state.caller = None  # a task keeps its error, and that this lease: it must not keep the task
            raise
        if grant is None:
            if not frame:
                return None
            lease._lease_state.caller = None  # as above
            raise self._stayed_taken()
        try:
            lease._begin(grant)
            if not client._closed:
                if frame:
                    self._begin_block(lease, frame)
                return lease
        except BaseException:  # interrupted: nobody would give it back
            await self._undo(local_queue, grant, lease)
            raise
        await lease._release()  # closed while we waited: whoever did that may not have seen this lease
        raise closed_error()

    async def _undo(self, local_queue: LocalQueue | None, reached: Grant, lease: LeaseT | None) -> None:
        """Give back what was reached when an interrupt came, since nobody will have the lease."""
        client = self._client
        if lease is not None:
            client.keepalive.unwatch(lease._lease_state)
            lease._lease_state.give_back()
        for block in tuple(self._blocks):
            if block.lease is lease:
                self._blocks.remove(block)
        await passing.withdraw(local_queue, client.store, client.runtime, reached)

    def _begin_block(self, lease: LeaseT, frame: int) -> None:
        self._blocks.append(tuple.__new__(Block, (lease._lease_state.caller, frame, lease)))
        if self._open_scope is not None and lease._cancelling < 0:  # else an outer block of the same lease has done it
            self._open_scope(lease)

    def _find_room(self) -> LocalQueue | None:
        client = self._client
        may_pass = self._options.passing and client.store.capabilities.fence_blocks
        self._local_queue = client.passing.local_queue(self._name) if may_pass else None
        return self._local_queue

    def _remember(self, lease: LeaseT | None) -> LeaseT | None:
        """What `release()` is to find."""
        if lease is None or lease._home is not None:
            return lease
        table, caller = self._taken, lease._lease_state.caller
        lease._home = (table, caller)
        if len(table) >= MOST_CALLERS:  # callers that let their leases expire and never came back
            for one in [one for one, leases in table.items() if not any(lease.remaining for lease in leases)]:
                table.pop(one, None)
        table.setdefault(caller, []).append(lease)
        return lease

    def _lease(self, grant: Grant) -> LeaseT:
        """A lease on what was granted otherwise than by `_acquire`."""
        lease = self._lease_class(self)
        lease._begin(grant)
        return lease

    def _stayed_taken(self) -> AcquireTimeout:
        return AcquireTimeout(
            f"The lock {shown(self._name)} stayed taken for {self._options.timeout:g} s, so the block was not "
            "entered; nothing was left behind. lock.inspect() tells who holds it and who waits.",
            name=self._name,
            timeout=self._options.timeout,
        )

    def _find_block(self, frame: int) -> Block:
        block = leave_block(self._blocks, self._client.runtime.caller(), frame)
        if block is None:
            raise self._not_held()
        return block

    def _last(self) -> BaseLease:
        """The lease that this thread or task got here last and has not given back, in a `with` block or not."""
        caller = self._client.runtime.caller()
        leases = self._taken.get(caller, [])[-1:]
        leases += [block.lease for block in tuple(self._blocks) if block.caller == caller and not block.lease._left]
        if not leases:
            raise self._not_held()
        return max(leases, key=lambda lease: (lease.state in ALIVE, lease.fence))

    def _not_held(self) -> NotHeld:
        return NotHeld(
            f"This thread or task holds no lease of the lock {shown(self._name)} that it got from this object, so "
            "there is nothing to give back. To release from elsewhere, call release() on the lease itself."
        )

    async def _exit(self, lease: LeaseT, error: BaseException | None) -> LeaseLost | None:
        """End a `with` block; the loss to raise, if there was one. Never masks the body's own error."""
        lease_state, state = lease._lease_state, lease.state
        if state is RELEASED and lease_state.settled:
            return None  # released or exported within the block
        try:
            if state is not LOST:
                if await lease._give_back(state):
                    return None
                lease_state.reason = "when it was to be given back, the store no longer had it"
        except LockError as failure:
            # The body ran under a valid lease to its end, so this is no reason to call it failed.
            log.warning(
                "The lock %s could not be given back yet; that goes on, and in %g s it frees itself: %s",
                shown(self._name),
                lease_state.ttl,
                failure,
            )
            return None
        finally:
            if lease._home is not None:
                lease._leave_home()
        return lease._lost_error()

    async def _inspect(self) -> LockInfo:
        client = self._client
        client.ensure_open()
        return await retry(client.runtime, lambda until: client.store.inspect(self._name, until), client.store_timeout)

    async def _break(self, holder: str | None) -> LockInfo | None:
        client = self._client
        client.ensure_open()
        broken = await force_release_lock(client.store, client.runtime, self._name, holder, client.store_timeout)
        if broken is not None:
            log.warning("The lock %s was taken away from its holder, %s.", shown(self._name), broken.owner or "unknown")
        return broken

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {clean(self._name)!r}, ttl {self._options.ttl:g} s>"
