"""One client process on virtual time: the shipped client code as a pure function of its inputs.

A `Process` implements `Runtime`, `Wire` and `Inbox`. It runs its tasks until all of them wait; then it stands still
until its next input: a reply, a notification, a timer, a lost connection, a cancellation. Nothing else reaches it and
randomness is fixed, so the list of its inputs *is* its state: a new process with the same inputs reaches the same
state. The explorer needs that, because a coroutine cannot be copied.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

from lockfast.client.all_of import BaseLeaseSet
from lockfast.client.lease import BaseLease
from lockfast.client.locks import AsyncLocks
from lockfast.core.keepalive import Keepalive
from lockfast.core.lease_state import ALIVE, LeaseState, State
from lockfast.errors import Outcome, StoreUnavailable
from lockfast.ports import CallerState
from lockfast.stores.redis.protocol.notifications import notification_in, subscribe_request
from lockfast.stores.redis.protocol.resp import pack
from lockfast.stores.redis.store import RedisStore
from lockfast.values import Answer, Claim, Enqueue, FirstNotification, GrantNotification, Owner, Queued

Program = Callable[["Process"], Coroutine[Any, Any, None]]

LOCK = "door"
"""The lock of every model with one lock."""
GRACE = 0.08
MOST_OVERTIME = 3 * GRACE + 0.04
"""Seconds that a wait may exceed its timeout: the grace for the subscription before the first request and for the reply
to that request, and the patience of the clean-up."""
KEEPALIVE = "keepalive"
"""The name of the keepalive's task. It outlives the leases, so it does not count as unfinished work."""


class Wait(NamedTuple):
    """The event that a task waits for; `until` is local time, None without a timeout."""

    kind: str  # "reply", "sleep", "wake", "mailbox", "join" or "work"
    key: Any
    until: float | None


block: Callable[[Wait], Any] | None = None
"""Set while a greenlet runs: blocks it until the event (see `thread_models.py`)."""


def block_on(wait: Wait) -> Any:
    """Block the running greenlet; return the value that ended the wait."""
    if block is None:
        raise RuntimeError("only a greenlet can block")
    return block(wait)


class Suspend:
    """Awaited by a task: passes the `Wait` to the driver of the process, or blocks if the task is a greenlet."""

    def __init__(self, wait: Wait) -> None:
        self._wait = wait

    def __await__(self) -> Generator[Wait, Any, Any]:
        return block_on(self._wait) if block is not None else (yield self._wait)


class VirtualWaker:
    """`ports.Waker` of a process; `kind` distinguishes waits for notifications from other waits."""

    def __init__(self, process: Process, kind: str = "wake") -> None:
        self._process = process
        self._kind = kind
        self._woken = False

    def wake(self) -> None:
        if not self._process.settle(self._kind, self, True):
            self._woken = True

    async def wait(self, until: float | None) -> bool:
        if self._woken:
            self._woken = False
            return True
        if until is not None and until <= self._process.now():
            return False
        return bool(await Suspend(Wait(self._kind, self, until)))


class VirtualMailbox:
    """`ports.Mailbox` with the behaviour of the shipped ones."""

    def __init__(self, process: Process, holder: str) -> None:
        self._process = process
        self._holder = holder
        self._notifications: deque[GrantNotification | FirstNotification] = deque()
        self._waker = VirtualWaker(process, "mailbox")
        self._address = ""

    @property
    def address(self) -> str:
        return self._process.address

    async def open(self, until: float) -> None:
        self._process.mailboxes[self._holder] = self
        self._address = await self._process.subscribe(until)

    def deliver(self, notification: GrantNotification | FirstNotification) -> None:
        self._notifications.append(notification)
        self._waker.wake()

    def wake(self) -> None:
        self._waker.wake()

    async def wait(self, until: float) -> GrantNotification | FirstNotification | None:
        if self._subscribed():
            if not self._notifications:
                await self._waker.wait(until)
            if self._notifications:
                return self._notifications.popleft()
            if self._subscribed():
                return None
        self._address = await self._process.subscribe(until)
        return None  # a notification may have been missed while the inbox was not subscribed

    def _subscribed(self) -> bool:
        return self._process.listening and self._address == self._process.address

    def close(self) -> None:
        self._process.mailboxes.pop(self._holder, None)


def state_of(lease: BaseLease) -> LeaseState:
    """The core's state of a lease: the checks look behind the public surface."""
    return lease._core


class Belief(NamedTuple):
    """A lease that this process believes it holds, up to `until` on its clock (None: without an end)."""

    holder: str
    fence: int
    until: float | None
    lock: str = LOCK
    weight: int = 0
    limit: int = 0
    slots: tuple[int, ...] = ()


class Task:
    __slots__ = ("name", "timed", "wait", "work")

    def __init__(self, name: str, work: Coroutine[Any, Any, Any]) -> None:
        self.name = name
        self.work = work
        self.wait: Wait | None = None
        self.timed: Wait | None = None  # the wait for which the simulator has set a timer


class WatchedStore(RedisStore):
    """The shipped store; it also records facts that the invariants need."""

    def __init__(self, process: Process, *, reasserts: bool = False) -> None:
        super().__init__(process, process, reasserts=reasserts)
        self.process = process

    async def acquire(self, claim: Claim, enqueue: Enqueue | None, until: float) -> Answer:
        self.process.claims[claim.holder] = claim
        answer = await super().acquire(claim, enqueue, until)
        if isinstance(answer, Queued):
            ticket = self.process.tickets.setdefault(claim.holder, answer.ticket)
            if ticket != answer.ticket:
                self.process.violate("FQ", f"the ticket of {claim.holder} changed from {ticket} to {answer.ticket}")
        return answer

    async def release(self, name: str, holder: str, until: float) -> bool:
        self.process.releasing.add(holder)
        return await super().release(name, holder, until)


class Process:
    """Invariant: when `feed` returns, every remaining task waits for an event."""

    grace = GRACE
    connected = True
    loop_closed = False
    pushes = False
    on_push: Callable[[Any], None] | None = None

    def __init__(self, name: str, program: Program, *, listening: bool = True, started: float = 100.0) -> None:
        self.name = name
        self.sent: list[tuple[int, int, bytes]] = []
        self.mailboxes: dict[str, VirtualMailbox] = {}
        self.tickets: dict[str, int] = {}
        self.claims: dict[str, Claim] = {}
        self.releasing: set[str] = set()
        self.denied: set[str] = set()
        self.notes: list[str] = []
        self.violations: list[tuple[str, str]] = []
        self.holder_ids: list[str] = []
        self.listening = listening
        self.signalled = False
        self.cancellable = False
        self.was_paused = False
        self.tasks: dict[int, Task] = {}
        self.random_source: Callable[[], float] = lambda: 0.5
        self.declared: list[Belief] = []
        self.leases: list[BaseLease] = []
        self.keepalives: list[Keepalive] = []
        self._now = started
        self._addresses = 1
        self._requests = 0
        self._started = 0
        self._ready: deque[tuple[int, Any, BaseException | None]] = deque()
        self._current = -1
        self._start("main", program(self))

    # Used by programs.

    def locks(
        self, store_timeout: float = 10.0, *, reasserts: bool = False, names: Sequence[str] = (LOCK,)
    ) -> AsyncLocks:
        """Return the shipped async client, connected to this process; `names` are the locks that it will use."""
        store = WatchedStore(self, reasserts=reasserts)
        owner = Owner(self.name, 1)
        locks = AsyncLocks(store, self, owner=owner, store_timeout=store_timeout, address=f"virtual://{self.name}")
        self.keepalives.append(locks.session.keepalive)
        # A client whose inbox is open has waited before, so its first request enqueues.
        for name in names:
            locks.session.local_queues.queue(name).contended = self.listening
        return locks

    def record_acquire(self, lease: BaseLease | None) -> None:
        """Report the result of an acquisition to the checker."""
        if lease is None:
            self.denied.add(self.holder_ids[-1])
            self.note("returns: not acquired")
        else:
            self.leases.append(lease)
            self.note(f"acquires the lock, fence {lease.fence}")
            if state_of(lease).valid_until <= self._now:
                self.violate("AL", f"{lease.holder} acquired a lease that had already expired")

    def record_acquire_all(self, lease_set: BaseLeaseSet[Any] | None, known: int) -> None:
        """Report the result of an acquisition of several locks; `known` counts the holder ids before it."""
        if lease_set is None:
            self.denied.update(self.holder_ids[known:])
            self.note("returns: not acquired")
        else:
            for name in lease_set.names:
                self.record_acquire(lease_set[name])

    def record_wait(self, sent_at: float, timeout: float, requests: int = 1) -> None:
        """Report the duration of a wait with a timeout; a process that was paused meanwhile may take longer.

        `requests` may follow one another after the timeout.
        """
        took = self._now - sent_at
        if took > timeout + MOST_OVERTIME * requests and not self.was_paused:
            self.violate("BD", f"a wait with a timeout of {timeout:g} s took {took:g} s")

    def enter(self, until: float | None = None, fence: int = 0) -> None:
        """A hand-written lock believes that it holds the lock, up to `until` on the local clock."""
        self.declared = [Belief(self.name, fence, until)]
        if self.name not in self.holder_ids:
            self.holder_ids.append(self.name)
        self.note("enters the critical section" + (f", fence {fence}" if fence else ""))

    def leave(self) -> None:
        self.declared = []
        self.note("leaves the critical section")

    def record_denied(self) -> None:
        """A hand-written lock returns "not acquired"."""
        self.denied.add(self.name)
        self.note("returns: not acquired")

    def signal(self) -> None:
        """Start the clients whose `after` names this one."""
        self.signalled = True

    def note(self, text: str) -> None:
        self.notes.append(text)

    def violate(self, rule: str, text: str) -> None:
        self.violations.append((rule, text))

    async def work(self) -> None:
        """The critical section; the driver of the process decides how long it lasts."""
        await Suspend(Wait("work", None, None))

    async def command(self, *words: str | int | bytes, server: int = 0, within: float = 5.0) -> Any:
        """Send one command to a server, for hand-written locks."""
        request = pack(*(word if isinstance(word, bytes) else str(word).encode() for word in words))
        return await self._send(request, self._now + within, server)

    # Wire and Inbox.

    async def request(self, request: bytes, until: float, before: Sequence[bytes] = ()) -> Any:
        return await self._send(request, until, 0)

    async def _send(self, request: bytes, until: float, server: int) -> Any:
        self._requests += 1
        self.sent.append((self._requests, server, request))
        return await Suspend(Wait("reply", self._requests, until))

    def poll_events(self) -> None: ...

    def watch_connection(self) -> Any:
        raise NotImplementedError

    def drop(self) -> None: ...

    async def close(self) -> None: ...

    def reset(self, *, forked: bool = True) -> None: ...

    @property
    def address(self) -> str:
        return f"inbox:{self.name}:{self._addresses}"

    def mailbox(self, holder: str) -> VirtualMailbox:
        return VirtualMailbox(self, holder)

    async def subscribe(self, until: float) -> str:
        """Subscribe the inbox if necessary; return its address."""
        if not self.listening:
            await self.request(subscribe_request(self.address), until)
            self.listening = True
        return self.address

    # Runtime.

    def now(self) -> float:
        return self._now

    def random(self) -> float:
        return self.random_source()

    def new_holder_id(self) -> str:
        self.holder_ids.append(f"{self.name}{len(self.holder_ids) + 1}")
        return self.holder_ids[-1]

    def caller(self) -> Hashable:
        return self._current

    def caller_state(self, caller: Hashable) -> CallerState:
        return CallerState.RUNNING if caller in self.tasks else CallerState.ENDED

    def mutex(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def waker(self) -> VirtualWaker:
        return VirtualWaker(self)

    def attach(self) -> bool:
        return False

    def after_fork(self) -> None: ...

    async def gather(self, works: Sequence[Coroutine[Any, Any, Any]], on_result: Callable[[int, Any], bool]) -> None:
        raise NotImplementedError("no model sends parallel requests of a quorum")

    async def sleep(self, seconds: float) -> None:
        await Suspend(Wait("sleep", None, self._now + max(0.0, seconds)))

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> bool:
        self._start(name, work())
        return True

    async def finish(self, work: Callable[[], Coroutine[Any, Any, None]], name: str, patience: float) -> None:
        task = self._start(name, work())
        await Suspend(Wait("join", task, self._now + patience))

    # Tasks.

    def _start(self, name: str, work: Coroutine[Any, Any, Any]) -> int:
        self._started += 1
        self.tasks[self._started] = Task(name, work)
        self._ready.append((self._started, None, None))
        return self._started

    def settle(self, kind: str, key: Any, value: Any) -> bool:
        """Resume the task that waits for this event with `value`; False if no task does."""
        for number, task in self.tasks.items():
            if task.wait is not None and task.wait.kind == kind and task.wait.key == key:
                self._resume(number, value, None)
                return True
        return False

    def _resume(self, number: int, value: Any, error: BaseException | None) -> None:
        self.tasks[number].wait = None
        self._ready.append((number, value, error))

    def _run(self) -> None:
        while self._ready:
            number, value, error = self._ready.popleft()
            self._current = number
            task = self.tasks[number]
            try:
                task.wait = task.work.send(value) if error is None else task.work.throw(error)
            except StopIteration:
                self._end(number)
            except asyncio.CancelledError:
                self.note("is cancelled")
                self._end(number)
            except Exception as failure:
                if not isinstance(failure, StoreUnavailable):
                    self.violate("ER", f"{task.name} failed: {type(failure).__name__}: {failure}")
                self.note(f"{task.name} ends with {type(failure).__name__}")
                self._end(number)

    def _end(self, number: int) -> None:
        del self.tasks[number]
        self.settle("join", number, None)

    # Inputs.

    def start(self, now: float) -> None:
        self._now = now
        self._run()

    def feed(self, kind: str, key: Any, value: Any, now: float) -> None:
        """Process one input at local time `now`, until every task waits again."""
        self._now = now
        if kind == "reply":
            self.settle("reply", key, value)
        elif kind == "notification":
            found = notification_in([b"message", key, value])
            if found is not None and found[0] in self.mailboxes:
                self.mailboxes[found[0]].deliver(found[1])
        elif kind == "timer":
            self._fire_timer(key)
        elif kind == "work_done":
            self.settle("work", None, None)
        elif kind == "connection_lost":
            self._lose_connection(key)
        elif kind == "inbox_lost":
            self.listening = False
            self._addresses += 1
            for box in list(self.mailboxes.values()):
                box.wake()
        elif kind == "cancel":
            self._resume(1, None, asyncio.CancelledError())
        self._run()

    def _fire_timer(self, number: int) -> None:
        wait = self.tasks[number].wait
        if wait is not None and wait.kind == "reply":
            self._resume(number, None, _no_reply("in time"))
        else:
            self._resume(number, False, None)

    def _lose_connection(self, requests: tuple[int, ...]) -> None:
        for number, task in list(self.tasks.items()):
            if task.wait is not None and task.wait.kind == "reply" and task.wait.key in requests:
                self._resume(number, None, _no_reply("before the connection was lost"))

    def retire(self) -> None:
        """End the keepalive if it is the only task left and has no lease: it will never act again."""
        states = map(state_of, self.leases)
        ended = all(one.state is State.RELEASED or (one.state is State.LOST and one.cleared) for one in states)
        if ended and all(task.name == KEEPALIVE for task in self.tasks.values()):
            for task in self.tasks.values():
                task.work.close()
            self.tasks.clear()

    # Observed from outside.

    @property
    def over(self) -> bool:
        """Whether the process will never act again."""
        return not self.tasks

    def lost(self) -> bool:
        """Whether the process lost a renewed lease."""
        return any(one.state is State.LOST and one.renews for one in map(state_of, self.leases))

    def beliefs(self) -> tuple[Belief, ...]:
        """The leases that this process believes it holds."""
        alive = [
            Belief(one.holder, one.fence, one.valid_until, one.name, one.weight, one.limit, one.slots)
            for one in self.lease_states()
            if one.state in ALIVE
        ]
        return (*self.declared, *alive)

    def lease_states(self) -> list[LeaseState]:
        """The recorded leases, and those that an acquisition of several locks has so far."""
        states = list(map(state_of, self.leases))
        watched = (lease for keepalive in self.keepalives for lease in keepalive.held())
        return states + [lease for lease in watched if lease not in states]


def _no_reply(when: str) -> StoreUnavailable:
    return StoreUnavailable(f"No reply {when}.", outcome=Outcome.UNKNOWN)


@contextmanager
def log_disabled() -> Iterator[None]:
    """Silence the client's log: it warns of lost leases, which the models cause all the time."""
    log = logging.getLogger("lockfast")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before
