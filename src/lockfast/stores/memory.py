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
from lockfast.admission import LiveGrant, admit, free_at, refuse_other_mode
from lockfast.errors import closed_error
from lockfast.facts import Facts, Persistence
from lockfast.ports import Capabilities, Mailbox, Runtime, Store
from lockfast.values import Answer, Claim, Enqueue, Granted, LockInfo, Mode, Notification, Page, Queued, Renewal, Taken

MOST_SHOWN = 1000
PAGE = 500
MOST_AHEAD_US = 1_000_000  # how far ahead of the clock a quorum may set a fence


class Grant:
    __slots__ = ("expires_at", "fence", "holder", "mode", "owner", "since", "slots")

    def __init__(self, claim: Claim, fence: int, slots: tuple[int, ...], now: float) -> None:
        self.holder, self.owner, self.mode = claim.holder, claim.owner, claim.mode
        self.fence, self.slots = fence, slots
        self.since, self.expires_at = now, now + claim.ttl

    def renew(self, expires_at: float) -> None:
        # Never shortens: a request with a shorter ttl may arrive after one with a longer ttl.
        self.expires_at = max(self.expires_at, expires_at)

    @property
    def granted(self) -> Granted:
        return Granted(self.fence, slots=self.slots)


class Waiter:
    __slots__ = ("address", "attempt", "claim", "expires_at", "since", "ticket")

    def __init__(self, claim: Claim, ticket: int, now: float) -> None:
        self.claim, self.ticket, self.since = claim, ticket, now
        self.address, self.attempt, self.expires_at = "", 0, 0.0


class Space:
    """Invariants: a name is in `_grants` only while it has grants, and in `_queues` only while it has waiters; the
    grants of a name are in the order of their fences, and its queue in that of the tickets; no holder waits for its own
    lock. `deliver(address, notification)` returns False if no mailbox is open there."""

    def __init__(self, deliver: Callable[[str, Notification], bool], wall_us: Callable[[], int]) -> None:
        self._deliver = deliver
        self._wall_us = wall_us
        self._grants: dict[str, dict[str, Grant]] = {}
        self._queues: dict[str, list[Waiter]] = {}
        self._fences: dict[str, int] = {}

    def clear(self) -> None:
        """Lose everything, like a server that restarts without persistence."""
        self._grants.clear()
        self._queues.clear()
        self._fences.clear()

    def drop(self, name: str) -> None:
        """Delete the grants without a notification, like an external DEL."""
        self._grants.pop(name, None)

    def _held(self, name: str, now: float) -> dict[str, Grant]:
        """The live grants of a lock by holder id; a copy, so use `_end()` to end one."""
        held = self._grants.get(name)
        if not held:
            return {}
        for grant in list(held.values()):
            if now >= grant.expires_at:
                self._end(name, grant.holder)
        return dict(self._grants.get(name, {}))

    def _end(self, name: str, holder: str) -> None:
        held = self._grants[name]
        del held[holder]
        if not held:
            del self._grants[name]

    def _next_fence(self, name: str, count: int = 1, floor: int = 0) -> int:
        wall = self._wall_us()
        wanted = floor if floor < wall + MOST_AHEAD_US else 0  # further ahead: from a wrong clock
        fence = self._fences[name] = max(self._fences.get(name, 0) + count, wall, wanted)
        return fence

    def _grant(self, claim: Claim, slots: tuple[int, ...], now: float) -> Granted:
        fence = self._next_fence(claim.name, claim.fences, claim.floor)
        grant = self._grants.setdefault(claim.name, {})[claim.holder] = Grant(claim, fence, slots, now)
        return grant.granted

    def _serve(self, name: str, now: float, caller: str = "", *, notify: bool = True) -> None:
        """Grant from the head of the queue while it is admitted; remove dead waiters.

        The waiter that is first then is notified, if `notify` or if there was a grant. The `caller` is alive and gets
        no notification.
        """
        queue = self._queues.get(name, [])
        while queue:
            head = queue[0]
            claim, is_caller = head.claim, head.claim.holder == caller
            if not is_caller and now >= head.expires_at:
                queue.pop(0)
                continue
            live = _live(self._held(name, now))
            slots = admit(live, claim)
            if slots is None:
                if is_caller or not notify or self._deliver(head.address, self._first(head, live, now)):
                    break
                queue.pop(0)
                continue
            queue.pop(0)
            granted = self._grant(claim, slots, now)
            notification = values.GrantNotification(head.attempt, granted.fence, slots)
            if is_caller or self._deliver(head.address, notification):
                notify = True
            else:
                self._end(name, claim.holder)
        if not queue:
            self._queues.pop(name, None)

    @staticmethod
    def _first(head: Waiter, live: list[LiveGrant], now: float) -> values.FirstNotification:
        return values.FirstNotification(head.attempt, _left(live, head.claim, now))

    def acquire(self, claim: Claim, enqueue: Enqueue | None, now: float) -> Answer:
        name = claim.name
        held = self._held(name, now)
        if claim.holder in held:
            return self._repeat(held[claim.holder], claim, now)
        live = _live(held)
        if claim.weight and not any(one.claim.holder == claim.holder for one in self._queues.get(name, ())):
            refuse_other_mode(live, claim)
        slots = admit(live, claim)
        if name in self._queues:
            waiter = None if enqueue is None else self._enqueue(claim, enqueue, now)
            if slots is not None or live[0].mode is not Mode.EXCLUSIVE:
                # If only the queue keeps the claim out, the head may be dead. If a shared grant expired, the head may
                # be admitted.
                self._serve(name, now, claim.holder, notify=slots is not None)
            held = self._held(name, now)
            if claim.holder in held:
                return self._repeat(held[claim.holder], claim, now)
            live = _live(held)
            slots = admit(live, claim, queued_before=name in self._queues)
            if waiter is not None and name in self._queues:
                return Queued(waiter.ticket, self._queues[name].index(waiter), _left(live, claim, now))
        if slots is not None:
            return self._grant(claim, slots, now)
        if enqueue is None:
            return Taken(_left(live, claim, now))
        return Queued(self._enqueue(claim, enqueue, now).ticket, 0, _left(live, claim, now))

    def _repeat(self, own: Grant, claim: Claim, now: float) -> Granted:
        """The answer to a claim that was granted already."""
        own.renew(now + claim.ttl)
        own.fence = max(own.fence, claim.floor)
        self._fences[claim.name] = max(self._fences[claim.name], own.fence)
        return own.granted

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
        queue.sort(key=lambda one: (one.ticket, one.claim.holder))
        waiter.claim, waiter.address, waiter.attempt = claim, enqueue.address, enqueue.attempt
        waiter.expires_at = now + claim.ttl
        return waiter

    def acquire_all(self, claims: Sequence[Claim], now: float) -> list[Granted] | None:
        answers: list[tuple[Claim, tuple[int, ...] | Grant]] = []
        for claim in claims:
            held = self._held(claim.name, now)
            slots = admit(_live(held), claim, queued_before=claim.name in self._queues)
            own_or_slots = held.get(claim.holder, slots)
            if own_or_slots is None:
                return None
            answers.append((claim, own_or_slots))
        return [
            self._repeat(answer, claim, now) if isinstance(answer, Grant) else self._grant(claim, answer, now)
            for claim, answer in answers
        ]

    def renew(self, renewal: Renewal, now: float) -> bool:
        own = self._held(renewal.name, now).get(renewal.holder)
        if own is None:
            return False
        if renewal.final:
            own.expires_at = now + renewal.ttl
        else:
            own.renew(now + renewal.ttl)
        return True

    def release(self, name: str, holder: str, now: float) -> bool:
        ours = holder in self._held(name, now)
        if ours:
            self._end(name, holder)
        queue = self._queues.get(name)
        if queue is None:
            return ours
        index = next((index for index, one in enumerate(queue) if one.claim.holder == holder), None)
        if index is not None:
            del queue[index]
        self._serve(name, now, notify=ours or index == 0)
        return ours

    def adopt(self, claim: Claim, old_holder: str, now: float) -> Granted | None:
        held = self._held(claim.name, now)
        own, old = held.get(claim.holder), held.get(old_holder)
        if own is not None:
            own.renew(now + claim.ttl)
            return own.granted
        if old is None or old.mode is not claim.mode:
            return None
        self._end(claim.name, old_holder)
        return self._grant(claim, old.slots, now)

    def downgrade(self, claim: Claim, now: float) -> bool:
        own = self._held(claim.name, now).get(claim.holder)
        if own is None or own.mode is Mode.PERMITS:
            return False
        own.mode = claim.mode
        own.renew(now + claim.ttl)
        self._serve(claim.name, now)
        return True

    def force_release(self, name: str, holder: str, now: float) -> bool:
        if holder not in self._held(name, now):
            return False
        self._end(name, holder)
        self._next_fence(name)
        self._serve(name, now)
        return True

    def listing(self, pattern: str, cursor: str, now: float) -> Page:
        names = sorted(name for name in self._fences if name > cursor and values.fits(name, pattern))
        infos = tuple(self.inspect(name, now)._replace(waiters=()) for name in names[:PAGE])
        return Page(infos, infos[-1].name if len(names) > PAGE else "")

    def inspect(self, name: str, now: float) -> LockInfo:
        decode = values.Owner.decode
        holders = tuple(
            values.HolderInfo(
                one.holder, decode(one.owner), one.fence, now - one.since, one.expires_at - now, one.mode, one.slots
            )
            for one in sorted(self._held(name, now).values(), key=lambda one: one.fence)
        )
        queue = [one for one in self._queues.get(name, []) if now < one.expires_at]
        waiters = tuple(
            values.waiter_info(one.claim, decode(one.claim.owner), now - one.since) for one in queue[:MOST_SHOWN]
        )
        return LockInfo(name, holders[:MOST_SHOWN], self._fences.get(name), waiters, len(queue))


def _live(held: dict[str, Grant]) -> list[LiveGrant]:
    return [LiveGrant(one.mode, one.slots, one.expires_at) for one in held.values()]


def _left(live: list[LiveGrant], claim: Claim, now: float) -> float | None:
    ends = free_at(live, claim)
    return None if ends is None else ends - now


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
    capabilities = Capabilities(fence_blocks=True, readers=True, permits=True, batches=True)

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

    async def acquire_all(self, claims: Sequence[Claim], until: float) -> list[Granted] | None:
        with self._hub.mutex:
            return self._hub.space.acquire_all(claims, self._runtime.now())

    async def downgrade(self, claim: Claim, until: float) -> bool:
        with self._hub.mutex:
            return self._hub.space.downgrade(claim, self._runtime.now())

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
