"""The only seams: `Store` (one engine), `Runtime` (time, randomness, tasks) and `Observer` (lifecycle events).

The core awaits nothing else. On asyncio these coroutines suspend. On threads they block and never suspend, so one
`send(None)` runs a whole operation (`runtime/base.py`).

Rules for every store:

- Every operation is idempotent by holder id. A retry after a lost reply changes nothing more and returns the same
  answer with the same fence.
- A grant, its retry or a renewal keeps the lock for the full ttl from the moment the store executes it. It never
  shortens an earlier one, because requests can arrive late and out of order. Only `Renewal.final` sets a new end.
- A fence is greater than every earlier fence of the name, and so are the `claim.fences - 1` numbers below it.
- `admission.py` decides which claim is granted. After every change that may admit the head of the queue, the store
  grants from the head for as long as the head is admitted.
- The queue is first come, first served by ticket. A waiter that cannot be reached is skipped at once.
- Each grant has its own ttl, deadline and fence, in every mode.
- The new head of the queue gets a `FirstNotification`, if it can be reached.
- If no answer arrives before `until`, the store raises `StoreUnavailable`; its `outcome` says whether the request
  may have been executed.

All `until` values are moments on `Runtime.now()`.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from lockfast.errors import ConfigurationError
from lockfast.events import Event
from lockfast.facts import Facts
from lockfast.values import Answer, Claim, Enqueue, Granted, LockInfo, Notification, Page, Renewal

Work = Callable[[], Coroutine[Any, Any, None]]
"""A background task: called once, then run to its end."""


class Observer(Protocol):
    """Receives lifecycle events, in whatever thread or task they happen. It must not block."""

    def observe(self, event: Event) -> None: ...


class Capabilities(NamedTuple):
    """Abilities that differ between stores.

    `fence_blocks`: one grant may reserve several fences, so local hand-off is possible. `replica_acks`: a grant counts
    only after replicas acknowledged it, which a notification cannot show. `reassert`: a grant that a failover lost can
    be restored. `change_events`: the server reports external changes of a renewed lock. `values`: `watch()` works.
    `readers` and `permits`: the store grants shared claims of these modes. `batches`: `acquire_all()` can grant several
    locks at once.
    """

    fence_blocks: bool = False
    replica_acks: bool = False
    reassert: bool = False
    change_events: bool = False
    values: bool = False
    readers: bool = False
    permits: bool = False
    batches: bool = False


class Waker(Protocol):
    """A wake-up call from any thread. A call before the wait is not lost."""

    def wake(self) -> None: ...

    def wait(self, until: float | None) -> Awaitable[bool]:
        """True when woken, which consumes the call; False when `until` passed first. Await it at once."""


class Mailbox(Protocol):
    """One acquisition's end of the inbox. Opened before the claim is enqueued."""

    @property
    def address(self) -> str:
        """The value for `Enqueue.address`; valid after `open()`."""

    async def open(self, until: float) -> None:
        """Return when every notification sent from now on will arrive here."""

    async def wait(self, until: float) -> Notification | None:
        """Return the next notification; None if `until` passed or notifications may have been missed."""

    def close(self) -> None: ...


class WatchedValue(Protocol):
    """A value under optimistic locking. Ends with exactly one `commit()` or `abandon()`."""

    @property
    def value(self) -> bytes | None: ...

    async def commit(self, value: bytes, until: float) -> bool:
        """Write the value. False, with nothing written, if it changed since it was read."""

    def abandon(self) -> None: ...


class Store(Protocol):
    """The operations of one engine. Stores inherit from it; methods with a body are optional."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def grace(self) -> float:
        """Seconds that a request may outlast the caller's timeout: about one slow round trip on this connection."""

    @property
    def connected(self) -> bool:
        """Whether a request can be sent without connecting first. True if there is nothing to connect."""
        return True

    def mailbox(self, holder: str) -> Mailbox: ...

    async def acquire(self, claim: Claim, enqueue: Enqueue | None, until: float) -> Answer:
        """Grant the claim; else enqueue it or refresh its ticket. `Taken` is returned only without `enqueue`.

        `ConfigurationError`, with nothing changed, if the lock is held in the other shared mode.
        """

    async def acquire_all(self, claims: Sequence[Claim], until: float) -> Sequence[Granted] | None:
        """Grant claims for different names in one step, or none of them; needs `capabilities.batches`.

        None, with nothing changed, if one of them would have to wait, or if the names are on different servers.
        """
        return None

    async def downgrade(self, claim: Claim, until: float) -> bool:
        """Turn the exclusive grant of `claim.holder` into a shared one, with the same fence, and serve the queue.

        False if the holder lost the lock. Needs `capabilities.readers`.
        """
        return False

    async def renew(self, renewals: Sequence[Renewal], until: float) -> Sequence[bool | None]:
        """Extend grants. For each: whether the holder still had the lock; None if no answer came for this one.

        Needs no memory on the server.
        """

    async def release(self, name: str, holder: str, until: float) -> bool:
        """Remove the grant or the ticket of `holder` and grant the next waiters. True if it was a grant."""

    async def adopt(self, claim: Claim, old_holder: str, until: float) -> Granted | None:
        """Replace `old_holder` by `claim.holder`, with a new fence. None if `old_holder` lost the lock."""

    async def reassert(self, claim: Claim, fence: int, until: float) -> bool:
        """Restore a grant that a failover lost. Only a free lock without an equal or greater fence is taken."""
        return False

    async def inspect(self, name: str, until: float) -> LockInfo: ...

    async def listing(self, pattern: str, cursor: str, until: float) -> Page:
        """Return one page of locks whose names match `pattern`, without their waiters; "" starts.

        A lock that exists throughout appears on at least one page, perhaps on two. A lock that is taken or freed
        meanwhile may be missing. Free locks with a remembered fence are included. Each page is cheap for the engine.
        """

    async def force_release(self, name: str, holder: str, until: float) -> bool:
        """End the grant of `holder` against its will and grant the next waiter. True if `holder` had the lock.

        The fence advances even if nobody waits. `holder` is as `inspect()` reports it, also for locks of other
        programs. A waiter keeps its ticket.
        """

    async def facts(self, until: float) -> Facts:
        """Return facts about the engine. Facts that it does not reveal are None."""

    async def watch(self, key: str, until: float) -> WatchedValue:
        """Read a value and watch it for changes; needs `capabilities.values`."""
        raise ConfigurationError("This store holds locks and no values.")

    def on_change(self, callback: Callable[[str | None], None]) -> None:
        """Call `callback(name)`, from any thread, after an external change of a lock; None means any lock."""
        return

    def poll_events(self) -> None:
        """Process unsolicited server messages. Does not block."""
        return

    def disconnect(self) -> None:
        """Close the connections without waiting, from any thread. The next request connects again."""
        return

    async def cancel_waits(self) -> None:
        """Before `close()`: end the waits of this client, so that locks released now go to other clients."""
        return

    async def close(self) -> None: ...

    def reset(self, *, forked: bool) -> None:
        """Drop connections without touching them: in a forked child, or after the event loop was closed."""


class MemberStore(Store, Protocol):
    """A store that can be one member of a quorum.

    Its requests never connect: they fail at once if the server is down, so that one server cannot delay the others.
    `connect()` runs in the background.
    """

    @property
    def inbox_open(self) -> bool:
        """Whether a mailbox can be opened without connecting first."""

    @property
    def silent_since(self) -> float | None:
        """When the oldest unanswered request was sent; None if every request was answered."""

    async def connect(self, until: float) -> bool:
        """Connect if necessary. True if the connection is new, so that the server may be another one."""

    async def identity(self, until: float) -> Facts:
        """Return only which server it is and how long it has been running: cheaper than `facts()`."""

    async def mark(self, secret: str, number: int, until: float) -> int | None:
        """Store `number` under `secret` for some seconds unless one exists, and return the stored one.

        None if the engine denies it.
        """

    async def connect_inbox(self, until: float) -> None:
        """Connect the inbox if necessary."""


class PendingWait(Protocol):
    """Yielded by a sync coroutine that waits as one of several: see `Runtime.gather`."""

    until: float

    @property
    def ready(self) -> bool: ...

    def wait_any(self, others: Sequence[PendingWait]) -> None:
        """Block until one of `others`, which include this one, is ready or the earliest `until` passed."""


class CallerState(enum.Enum):
    """The life of a thread or task."""

    RUNNING = "running"
    ENDING = "ending"
    """Cancelled, and not ended yet."""
    ENDED = "ended"


class Runtime(Protocol):
    """Time, randomness and tasks, in one flavour."""

    def now(self) -> float:
        """Monotonic seconds that include the time during which the machine is suspended."""

    def random(self) -> float:
        """Return a number from 0 up to 1, for backoff and never for ids."""

    def new_holder_id(self) -> str:
        """Return an unguessable id."""

    def caller(self) -> Hashable:
        """Identify the running thread or task; an identity is never reused."""

    def caller_state(self, caller: Hashable) -> CallerState: ...

    def mutex(self) -> AbstractContextManager[Any]:
        """Guard a few lines without an await between threads."""

    def waker(self) -> Waker: ...

    async def sleep(self, seconds: float) -> None: ...

    def spawn(self, work: Work, name: str) -> bool:
        """Start a background task, from any thread; its errors are logged. False, logged, if it cannot start."""

    async def finish(self, work: Work, name: str, patience: float) -> None:
        """Run `work` to its end even if the caller is cancelled, but wait at most `patience` seconds for it."""

    async def gather(self, works: Sequence[Coroutine[Any, Any, Any]], on_result: Callable[[int, Any], bool]) -> None:
        """Run several operations at the same time.

        Call `on_result(number, result)` as each one ends, with its return value or its `StoreError`. Return when all
        have ended or `on_result` returned True. The others are abandoned then: their requests stay sent, and
        `on_result` is not called again.
        """

    def attach(self) -> bool:
        """Attach to the running event loop, if there are loops. True if the previous loop has been closed."""

    @property
    def loop_closed(self) -> bool:
        """Whether the event loop that this runtime is attached to is closed."""

    def after_fork(self) -> None:
        """In a forked child: forget the event loop and the tasks of the parent."""


class Ports(NamedTuple):
    """The seams of one connection, passed to every operation of the core.

    `emit` receives each lifecycle event; None if nobody observes. It never raises.
    """

    store: Store
    runtime: Runtime
    emit: Callable[[Event], None] | None = None
