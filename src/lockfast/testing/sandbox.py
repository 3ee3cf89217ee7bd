"""Sandbox for tests of code that uses locks: an in-memory store, a virtual clock, and faults on demand.

Nothing sleeps. Sync code moves the clock by waiting, or you move it with `advance()`. Async code runs in `run()`, an
event loop whose timers fire at once, in order. Both flavours share one store and one clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from typing import Any, Self, TypeVar

from lockfast.client.lease import BaseLease
from lockfast.client.locks import AsyncLocks, Locks
from lockfast.errors import StoreUnavailable
from lockfast.stores.memory import Hub, MemoryStore
from lockfast.testing.virtual_time import Clock, SandboxAsyncioRuntime, SandboxRuntime, Scheduler, VirtualLoop
from lockfast.values import Claim, FirstNotification, Granted, GrantNotification, Owner, lock_name

__all__ = ["Held", "Sandbox"]

T = TypeVar("T")

STRANGER = Owner("elsewhere", 1, "somebody else")
FOR_EVER = 366 * 86_400.0


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
        self._hub = hub = _SandboxHub(self.clock)
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
    """The shared state of the memory store on a virtual clock; `lock` reaches it even while it is unreachable."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock.wall_us)
        self.reachable = True
        self._guard()

    def _guard(self) -> None:
        self.lock = self.mutex
        self.mutex = _Guard(self)

    def _deliver(self, address: str, notification: GrantNotification | FirstNotification) -> bool:
        return super()._deliver(address, notification) if self.reachable else address in self.boxes

    def reset(self) -> None:
        super().reset()
        self._guard()


class _Guard(AbstractContextManager[None]):
    """The hub's mutex for the code under test: fails while the store is unreachable."""

    def __init__(self, hub: _SandboxHub) -> None:
        self._hub = hub

    def __enter__(self) -> None:
        if not self._hub.reachable:
            raise StoreUnavailable(
                "The test made the store unreachable, so the request was not executed. Call Sandbox.reachable() to "
                "connect it again."
            )
        self._hub.lock.__enter__()

    def __exit__(self, *_: object) -> None:
        self._hub.lock.__exit__(None, None, None)
