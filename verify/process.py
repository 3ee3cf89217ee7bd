"""One client process under virtual time: the shipped client code, run as a pure function of what it receives.

A `Process` is a `Runtime`, a `Wire` and an `Inbox` at once. It runs its tasks until all of them wait, and then stands
still until the next input: a reply, a push, a timer, a broken connection, a cancellation. Nothing else reaches it,
and chance is fixed; so the list of its inputs *is* its state, and giving the same list to a new process leads to the
same state again. The explorer relies on that, because a coroutine can't be copied.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from lockfast.client.lease import BaseLease
from lockfast.client.locks import AsyncLocks
from lockfast.core.lease_state import ALIVE, State
from lockfast.errors import Outcome, StoreUnavailable
from lockfast.ports import CallerState
from lockfast.stores.redis.protocol.notifications import notification_in, subscribe_request
from lockfast.stores.redis.protocol.resp import pack
from lockfast.stores.redis.store import RedisStore
from lockfast.values import Answer, Claim, Enqueue, Owner, Queued
from verify.waits import Trap, VirtualMailbox, VirtualWaker, Wait

Program = Callable[["Process"], Coroutine[Any, Any, None]]

GRACE = 0.08
MOST_OVER = 2 * GRACE + 0.04
"""A last answer may take the grace of the link, and the clean-up after it its own patience."""


class Belief(NamedTuple):
    """A lease that this process takes for its own, up to `until` on its clock (None: without an end)."""

    holder: str
    fence: int
    until: float | None


class Task:
    __slots__ = ("name", "timed", "wait", "work")

    def __init__(self, name: str, work: Coroutine[Any, Any, Any]) -> None:
        self.name = name
        self.work = work
        self.wait: Wait | None = None
        self.timed: Wait | None = None  # the wait for which a timer is set already


class WatchedStore(RedisStore):
    """The shipped store, which also notes what a check needs to know."""

    process: Process

    async def acquire(
        self, claim: Claim, enqueue: Enqueue | None, until: float, before: Sequence[bytes] = ()
    ) -> Answer:
        answer = await super().acquire(claim, enqueue, until)
        if isinstance(answer, Queued):
            told = self.process.tickets.setdefault(claim.holder, answer.ticket)
            if told != answer.ticket:
                self.process.problem("FQ", f"the ticket of {claim.holder} changed from {told} to {answer.ticket}")
        return answer

    async def release(self, name: str, holder: str, until: float, before: Sequence[bytes] = ()) -> bool:
        self.process.releasing.add(holder)
        return await super().release(name, holder, until)


class Process:
    """Invariant: whenever `feed` returns, every task that is left waits for something."""

    grace = GRACE
    connected = True
    pushes = False
    on_push: Callable[[Any], None] | None = None

    def __init__(self, name: str, program: Program, *, listening: bool = True, started: float = 100.0) -> None:
        self.name = name
        self.sent: list[tuple[int, int, bytes]] = []
        self.boxes: dict[str, VirtualMailbox] = {}
        self.tickets: dict[str, int] = {}
        self.releasing: set[str] = set()
        self.refused: set[str] = set()
        self.notes: list[str] = []
        self.problems: list[tuple[str, str]] = []
        self.holders: list[str] = []
        self.listening = listening
        self.signalled = False
        self.cancellable = False
        self.was_stopped = False
        self.tasks: dict[int, Task] = {}
        self.chance: Callable[[], float] = lambda: 0.5
        self.told: list[Belief] = []
        self.leases: list[BaseLease] = []
        self._now = started
        self._addresses = 1
        self._requests = 0
        self._started = 0
        self._ready: deque[tuple[int, Any, BaseException | None]] = deque()
        self._current = -1
        self._start("main", program(self))

    # What programs use.

    def locks(self, store_timeout: float = 10.0, *, reasserts: bool = False) -> AsyncLocks:
        """The shipped client on this process."""
        store = WatchedStore(self, self, reasserts=reasserts)
        store.process = self
        return AsyncLocks(
            store, self, owner=Owner(self.name, 1), store_timeout=store_timeout, address=f"virtual://{self.name}"
        )

    def holds(self, lease: BaseLease | None) -> None:
        """Tell the checker of the outcome of an acquisition."""
        if lease is None:
            self.refused.add(self.holders[-1])
            self.note("is told: not acquired")
        else:
            self.leases.append(lease)
            self.note(f"holds the lock with fence {lease.fence}")
            if lease._lease_state.valid_until <= self._now:
                self.problem("AL", f"{lease.holder} was handed a lease that had already run out")

    def waited(self, sent_at: float, timeout: float) -> None:
        """Tell the checker how long a wait with a limit took; a process that was stopped meanwhile is excused."""
        took = self._now - sent_at
        if took > timeout + MOST_OVER and not self.was_stopped:
            self.problem("BD", f"a wait of {timeout:g} s took {took:g} s")

    def enters(self, until: float | None = None, fence: int = 0) -> None:
        """A lock that is written by hand takes itself for held, up to `until` on the local clock."""
        self.told = [Belief(self.name, fence, until)]
        if self.name not in self.holders:
            self.holders.append(self.name)
        self.note("enters: it takes the lock for its own" + (f", with fence {fence}" if fence else ""))

    def leaves(self) -> None:
        self.told = []
        self.note("leaves")

    def refuses(self) -> None:
        """A lock that is written by hand says: not acquired."""
        self.refused.add(self.name)
        self.note("is told: not acquired")

    def signal(self) -> None:
        """Let those go on that come after this client."""
        self.signalled = True

    def note(self, text: str) -> None:
        self.notes.append(text)

    def problem(self, rule: str, text: str) -> None:
        self.problems.append((rule, text))

    async def work(self) -> None:
        """The body under the lock: lasts as long as whoever drives this process likes."""
        await Trap(Wait("work", None, None))

    async def command(self, *words: str | int | bytes, server: int = 0, within: float = 5.0) -> Any:
        """One plain command to a server, for locks that are written by hand."""
        request = pack(*(word if isinstance(word, bytes) else str(word).encode() for word in words))
        return await self._ask(request, self._now + within, server)

    # Wire and Inbox.

    async def request(self, request: bytes, until: float, before: Sequence[bytes] = ()) -> Any:
        return await self._ask(request, until, 0)

    async def _ask(self, request: bytes, until: float, server: int) -> Any:
        return await Trap(Wait("reply", self.send(request, server), until))

    def send(self, request: bytes, server: int = 0) -> int:
        """Send a request; its number, which the reply has too."""
        self._requests += 1
        self.sent.append((self._requests, server, request))
        return self._requests

    def poll_events(self) -> None: ...

    has_sessions = False

    def session(self) -> Any:
        raise NotImplementedError

    def drop(self) -> None: ...

    async def close(self) -> None: ...

    def reset(self, *, forked: bool = True) -> None: ...

    @property
    def address(self) -> str:
        return f"inbox:{self.name}:{self._addresses}"

    @property
    def in_use(self) -> bool:
        return bool(self.boxes)

    def mailbox(self, holder: str) -> VirtualMailbox:
        return VirtualMailbox(self, holder)

    async def subscribed(self, until: float) -> str:
        """Subscribe unless that is done, and give the address."""
        if not self.listening:
            address = self.address
            await self.request(subscribe_request(address), until)
            self.listening = True
        return self.address

    # Runtime.

    def now(self) -> float:
        return self._now

    def random(self) -> float:
        return self.chance()

    def new_holder_id(self) -> str:
        self.holders.append(f"{self.name}{len(self.holders) + 1}")
        return self.holders[-1]

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

    loop_closed = False

    def after_fork(self) -> None: ...

    async def gather(self, works: Sequence[Coroutine[Any, Any, Any]], on_result: Callable[[int, Any], bool]) -> None:
        raise NotImplementedError("no model has a quorum's parallel requests")

    async def sleep(self, seconds: float) -> None:
        await Trap(Wait("sleep", None, self._now + max(0.0, seconds)))

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> bool:
        self._start(name, work())
        return True

    async def finish(self, work: Callable[[], Coroutine[Any, Any, None]], name: str, patience: float) -> None:
        task = self._start(name, work())
        await Trap(Wait("join", task, self._now + patience))

    # Tasks.

    def _start(self, name: str, work: Coroutine[Any, Any, Any]) -> int:
        self._started += 1
        self.tasks[self._started] = Task(name, work)
        self._ready.append((self._started, None, None))
        return self._started

    def settle(self, kind: str, key: Any, value: Any) -> bool:
        """Give `value` to the task that waits for this, if one does."""
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
                self._ended(number)
            except asyncio.CancelledError:
                self.note("is cancelled")
                self._ended(number)
            except Exception as failure:
                if not isinstance(failure, StoreUnavailable):
                    self.problem("ER", f"{task.name} failed: {type(failure).__name__}: {failure}")
                self.note(f"{task.name} ends with {type(failure).__name__}")
                self._ended(number)

    def _ended(self, number: int) -> None:
        del self.tasks[number]
        self.settle("join", number, None)

    # Inputs.

    def start(self, now: float) -> None:
        self._now = now
        self._run()

    def feed(self, kind: str, key: Any, value: Any, now: float) -> None:
        """One input at the local time `now`, and all that follows from it until everything waits again."""
        self._now = now
        if kind == "reply":
            self.settle("reply", key, value)
        elif kind == "push":
            found = notification_in([b"message", key, value])
            if found is not None and found[0] in self.boxes:
                self.boxes[found[0]].push(found[1])
        elif kind == "timer":
            self._timer(key)
        elif kind == "go":
            self.settle("work", None, None)
        elif kind == "broken":
            self._broken(key)
        elif kind == "deaf":
            self.listening = False
            self._addresses += 1
            for box in list(self.boxes.values()):
                box.wake()
        elif kind == "cancel":
            self._resume(1, None, asyncio.CancelledError())
        self._run()

    def _timer(self, number: int) -> None:
        wait = self.tasks[number].wait
        if wait is not None and wait.kind == "reply":
            self._resume(number, None, _no_answer("in time"))
        else:
            self._resume(number, False, None)

    def _broken(self, numbers: tuple[int, ...]) -> None:
        for number, task in list(self.tasks.items()):
            if task.wait is not None and task.wait.kind == "reply" and task.wait.key in numbers:
                self._resume(number, None, _no_answer("before the connection broke"))

    def retire(self) -> None:
        """If nothing is left but a keeper with nothing to keep, end that too: nobody will hear of it again."""
        held = [lease._lease_state for lease in self.leases]
        ended = all(one.state is State.RELEASED or (one.state is State.LOST and one.settled) for one in held)
        if ended and all(task.name == "keeper" for task in self.tasks.values()):
            for task in self.tasks.values():
                task.work.close()
            self.tasks.clear()

    # What can be seen from outside.

    @property
    def over(self) -> bool:
        """Whether it will never do anything again."""
        return not self.tasks

    def lost(self) -> bool:
        """Whether a lease was lost that is renewed."""
        return any(lease._lease_state.state is State.LOST and lease._lease_state.renewing for lease in self.leases)

    def beliefs(self) -> tuple[Belief, ...]:
        """The leases that this process takes for its own."""
        if not self.leases:
            return tuple(self.told)
        held = [lease._lease_state for lease in self.leases]
        return (
            *self.told,
            *(Belief(one.holder, one.fence, one.valid_until) for one in held if one.state in ALIVE),
        )


def _no_answer(when: str) -> StoreUnavailable:
    return StoreUnavailable(f"No answer {when}.", outcome=Outcome.UNKNOWN)
