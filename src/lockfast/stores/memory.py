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

from lockfast.errors import closed_error
from lockfast.facts import Facts, Persistence
from lockfast.ports import Mailbox, Runtime
from lockfast.values import (
    Answer,
    Ask,
    Granted,
    LockInfo,
    Next,
    Owner,
    Page,
    Place,
    Push,
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

Deliver = Callable[[str, Push | Next], bool]
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
    __slots__ = ("address", "ask", "dead_at", "since", "ticket", "turn")

    def __init__(self, ask: Ask, ticket: int, now: float) -> None:
        self.ask = ask
        self.ticket = ticket
        self.since = now
        self.refresh("", 0, now)

    def refresh(self, address: str, turn: int, now: float) -> None:
        self.address = address
        self.turn = turn
        self.dead_at = now + self.ask.ttl


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

    def _grant(self, ask: Ask, now: float) -> int:
        fence = self._next_fence(ask.name, ask.fences, ask.floor)
        self._holders[ask.name] = Holder(ask.holder, ask.owner, fence, now, ask.ttl)
        return fence

    def _hand_over(self, name: str, now: float, asker: str | None = None) -> None:
        """Give a free lock to the first in the queue who is alive; `asker` is, and needs no push."""
        queue = self._queues.get(name, [])
        while queue:
            waiter = queue.pop(0)
            if waiter.ask.holder != asker and now >= waiter.dead_at:
                continue
            fence = self._grant(waiter.ask, now)
            if waiter.ask.holder == asker or self._deliver(waiter.address, Push(waiter.turn, fence)):
                break
            del self._holders[name]
        self._tell_next(name, now)

    def _tell_next(self, name: str, now: float) -> None:
        """Tell whoever is first now for how long the holder may hold; one that cannot be told is dead."""
        queue, held = self._queues.get(name, []), self._holders.get(name)
        while queue and held is not None:
            if self._deliver(queue[0].address, Next(queue[0].turn, held.expires_at - now)):
                break
            queue.pop(0)
        if not queue:
            self._queues.pop(name, None)

    def acquire(self, ask: Ask, place: Place | None, now: float) -> Answer:
        held = self._held(ask.name, now)
        if held is None and ask.name in self._queues:
            if place is not None:
                self._join(ask, place, now)
            self._hand_over(ask.name, now, ask.holder)
            held = self._held(ask.name, now)
        if held is None:
            return Granted(self._grant(ask, now))
        if held.holder == ask.holder:
            held.prolong(now + ask.ttl)
            held.fence = self._fences[ask.name] = max(held.fence, ask.floor)
            return Granted(held.fence)
        left = held.expires_at - now
        if place is None:
            return Taken(left)
        waiter = self._join(ask, place, now)
        return Queued(waiter.ticket, self._queues[ask.name].index(waiter), left)

    def _join(self, ask: Ask, place: Place, now: float) -> Waiter:
        queue = self._queues.setdefault(ask.name, [])
        waiter = next((one for one in queue if one.ask.holder == ask.holder), None)
        if waiter is None:
            last = queue[-1].ticket if queue else 0
            # A ticket from before keeps its place: whoever was passed over while its connection was down
            # is not sent to the end.
            ticket = place.ticket if place.ticket is not None else max(last + 1, self._wall_us())
            waiter = Waiter(ask, ticket, now)
            queue.append(waiter)
            queue.sort(key=lambda one: one.ticket)
        elif place.ticket is not None and place.ticket < waiter.ticket:  # the older one counts
            waiter.ticket = place.ticket
            queue.sort(key=lambda one: one.ticket)
        waiter.refresh(place.address, place.turn, now)
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
        place = next((place for place, one in enumerate(queue) if one.ask.holder == holder), None)
        if place is None:
            return
        del queue[place]
        if place == 0:
            self._tell_next(name, now)

    def adopt(self, ask: Ask, old_holder: str, now: float) -> Granted | None:
        held = self._held(ask.name, now)
        if held is None or held.holder not in (ask.holder, old_holder):
            return None
        if held.holder == ask.holder:
            held.prolong(now + ask.ttl)
            return Granted(held.fence)
        return Granted(self._grant(ask, now))

    def take_away(self, name: str, holder: str, now: float) -> bool:
        held = self._held(name, now)
        if held is None or held.holder != holder:
            return False
        del self._holders[name]
        self._next_fence(name)
        self._hand_over(name, now)
        return True

    def survey(self, pattern: str, cursor: str, now: float) -> Page:
        names = sorted(name for name in self._fences if name > cursor and fits(name, pattern))
        infos = tuple(self.inspect(name, now)._replace(waiters=()) for name in names[:PAGE])
        return Page(infos, infos[-1].name if len(names) > PAGE else "")

    def inspect(self, name: str, now: float) -> LockInfo:
        held = self._held(name, now)
        queue = [one for one in self._queues.get(name, []) if now < one.dead_at]
        waiters = tuple(
            WaiterInfo(one.ask.holder, Owner.decode(one.ask.owner), now - one.since) for one in queue[:MOST_SHOWN]
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

    def __init__(self) -> None:
        self.mutex = threading.Lock()
        self.boxes: dict[str, MemoryMailbox] = {}
        self.space = Space(self._deliver, lambda: time.time_ns() // 1000)

    def _deliver(self, address: str, push: Push | Next) -> bool:
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
        self._pushes: deque[Push | Next] = deque()

    @property
    def address(self) -> str:
        return self._holder

    async def open(self, until: float) -> None:
        self._hub.boxes[self._holder] = self

    def push(self, push: Push | Next) -> None:
        self._pushes.append(push)
        self._waker.wake()

    def wake(self) -> None:
        self._waker.wake()

    async def wait(self, until: float) -> Push | Next | None:
        if not self._pushes:
            await self._waker.wait(until)
        if self._store.closed:
            raise closed_error()
        return self._pushes.popleft() if self._pushes else None

    def close(self) -> None:
        self._hub.boxes.pop(self._holder, None)


class MemoryStore:
    """`ports.Store` on a hub."""

    grace = 0.08
    direct = None
    reserves = True
    connected = True
    listening = True
    notices = False
    confirms = False
    reassert = None

    def __init__(self, shared: Hub, runtime: Runtime) -> None:
        self._hub = shared
        self._runtime = runtime
        self.closed = False

    def mailbox(self, holder: str) -> Mailbox:
        return MemoryMailbox(self, self._hub, self._runtime, holder)

    async def acquire(self, ask: Ask, place: Place | None, until: float) -> Answer:
        with self._hub.mutex:
            return self._hub.space.acquire(ask, place, self._runtime.now())

    async def renew(self, renewals: Sequence[Renewal], until: float) -> list[bool]:
        with self._hub.mutex:
            now = self._runtime.now()
            return [self._hub.space.renew(line, now) for line in renewals]

    async def release(self, name: str, holder: str, until: float) -> bool:
        with self._hub.mutex:
            return self._hub.space.release(name, holder, self._runtime.now())

    async def adopt(self, ask: Ask, old_holder: str, until: float) -> Granted | None:
        with self._hub.mutex:
            return self._hub.space.adopt(ask, old_holder, self._runtime.now())

    def on_change(self, tell: Callable[[str | None], None]) -> None:
        return None

    def listen(self) -> None:
        return None

    async def inspect(self, name: str, until: float) -> LockInfo:
        with self._hub.mutex:
            return self._hub.space.inspect(name, self._runtime.now())

    async def facts(self, until: float) -> Facts:
        return Facts("memory", reach="process", persistence=Persistence.NONE, clock_offset=0.0)

    async def survey(self, pattern: str, cursor: str, until: float) -> Page:
        with self._hub.mutex:
            return self._hub.space.survey(pattern, cursor, self._runtime.now())

    async def take_away(self, name: str, holder: str, until: float) -> bool:
        with self._hub.mutex:
            return self._hub.space.take_away(name, holder, self._runtime.now())

    def hang_up(self) -> None:
        """There is no connection."""

    async def end_waits(self) -> None:
        """Who waits is sent away by `close`, and what it is given until then goes back as all else does."""

    async def close(self) -> None:
        self.closed = True
        for box in list(self._hub.boxes.values()):
            box.wake()

    def forget(self, *, forked: bool) -> None:
        if forked:
            self._hub.reset()
