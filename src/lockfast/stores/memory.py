"""The memory store: locks between the threads and tasks of one process, and the reference for all stores.

A `Space` is one set of locks. All sessions on the same `memory://name` share it, in either flavour. Read `Space` for
the rules that the Lua scripts and the SQL keep too: it does no I/O, and receives the time as an argument.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from lockfast import values
from lockfast.errors import closed_error
from lockfast.facts import Facts, Persistence
from lockfast.ports import Capabilities, Mailbox, Runtime, Store
from lockfast.values import Answer, Claim, Enqueue, Granted, LockInfo, Notification, Page, Queued, Renewal, Taken

MOST_SHOWN = 1000
PAGE = 500
MOST_AHEAD_US = 1_000_000  # how far ahead of the clock a quorum may set a fence


class Grant:
    __slots__ = ("expires_at", "fence", "holder", "owner", "since")

    def __init__(self, claim: Claim, fence: int, now: float) -> None:
        self.holder, self.owner, self.fence = claim.holder, claim.owner, fence
        self.since, self.expires_at = now, now + claim.ttl

    def renew(self, expires_at: float) -> None:
        # Never shortens: a request with a shorter ttl may arrive after one with a longer ttl.
        self.expires_at = max(self.expires_at, expires_at)


class Waiter:
    __slots__ = ("address", "attempt", "claim", "expires_at", "since", "ticket")

    def __init__(self, claim: Claim, ticket: int, now: float) -> None:
        self.claim, self.ticket, self.since = claim, ticket, now
        self.address, self.attempt, self.expires_at = "", 0, 0.0


class Space:
    """Invariants: a name is in `_queues` only while it has waiters; a queue is sorted by ticket; no holder waits for
    its own lock. `deliver(address, notification)` returns False if no mailbox is open there."""

    def __init__(self, deliver: Callable[[str, Notification], bool], wall_us: Callable[[], int]) -> None:
        self._deliver = deliver
        self._wall_us = wall_us
        self._grants: dict[str, Grant] = {}
        self._queues: dict[str, list[Waiter]] = {}
        self._fences: dict[str, int] = {}

    def clear(self) -> None:
        """Lose everything, like a server that restarts without persistence."""
        self._grants.clear()
        self._queues.clear()
        self._fences.clear()

    def drop(self, name: str) -> None:
        """Delete the grant without a notification, like an external DEL."""
        self._grants.pop(name, None)

    def _held(self, name: str, now: float) -> Grant | None:
        held = self._grants.get(name)
        if held is not None and now >= held.expires_at:
            del self._grants[name]
            return None
        return held

    def _next_fence(self, name: str, count: int = 1, floor: int = 0) -> int:
        wall = self._wall_us()
        wanted = floor if floor < wall + MOST_AHEAD_US else 0  # further ahead: from a wrong clock
        fence = self._fences[name] = max(self._fences.get(name, 0) + count, wall, wanted)
        return fence

    def _grant(self, claim: Claim, now: float) -> int:
        fence = self._next_fence(claim.name, claim.fences, claim.floor)
        self._grants[claim.name] = Grant(claim, fence, now)
        return fence

    def _grant_next(self, name: str, now: float, caller: str | None = None) -> None:
        """Grant a free lock to the first live waiter. The `caller` is alive, and needs no notification."""
        queue = self._queues.get(name, [])
        while queue:
            waiter = queue.pop(0)
            if waiter.claim.holder != caller and now >= waiter.expires_at:
                continue
            notification = values.GrantNotification(waiter.attempt, self._grant(waiter.claim, now))
            if waiter.claim.holder == caller or self._deliver(waiter.address, notification):
                break
            del self._grants[name]
        self._notify_head(name, now)

    def _notify_head(self, name: str, now: float) -> None:
        """Notify the first live waiter how long the holder may still hold; remove dead ones."""
        queue, held = self._queues.get(name, []), self._grants.get(name)
        while queue and held is not None:
            if self._deliver(queue[0].address, values.FirstNotification(queue[0].attempt, held.expires_at - now)):
                break
            queue.pop(0)
        if not queue:
            self._queues.pop(name, None)

    def acquire(self, claim: Claim, enqueue: Enqueue | None, now: float) -> Answer:
        held = self._held(claim.name, now)
        if held is None and claim.name in self._queues:
            if enqueue is not None:
                self._enqueue(claim, enqueue, now)
            self._grant_next(claim.name, now, claim.holder)
            held = self._held(claim.name, now)
        if held is None:
            return Granted(self._grant(claim, now))
        if held.holder == claim.holder:
            held.renew(now + claim.ttl)
            held.fence = self._fences[claim.name] = max(held.fence, claim.floor)
            return Granted(held.fence)
        left = held.expires_at - now
        if enqueue is None:
            return Taken(left)
        waiter = self._enqueue(claim, enqueue, now)
        return Queued(waiter.ticket, self._queues[claim.name].index(waiter), left)

    def _enqueue(self, claim: Claim, enqueue: Enqueue, now: float) -> Waiter:
        queue = self._queues.setdefault(claim.name, [])
        waiter = next((one for one in queue if one.claim.holder == claim.holder), None)
        if waiter is None:
            last = queue[-1].ticket if queue else 0
            # A waiter that was removed while its connection was down returns with its ticket, to its old position.
            ticket = enqueue.ticket if enqueue.ticket is not None else max(last + 1, self._wall_us())
            waiter = Waiter(claim, ticket, now)
            queue.append(waiter)
        elif enqueue.ticket is not None:
            waiter.ticket = min(waiter.ticket, enqueue.ticket)  # the earlier ticket counts
        queue.sort(key=lambda one: one.ticket)
        waiter.address, waiter.attempt, waiter.expires_at = enqueue.address, enqueue.attempt, now + waiter.claim.ttl
        return waiter

    def renew(self, renewal: Renewal, now: float) -> bool:
        held = self._held(renewal.name, now)
        if held is None or held.holder != renewal.holder:
            return False
        if renewal.final:
            held.expires_at = now + renewal.ttl
        else:
            held.renew(now + renewal.ttl)
        return True

    def release(self, name: str, holder: str, now: float) -> bool:
        held = self._held(name, now)
        ours = held is not None and held.holder == holder
        if ours:
            del self._grants[name]
        queue = self._queues.get(name, [])
        index = next((index for index, one in enumerate(queue) if one.claim.holder == holder), None)
        if index is not None:  # no holder waits for its own lock
            del queue[index]
            if index == 0:
                self._notify_head(name, now)
        if name in self._queues and self._held(name, now) is None:
            self._grant_next(name, now)
        return ours

    def adopt(self, claim: Claim, old_holder: str, now: float) -> Granted | None:
        held = self._held(claim.name, now)
        if held is None or held.holder not in (claim.holder, old_holder):
            return None
        if held.holder == claim.holder:
            held.renew(now + claim.ttl)
            return Granted(held.fence)
        return Granted(self._grant(claim, now))

    def force_release(self, name: str, holder: str, now: float) -> bool:
        held = self._held(name, now)
        if held is None or held.holder != holder:
            return False
        del self._grants[name]
        self._next_fence(name)
        self._grant_next(name, now)
        return True

    def listing(self, pattern: str, cursor: str, now: float) -> Page:
        names = sorted(name for name in self._fences if name > cursor and values.fits(name, pattern))
        infos = tuple(self.inspect(name, now)._replace(waiters=()) for name in names[:PAGE])
        return Page(infos, infos[-1].name if len(names) > PAGE else "")

    def inspect(self, name: str, now: float) -> LockInfo:
        held = self._held(name, now)
        queue = [one for one in self._queues.get(name, []) if now < one.expires_at]
        waiters = tuple(
            values.WaiterInfo(one.claim.holder, values.Owner.decode(one.claim.owner), now - one.since)
            for one in queue[:MOST_SHOWN]
        )
        info = LockInfo(name, fence=self._fences.get(name), waiters=waiters, waiting=len(queue))
        if held is None:
            return info
        owner, held_for, ttl_left = values.Owner.decode(held.owner), now - held.since, held.expires_at - now
        return info._replace(holder=held.holder, owner=owner, held_for=held_for, ttl_left=ttl_left)


class Hub:
    """A space shared by many sessions, and the mailboxes of their waiters."""

    def __init__(self, wall_us: Callable[[], int] = lambda: time.time_ns() // 1000) -> None:
        self.mutex: AbstractContextManager[Any] = threading.Lock()
        self.boxes: dict[str, MemoryMailbox] = {}
        self.space = Space(self._deliver, wall_us)

    def _deliver(self, address: str, notification: Notification) -> bool:
        box = self.boxes.get(address)
        if box is not None:
            box.deliver(notification)
        return box is not None

    def reset(self) -> None:
        """In a forked child: drop the parent's locks, and the mutex, which may have been locked at the fork."""
        self.mutex = threading.Lock()
        self.boxes.clear()
        self.space.clear()


_hubs: dict[str, Hub] = {}


def hub(name: str) -> Hub:
    """The hub that every `memory://name` of this process shares."""
    return _hubs.setdefault(name, Hub())  # atomic, so it needs no mutex that a fork could leave locked


class MemoryMailbox:
    """`ports.Mailbox`; any thread may deliver."""

    def __init__(self, store: MemoryStore, shared: Hub, runtime: Runtime, holder: str) -> None:
        self._store = store
        self._hub = shared
        self._waker = runtime.waker()
        self.address = holder
        self.wake = self._waker.wake
        self._notifications: deque[Notification] = deque()

    async def open(self, until: float) -> None:
        self._hub.boxes[self.address] = self

    def deliver(self, notification: Notification) -> None:
        self._notifications.append(notification)
        self.wake()

    async def wait(self, until: float) -> Notification | None:
        if not self._notifications:
            await self._waker.wait(until)
        if self._store.closed:
            raise closed_error()
        return self._notifications.popleft() if self._notifications else None

    def close(self) -> None:
        self._hub.boxes.pop(self.address, None)


class MemoryStore(Store):
    """`ports.Store` on a hub."""

    grace = 0.08
    capabilities = Capabilities(fence_blocks=True)

    def __init__(self, shared: Hub, runtime: Runtime) -> None:
        self._hub = shared
        self._runtime = runtime
        self.closed = False

    def mailbox(self, holder: str) -> Mailbox:
        return MemoryMailbox(self, self._hub, self._runtime, holder)

    async def acquire(self, claim: Claim, enqueue: Enqueue | None, until: float) -> Answer:
        with self._hub.mutex:
            return self._hub.space.acquire(claim, enqueue, self._runtime.now())

    async def renew(self, renewals: Sequence[Renewal], until: float) -> list[bool]:
        with self._hub.mutex:
            now = self._runtime.now()
            return [self._hub.space.renew(renewal, now) for renewal in renewals]

    async def release(self, name: str, holder: str, until: float) -> bool:
        with self._hub.mutex:
            return self._hub.space.release(name, holder, self._runtime.now())

    async def adopt(self, claim: Claim, old_holder: str, until: float) -> Granted | None:
        with self._hub.mutex:
            return self._hub.space.adopt(claim, old_holder, self._runtime.now())

    async def inspect(self, name: str, until: float) -> LockInfo:
        with self._hub.mutex:
            return self._hub.space.inspect(name, self._runtime.now())

    async def facts(self, until: float) -> Facts:
        return Facts("memory", reach="process", persistence=Persistence.NONE, clock_offset=0.0)

    async def listing(self, pattern: str, cursor: str, until: float) -> Page:
        with self._hub.mutex:
            return self._hub.space.listing(pattern, cursor, self._runtime.now())

    async def force_release(self, name: str, holder: str, until: float) -> bool:
        with self._hub.mutex:
            return self._hub.space.force_release(name, holder, self._runtime.now())

    async def cancel_waits(self) -> None:
        self.closed = True
        for box in list(self._hub.boxes.values()):
            box.wake()

    async def close(self) -> None:
        await self.cancel_waits()

    def reset(self, *, forked: bool) -> None:
        if forked:
            self._hub.reset()
