"""A sandbox for tests of code that uses locks: the memory store, a clock that you move, and faults when you say so.

Nothing sleeps. On threads, time passes when the code under test waits or when you call `advance()`; on asyncio, `run()`
gives an event loop whose timers fire at once, one after the other. Both colours share one store and one clock.
"""

from __future__ import annotations

import threading
from collections.abc import Coroutine
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self, TypeVar

from lockfast.client.lease import BaseLease
from lockfast.client.locks import AsyncLocks, Locks
from lockfast.errors import StoreUnavailable
from lockfast.ports import Mailbox, Runtime
from lockfast.stores.memory import Hub, MemoryMailbox, MemoryStore, Space
from lockfast.testing.virtual_loop import SandboxAsyncioRuntime, VirtualLoop
from lockfast.testing.virtual_threads import Agenda, Clock, SandboxRuntime
from lockfast.values import Claim, FirstNotification, Granted, GrantNotification, Owner, lock_name

T = TypeVar("T")

STRANGER = Owner("elsewhere", 1, "somebody else")
FOR_EVER = 366 * 86_400.0


class Held:
    """A lock that somebody else holds, until you give it back or its time is over."""

    def __init__(self, sandbox: Sandbox, name: str, holder: str) -> None:
        self._sandbox = sandbox
        self._name = name
        self._holder = holder

    def release(self) -> bool:
        """Give it back, and hand it to whoever waits; False when it had gone already."""
        return self._sandbox._release(self._name, self._holder)


class Sandbox:
    """One store, one clock, locks in both colours, and what can go wrong with them.

    >>> sandbox = Sandbox()
    >>> other = sandbox.hold("report", seconds=60)
    >>> lock = sandbox.locks.lock("report")
    >>> lock.acquire(timeout=0) is None
    True
    >>> lease = lock.acquire(timeout=90)  # takes no time: the clock jumps to the end of the other's hold
    >>> sandbox.lose(lease)
    >>> lease.state.value
    'lost'
    """

    def __init__(self) -> None:
        self.clock = Clock()
        self._agenda = Agenda(self.clock)
        self._hub = Hub()
        self._hub.space = Space(self._hub._deliver, self.clock.wall_us)
        self._reachable = True
        self._strangers = 0
        runtime, looping = SandboxRuntime(self._agenda), SandboxAsyncioRuntime(self.clock)
        self.locks = Locks(
            self._store(runtime), runtime, owner=Owner("sandbox", 1), store_timeout=10.0, address="sandbox://"
        )
        self.async_locks = AsyncLocks(
            self._store(looping), looping, owner=Owner("sandbox", 1), store_timeout=10.0, address="sandbox://"
        )

    def _store(self, runtime: Runtime) -> _SandboxStore:
        return _SandboxStore(self, _Door(self, self._hub), runtime)

    # Time.

    def now(self) -> float:
        """The virtual time in seconds."""
        return self.clock.now()

    def advance(self, seconds: float) -> None:
        """Let time pass, for threads: keepers renew, what is over is lost, and callbacks are called.

        >>> sandbox = Sandbox()
        >>> lease = sandbox.locks.lock("door", ttl=10).acquire()
        >>> sandbox.advance(3600)
        >>> lease.state.value
        'held'
        """
        self._agenda.advance(seconds)

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in an event loop of virtual time, and give its result.

        >>> async def main(locks):
        ...     async with locks.lock("door", ttl=10) as lease:
        ...         await asyncio.sleep(3600)
        ...         return lease.state.value
        >>> import asyncio
        >>> sandbox = Sandbox()
        >>> sandbox.run(main(sandbox.async_locks))
        'held'
        """
        import asyncio

        self.clock.touched()
        with asyncio.Runner(loop_factory=lambda: VirtualLoop(self.clock)) as runner:
            return runner.run(main)

    # Others.

    def hold(self, name: str, *, seconds: float = FOR_EVER) -> Held:
        """Somebody else holds the lock from now on, for so long, whoever had it before.

        >>> sandbox = Sandbox()
        >>> other = sandbox.hold("door")
        >>> sandbox.locks.lock("door").locked(), other.release(), sandbox.locks.lock("door").locked()
        (True, True, False)
        """
        self._strangers += 1
        claim = Claim(lock_name(name), f"stranger{self._strangers}", seconds, STRANGER.encode())
        with self._hub.mutex:
            held = self._hub.space.inspect(name, self.now()).holder
            if held is not None:
                self._hub.space.adopt(claim, held, self.now())
            else:
                granted = self._hub.space.acquire(claim, None, self.now())
                if not isinstance(granted, Granted):  # somebody waited, and has just been given it
                    self._hub.space.drop(name)
                    self._hub.space.acquire(claim, None, self.now())
        self._settle()
        return Held(self, name, claim.holder)

    def _release(self, name: str, holder: str) -> bool:
        with self._hub.mutex:
            released = self._hub.space.release(name, holder, self.now())
        self._settle()
        return released

    # Faults.

    def lose(self, lease: BaseLease) -> None:
        """This lease is lost now: the store no longer has it, and its holder is told.

        >>> sandbox = Sandbox()
        >>> lease = sandbox.locks.lock("door").acquire()
        >>> sandbox.lose(lease)
        >>> lease.state.value, lease.lost.wait(timeout=0), sandbox.locks.lock("door").locked()
        ('lost', True, False)
        """
        with self._hub.mutex:
            if self._hub.space.inspect(lease.name, self.now()).holder == lease.holder:
                self._hub.space.drop(lease.name)
        lease._client.keepalive.unwatch(lease._lease_state)
        lease._lease_state.refused("the test took it away")
        self._settle()

    def unreachable(self) -> None:
        """From now on no request reaches the store, and no push comes from it.

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
        self._reachable = False
        self._settle()

    def reachable(self) -> None:
        """The store can be reached again."""
        self._reachable = True
        self._settle()

    def reset(self) -> None:
        """The store restarts and has forgotten every lock, fence and queue; holders learn it at their next renewal."""
        with self._hub.mutex:
            self._hub.space.clear()
        self._settle()

    def _settle(self) -> None:
        """Let the background take notice; in an event loop, that comes by itself."""
        self.clock.touched()
        if not _in_event_loop():
            self._agenda.run_due()

    def close(self) -> None:
        """End what runs in the background; leases are given back."""
        self.reachable()
        self.locks.close()
        self._agenda.run_due()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _in_event_loop() -> bool:
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class _Door(AbstractContextManager[None]):
    """The hub as the code under test reaches it: its mutex cannot be had while the store is unreachable."""

    def __init__(self, sandbox: Sandbox, shared: Hub) -> None:
        self._sandbox = sandbox
        self.boxes = shared.boxes
        self.space = shared.space
        self._mutex: threading.Lock = shared.mutex

    @property
    def mutex(self) -> Self:
        return self

    def __enter__(self) -> None:
        if not self._sandbox._reachable:
            raise StoreUnavailable(
                "The test has made the store unreachable, so the request was not carried out. "
                "Sandbox.reachable() ends that."
            )
        self._mutex.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._mutex.release()

    def reset(self) -> None:
        """In a forked child."""
        self.space.clear()


class _SandboxMailbox(MemoryMailbox):
    """Hears nothing while the store is unreachable."""

    sandbox: Sandbox

    def push(self, push: GrantNotification | FirstNotification) -> None:
        if self.sandbox._reachable:
            super().push(push)


class _SandboxStore(MemoryStore):
    def __init__(self, sandbox: Sandbox, door: _Door, runtime: Runtime) -> None:
        super().__init__(door, runtime)  # type: ignore[arg-type]
        self._sandbox = sandbox

    def mailbox(self, holder: str) -> Mailbox:
        box = _SandboxMailbox(self, self._hub, self._runtime, holder)
        box.sandbox = self._sandbox
        return box


__all__ = ["Held", "Sandbox"]
