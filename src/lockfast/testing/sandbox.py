"""Sandbox for tests of code that uses locks: an in-memory store, a virtual clock, and faults on demand.

Both flavours share one store and one clock, and nothing sleeps: the clock jumps whenever all threads or tasks wait.

- Sync: one thread runs at a time. The thread that creates the sandbox drives the scheduler: while that thread waits,
  the background actors that are ready run, one by one, then the clock advances to the next deadline. Time passes only
  while the driver waits, or in `advance()`. A wait that nothing can end raises `Stuck`.
- Threads that the code under test starts itself are not scheduled. Their waits end when another thread wakes them, or
  when the driver moves the clock past their deadline.
- Async: `run()` has an event loop that advances the clock to its next timer instead of waiting. `asyncio.sleep`,
  `asyncio.timeout` and the library's own timers follow it.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from typing import Any, Self, TypeVar

from lockfast.client.lease import BaseLease
from lockfast.client.locks import AsyncLocks, Locks
from lockfast.errors import StoreUnavailable
from lockfast.ports import Work
from lockfast.runtime.asyncio import AsyncioRuntime
from lockfast.runtime.threads import ThreadRuntime, run_logged
from lockfast.stores.memory import Hub, MemoryStore
from lockfast.values import Claim, FirstNotification, Granted, GrantNotification, Owner, lock_name

__all__ = ["Held", "Sandbox", "Stuck"]

T = TypeVar("T")

STRANGER = Owner("elsewhere", 1, "somebody else")
FOR_EVER = 366 * 86_400.0
START = 1_000_000.0
# Clock jumps without an action of the test, after which a wait counts as endless. With a lease to renew, they take half
# a day of virtual time or more.
MOST_JUMPS = 50_000
REAL_PATIENCE = 2.0  # real seconds that a loop without timers waits for a thread or a socket to wake it


class Held:
    """A lock held by another client, until `release()` or until it expires."""

    def __init__(self, release: Callable[[], bool]) -> None:
        self._release = release

    def release(self) -> bool:
        """Release the lock; the first waiter gets it. False if it had expired."""
        return self._release()


class Sandbox:
    """One store, one clock, sync and async locks, and the faults to test them with.

    >>> sandbox = Sandbox()
    >>> other = sandbox.hold("report", seconds=60)
    >>> lock = sandbox.locks.lock("report")
    >>> lock.acquire(timeout=0) is None
    True
    >>> lease = lock.acquire(timeout=90)  # no real wait: the clock jumps to the expiry of the other hold
    >>> sandbox.lose(lease)
    >>> lease.state.value
    'lost'
    """

    def __init__(self) -> None:
        self.clock = Clock()
        self._scheduler = Scheduler(self.clock)
        self._hub = hub = _SandboxHub(self.clock.wall_us)
        self._strangers = 0
        threads, loop = SandboxRuntime(self._scheduler), SandboxAsyncioRuntime(self.clock)
        common: Any = {"owner": Owner("sandbox", 1), "store_timeout": 10.0, "address": "sandbox://"}
        self.locks = Locks(MemoryStore(hub, threads), threads, **common)
        self.async_locks = AsyncLocks(MemoryStore(hub, loop), loop, **common)

    def now(self) -> float:
        """The virtual time in seconds."""
        return self.clock.now()

    def advance(self, seconds: float) -> None:
        """Advance the clock, for sync code: the keepalive renews, leases expire, callbacks run.

        >>> sandbox = Sandbox()
        >>> lease = sandbox.locks.lock("door", ttl=10).acquire()
        >>> sandbox.advance(3600)
        >>> lease.state.value
        'held'
        """
        self._scheduler.advance(seconds)

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in an event loop on the virtual clock; return its result.

        >>> async def main(locks):
        ...     async with locks.lock("door", ttl=10) as lease:
        ...         await asyncio.sleep(3600)
        ...         return lease.state.value
        >>> sandbox = Sandbox()
        >>> sandbox.run(main(sandbox.async_locks))
        'held'
        """
        self.clock.reset_jumps()
        with asyncio.Runner(loop_factory=lambda: VirtualLoop(self.clock)) as runner:
            return runner.run(main)

    def hold(self, name: str, *, seconds: float = FOR_EVER) -> Held:
        """Let another client hold the lock for `seconds`, from now on. A current holder loses it.

        >>> sandbox = Sandbox()
        >>> other = sandbox.hold("door")
        >>> sandbox.locks.lock("door").locked(), other.release(), sandbox.locks.lock("door").locked()
        (True, True, False)
        """
        self._strangers += 1
        claim = Claim(lock_name(name), f"stranger{self._strangers}", seconds, STRANGER.encode())
        with self._hub.lock:
            held = self._hub.space.inspect(name, self.now()).holder
            if held is not None:
                self._hub.space.adopt(claim, held, self.now())
            else:
                granted = self._hub.space.acquire(claim, None, self.now())
                if not isinstance(granted, Granted):  # an expired lock was just granted to its first waiter
                    self._hub.space.drop(name)
                    self._hub.space.acquire(claim, None, self.now())
        self._settle()

        def release() -> bool:
            with self._hub.lock:
                released = self._hub.space.release(name, claim.holder, self.now())
            self._settle()
            return released

        return Held(release)

    def lose(self, lease: BaseLease) -> None:
        """Lose this lease now: the store drops the grant and the holder is notified.

        >>> sandbox = Sandbox()
        >>> lease = sandbox.locks.lock("door").acquire()
        >>> sandbox.lose(lease)
        >>> lease.state.value, lease.lost.wait(timeout=0), sandbox.locks.lock("door").locked()
        ('lost', True, False)
        """
        with self._hub.lock:
            if self._hub.space.inspect(lease.name, self.now()).holder == lease.holder:
                self._hub.space.drop(lease.name)
        lease._lose("the test took it away")
        self._settle()

    def unreachable(self) -> None:
        """Disconnect the store: no request reaches it, and no notification leaves it.

        >>> sandbox = Sandbox()
        >>> lease = sandbox.locks.lock("door", ttl=30).acquire()
        >>> sandbox.unreachable()
        >>> sandbox.advance(25)
        >>> lease.state.value
        'at risk'
        >>> sandbox.advance(25)
        >>> lease.state.value
        'lost'
        """
        self._hub.reachable = False
        self._settle()

    def reachable(self) -> None:
        """Connect the store again."""
        self._hub.reachable = True
        self._settle()

    def reset(self) -> None:
        """Restart the store without its locks, fences and queues. Holders notice at their next renewal."""
        with self._hub.lock:
            self._hub.space.clear()
        self._settle()

    def _settle(self) -> None:
        """Run the background actors that are ready; an event loop runs its own."""
        self.clock.reset_jumps()
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            self._scheduler.run_due()

    def close(self) -> None:
        """Release all leases and end the background actors."""
        self.reachable()
        self.locks.close()
        self._scheduler.run_due()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _SandboxHub(Hub):
    """The shared state of the memory store on a virtual clock; `lock` works even while it is unreachable."""

    reachable = True

    @property
    def mutex(self) -> AbstractContextManager[Any]:
        """The lock for the code under test."""
        if not self.reachable:
            raise StoreUnavailable(
                "The test made the store unreachable, so the request was not executed. Call Sandbox.reachable() to "
                "connect it again."
            )
        return self.lock

    @mutex.setter
    def mutex(self, lock: AbstractContextManager[Any]) -> None:
        self.lock = lock

    def _deliver(self, address: str, notification: GrantNotification | FirstNotification) -> bool:
        return super()._deliver(address, notification) if self.reachable else address in self.boxes


class Stuck(RuntimeError):
    """The code under test waits for an event that cannot happen.

    >>> raise Stuck("no holder releases the lock")
    Traceback (most recent call last):
    lockfast.testing.sandbox.Stuck: no holder releases the lock
    """


class Clock:
    """Virtual seconds. `_jumps` counts the jumps since the last action of the test."""

    _now = START
    _jumps = 0

    def now(self) -> float:
        return self._now

    def wall_us(self) -> int:
        """The wall clock in microseconds, for fences."""
        return 1_700_000_000_000_000 + round((self._now - START) * 1e6)

    def jump(self, moment: float) -> None:
        """Advance to `moment`, because all threads or tasks wait until then."""
        if moment <= self._now:
            return
        self._now = moment
        self._jumps += 1
        if self._jumps > MOST_JUMPS:
            raise Stuck(
                "The code under test waits, and nothing can end the wait. Release the lock (Held.release), or give the "
                "wait a timeout."
            )

    def reset_jumps(self) -> None:
        """Count from zero: the test did something."""
        self._jumps = 0


class SandboxWaker:
    """`ports.Waker` on a scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.woken = False

    def wake(self) -> None:
        with self._scheduler.changed:
            self.woken = True
            self._scheduler.changed.notify_all()

    def consume(self) -> bool:
        woken, self.woken = self.woken, False
        return woken

    async def wait(self, until: float | None) -> bool:
        return self.consume() or self._scheduler.park(self, until)


class Actor:
    """A background thread; it runs from `gate.release()` to its next wait."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.gate = threading.Semaphore(0)
        self.waker: SandboxWaker | None = None
        self.until: float | None = -1.0  # ready at once
        self.done = False


class Scheduler:
    """Invariant: at most one of the driver and the actors runs."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.changed = threading.Condition()
        self._driver = threading.get_ident()
        self._actors: list[Actor] = []
        self._local = threading.local()
        self._yielded = threading.Semaphore(0)

    def add(self, work: Work, name: str) -> None:
        """Run `work` in the background, starting at the driver's next wait."""
        actor = Actor(name)
        self._actors.append(actor)
        threading.Thread(target=self._body, args=(actor, work), name=f"lockfast-{name}", daemon=True).start()

    def _body(self, actor: Actor, work: Work) -> None:
        self._local.actor = actor
        actor.gate.acquire()
        try:
            run_logged(work, actor.name)
        finally:
            actor.done = True
            self._yielded.release()

    def park(self, waker: SandboxWaker | None, until: float | None) -> bool:
        """Wait for the waker or the deadline; True when woken."""
        actor: Actor | None = getattr(self._local, "actor", None)
        if actor is not None:
            actor.waker, actor.until = waker, until
            self._yielded.release()
            actor.gate.acquire()
        elif threading.get_ident() == self._driver:
            self._drive(waker, until)
        else:
            with self.changed:
                self.changed.wait_for(lambda: self._is_over(waker, until))
        return waker is not None and waker.consume()

    def _is_over(self, waker: SandboxWaker | None, until: float | None) -> bool:
        return (waker is not None and waker.woken) or (until is not None and self.clock.now() >= until)

    def run_due(self) -> None:
        """Run the actors that are ready until all of them wait."""
        progress = True
        while progress:
            progress = False
            for actor in tuple(self._actors):
                if not actor.done and self._is_over(actor.waker, actor.until):
                    actor.gate.release()
                    self._yielded.acquire()
                    progress = True
            self._actors = [actor for actor in self._actors if not actor.done]

    def _drive(self, waker: SandboxWaker | None, until: float | None) -> None:
        while True:
            self.run_due()
            if self._is_over(waker, until):
                return
            deadlines = [actor.until for actor in self._actors if actor.until is not None]
            if until is not None:
                deadlines.append(until)
            if not deadlines:
                raise Stuck("The code under test waits without a timeout, and no thread is left to wake it.")
            self.clock.jump(min(deadlines))
            with self.changed:
                self.changed.notify_all()

    def advance(self, seconds: float) -> None:
        end = self.clock.now() + seconds
        while self.clock.now() < end:
            self.clock.reset_jumps()
            self.park(None, min(end, self.clock.now() + 1000.0))


class SandboxRuntime(ThreadRuntime):
    """`ports.Runtime` for threads, on a scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler
        self.now = scheduler.clock.now
        self.random = lambda: 0.5
        self.waker: Any = lambda: SandboxWaker(scheduler)

    async def sleep(self, seconds: float) -> None:
        self._scheduler.park(None, self._scheduler.clock.now() + max(0.0, seconds))

    def spawn(self, work: Work, name: str) -> bool:
        self._scheduler.add(work, name)
        return True


class _Selector(selectors.DefaultSelector):
    """Polls real events without blocking; advances the clock where a real selector would wait."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            found = super().select(REAL_PATIENCE)
            if not found:
                raise Stuck("All tasks wait without a timeout, and no task is left to wake them.")
            return found
        found = super().select(0)
        if not found and timeout > 0:
            self._clock.jump(self._clock.now() + timeout)
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on a virtual clock.

    >>> clock = Clock()
    >>> with asyncio.Runner(loop_factory=lambda: VirtualLoop(clock)) as runner:
    ...     before = clock.now()
    ...     runner.run(asyncio.sleep(3600))
    ...     clock.now() - before
    3600.0
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__(_Selector(clock))
        self._clock = clock

    def time(self) -> float:
        return self._clock.now()


class SandboxAsyncioRuntime(AsyncioRuntime):
    """`ports.Runtime` for asyncio, on a virtual clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.now = clock.now
        self.random = lambda: 0.5
