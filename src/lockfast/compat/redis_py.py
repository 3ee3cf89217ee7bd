"""redis-py's `Lock`, implemented by lockfast: the same signature, methods, attributes and exceptions.

    from lockfast.compat.redis_py import Lock

    lock = Lock(client, "report", timeout=10)                   # or, in existing code:
    lock = client.lock("report", timeout=10, lock_class=Lock)

This lock and redis-py's own exclude each other on one key, so a fleet can migrate one service at a time.
`docs/migrating.md` lists the differences. In new code, use `lockfast.Lock`.

A lock reaches its key in one of two ways:
- `_queued`: through lockfast's store, with queue, hand-off and clean-up. For tokens that lockfast generates.
- `_polled`: by one command on the user's client. For tokens that the caller chooses, which need not be unique and must
  be refused while the key exists, and for names and clients that lockfast's store does not accept.

Rules:
- A lock without a timeout has a ttl of UNLIMITED seconds, which the keepalive renews.
- A release that failed can be repeated.
- The token (`lock.local.token`) is kept per thread, per task or, with `thread_local=False`, once. A forked child does
  not inherit it. A thread that never acquired the lock reads None. A task that acquired the lock sees only its own
  token, so that two tasks that share a lock object cannot release each other's; any other task sees the last token,
  because redis-py lets any task release.
- Each error is redis-py's and lockfast's at once, so that handlers for either catch it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from typing import Any, Concatenate, Literal, ParamSpec, Self, TypeVar
from weakref import WeakKeyDictionary, ref

import redis.exceptions as theirs

from lockfast import errors as ours
from lockfast.client.session import Session, session_of
from lockfast.core.acquire import Acquisition, Grant, History
from lockfast.core.lease_state import LeaseState, State, valid_until
from lockfast.core.release import release
from lockfast.errors import ConfigurationError, shown
from lockfast.ports import Runtime
from lockfast.runtime.asyncio import AsyncioRuntime
from lockfast.runtime.base import run
from lockfast.runtime.threads import ThreadRuntime
from lockfast.simple import KeyLock
from lockfast.values import Claim, holder_id, lock_name

__all__ = ["AsyncLock", "Lock", "LockError", "LockNotOwnedError", "errors"]

errors = sys.modules[__name__]
"""An alias: `redis_py.errors.LockError` is `redis_py.LockError`."""

log = logging.getLogger("lockfast")

Number = int | float
UNLIMITED = 30.0

P = ParamSpec("P")
R = TypeVar("R")
L = TypeVar("L", bound="BaseLock")


class LockError(theirs.LockError, ours.LockError):
    """`redis.exceptions.LockError`."""

    def __init__(self, message: str | None = None, lock_name: object = None) -> None:
        super().__init__(message)
        self.lock_name = lock_name  # type: ignore[assignment]


class LockNotOwnedError(LockError, theirs.LockNotOwnedError):
    """`redis.exceptions.LockNotOwnedError`."""


class ConnectionError(ours.StoreUnavailable, theirs.ConnectionError):  # noqa: A001
    """`redis.exceptions.ConnectionError` with lockfast's `outcome`."""

    def __init__(self, message: str, *, outcome: ours.Outcome = ours.Outcome.NOT_DONE) -> None:
        theirs.ConnectionError.__init__(self, message)
        self.outcome = outcome


class NoPermissionError(theirs.NoPermissionError, ours.StoreRefused):
    """`redis.exceptions.NoPermissionError`."""


class ResponseError(theirs.ResponseError, ours.StoreProtocolError):
    """`redis.exceptions.ResponseError`."""


@contextmanager
def translated() -> Iterator[None]:
    """Raise lockfast's store errors as errors of both libraries."""
    try:
        yield
    except ours.StoreUnavailable as error:
        raise ConnectionError(str(error), outcome=error.outcome) from error
    except ours.StoreRefused as error:
        raise NoPermissionError(str(error)) from error
    except ours.StoreProtocolError as error:
        raise ResponseError(str(error)) from error


class SharedToken:
    """One token for all threads and tasks (`thread_local=False`), with the pid that set it."""

    _value: tuple[int, bytes | None] = (0, None)

    @property
    def token(self) -> bytes | None:
        pid, token = self._value
        return token if pid == os.getpid() else None

    @token.setter
    def token(self, token: bytes | None) -> None:
        self._value = (os.getpid(), token)


class ThreadToken(threading.local, SharedToken):
    """A token per thread."""


class TaskToken(SharedToken):
    """A token per task. `_value` holds the last token and `_setter` the task that set it."""

    def __init__(self) -> None:
        self._tokens: MutableMapping[Any, bytes | None] = WeakKeyDictionary()
        self._setter: Callable[[], asyncio.Task[Any] | None] = lambda: None

    @property
    def token(self) -> bytes | None:
        pid, last = self._value
        if pid != os.getpid():
            return None
        task = _current_task()
        if task not in self._tokens:
            return last
        # Before Python 3.12 `asyncio.wait_for` acquires in a task of its own, which ends: then the token belongs to the
        # task that awaited it.
        setter = self._setter()
        return self._tokens[task] or (None if setter is not None and not setter.done() else last)

    @token.setter
    def token(self, token: bytes | None) -> None:
        pid, last = self._value
        if pid != os.getpid():
            self._tokens.clear()
            last = None
        task, before = _current_task(), self.token
        if token is None:
            for other in [one for one, its in self._tokens.items() if its == before]:
                self._tokens[other] = None  # a released token belongs to no task
        else:
            if task is not None:
                self._tokens[task] = token
            self._setter = (lambda: None) if task is None else ref(task)
        if token is not None or before == last:
            last = token
        self._value = (os.getpid(), last)


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None  # outside an event loop


class BaseLock:
    """`_leases` are the renewed grants (those without a timeout), by token. `_releasing` are tokens whose release got
    no reply: if a repeat finds no grant, the first release removed it."""

    _flavour: str
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
        self._runtime = self._runtime_class()
        self._key = KeyLock(self._runtime, redis, self._flavour, name)
        self._locks: Session | None = None  # for the queue, if it accepts the name and the client
        with suppress(ConfigurationError):
            lock_name(name)
            self._locks = session_of(redis, is_async=self._flavour == "asyncio")
        self._leases: dict[bytes, LeaseState] = {}
        self._releasing: dict[bytes, LeaseState] = {}
        self._history = History()

    def _encoded(self, token: Any) -> bytes:
        try:
            encoder = self.redis.connection_pool.get_encoder()
        except AttributeError:  # a cluster client
            encoder = self.redis.get_encoder()
        return bytes(encoder.encode(token))

    async def _acquire(
        self,
        sleep: Number | None = None,
        blocking: bool | None = None,
        blocking_timeout: Number | None = None,
        token: str | bytes | None = None,
    ) -> bool:
        """Acquire the lock; return False if it stayed held."""
        blocking = self.blocking if blocking is None else blocking
        timeout = self.blocking_timeout if blocking_timeout is None else blocking_timeout
        if not blocking or (timeout is not None and timeout <= 0):
            timeout = 0.0
        value = self._runtime.new_holder_id().encode() if token is None else self._encoded(token)
        with translated():
            if token is None and self._locks is not None:
                acquired = await self._queued(self._locks, value, timeout)
            else:
                acquired = await self._polled(value, timeout, self.sleep if sleep is None else sleep)
        if acquired:
            self.local.token = value
        return acquired

    async def _queued(self, locks: Session, token: bytes, timeout: float | None) -> bool:
        locks.ensure_open()
        claim = self._claim(locks, token.decode(), self.timeout)
        grant = await Acquisition(locks.ports, claim, locks.deadline(timeout), timeout != 0, self._history).run()
        if grant is None:
            return False
        self._watch(locks, grant)
        return True

    async def _polled(self, token: bytes, timeout: float | None, sleep: Number) -> bool:
        give_up_at = None if timeout is None else self._runtime.now() + timeout
        while not await self._try(token):
            left = sleep if give_up_at is None else give_up_at - self._runtime.now()
            if left <= 0:
                return False
            await self._runtime.sleep(min(left, sleep))
        return True

    async def _do_acquire(self, token: str | bytes) -> bool:
        """Try once, with this token."""
        return await self._try(self._encoded(token))

    async def _try(self, token: bytes) -> bool:
        """Acquire the key with one command."""
        locks, holder = self._locks, _as_holder_id(token)
        renewable = locks is not None and holder is not None
        ttl = self.timeout or (UNLIMITED if renewable else None)
        sent_at = self._runtime.now()
        acquired = await self._key.acquire(token, ttl, only_if_free=True)
        if acquired and locks is not None and holder is not None:
            locks.ensure_open()
            claim = self._claim(locks, holder, ttl)
            self._watch(locks, Grant(claim, 0, sent_at, valid_until(sent_at, claim.ttl)))
        return acquired

    def _claim(self, locks: Session, holder: str, ttl: float | None) -> Claim:
        return Claim(self.name, holder, ttl or UNLIMITED, locks.owner.encode())

    def _watch(self, locks: Session, grant: Grant) -> None:
        """Renew a grant without a timeout until it is released or lost."""
        if self.timeout:
            return
        lease = LeaseState(locks.runtime, renews=True, max_hold=None)

        def log_loss(state: State) -> None:
            if state is State.LOST:
                log.warning("Lock %s was lost; another client may hold it now: %s", shown(self.name), lease.reason)

        lease.begin(grant, log_loss)
        self._leases[lease.holder.encode()] = lease
        locks.keepalive.watch(lease)

    async def _release(self) -> None:
        """Release the lock; `LockError` if it is not held, `LockNotOwnedError` if it was lost."""
        token = self.local.token
        if token is None:
            raise LockError(
                "Cannot release a lock that's not owned or is already unlocked. It is owned by the thread that "
                "acquired it, unless it was made with thread_local=False.",
                lock_name=self.name,
            )
        try:
            await self._do_release(token)
        except LockNotOwnedError:
            self.local.token = None
            raise
        self.local.token = None

    async def _do_release(self, expected_token: bytes) -> None:
        """Release the lock if this token holds it."""
        with translated():
            released = await self._try_release(expected_token)
        if not released:
            raise LockNotOwnedError("Cannot release a lock that's no longer owned", lock_name=self.name)

    async def _try_release(self, token: bytes) -> bool:
        locks, holder = self._locks, _as_holder_id(token)
        if locks is None or holder is None:
            return await self._key.release(token)
        locks.ensure_open()
        renewed = self._leases.get(token)
        if renewed is not None:
            renewed.release()
            locks.keepalive.unwatch(renewed)
        lease = self._releasing.get(token)
        if lease is None:
            lease = self._releasing[token] = LeaseState(locks.runtime, renews=False, max_hold=None)
            lease.begin(Grant(self._claim(locks, holder, self.timeout), 0, locks.runtime.now(), math.inf))
        released = await release(locks.ports, lease)
        del self._releasing[token]
        self._leases.pop(token, None)
        return released

    def _token_for(self, operation: str) -> bytes:
        """The token of a held lock that has a timeout."""
        token = self.local.token
        if token is None:
            raise LockError(f"Cannot {operation} an unlocked lock", lock_name=self.name)
        if self.timeout is None:
            raise LockError(f"Cannot {operation} a lock with no timeout", lock_name=self.name)
        return token

    def _extend(self, additional_time: Number, replace_ttl: bool = False) -> Coroutine[Any, Any, Literal[True]]:
        """Add to the ttl, or set it with `replace_ttl`."""
        return self._set_ttl("extend", self._token_for("extend"), additional_time, add=not replace_ttl)

    def _do_extend(self, additional_time: Number, replace_ttl: bool) -> Coroutine[Any, Any, Literal[True]]:
        """`extend` without its checks."""
        return self._set_ttl("extend", self.local.token, additional_time, add=not replace_ttl)

    def _reacquire(self) -> Coroutine[Any, Any, Literal[True]]:
        """Set the ttl to the timeout again."""
        return self._set_ttl("reacquire", self._token_for("reacquire"), self.timeout or UNLIMITED, add=False)

    def _do_reacquire(self) -> Coroutine[Any, Any, Literal[True]]:
        """`reacquire` without its checks."""
        return self._set_ttl("reacquire", self.local.token, self.timeout or UNLIMITED, add=False)

    async def _set_ttl(self, operation: str, token: bytes | None, ttl: Number, *, add: bool) -> Literal[True]:
        with translated():
            done = await self._key.extend(token or b"", int(ttl * 1000), add=add, needs_ttl=operation == "extend")
        if not done:
            raise LockNotOwnedError(f"Cannot {operation} a lock that's no longer owned", lock_name=self.name)
        return True

    async def _locked(self) -> bool:
        """Whether any client holds the lock."""
        with translated():
            return await self._key.holder() is not None

    async def _owned(self) -> bool:
        """Whether this lock object holds it."""
        token = self.local.token
        with translated():
            return await self._key.holder() == token and token is not None

    async def _enter(self) -> Self:
        if not await self._acquire():
            raise LockError("Unable to acquire lock within the time specified", lock_name=self.name)
        return self

    async def _exit(self, *_: object) -> None:
        try:
            await self._release()
        except LockError:
            if self.raise_on_release_error:
                raise
            log.warning("Lock %s was unlocked or no longer owned at the end of its block.", shown(self.name))


def _sync(method: Callable[Concatenate[L, P], Coroutine[Any, Any, R]]) -> Callable[Concatenate[L, P], R]:
    """The same method for threads: it runs the coroutine to its end."""

    @functools.wraps(method)
    def call(self: L, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return run(method(self, *args, **kwargs))

    return call


class Lock(BaseLock):
    """`redis.lock.Lock`.

    `timeout` is the maximum hold in seconds; without one the lock is renewed while the process lives.
    `blocking_timeout` limits the wait. `sleep` has no effect on waiters in the queue: the store notifies them.
    """

    _flavour = "threads"
    _local_class = ThreadToken
    _runtime_class = ThreadRuntime

    acquire = _sync(BaseLock._acquire)
    do_acquire = _sync(BaseLock._do_acquire)
    release = _sync(BaseLock._release)
    do_release = _sync(BaseLock._do_release)
    extend = _sync(BaseLock._extend)
    do_extend = _sync(BaseLock._do_extend)
    reacquire = _sync(BaseLock._reacquire)
    do_reacquire = _sync(BaseLock._do_reacquire)
    locked = _sync(BaseLock._locked)
    owned = _sync(BaseLock._owned)

    def __enter__(self) -> Self:
        return run(self._enter())

    def __exit__(self, *_: object) -> None:
        run(self._exit())


class AsyncLock(BaseLock):
    """`redis.asyncio.lock.Lock`: the methods of `Lock`, awaited."""

    _flavour = "asyncio"
    _local_class = TaskToken
    _runtime_class = AsyncioRuntime

    async def acquire(
        self, blocking: bool | None = None, blocking_timeout: Number | None = None, token: str | bytes | None = None
    ) -> bool:
        """Acquire the lock; return False if it stayed held."""
        return await self._acquire(None, blocking, blocking_timeout, token)

    do_acquire = BaseLock._do_acquire
    release = BaseLock._release
    do_release = BaseLock._do_release
    extend = BaseLock._extend
    do_extend = BaseLock._do_extend
    reacquire = BaseLock._reacquire
    do_reacquire = BaseLock._do_reacquire
    locked = BaseLock._locked
    owned = BaseLock._owned
    __aenter__ = BaseLock._enter
    __aexit__ = BaseLock._exit


def _as_holder_id(token: bytes) -> str | None:
    """The token as a holder id; None if it cannot be one."""
    try:
        return holder_id(token.decode("ascii"))
    except (UnicodeDecodeError, ConfigurationError):
        return None
