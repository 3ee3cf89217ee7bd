"""`Session`: a store with its keepalive, its local queues and its leases. `Locks` and every lock share one.

A forked process starts over: it drops inherited connections without touching them, and holds none of its parent's
leases. The same happens when a new event loop uses the session after its loop was closed. Each start has a new
`generation`, and a lease from an earlier one counts as lost.

Locks that are made directly on a client (`lockfast.Lock(client, name)`) share one session per client. It is closed when
the client is garbage-collected, and with asyncio also at the end of the event loop, because no user code closes it.
Locks and leases keep the client alive. lockfast reads the client's settings and never changes them.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable, Hashable, MutableMapping
from typing import TYPE_CHECKING, Any, NoReturn

from lockfast.client.options import LockOptions, Options, checked
from lockfast.core.acquire import Deadline
from lockfast.core.background import BackgroundTasks, SingleFlight
from lockfast.core.keepalive import Keepalive
from lockfast.core.lease_state import LeaseState
from lockfast.core.local_handoff import LocalQueues
from lockfast.core.release import BUDGET, clean_up
from lockfast.errors import ConfigurationError, closed_error
from lockfast.events import Event
from lockfast.ports import Observer, Ports, Runtime, Store, Waker
from lockfast.values import Mode, Owner

if TYPE_CHECKING:
    from lockfast.client.guarantees import Guarantees

log = logging.getLogger("lockfast")

CALLBACK_WORKERS = 16
"""Callbacks of one session that may run at the same time."""

CLOSES_WITHIN = BUDGET + 1.0
"""Seconds that `close()` takes at most: the budget for releases, and a moment to disconnect."""

ACQUIRING_END_WITHIN = 0.5
"""Seconds that `close()` gives acquisitions under way to end and to remove what the store has granted them."""

_exiting: list[bool] = []
"""Not empty once the program exits."""
sessions: weakref.WeakSet[Session] = weakref.WeakSet()
_of_client: MutableMapping[Any, Session] = weakref.WeakKeyDictionary()


class NotPickled:
    """Something that works only in the process that made it."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"A {type(self).__name__} cannot be pickled: its connection belongs to this process. Call connect() in the "
            "other process, and pass the name of the lock; or pass the text of lease.export(), and adopt() it there."
        )


class Session:
    """One connection to a store, for either flavour."""

    closes_with_loop = False
    """Whether no user code closes this session, so that it ends with the event loop."""
    _loop_end: Waker | None = None

    def __init__(
        self,
        store: Store,
        runtime: Runtime,
        *,
        owner: Owner,
        store_timeout: float,
        address: str,
        is_async: bool,
        observer: Observer | None = None,
    ) -> None:
        self.ports = Ports(store, runtime, None if observer is None else _guarded(observer))
        self.store = store
        self.runtime = runtime
        self.store_timeout = store_timeout
        self.no_deadline = Deadline(None, store_timeout)
        self.address = address
        self.is_async = is_async
        self.generation = 0
        self.reading: dict[Hashable, tuple[Any, int]] = {}
        """Maps (name, thread or task) to its read lease and the depth of re-entry; see `client/rwlock.py`."""
        self.closed = False
        self._warned: set[str] = set()
        self._left_behind: list[LeaseState] = []
        self._start(owner)
        sessions.add(self)

    def _start(self, owner: Owner) -> None:
        self.owner = owner
        self.default_options = checked(owner, {})
        self.keepalive = Keepalive(self.ports)
        self.local_queues = LocalQueues(self.runtime)
        self.acquiring: dict[Any, None] = {}
        """The acquisitions under way, each by its lease, or by a holder id if it is for several locks."""
        self.callbacks = BackgroundTasks(self.runtime, "callback", CALLBACK_WORKERS)
        self._closing = SingleFlight(self.runtime, "close")

    def options(self, options: LockOptions[Any]) -> Options:
        return checked(self.owner, options) if options else self.default_options

    def deadline(self, wait: float | None) -> Deadline:
        """The deadline of an operation that may wait for that many seconds; None for no limit."""
        return self.no_deadline if wait is None else Deadline(self.runtime.now() + wait, self.store_timeout)

    def ensure_open(self) -> None:
        """Raise if closed, and attach to the running event loop."""
        if self.closed:
            raise closed_error()
        if self.runtime.attach():
            for lease in self._abandon_loop():
                self.keepalive.clean_up(lease)
        if self.closes_with_loop and self._loop_end is None:
            self._loop_end = self.runtime.waker()
            if not self.runtime.spawn(self._disconnect_at_loop_end, "session"):
                self._loop_end = None

    def ensure_mode(self, mode: Mode) -> None:
        """Raise unless the store grants claims of that shared mode."""
        capabilities = self.store.capabilities
        if not (capabilities.readers if mode is Mode.READ else capabilities.permits):
            raise ConfigurationError(_not_granted(mode, self.address))

    def reads_on(self, lease: Any) -> bool:
        """Whether a downgraded lease stays held at the end of its block: its caller acquired it again to read."""
        key = lease._core.name, lease._core.caller
        held, depth = self.reading.get(key, (None, 0))
        if held is not lease or depth < 2:
            return False
        self.reading[key] = held, depth - 1
        return True

    def _abandon_loop(self) -> list[LeaseState]:
        """Start over, because the event loop was closed. Return the leases that its tasks held."""
        left = self.keepalive.held()
        for lease in left:
            lease.release()
        self.start_over(forked=False)
        return left

    def start_over(self, *, forked: bool) -> None:
        """In a forked child, or after the event loop was closed: drop all state without using the connections."""
        if forked:
            self.runtime.after_fork()
        self.generation += 1
        self.reading.clear()  # not replaced: readers have it too
        self.store.reset(forked=forked)
        self._start(Owner(self.owner.host, os.getpid(), self.owner.label))
        self._loop_end = None
        self._left_behind = []

    async def _disconnect_at_loop_end(self) -> None:
        """An event loop that shuts down cancels its tasks: the last chance to disconnect."""
        try:
            if self._loop_end is not None:
                await self._loop_end.wait(None)
        except GeneratorExit:
            raise
        except BaseException:
            give_up_at = self.runtime.now() + BUDGET
            while self.keepalive.held() and self.runtime.now() < give_up_at:
                await self.runtime.sleep(0.002)  # the keepalive was cancelled too, and releases the leases
            self.store.disconnect()
            raise

    def abandon(self) -> None:
        """The client was garbage-collected. Leases keep it alive, so nothing is held.

        The garbage collector calls this in any thread and in the middle of anything, so it takes no mutex.
        """
        if self.is_async:
            self.runtime.spawn(self.close, "close")
        else:
            self.keepalive.close()
            self.store.disconnect()

    def wait_for_exit(self) -> None:
        """Block a daemon thread for good if the exit of the program closed its session: the exit ends the thread."""
        if self.closed and _exiting and threading.current_thread().daemon:
            threading.Event().wait()

    async def close(self) -> None:
        """Release all leases and disconnect, within `CLOSES_WITHIN` seconds."""
        if not self.closed and self.runtime.attach():
            self._left_behind = self._abandon_loop()
        self.closed = True
        self.keepalive.close()
        try:
            await self._closing.run(self._close, CLOSES_WITHIN)
        finally:
            if self._loop_end is not None:
                self._loop_end.wake()

    async def _close(self) -> None:
        try:
            await self.store.cancel_waits()  # first: released locks must not go to waiters of this session
        finally:
            try:
                for claim in self.local_queues.close():
                    await clean_up(self.ports, claim.name, claim.holder, claim.ttl, inline=True)
                give_up_at = self.runtime.now() + ACQUIRING_END_WITHIN
                while self.acquiring and self.runtime.now() < give_up_at:
                    await self.runtime.sleep(0.002)  # they clean up, for which they need the store
                await self.keepalive.release([*self._left_behind, *self.keepalive.held()])
            finally:
                await self.store.close()

    async def guarantees(self) -> Guarantees:
        """Describe the guarantees of this session, and log each danger once."""
        self.ensure_open()
        from lockfast.client.guarantees import guarantees_of
        from lockfast.core.retry import retry

        found = guarantees_of(await retry(self.runtime, self.store.facts, self.store_timeout))
        for line in found.dangers:
            if line.topic not in self._warned:
                self._warned.add(line.topic)
                log.warning("%s: %s: %s", self.address, line.topic, line.text)
        return found


def _not_granted(mode: Mode, address: str) -> str:
    if mode is Mode.PERMITS:
        return (
            f"{address} has no semaphores. Nothing was sent. Each server of a quorum counts only the permits that it "
            "granted itself, so different majorities could grant more than the limit. Use one server, Sentinel or a "
            "cluster for semaphores."
        )
    return f"{address} has no read/write locks. Nothing was sent. Use lock(), or another store."


def _guarded(observer: Observer) -> Callable[[Event], None]:
    """Call the observer, and log its errors: they must not harm a lock."""

    def emit(event: Event) -> None:
        try:
            observer.observe(event)
        except Exception:
            log.exception("An observer failed on the event %r.", event.kind.value)

    return emit


def session_of(client: Any, *, is_async: bool) -> Session:
    """Return the session of a `Locks` object, or the one that all locks on a redis-py or valkey-py client share."""
    session = getattr(client, "session", None)
    if isinstance(session, Session):
        if session.is_async is not is_async:
            use = "lockfast.aio.Lock" if session.is_async else "lockfast.Lock"
            kind = "asyncio" if session.is_async else "threads"
            raise ConfigurationError(f"This connection is made for {kind}; use {use} with it.")
        return session
    try:
        found = _of_client.get(client)
    except TypeError:
        found = None  # not a client at all: the error comes below
    if found is None or found.closed or found.is_async is not is_async:
        return _connect(client, is_async=is_async)  # raises if the client is of the other flavour
    return found


def _connect(client: Any, *, is_async: bool) -> Session:
    from lockfast.client.connect import connect, connect_asyncio

    if client is None or isinstance(client, str):
        raise ConfigurationError(
            "A lock is made on a client of redis-py or valkey-py. For a URL or the embedded store, call connect() and "
            "then lock(name) on the result."
        )
    made = connect_asyncio(client).session if is_async else connect(client).session
    made.closes_with_loop = is_async
    kept = _of_client.setdefault(client, made)  # another thread may have been faster; then ours is unused
    if kept.closed:
        kept = _of_client[client] = made
    if kept is made:
        weakref.finalize(client, made.abandon).atexit = False
    return kept


def _after_fork() -> None:
    for session in list(sessions):
        session.start_over(forked=True)


def _at_exit() -> None:
    from lockfast.runtime.base import run

    _exiting.append(True)
    for session in list(sessions):
        if not session.is_async:
            try:
                run(session.close())
            except Exception as error:
                log.debug("Could not close %s at exit; its locks expire by their ttl: %s", session.address, error)
        elif session.runtime.loop_closed and session.keepalive.held():  # an open loop is its owner's to finish
            _close_in_new_loop(session)


def _close_in_new_loop(session: Session) -> None:
    import asyncio

    try:
        asyncio.run(session.close())
    except Exception as error:
        log.debug("Leases of a closed event loop could not be released; they expire by their ttl: %s", error)


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
