"""The only seams: `Store` (one engine's operations) and `Runtime` (time, chance and tasks).

The core awaits nothing else. On asyncio these coroutines suspend; on threads they block instead, and never
suspend, so that one `send(None)` runs a whole operation (see `runtime/runner.py`).

Rules that every store keeps:

- Every operation is idempotent by holder id: repeated after a lost reply, it changes nothing more and gives
  the same answer with the same fence.
- A grant, its repeat or a renewal keeps the lock for the full ttl from when the store executed it, and never
  shortens what an earlier one gave: requests may arrive late and out of order. Only a holder's own last word
  (`Renewal.final`) sets the end anew, and that comes no sooner than the holder wanted, however late it arrives.
- A fence is greater than every fence granted before for that name, and so are the `ask.fences - 1` below it: they are
  the asker's to give out, where the store `reserves`.
- First come, first served by ticket; a waiter that cannot be reached is passed over at once.
- Whoever becomes the first in the queue is told so (`Next`), as far as it can be reached.
- No answer within `until`: `StoreUnavailable`, whose `outcome` says if the request may have been executed.

All `until` values are moments on `Runtime.now`.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from lockfast.facts import Facts
from lockfast.values import (
    Answer,
    Claim,
    Enqueue,
    FirstNotification,
    Granted,
    GrantNotification,
    LockInfo,
    Page,
    Renewal,
)

Sent = TypeVar("Sent")


class Stage(enum.Enum):
    """How far a thread or task has come."""

    RUNS = "runs"
    ENDS = "ends"
    """It was told to end, and has not yet."""
    ENDED = "ended"


class Waker(Protocol):
    """A wake-up call that may come from any thread, before or during the wait; it is never lost."""

    def wake(self) -> None: ...

    def wait(self, until: float | None) -> Awaitable[bool]:
        """True when woken (which uses the call up), False when `until` passed first. To be awaited at once."""


class Mailbox(Protocol):
    """Where the store pushes one acquisition's grant. Made before the request that asks for a place."""

    @property
    def address(self) -> str:
        """What `Place.address` must say; valid once `open` has returned."""

    async def open(self, until: float) -> None:
        """Return when everything pushed from now on will arrive here."""

    async def wait(self, until: float) -> GrantNotification | FirstNotification | None:
        """The next push or news; None when `until` passed, or when pushes may have been missed: ask again."""

    def close(self) -> None:
        """Stop listening for this acquisition."""


Reassert = Callable[[Claim, int, float], Awaitable[bool]]
"""From what was asked for, its fence and a time limit to whether the grant is there (again). Only a lock that is free
is taken, and only if the store knows of no grant with that fence or a greater one."""


class Direct(Protocol[Sent]):
    """The two requests of every cycle by functions that block, for threads: see `core/express.py`. Where it is not the
    usual that happens, they give what is to be awaited instead; `now` is the moment in which they are called."""

    def request(self, claim: Claim, now: float, until: float) -> Sent:
        """Send what `Store.acquire` would without a place; waits for no answer."""

    def answer(self, sent: Sent, claim: Claim, until: float) -> int | Coroutine[Any, Any, Answer]:
        """The fence of a grant."""

    def release(self, name: str, holder: str, now: float, until: float) -> bool | Coroutine[Any, Any, bool]:
        """As `Store.release`."""


class Store(Protocol):
    """The operations on one engine."""

    @property
    def direct(self) -> Direct[Any] | None:
        """How to ask without a coroutine, where that can be done."""

    @property
    def grace(self) -> float:
        """Seconds by which a request may outlast the caller's timeout: a round trip on this link, and some."""

    @property
    def reserves(self) -> bool:
        """Whether a grant may reserve more fences than one, to be given out later; if not, `ask.fences` is always 1."""

    @property
    def listening(self) -> bool:
        """Whether opening a mailbox costs nothing, so that the first request may ask for a place."""

    @property
    def connected(self) -> bool:
        """Whether a request can go out without dialling first, which takes its time; True where that is not known, or
        nothing is dialled."""

    def mailbox(self, holder: str) -> Mailbox: ...

    async def acquire(self, claim: Claim, enqueue: Enqueue | None, until: float) -> Answer:
        """Take the lock, or with `place` join or keep the queue. `Taken` only without `place`."""

    async def renew(self, renewals: Sequence[Renewal], until: float) -> Sequence[bool | None]:
        """For each, whether the lock was still its holder's, or None where no answer came about this one; needs no
        memory on the server."""

    async def release(self, name: str, holder: str, until: float) -> bool:
        """Give back a grant or a place, whichever there is, and hand on. True if it was a grant."""

    async def adopt(self, claim: Claim, old_holder: str, until: float) -> Granted | None:
        """Make `ask.holder` the holder in place of `old_holder`, with a new fence; None when it has gone."""

    @property
    def confirms(self) -> bool:
        """Whether a grant counts only once replicas acknowledged it, which the answer to `acquire` implies and a push
        does not."""

    @property
    def reassert(self) -> Reassert | None:
        """How to take back in a grant that a failover forgot; None where that is not done."""

    @property
    def notices(self) -> bool:
        """Whether the engine tells when somebody else changes a lock that we renewed."""

    def on_change(self, tell: Callable[[str | None], None]) -> None:
        """Call `tell(name)` then, from whatever thread; None for the name means that it may be any."""

    def listen(self) -> None:
        """Take in what the engine told unasked; sends nothing, and does not wait."""

    async def inspect(self, name: str, until: float) -> LockInfo: ...

    async def facts(self, until: float) -> Facts:
        """What can be found out about the engine. What it will not tell is None; that is no error."""

    async def listing(self, pattern: str, cursor: str, until: float) -> Page:
        """Some of the locks whose names fit `pattern` (see `values.fits`), without their waiters; the first part for an
        empty `cursor`, the next for the one that the last part gave. A lock that is there all the time is in one
        part at least, and may be in two; one that is taken or freed meanwhile may be missing. Free locks whose
        fence is remembered are among them. No part is much work for the engine, however many locks there are."""

    async def force_release(self, name: str, holder: str, until: float) -> bool:
        """End the grant of `holder` against its will, and hand the lock on; True if it had the lock. The fence moves on
        even when nobody waits. `holder` is as `inspect` tells it, also for a lock that something else than lockfast
        took. A waiter keeps its place."""

    def disconnect(self) -> None:
        """Close the connections, if there are any: without waiting, in whatever thread. The next request dials anew."""

    async def cancel_waits(self) -> None:
        """Before `close`: send away who waits, so that what is given back then goes to others."""

    async def close(self) -> None: ...

    def reset(self, *, forked: bool) -> None:
        """In a forked child: drop what the parent owns without touching its connections. Not `forked`: the event
        loop that we belonged to is closed; drop what lived in it."""


class NodeStore(Store, Protocol):
    """A store that can be one of the nodes of a quorum. It never dials by itself: a node that is not there must hold up
    nobody, so its requests fail at once, and `connect` dials in the background."""

    @property
    def silent_since(self) -> float | None:
        """When the oldest request was sent that is not answered yet; None when all are."""

    async def connect(self, until: float) -> bool:
        """Dial, unless it is connected; whether it was dialled anew, and so may be another server than before."""

    async def who(self, until: float) -> Facts:
        """Less than `facts` and sooner: which server it is, and since when it runs."""

    async def mark(self, secret: str, number: int, until: float) -> int | None:
        """Leave `number` under `secret` for some seconds, unless there is one already; the one that is there. None when
        the engine does not allow it."""

    async def connect_inbox(self, until: float) -> None:
        """Dial what mailboxes need, unless that is done."""


class Parked(Protocol):
    """What a coroutine of the threads' colour yields while it waits as one of several: see `Together`."""

    until: float

    @property
    def ready(self) -> bool:
        """Whether it can go on."""

    def wait_any(self, others: Sequence[Parked]) -> None:
        """Block until one of `others`, itself among them, is ready, or the first of their times is up."""


class Together(Protocol):
    """Several operations at the same time, in one colour."""

    async def __call__(self, works: Sequence[Coroutine[Any, Any, Any]], tell: Callable[[int, Any], bool]) -> None:
        """Start all; then call `tell(number, outcome)` as each one ends, with what it returned or the `StoreError` that
        it raised. Return when all have ended, or `tell` says that it is enough: the others are left alone then, and
        what they have sent stays sent. Nobody is told after the return."""


class Draft(Protocol):
    """A value as it was read, and what becomes of it. Ends with `commit` or `abandon`, exactly once."""

    @property
    def value(self) -> bytes | None: ...

    async def commit(self, value: bytes, until: float) -> bool:
        """Write it, unless somebody else has written since it was read: then False, and nothing was written."""

    def abandon(self) -> None: ...


class Editor(Protocol):
    """What a store that also holds values has, as `editor`: changes that fail when another came in between."""

    async def watch(self, key: str, until: float) -> Draft: ...


class Runtime(Protocol):
    """Time, chance and tasks, in one colour."""

    def now(self) -> float:
        """Monotonic seconds that go on while the machine is suspended."""

    def random(self) -> float:
        """From 0 up to 1; for back-off, never for ids."""

    def new_holder_id(self) -> str:
        """An unguessable id."""

    def caller(self) -> Hashable:
        """The running thread or task, never reused for another."""

    def stage(self, caller: Hashable) -> Stage:
        """How far that thread or task has come, as far as can be known."""

    def mutex(self) -> AbstractContextManager[Any]:
        """Guards a few lines without an await between threads; may be free of cost where there are none."""

    def waker(self) -> Waker: ...

    async def sleep(self, seconds: float) -> None: ...

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> bool:
        """Run `work` in the background, as a daemon thread or a task; its errors are logged. May be called from any
        thread. False, with a line in the log, when it cannot be started now."""

    async def finish(self, work: Callable[[], Coroutine[Any, Any, None]], name: str, patience: float) -> None:
        """Run `work` to its end even if the caller is cancelled, but wait for it no longer than `patience`."""
