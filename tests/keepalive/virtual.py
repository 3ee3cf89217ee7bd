"""The core with a virtual clock: no threads, no sockets, no waiting.

`VirtualRuntime` runs the coroutines of the core. Time passes in `run_for`, where everything that is due happens in
order, and in `freeze`, where nothing runs, as in a stopped process. `FaultyStore` applies the rules of the memory store
behind a connection that the test breaks and repairs.
"""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple

from lockfast.client.locks import AsyncLocks
from lockfast.errors import Outcome, StoreUnavailable
from lockfast.facts import Facts
from lockfast.ports import CallerState, Capabilities, Mailbox, WatchedValue
from lockfast.stores.memory import Space
from lockfast.values import Answer, Claim, Enqueue, Granted, LockInfo, Owner, Page, Renewal

Work = Coroutine[Any, Any, Any]
Fault = Literal["none", "refused", "silent", "deaf", "late", "stuck"]
"""refused: fails at once, not executed. silent: not executed, no reply. deaf: executed, but the reply is lost.
late: executed after the client gave up, as when a request waits in the buffer of a stopped server while the client uses
another connection. stuck: silent until a request times out and the first one is two seconds old, as with a connection
that is dead without notice and is replaced then."""
LATE_BY = 0.1
STUCK_FOR = 2.0

START = 1000.0
MOST_STEPS = 200_000
"""Steps at one moment that mean an endless loop."""
MOST_REQUESTS = 1000
"""Requests at one moment that mean an endless loop."""


class EndlessLoopError(BaseException):
    """The code runs in circles while the time stands still. Not an `Exception`, so that no code handles it."""


class Pause:
    """A task waits here until another task ends the pause, or until its time, which returns False."""

    __slots__ = ("task", "until")

    def __init__(self, until: float | None) -> None:
        self.until = until
        self.task: Work | None = None

    def __await__(self) -> Generator["Pause", bool, bool]:
        return (yield self)


class VirtualWaker:
    def __init__(self, runtime: "VirtualRuntime") -> None:
        self._runtime = runtime
        self._called = False
        self._pause: Pause | None = None

    def wake(self) -> None:
        if self._pause is None:
            self._called = True
        else:
            self._runtime.end(self._pause, True)
            self._pause = None

    async def wait(self, until: float | None) -> bool:
        if self._called:
            self._called = False
            return True
        if until is not None and until <= self._runtime.now():
            return False
        self._pause = pause = Pause(until)
        try:
            return await pause
        finally:
            self._pause = None


class VirtualRuntime:
    """`ports.Runtime`. `spawned` has the names of all background tasks; `check` is called before the time advances."""

    def __init__(self) -> None:
        self._now = START
        self._ready: deque[tuple[Work, bool | None]] = deque()
        self._timers: list[tuple[float, int, Pause]] = []
        self._numbers = itertools.count(1)
        self._tasks: set[Work] = set()
        self.spawned: list[str] = []
        self.check: Callable[[], None] = lambda: None

    def now(self) -> float:
        return self._now

    def random(self) -> float:
        return 0.5

    def new_holder_id(self) -> str:
        return f"holder-{next(self._numbers)}"

    def caller(self) -> Hashable:
        return "the test"

    def caller_state(self, caller: Hashable) -> CallerState:
        return CallerState.RUNNING

    def mutex(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def waker(self) -> VirtualWaker:
        return VirtualWaker(self)

    def attach(self) -> bool:
        return False

    loop_closed = False

    def after_fork(self) -> None: ...

    async def gather(self, works: Sequence[Coroutine[Any, Any, Any]], on_result: Callable[[int, Any], bool]) -> None:
        raise NotImplementedError

    async def sleep(self, seconds: float) -> None:
        await Pause(self._now + max(0.0, seconds))

    def spawn(self, work: Callable[[], Work], name: str) -> bool:
        self.spawned.append(name)
        self._start(work())
        return True

    async def finish(self, work: Callable[[], Work], name: str, patience: float) -> None:
        ended = self.waker()

        async def run_to_end() -> None:
            await work()
            ended.wake()

        self._start(run_to_end())
        await ended.wait(self._now + patience)

    def _start(self, work: Work) -> None:
        self._tasks.add(work)
        self._ready.append((work, None))

    def close(self) -> None:
        """End all tasks without running them any further, as the end of a process does."""
        for work in self._tasks:
            work.close()

    def end(self, pause: Pause, value: bool) -> None:
        if pause.task is not None:
            self._ready.append((pause.task, value))
            pause.task = None

    def _step(self, work: Work, value: bool | None) -> None:
        try:
            pause = work.send(value)
        except StopIteration:
            self._tasks.discard(work)
            return
        pause.task = work
        if pause.until is not None:
            heapq.heappush(self._timers, (pause.until, next(self._numbers), pause))

    def _settle(self) -> None:
        """Run all tasks that can run at this moment."""
        for _ in range(MOST_STEPS):
            if not self._ready:
                self.check()
                return
            self._step(*self._ready.popleft())
        raise EndlessLoopError

    def run_until(self, moment: float) -> None:
        """Let time pass until `moment`; everything happens when it is due."""
        while True:
            self._settle()
            if not self._timers or self._timers[0][0] > moment:
                break
            self._next_timer()
        self._now = max(self._now, moment)

    def _next_timer(self) -> None:
        until, _, pause = heapq.heappop(self._timers)
        self._now = max(self._now, until)
        self.end(pause, False)

    def run_for(self, seconds: float) -> None:
        self.run_until(self._now + seconds)

    def freeze(self, seconds: float) -> None:
        """Time passes and nothing runs: a stopped process, a suspended laptop."""
        self._settle()
        self._now += seconds

    def do(self, work: Work, within: float = 60.0) -> Any:
        """Return the result of `work`; time passes only as far as needed."""
        outcome: list[Any] = []

        async def keep() -> None:
            try:
                outcome.append((await work, None))
            except Exception as error:
                outcome.append((None, error))

        self._start(keep())
        give_up_at = self._now + within
        while True:
            self._settle()
            if outcome:
                break
            if not self._timers or self._timers[0][0] > give_up_at:
                raise AssertionError(f"{work} did not end within {within:g} virtual seconds")
            self._next_timer()
        result, error = outcome[0]
        if error is not None:
            raise error
        return result


class Request(NamedTuple):
    """A request that the store received, and when."""

    at: float
    kind: str
    names: tuple[str, ...]
    ttls: tuple[float, ...] = ()


class FaultyStore:
    """`ports.Store`: the rules of the memory store behind a connection with a `fault` and delays in seconds.

    `delays` has the delays of the request and the reply by kind of request; else `request_delay` and `reply_delay`.
    """

    connected = True
    inbox_open = True

    def __init__(self, runtime: VirtualRuntime) -> None:
        self.runtime = runtime
        self.space = Space(lambda *_: False, lambda: round(runtime.now() * 1e6))
        self.fault: Any = "none"  # one of `Fault`; Any, because mypy would assume that it never changes
        self.request_delay = 0.0
        self.reply_delay = 0.0
        self.delays: dict[str, tuple[float, float]] = {}
        self.stuck_since = math.inf
        self.grace = 0.08
        self.capabilities = Capabilities(fence_blocks=True)
        self.on_reassert: Callable[[Claim, int, float], Awaitable[bool]] | None = None
        self.requests: list[Request] = []
        self.report_change: Callable[[str | None], None] = lambda _: None

    async def _send(self, request: Request, until: float, execute: Callable[[], Any]) -> Any:
        """Send a request and return its reply, as far as the fault allows."""
        self.requests.append(request)
        latest = self.requests[-MOST_REQUESTS:]
        if len(latest) == MOST_REQUESTS and all((one.at, one.kind) == (request.at, "renew") for one in latest):
            raise EndlessLoopError
        fault = self.fault
        request_delay, reply_delay = self.delays.get(request.kind, (self.request_delay, self.reply_delay))
        if fault == "refused":
            raise StoreUnavailable("refused")
        if fault in ("none", "deaf"):
            await self._travel(request_delay, until)
            answer = execute()
        if fault != "none":
            await self.runtime.sleep(until - self.runtime.now())
            if fault == "late":
                self.runtime.spawn(lambda: self._execute_late(execute), "late")
            if fault == "stuck":
                self._reconnect(request.at)
            raise StoreUnavailable("no answer", outcome=Outcome.UNKNOWN)
        await self._travel(reply_delay, until)
        return answer

    def _reconnect(self, sent_at: float) -> None:
        self.stuck_since = min(self.stuck_since, sent_at)
        if self.runtime.now() - self.stuck_since > STUCK_FOR:
            self.fault = "none"

    async def _execute_late(self, execute: Callable[[], Any]) -> None:
        await self.runtime.sleep(LATE_BY)
        execute()

    async def _travel(self, seconds: float, until: float) -> None:
        if self.runtime.now() + seconds > until:
            await self.runtime.sleep(until - self.runtime.now())
            raise StoreUnavailable("too late", outcome=Outcome.UNKNOWN)
        if seconds:
            await self.runtime.sleep(seconds)

    def renewals(self, name: str | None = None) -> list[Request]:
        return [one for one in self.requests if one.kind == "renew" and (name is None or name in one.names)]

    def holder(self, name: str) -> str | None:
        return self.space.inspect(name, self.runtime.now()).holder

    def mailbox(self, holder: str) -> Mailbox:
        raise NotImplementedError("no claim waits in these tests")

    async def acquire(self, claim: Claim, enqueue: Enqueue | None, until: float) -> Answer:
        answer: Answer = await self._send(
            Request(self.runtime.now(), "acquire", (claim.name,)),
            until,
            lambda: self.space.acquire(claim, None, self.runtime.now()),
        )
        return answer

    async def renew(self, renewals: Sequence[Renewal], until: float) -> list[bool]:
        request = Request(
            self.runtime.now(), "renew", tuple(line.name for line in renewals), tuple(line.ttl for line in renewals)
        )
        answers: list[bool] = await self._send(
            request, until, lambda: [self.space.renew(line, self.runtime.now()) for line in renewals]
        )
        return answers

    async def release(self, name: str, holder: str, until: float) -> bool:
        released: bool = await self._send(
            Request(self.runtime.now(), "release", (name,)),
            until,
            lambda: self.space.release(name, holder, self.runtime.now()),
        )
        return released

    async def adopt(self, claim: Claim, old_holder: str, until: float) -> Granted | None:
        granted: Granted | None = await self._send(
            Request(self.runtime.now(), "adopt", (claim.name,)),
            until,
            lambda: self.space.adopt(claim, old_holder, self.runtime.now()),
        )
        return granted

    async def acquire_all(self, claims: Sequence[Claim], until: float) -> list[Granted] | None:
        raise NotImplementedError("no claims for several locks in these tests")

    async def downgrade(self, claim: Claim, until: float) -> bool:
        raise NotImplementedError("no shared claims in these tests")

    async def inspect(self, name: str, until: float) -> LockInfo:
        return self.space.inspect(name, self.runtime.now())

    async def facts(self, until: float) -> Facts:
        return Facts("virtual")

    async def listing(self, pattern: str, cursor: str, until: float) -> Page:
        return self.space.listing(pattern, cursor, self.runtime.now())

    async def force_release(self, name: str, holder: str, until: float) -> bool:
        taken: bool = await self._send(
            Request(self.runtime.now(), "force_release", (name,)),
            until,
            lambda: self.space.force_release(name, holder, self.runtime.now()),
        )
        return taken

    async def reassert(self, claim: Claim, fence: int, until: float) -> bool:
        return self.on_reassert is not None and await self.on_reassert(claim, fence, until)

    async def watch(self, key: str, until: float) -> WatchedValue:
        raise NotImplementedError

    def on_change(self, callback: Callable[[str | None], None]) -> None:
        self.report_change = callback

    def poll_events(self) -> None: ...

    def disconnect(self) -> None: ...

    async def cancel_waits(self) -> None: ...

    async def close(self) -> None: ...

    def reset(self, *, forked: bool) -> None: ...


class World:
    """One client on one store, and the calls of its callbacks: (time, kind, name)."""

    def __init__(self) -> None:
        self.time = VirtualRuntime()
        self.store = FaultyStore(self.time)
        self.locks = AsyncLocks(self.store, self.time, owner=Owner("here", 1), store_timeout=10.0, address="virtual://")
        self.calls: list[tuple[float, str, str]] = []

    def callback(self, kind: str) -> Callable[[Any], None]:
        """Return a callback that records its calls."""
        return lambda lease: self.calls.append((round(self.time.now() - START, 3), kind, lease.name))

    def acquire(self, name: str = "thing", **options: Any) -> Any:
        lock = self.locks.lock(name, **{"on_risk": self.callback("risk"), "on_lost": self.callback("lost"), **options})
        return self.time.do(lock.acquire(timeout=0))

    def kinds(self, name: str = "thing") -> list[str]:
        return [kind for _, kind, lease_name in self.calls if lease_name == name]
