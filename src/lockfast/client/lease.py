"""`Lease`: a grant in the hands of the caller. A base class has the rules for sync and async.

A lease belongs to the code that has the object, in any thread or task. Its state follows the local clock even if the
store is silent, so `ensure_held()` is right in the instant in which a stopped process runs again.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from lockfast.client.session import NotPickled
from lockfast.core.acquire import Grant, downgrade
from lockfast.core.lease_state import ALIVE, AT_RISK, LOST, RELEASED, LeaseState, State
from lockfast.core.local_handoff import PooledGrant
from lockfast.core.release import BUDGET, release
from lockfast.core.retry import retry
from lockfast.errors import ConfigurationError, LeaseLost, NotHeld, Outcome, StoreUnavailable, shown
from lockfast.events import Event, EventKind
from lockfast.ports import Waker
from lockfast.runtime.base import run
from lockfast.values import LEAST_TTL, Mode, Seconds, clean, holder_id, lock_name, seconds

if TYPE_CHECKING:
    from lockfast.client.lock import BaseLock, Scope

log = logging.getLogger("lockfast")


class BaseLease(NotPickled):
    """The rules of a lease in both flavours."""

    # The values of every new lease stand in the class, which makes construction cheap.
    _generation = 0
    _pooled_grant: PooledGrant | None = None
    _keep_until = 0.0
    """After a release, the name stays taken until this moment on the clock of the runtime."""
    _scope: Scope[Any] | None = None
    """The block that is cancelled when the lease is lost."""
    _blocks = 0
    """How many `async with` blocks share the lease, also through other lock objects."""
    _wakers: tuple[Waker, ...] = ()
    _started = 0.0
    """When the acquisition began; measured only for an observer."""
    _ended = False
    """Whether `lock.release()` must not find this lease any more."""

    def __init__(self, lock: BaseLock[Any]) -> None:
        """Construct it before the claim is sent; `begin()` starts it."""
        session, options = lock._session, lock._options
        self._lock = lock  # keeps the user's client alive, if the lock was made on one
        self._session = session
        self._core = LeaseState(session.runtime, options.renew, options.max_hold)
        if session.ports.emit is not None:
            self._started = session.runtime.now()

    def _begin(self, grant: Grant) -> None:
        """The store granted the claim."""
        session = self._session
        self._generation = session.generation  # now: this process may have been forked during the wait
        self._pooled_grant = grant.pooled_grant
        self._core.begin(grant, self._on_change)
        session.keepalive.watch(self._core)
        if session.ports.emit is not None:
            self._core.held_since = session.runtime.now()
            self._event(EventKind.GRANTED, self._started)

    def _event(self, kind: EventKind, since: float, detail: str = "") -> None:
        """Report an event to the observer, if there is one; `since` is when the wait or the hold began."""
        session, core = self._session, self._core
        if session.ports.emit is not None:
            name, seconds = self._lock.name, session.runtime.now() - since
            session.ports.emit(Event(kind, name, seconds, core.fence or None, detail))

    def _not_acquired(self, error: BaseException | None = None) -> None:
        """The acquisition failed, or timed out if there is no `error`."""
        if self._core.fence:
            return  # granted, and released again
        self._core.caller = None  # a task keeps its error, and that this lease: it must not keep the task
        if error is None:
            self._event(EventKind.TIMED_OUT, self._started)
        elif isinstance(error, StoreUnavailable):
            self._event(EventKind.UNAVAILABLE, self._started, str(error))

    @property
    def name(self) -> str:
        """The lock's name."""
        return self._core.name

    @property
    def holder(self) -> str:
        """The unguessable holder id of this lease in the store. Leases that were handed off locally share it; their
        fences differ."""
        return self._core.holder

    @property
    def fence(self) -> int:
        """A number greater than that of every earlier grant. Pass it to the resource that the lock protects."""
        return self._core.fence

    @property
    def ttl(self) -> float:
        """Seconds for which the store keeps the grant without a renewal."""
        return self._core.ttl

    @property
    def acknowledged(self) -> int | None:
        """How many replicas acknowledged the grant; None without `connect(replicas=n)`. It narrows what a failover can
        lose, and no more: another replica may take over."""
        return self._core.acknowledged

    @property
    def reasserted(self) -> int:
        """How often a server had lost the grant, as after a failover, and restored it because the lock was free."""
        return self._core.reasserted

    @property
    def inherited(self) -> bool:
        """True in a process that was forked from the holder: it holds nothing."""
        return self._generation != self._session.generation

    @property
    def state(self) -> State:
        """Held, at risk, lost or released, by the local clock."""
        session, core = self._session, self._core
        if self._generation != session.generation:  # inherited
            return LOST
        now = session.runtime.now()
        return core.state if now < core.valid_until else core.check(now)

    @property
    def remaining(self) -> float:
        """Seconds for which the lease is certainly valid without another renewal; 0 if it has ended."""
        if self.state not in ALIVE:
            return 0.0
        return max(0.0, self._core.valid_until - self._session.runtime.now())

    def __bool__(self) -> Literal[True]:
        """Always True: `if lease := lock.acquire(timeout=0)` checks whether there is a lease."""
        return True

    def ensure_held(self) -> None:
        """Raise `LeaseLost` unless the lease is valid. Sends nothing, so it costs next to nothing."""
        state = self.state
        if state is LOST:
            raise self._lost_error()
        if state is RELEASED:
            raise LeaseLost(
                f"The lease on {shown(self.name)} was already released, so another client may hold the lock. Acquire "
                "it again before you continue.",
                name=self.name,
                fence=self.fence,
            )

    def _lost_error(self) -> LeaseLost:
        """The error that reports the loss of this lease."""
        why = "this process was forked from the holder" if self.inherited else self._core.reason
        return LeaseLost(
            f"The lease on {shown(self.name)} was lost: {why}. Another client may hold the lock now, so treat your "
            "work since then as unprotected: check it by its fence, or repeat it under a new lease.",
            name=self.name,
            fence=self.fence,
        )

    def _lose(self, reason: str) -> None:
        """End the lease as lost, as if the store had reported it; for tests."""
        self._session.keepalive.lose(self._core, reason)

    def _on_change(self, state: State) -> None:
        core, session = self._core, self._session
        if state in (AT_RISK, LOST):
            self._event(EventKind.LOST if state is LOST else EventKind.AT_RISK, core.held_since, core.reason)
        if state is LOST:
            log.warning("Lost the lease on lock %s (fence %d): %s", shown(core.name), core.fence, core.reason)
            for waker in self._wakers:
                waker.wake()
            if self._scope is not None:
                self._scope.cancel_body()
            if self._pooled_grant is not None:
                self._pooled_grant.end()
        options = self._lock._options
        callback = {AT_RISK: options.on_risk, LOST: options.on_lost}.get(state)
        if callback is not None:
            # In a background task: never inside an operation of the caller or of the keepalive.
            session.callbacks.add(lambda: self._call(callback))

    async def _call(self, callback: Any) -> None:
        try:
            result = callback(self)
            if hasattr(result, "__await__"):
                await result
        except BaseException as error:
            if self._ends_worker(error):
                raise
            log.exception("A callback of the lease on lock %s failed.", shown(self.name))

    def _ends_worker(self, error: BaseException) -> bool:
        """Whether an error of a callback is meant for the thread or task that called it."""
        return not isinstance(error, Exception)

    async def _release(self, budget: float = BUDGET) -> bool:
        """Release the lease, within `budget` seconds; False if it had ended. May be called again after an error."""
        session, core, pooled = self._session, self._core, self._pooled_grant
        if self._generation != session.generation:
            log.debug("A forked process does not release its parent's lease on lock %s.", shown(self.name))
            return False
        if pooled is not None:
            if self._hand_off():
                return True
            pooled.end()  # first: then the next local waiter sends its claim right behind the release
        released = await release(session.ports, core, self._keep_until, budget=budget)
        session.keepalive.unwatch(core)
        self._lock._forget(self)
        if not released:
            log.warning("The lease on lock %s (fence %d) had already ended on release.", shown(self.name), self.fence)
        return released

    def _hand_off(self) -> bool:
        """Whether another thread or task of this process has the lock now."""
        session, core, pooled = self._session, self._core, self._pooled_grant
        if pooled is None:
            return False
        now = session.runtime.now()
        if now < self._keep_until or self._generation != session.generation:
            return False
        if not pooled.queue.hand_off(pooled, core, now):
            return False
        session.keepalive.unwatch(core)
        self._lock._forget(self)
        if session.ports.emit is not None:
            self._event(EventKind.HANDED_OFF, core.held_since)
        return True

    async def _renew(self, ttl: float | None) -> None:
        """Extend the lease now, and use `ttl` for later renewals."""
        self.ensure_held()
        session, core = self._session, self._core
        session.ensure_open()
        if ttl is not None:
            core.change_ttl(session.runtime.now(), ttl)

        async def attempt(until: float) -> None:
            if await session.keepalive.renew([core], until):
                raise StoreUnavailable(
                    "The renewal got no answer, so the lease may not be extended. Try again before it expires.",
                    outcome=Outcome.UNKNOWN,
                )

        await retry(session.runtime, attempt, BUDGET)
        session.keepalive.reschedule(core)
        self.ensure_held()

    async def _downgrade(self) -> None:
        self.ensure_held()
        session, core = self._session, self._core
        session.ensure_open()
        session.ensure_mode(Mode.READ)
        if core.weight and not core.downgrading:
            raise NotHeld(f"The lease on {shown(self.name)} is shared already; only a writer can become a reader.")
        if self._pooled_grant is not None:
            self._pooled_grant.end()  # a shared lease is not handed off
        if not await downgrade(session.ports, core):
            session.keepalive.lose(core, "the store no longer has it")
        self.ensure_held()
        session.reading[self.name, core.caller] = self, 1

    def export(self) -> str:
        """Return a string with which `locks.adopt()` takes the lease over, in another thread, process or host.

        From now on this side neither renews nor releases. The other side has `remaining` seconds to adopt. Anybody who
        has the string can take the lock, so protect it like a password.
        """
        self.ensure_held()
        if not self._core.release(handed_off=True):
            self.ensure_held()  # another thread released it meanwhile: report that
        self._session.keepalive.unwatch(self._core)
        self._lock._forget(self)
        if self._pooled_grant is not None:
            self._pooled_grant.end()
        return ExportedLease(self.name, self.holder, self.ttl, self._core.weight, self._core.limit).encode()

    @property
    def _leases(self) -> Sequence[BaseLease]:
        return (self,)

    def __repr__(self) -> str:
        if not self._core.fence:  # an error report may show the locals of an acquisition that failed
            return f"<{type(self).__name__} without a grant>"
        return (
            f"<{type(self).__name__} {clean(self.name)!r} {self.state.value}, fence {self.fence}, "
            f"{self.remaining:.1f} s left>"
        )


class Lease(BaseLease):
    """A lease for threads.

    >>> import lockfast
    >>> locks = lockfast.connect("memory://")
    >>> lease = locks.lock("doc:lease", ttl=10).acquire()
    >>> lease.state.value, lease.remaining > 9
    ('held', True)
    >>> lease.release()
    True
    """

    def _ends_worker(self, error: BaseException) -> bool:
        return False  # sys.exit() ends a thread, and this thread has other callbacks to call

    @property
    def lost(self) -> Lost:
        """Set when the lease is lost; `lease.lost.wait(timeout)` blocks until then."""
        return Lost(self)

    def release(self) -> bool:
        """Release the lease; False, with a warning in the log, if it had already ended."""
        return run(self._release())

    def renew(self, ttl: Seconds | None = None) -> None:
        """Extend the lease to at least its ttl from now; `LeaseLost` if it has ended. A new `ttl` applies to this and
        all later renewals; a shorter one does not shorten the current grant."""
        run(self._renew(None if ttl is None else seconds(ttl, "ttl", least=LEAST_TTL)))

    def downgrade(self) -> None:
        """Turn this exclusive lease into a read lease, in one step: readers that wait enter, and no writer gets in
        between. The lease and its fence stay the same. After a `StoreUnavailable` the lease counts as that of a reader,
        and you can call this again.

        >>> import lockfast
        >>> config = lockfast.connect("memory://").rwlock("doc:downgrade")
        >>> with config.writer as lease:
        ...     lease.downgrade()
        ...     config.writer.inspect().mode.value
        'read'
        """
        run(self._downgrade())


class AsyncLease(BaseLease):
    """A lease for asyncio: the same names, awaited."""

    def _ends_worker(self, error: BaseException) -> bool:
        import asyncio  # here, so that threads need not load it

        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()  # a callback may await something that was cancelled; that is its own affair
            return task is None or task.cancelling() > 0
        return super()._ends_worker(error)

    @property
    def lost(self) -> AsyncLost:
        """Set when the lease is lost; `await lease.lost.wait(timeout)` waits for that."""
        return AsyncLost(self)

    async def release(self) -> bool:
        """Release the lease; False, with a warning in the log, if it had already ended."""
        return await self._release()

    async def renew(self, ttl: Seconds | None = None) -> None:
        """Extend the lease to at least its ttl from now; `LeaseLost` if it has ended. A new `ttl` applies to this and
        all later renewals; a shorter one does not shorten the current grant."""
        await self._renew(None if ttl is None else seconds(ttl, "ttl", least=LEAST_TTL))

    async def downgrade(self) -> None:
        """Turn this exclusive lease into a read lease, in one step; see `Lease.downgrade`."""
        await self._downgrade()


class Losable(Protocol):
    """A lease, or several as one."""

    @property
    def state(self) -> State: ...

    @property
    def _leases(self) -> Sequence[BaseLease]: ...


class BaseLost:
    """The loss of a lease as an event; true once it happened."""

    def __init__(self, lease: Losable) -> None:
        self._lease = lease

    def is_set(self) -> bool:
        """Whether the lease is lost, by the local clock."""
        return self._lease.state is LOST

    def __bool__(self) -> bool:
        return self.is_set()

    async def _wait(self, timeout: Seconds | None) -> bool:
        leases = self._lease._leases
        runtime = leases[0]._session.runtime
        until = None if timeout is None else runtime.now() + seconds(timeout, "timeout")
        waker = runtime.waker()
        for lease in leases:
            lease._wakers = (*lease._wakers, waker)
        try:
            while not self.is_set():
                if not await waker.wait(until):
                    return self.is_set()
            return True
        finally:
            for lease in leases:
                lease._wakers = tuple(other for other in lease._wakers if other is not waker)


class Lost(BaseLost):
    """For threads: `wait()` blocks.

    >>> import lockfast
    >>> lease = lockfast.connect("memory://").lock("doc:lost").acquire()
    >>> lease.lost.wait(timeout=0)
    False
    >>> lease.release()
    True
    """

    def wait(self, timeout: Seconds | None = None) -> bool:
        """Block until the lease is lost; False if `timeout` seconds passed first."""
        return run(self._wait(timeout))


class AsyncLost(BaseLost):
    """For asyncio: `await wait()`."""

    async def wait(self, timeout: Seconds | None = None) -> bool:
        """Wait until the lease is lost; False if `timeout` seconds passed first."""
        return await self._wait(timeout)


class ExportedLease(NamedTuple):
    """The content of the string that `lease.export()` returns and `locks.adopt()` takes."""

    name: str
    holder: str
    ttl: float
    weight: int = 0
    limit: int = 0

    def encode(self) -> str:
        packed = json.dumps(list(self), separators=(",", ":")).encode()
        return "lf1." + base64.urlsafe_b64encode(packed).decode()

    @classmethod
    def decode(cls, text: str) -> ExportedLease:
        try:
            version, _, packed = text.partition(".")
            name, holder, ttl, weight, limit = json.loads(base64.b64decode(packed, altchars=b"-_", validate=True))
            if version != "lf1" or not (type(weight) is type(limit) is int and 0 <= weight <= (limit or 1)):
                raise ValueError(version)
        except (AttributeError, TypeError, ValueError, RecursionError, binascii.Error):
            raise ConfigurationError(
                "This is not an exported lease. Pass locks.adopt() the string that lease.export() returned."
            ) from None
        return cls(lock_name(name), holder_id(holder), seconds(ttl, "ttl"), weight, limit)
