"""What redis-py's lock does, once for both colours.

Two ways lead to the key. The full one (lockfast's store: queue, hand-over, nothing left behind) is for tokens that we
made. The plain one (one command on the user's own client) is for tokens that the caller chose, because those need not
be unique and must be refused while the key is there, and for names and clients that the full one does not take.

Rules kept here: release, extend and reacquire act only on one's own token; a lock without a timeout is kept for
`UNLIMITED` seconds at a time and renewed by the keeper; a release that failed may be called again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal

from lockfast.client.session import BaseLocks
from lockfast.client.shared_session import locks_of
from lockfast.compat.redis_py.errors import LockError, LockNotOwnedError, as_theirs
from lockfast.compat.redis_py.tokens import SharedToken
from lockfast.core import acquire as core
from lockfast.core.deadline import Deadline
from lockfast.core.lease_state import LeaseState, State
from lockfast.core.release import release
from lockfast.core.validity import valid_until
from lockfast.errors import ConfigurationError
from lockfast.ports import Runtime
from lockfast.simple.key_lock import KeyLock
from lockfast.values import Claim, holder_id, lock_name, shown

log = logging.getLogger("lockfast")

Number = int | float

UNLIMITED = 30.0


class BaseLock:
    """`_kept` are the grants without a timeout, by token, which the keeper renews; `_given` the tokens whose release
    got no answer: if a repeat finds nothing, it was the first that freed the lock."""

    _colour: str
    _local_class: type[SharedToken]
    _runtime_class: Callable[[], Runtime]

    def __init__(
        self,
        redis: Any,
        name: Any,
        timeout: Number | None = None,
        sleep: Number = 0.1,
        blocking: bool = True,
        blocking_timeout: Number | None = None,
        thread_local: bool = True,
        raise_on_release_error: bool = True,
    ) -> None:
        self.redis = redis
        self.name = name
        self.timeout = timeout
        self.sleep = sleep
        self.blocking = blocking
        self.blocking_timeout = blocking_timeout
        self.thread_local = bool(thread_local)
        self.raise_on_release_error = raise_on_release_error
        self.local = self._local_class() if self.thread_local else SharedToken()
        self.local.token = None
        self._plain = KeyLock(self._runtime_class(), redis, self._colour, name)
        self._locks = self._full()
        self._kept: dict[bytes, LeaseState] = {}
        self._given: set[bytes] = set()

    def _full(self) -> BaseLocks[Any] | None:
        """The connection for the full way, if name and client are fit for it."""
        try:
            lock_name(self.name)
            return locks_of(self.redis, awaited=self._colour == "asyncio")
        except ConfigurationError:
            return None

    def _encoded(self, token: Any) -> bytes:
        try:
            encoder = self.redis.connection_pool.get_encoder()
        except AttributeError:  # a cluster's client
            encoder = self.redis.get_encoder()
        encoded: bytes = bytes(encoder.encode(token))
        return encoded

    async def _acquire(
        self, sleep: Number | None, blocking: bool | None, blocking_timeout: Number | None, token: Any
    ) -> bool:
        blocking = self.blocking if blocking is None else blocking
        patience = self.blocking_timeout if blocking_timeout is None else blocking_timeout
        if not blocking or (patience is not None and patience <= 0):
            patience = 0.0
        with as_theirs():
            if token is None and self._locks is not None:
                ours = self._locks.runtime.new_holder_id().encode()
                taken = await self._queue_up(self._locks, ours, patience)
            else:
                ours = self._runtime_class().new_holder_id().encode() if token is None else self._encoded(token)
                taken = await self._poll(ours, patience, self.sleep if sleep is None else sleep)
        if taken:
            self.local.token = ours
        return taken

    async def _queue_up(self, locks: BaseLocks[Any], token: bytes, patience: float | None) -> bool:
        locks.ensure_open()
        runtime = locks.runtime
        claim = Claim(self.name, token.decode(), self.timeout or UNLIMITED, locks._owner.encode())
        deadline = Deadline(None if patience is None else runtime.now() + patience, locks.store_timeout)
        grant = await core.Attempt(locks.store, runtime, claim, deadline, blocking=patience != 0).run()
        if grant is None:
            return False
        self._keep(locks, grant)
        return True

    async def _poll(self, token: bytes, patience: float | None, sleep: Number) -> bool:
        runtime = self._runtime_class()
        give_up_at = None if patience is None else runtime.now() + patience
        while not await self._try(token):
            left = sleep if give_up_at is None else give_up_at - runtime.now()
            if left <= 0:
                return False
            await runtime.sleep(min(left, sleep))
        return True

    async def _try(self, token: bytes) -> bool:
        """One try to take the key, whoever has it."""
        locks, holder = self._locks, _as_holder(token)
        kept = not self.timeout and locks is not None and holder is not None
        ttl = self.timeout or (UNLIMITED if kept else None)
        runtime = self._runtime_class()
        sent_at = runtime.now()
        taken = await self._plain.acquire(token, ttl, only_if_free=True)
        if taken and locks is not None and holder is not None:
            locks.ensure_open()
            claim = Claim(self.name, holder, ttl or UNLIMITED, locks._owner.encode())
            self._keep(locks, core.Grant(claim, 0, sent_at, valid_until(sent_at, claim.ttl)))
        return taken

    def _keep(self, locks: BaseLocks[Any], grant: core.Grant) -> None:
        """Renew what has no timeout, until it is given back or lost."""
        if self.timeout:
            return
        lease_state = LeaseState(locks.runtime, renewing=True, max_hold=None)
        lease_state.begin(grant, lambda state: self._tell(lease_state, state))
        self._kept[lease_state.holder.encode()] = lease_state
        locks.keepalive.watch(lease_state)

    def _tell(self, lease_state: LeaseState, state: State) -> None:
        if state is State.LOST:
            log.warning("The lock %s was lost: %s. Another may hold it now.", shown(self.name), lease_state.reason)

    async def _release(self) -> None:
        token = self.local.token
        if token is None:
            raise LockError(
                "Cannot release a lock that's not owned or is already unlocked. It is owned by the thread that took "
                "it, unless it was made with thread_local=False.",
                lock_name=self.name,
            )
        try:
            await self._release_token(token)
        except LockNotOwnedError:
            self.local.token = None
            raise
        self.local.token = None

    async def _release_token(self, token: bytes) -> None:
        with as_theirs():
            released = await self._give_back(token)
        if not released:
            raise LockNotOwnedError("Cannot release a lock that's no longer owned", lock_name=self.name)

    async def _give_back(self, token: bytes) -> bool:
        locks, holder = self._locks, _as_holder(token)
        if locks is None or holder is None:
            return await self._plain.release(token)
        locks.ensure_open()
        lease_state = self._kept.get(token)
        if lease_state is not None:
            lease_state.give_back()
            locks.keepalive.unwatch(lease_state)
        ttl = self.timeout or UNLIMITED
        tried = token in self._given
        self._given.add(token)
        released = await release(locks.store, locks.runtime, self.name, holder, ttl, ours=True, maybe_done=tried)
        self._given.discard(token)
        self._kept.pop(token, None)
        return released

    def _timed(self, what: str) -> bytes:
        """The token of a lock that is held and has a timeout."""
        token = self.local.token
        if token is None:
            raise LockError(f"Cannot {what} an unlocked lock", lock_name=self.name)
        if self.timeout is None:
            raise LockError(f"Cannot {what} a lock with no timeout", lock_name=self.name)
        return token

    async def _extend(self, token: bytes | None, additional_time: Number, replace_ttl: bool) -> Literal[True]:
        milliseconds = int(additional_time * 1000)
        return await self._lengthen("extend", token, milliseconds, add=not replace_ttl, needs_ttl=True)

    async def _reacquire(self, token: bytes | None) -> Literal[True]:
        milliseconds = int((self.timeout or UNLIMITED) * 1000)
        return await self._lengthen("reacquire", token, milliseconds, add=False, needs_ttl=False)

    async def _lengthen(
        self, what: str, token: bytes | None, milliseconds: int, *, add: bool, needs_ttl: bool
    ) -> Literal[True]:
        with as_theirs():
            done = await self._plain.extend(token or b"", milliseconds, add=add, needs_ttl=needs_ttl)
        if not done:
            raise LockNotOwnedError(f"Cannot {what} a lock that's no longer owned", lock_name=self.name)
        return True

    async def _locked(self) -> bool:
        with as_theirs():
            return await self._plain.holder() is not None

    async def _owned(self) -> bool:
        token = self.local.token
        with as_theirs():
            return await self._plain.holder() == token and token is not None

    async def _enter(self) -> None:
        if not await self._acquire(None, None, None, None):
            raise LockError("Unable to acquire lock within the time specified", lock_name=self.name)

    async def _exit(self) -> None:
        try:
            await self._release()
        except LockError:
            if self.raise_on_release_error:
                raise
            log.warning("The lock %s was unlocked or no longer owned at the end of its block.", shown(self.name))


def _as_holder(token: bytes) -> str | None:
    """The token as a holder id, if it can be one."""
    try:
        return holder_id(token.decode("ascii"))
    except (UnicodeDecodeError, ConfigurationError):
        return None
