"""The memory store: locks between the threads and tasks of one process, and the reference of what a store does.

One `Space` is one set of locks; every connection to the same `memory://name` shares it, in either colour. Read
`Space` to learn the semantics that the Lua scripts and the SQL keep too: it has no I/O, and time comes in as an
argument.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from lockfast.errors import closed_error
from lockfast.facts import Facts, Persistence
from lockfast.ports import Capabilities, Mailbox, Runtime, Store
from lockfast.values import (
    Answer,
    Claim,
    Enqueue,
    FirstNotification,
    Granted,
    GrantNotification,
    LockInfo,
    Owner,
    Page,
    Queued,
    Renewal,
    Taken,
    WaiterInfo,
    fits,
)

MOST_SHOWN = 1000
PAGE = 500
MOST_AHEAD_US = 1_000_000
"""How far ahead of the clock a quorum may ask a fence to be."""

Deliver = Callable[[str, GrantNotification | FirstNotification], bool]
"""Push to an address; False when nobody listens there."""


class Holder:
    __slots__ = ("expires_at", "fence", "holder", "owner", "since")

    def __init__(self, holder: str, owner: str, fence: int, now: float, ttl: float) -> None:
        self.holder = holder
        self.owner = owner
        self.fence = fence
        self.since = now
        self.expires_at = now + ttl

    def prolong(self, until: float) -> None:
        # Never shortens: a request with a shorter ttl may arrive late, after one with a longer.
        self.expires_at = max(self.expires_at, until)


class Waiter:
    __slots__ = ("address", "attempt", "claim", "dead_at", "since", "ticket")

    def __init__(self, claim: Claim, ticket: int, now: float) -> None:
        self.claim = claim
        self.ticket = ticket
        self.since = now
        self.refresh("", 0, now)

    def refresh(self, address: str, attempt: int, now: float) -> None:
        self.address = address
        self.attempt = attempt
        self.dead_at = now + self.claim.ttl


class Space:
    """Invariants: a name is in `_queues` only while somebody waits for it; a queue is sorted by ticket; nobody is
    both the holder and in the queue."""

    def __init__(self, deliver: Deliver, wall_us: Callable[[], int]) -> None:
        self._deliver = deliver
        self._wall_us = wall_us
        self._holders: dict[str, Holder] = {}
        self._queues: dict[str, list[Waiter]] = {}
        self._fences: dict[str, int] = {}

    def clear(self) -> None:
        """Forget everything, as a server does that restarts without persistence."""
        self._holders.clear()
        self._queues.clear()
        self._fences.clear()

    def drop(self, name: str) -> None:
        """Take the lock away from its holder without a word, as an operator's DEL does."""
        self._holders.pop(name, None)

    def _held(self, name: str, now: float) -> Holder | None:
        held = self._holders.get(name)
        if held is not None and now >= held.expires_at:
            del self._holders[name]
            return None
        return held

    def _next_fence(self, name: str, count: int = 1, floor: int = 0) -> int:
        wall = self._wall_us()
        wanted = floor if floor < wall + MOST_AHEAD_US else 0  # further ahead, it came from a wrong clock
        fence = self._fences[name] = max(self._fences.get(name, 0) + count, wall, wanted)
        return fence

    def _grant(self, claim: Claim, now: float) -> int:
        fence = self._next_fence(claim.name, claim.fences, claim.floor)
        self._holders[claim.name] = Holder(claim.holder, claim.owner, fence, now, claim.ttl)
        return fence

    def _hand_over(self, name: str, now: float, asker: str | None = None) -> None:
        """Give a free lock to the first in the queue who is alive; `asker` is, and needs no push."""
        queue = self._queues.get(name, [])
        while queue:
            waiter = queue.pop(0)
            if waiter.claim.holder != asker and now >= waiter.dead_at:
                continue
            fence = self._grant(waiter.claim, now)
            if waiter.claim.holder == asker or self._deliver(waiter.address, GrantNotification(waiter.attempt, fence)):
                break
            del self._holders[name]
        self._tell_next(name, now)

    def _tell_next(self, name: str, now: float) -> None:
        """Tell whoever is first now for how long the holder may hold; one that cannot be told is dead."""
        queue, held = self._queues.get(name, []), self._holders.get(name)
        while queue and held is not None:
            if self._deliver(queue[0].address, FirstNotification(queue[0].attempt, held.expires_at - now)):
                break
            queue.pop(0)
        if not queue:
            self._queues.pop(name, None)

    def acquire(self, claim: Claim, enqueue: Enqueue | None, now: float) -> Answer:
        held = self._held(claim.name, now)
        if held is None and claim.name in self._queues:
            if enqueue is not None:
                self._join(claim, enqueue, now)
            self._hand_over(claim.name, now, claim.holder)
            held = self._held(claim.name, now)
        if held is None:
            return Granted(self._grant(claim, now))
        if held.holder == claim.holder:
            held.prolong(now + claim.ttl)
            held.fence = self._fences[claim.name] = max(held.fence, claim.floor)
            return Granted(held.fence)
        left = held.expires_at - now
        if enqueue is None:
            return Taken(left)
        waiter = self._join(claim, enqueue, now)
        return Queued(waiter.ticket, self._queues[claim.name].index(waiter), left)

    def _join(self, claim: Claim, enqueue: Enqueue, now: float) -> Waiter:
        queue = self._queues.setdefault(claim.name, [])
        waiter = next((one for one in queue if one.claim.holder == claim.holder), None)
        if waiter is None:
            last = queue[-1].ticket if queue else 0
            # A ticket from before keeps its place: whoever was passed over while its connection was down
            # is not sent to the end.
            ticket = enqueue.ticket if enqueue.ticket is not None else max(last + 1, self._wall_us())
            waiter = Waiter(claim, ticket, now)
            queue.append(waiter)
            queue.sort(key=lambda one: one.ticket)
        elif enqueue.ticket is not None and enqueue.ticket < waiter.ticket:  # the older one counts
            waiter.ticket = enqueue.ticket
            queue.sort(key=lambda one: one.ticket)
        waiter.refresh(enqueue.address, enqueue.attempt, now)
        return waiter

    def renew(self, line: Renewal, now: float) -> bool:
        held = self._held(line.name, now)
        if held is None or held.holder != line.holder:
            return False
        if line.final:
            held.expires_at = now + line.ttl
        else:
            held.prolong(now + line.ttl)
        return True

    def release(self, name: str, holder: str, now: float) -> bool:
        held = self._held(name, now)
        ours = held is not None and held.holder == holder
        if ours:
            del self._holders[name]
        else:
            self._leave(name, holder, now)
        if name in self._queues and self._held(name, now) is None:
            self._hand_over(name, now)
        return ours

    def _leave(self, name: str, holder: str, now: float) -> None:
        queue = self._queues.get(name, [])
        enqueue = next((enqueue for enqueue, one in enumerate(queue) if one.claim.holder == holder), None)
        if enqueue is None:
            return
        del queue[enqueue]
        if enqueue == 0:
            self._tell_next(name, now)

    def adopt(self, claim: Claim, old_holder: str, now: float) -> Granted | None:
        held = self._held(claim.name, now)
        if held is None or held.holder not in (claim.holder, old_holder):
            return None
        if held.holder == claim.holder:
            held.prolong(now + claim.ttl)
            return Granted(held.fence)
        return Granted(self._grant(claim, now))

    def force_release(self, name: str, holder: str, now: float) -> bool:
        held = self._held(name, now)
        if held is None or held.holder != holder:
            return False
        del self._holders[name]
        self._next_fence(name)
        self._hand_over(name, now)
        return True

    def listing(self, pattern: str, cursor: str, now: float) -> Page:
        names = sorted(name for name in self._fences if name > cursor and fits(name, pattern))
        infos = tuple(self.inspect(name, now)._replace(waiters=()) for name in names[:PAGE])
        return Page(infos, infos[-1].name if len(names) > PAGE else "")

    def inspect(self, name: str, now: float) -> LockInfo:
        held = self._held(name, now)
        queue = [one for one in self._queues.get(name, []) if now < one.dead_at]
        waiters = tuple(
            WaiterInfo(one.claim.holder, Owner.decode(one.claim.owner), now - one.since) for one in queue[:MOST_SHOWN]
        )
        fence = self._fences.get(name)
        if held is None:
            return LockInfo(name, fence=fence, waiters=waiters, waiting=len(queue))
        return LockInfo(
            name,
            holder=held.holder,
            owner=Owner.decode(held.owner),
            fence=fence,
            held_for=now - held.since,
            ttl_left=held.expires_at - now,
            waiters=waiters,
            waiting=len(queue),
        )


class Hub:
    """A space that many connections share, with the post between them."""

    def __init__(self, wall_us: Callable[[], int] = lambda: time.time_ns() // 1000) -> None:
        self.mutex: AbstractContextManager[Any] = threading.Lock()
        self.boxes: dict[str, MemoryMailbox] = {}
        self.space = Space(self._deliver, wall_us)

    def _deliver(self, address: str, push: GrantNotification | FirstNotification) -> bool:
        box = self.boxes.get(address)
        if box is None:
            return False
        box.push(push)
        return True

    def reset(self) -> None:
        """In a forked child: the parent's locks are not ours, and a mutex may have been held at the fork."""
        self.mutex = threading.Lock()
        self.boxes.clear()
        self.space.clear()


_hubs: dict[str, Hub] = {}


def hub(name: str) -> Hub:
    """The hub that every `memory://name` of this process shares."""
    return _hubs.setdefault(name, Hub())  # atomic, so that no mutex can be held at a fork


class MemoryMailbox:
    """One acquisition's mailbox; pushes may come from any thread."""

    def __init__(self, store: MemoryStore, shared: Hub, runtime: Runtime, holder: str) -> None:
        self._store = store
        self._hub = shared
        self._waker = runtime.waker()
        self._holder = holder
        self._pushes: deque[GrantNotification | FirstNotification] = deque()

    @property
    def address(self) -> str:
        return self._holder

    async def open(self, until: float) -> None:
        self._hub.boxes[self._holder] = self

    def push(self, push: GrantNotification | FirstNotification) -> None:
        self._pushes.append(push)
        self._waker.wake()

    def wake(self) -> None:
        self._waker.wake()

    async def wait(self, until: float) -> GrantNotification | FirstNotification | None:
        if not self._pushes:
            await self._waker.wait(until)
        if self._store.closed:
            raise closed_error()
        return self._pushes.popleft() if self._pushes else None

    def close(self) -> None:
        self._hub.boxes.pop(self._holder, None)


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
            return [self._hub.space.renew(line, now) for line in renewals]

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

    def disconnect(self) -> None:
        """There is no connection."""

    async def cancel_waits(self) -> None:
        """Who waits is sent away by `close`, and what it is given until then goes back as all else does."""

    async def close(self) -> None:
        self.closed = True
        for box in list(self._hub.boxes.values()):
            box.wake()

    def reset(self, *, forked: bool) -> None:
        if forked:
            self._hub.reset()
