"""The wire and the inbox for threads: two connections, shared by all threads of a client.

Rules kept here:

- Requests go out in one order and replies come back in it. A caller that gave up leaves its slot behind, so that the
  late reply is recognised and dropped; the connection survives that, and what the caller sends next (its clean-up)
  is executed after what it gave up on.
- A connection that has owed a reply for `STALE` seconds is given up.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lockfast.errors import LockError, Outcome, StoreUnavailable, closed_error
from lockfast.ports import Runtime
from lockfast.stores.redis.protocol.notifications import (
    FIRST_GRACE,
    HEAR_WITHIN,
    LEAVE_WITHIN,
    PING,
    STALE,
    at_a_glance,
    grace_after,
    new_address,
    push_in,
    sound,
    subscribe_error,
    subscribe_request,
)
from lockfast.stores.redis.protocol.resp import Pushed
from lockfast.stores.redis.topology.shard_channels import Shards, left_in
from lockfast.stores.redis.transport.dial import Dial
from lockfast.stores.redis.transport.thread_link import AGAIN, SLICE, Link, Slot, dial_link
from lockfast.stores.redis.transport.thread_mailbox import ThreadMailbox
from lockfast.values import FirstNotification, GrantNotification

if TYPE_CHECKING:
    from lockfast.stores.redis.watch import ThreadSession


class ThreadWire:
    """`store.Wire`. `_mutex` is held by whoever dials or sends."""

    link_class = Link

    def __init__(self, dial: Dial, runtime: Runtime, longest: float = math.inf) -> None:
        self._dial = dial
        self._runtime = runtime
        self._longest = longest
        self.grace = FIRST_GRACE
        self.pushes = False
        self.on_push: Callable[[Any], None] | None = None
        self._link: Link | None = None
        self.reset(forked=False)

    def reset(self, *, forked: bool) -> None:
        link, self._link = self._link, None
        self._mutex = threading.Lock()
        self._closed = False
        if link is not None:
            link.reset()

    async def request(self, request: bytes, until: float, before: Sequence[bytes] = ()) -> Any:
        sent = self.submit(request, self._runtime.now(), until, before)
        reply = self.fetch(sent, until)
        return await self.reply(sent, until) if reply is None else reply

    def submit(self, request: bytes, now: float, until: float, before: Sequence[bytes] = ()) -> tuple[Link, Slot]:
        """Send a request, at the moment `now`; what to fetch the reply with. In few steps, as every cycle comes by here
        twice: what is unusual is left to others."""
        link = self._link
        if link is None or link.error is not None or self._mutex.locked():
            return self._send(request, until, before)
        slot = Slot()
        slot.sent_at = now
        try:
            with self._mutex:  # not by acquire(): an interrupt right after that would leave it taken for ever
                if before:
                    link.pending.extend(_in_order(before, slot))
                    request = b"".join((*before, request))
                else:
                    link.pending.append(slot)
                try:
                    written = link.write(request)
                except AGAIN:
                    written = 0
                if written != len(request):
                    link.send(request[written:], until)
                    slot.sent_at = self._runtime.now()  # that may have taken a while
        except OSError as error:
            link.fail(f"the connection broke while sending ({error})")
        except BaseException:
            link.fail("sending was interrupted")  # half a request may be out
            raise
        return link, slot

    def fetch(self, sent: tuple[Link, Slot], until: float) -> Any:
        """The reply to what was submitted, if it comes at once, as nearly always; None when it is to be awaited."""
        link, slot = sent
        leads = False
        try:
            if link.reads_freely and until - slot.sent_at > SLICE and link.leading.acquire(False):
                leads = True
                if not slot.ready:  # another may have read it
                    link.take_in()
        except BaseException:  # in the midst of reading, or leading without knowing it
            link.fail("reading was interrupted")
            raise
        finally:
            if leads:
                link.leading.release()
                if link.followers:
                    link.wake_a_follower()
        return slot.value

    async def reply(self, sent: tuple[Link, Slot], until: float) -> Any:
        """The same, whenever it comes."""
        link, slot = sent
        await link.await_slot(slot, min(until, slot.sent_at + self._longest))
        if slot.ready:
            return slot.value
        raise link.error or self._overdue(link)

    async def post(self, requests: Sequence[bytes], until: float, on: Link | None = None) -> tuple[Link, list[Slot]]:
        slots: list[Slot] = []
        link, last = self._send(requests[-1], until, requests[:-1], slots, on)
        return link, [*slots, last]

    async def collect(self, posted: tuple[Link, list[Slot]], until: float) -> list[Any]:
        link, slots = posted
        await self.reply((link, slots[-1]), until)  # replies come in order, so with it all are there
        return [slot.value for slot in slots]

    @property
    def connected(self) -> bool:
        link = self._link
        return link is not None and link.error is None

    def session(self) -> ThreadSession:
        """A connection of its own, to the same place."""
        from lockfast.stores.redis.watch import ThreadSession

        return ThreadSession(self._dial, self._runtime)

    def listen(self) -> None:
        link = self._link
        if link is not None and link.error is None:
            link.look()

    def _send(
        self,
        request: bytes,
        until: float,
        before: Sequence[bytes],
        early: list[Slot] | None = None,
        on: Link | None = None,
    ) -> tuple[Link, Slot]:
        mutex = self._mutex
        if not mutex.acquire(False) and not mutex.acquire(timeout=max(0.0, until - self._runtime.now())):
            raise StoreUnavailable("The connection is busy, so the request was not sent. Try again later.")
        try:
            link = self._link
            if link is None or link.error is not None or on is not None:
                link = self._connect(until) if on is None else sound(on, link)
            slot = Slot()
            slot.sent_at = self._runtime.now()
            slots = _in_order(before, slot)
            if early is not None:
                early += slots[:-1]
            link.send(b"".join((*before, request)), until, slots)
            return link, slot
        finally:
            mutex.release()

    def _connect(self, until: float) -> Link:
        if self._closed:
            raise closed_error()
        if self._link is not None:
            self._link.close()
            self._link = None
        started = self._runtime.now()
        until = min(until, started + self._longest)
        link = dial_link(self._dial, self._runtime, until, self._told, self.link_class)
        if self._closed:  # meanwhile, and without waiting for us
            link.close()
            raise closed_error()
        self._link = link
        self.grace = grace_after(self._runtime.now() - started)
        self.pushes = link.protocol == 3
        return link

    def _told(self, reply: Any) -> None:
        """What no request asked for."""
        if type(reply) is Pushed and self.on_push is not None:
            self.on_push(reply)

    def _overdue(self, link: Link) -> StoreUnavailable:
        pending = link.pending
        if pending and self._runtime.now() - pending[0].sent_at > STALE:
            link.fail("the server has been silent for too long")
        return StoreUnavailable(
            "The server did not answer in time; the request may or may not have been carried out.",
            outcome=Outcome.UNKNOWN,
        )

    def drop(self) -> None:
        if self._link is not None:
            self._link.disconnect("the server is no master any more")

    async def close(self) -> None:
        self._closed = True
        in_time = self._mutex.acquire(timeout=LEAVE_WITHIN)  # else somebody dials, and hangs up when that succeeds
        link, self._link = self._link, None
        if in_time:
            self._mutex.release()
        if link is not None:
            link.close()


def _in_order(before: Sequence[bytes], last: Slot) -> list[Slot]:
    """A slot for each request that goes out `before` that of `last`, and that one."""
    slots = []
    for _ in before:
        slot = Slot()
        slot.sent_at = last.sent_at
        slots.append(slot)
    slots.append(last)
    return slots


class ThreadInbox:
    """`store.Inbox`. Invariant: whoever is in `boxes` gets its pushes as long as `link` is sound."""

    link_class = Link

    def __init__(self, dial: Dial, runtime: Runtime, longest: float = math.inf, sharded: bool = False) -> None:
        self._dial = dial
        self.runtime = runtime
        self._longest = longest
        self.sharded = sharded
        self.address = ""
        self.link: Link | None = None
        self.reset(forked=False)

    def reset(self, *, forked: bool) -> None:
        link, self.link = self.link, None
        self._mutex = threading.Lock()
        self.boxes: dict[str, ThreadMailbox] = {}
        self._shards = Shards("")
        self._heard_at = self._pinged_at = 0.0
        self._closed = False
        if link is not None:
            link.reset()

    @property
    def listening(self) -> bool:
        return self.link is not None and self.link.error is None

    def mailbox(self, holder: str, slot: int | None = None) -> ThreadMailbox:
        return ThreadMailbox(self, holder, slot)

    def sound_link(self, until: float) -> Link:
        """A subscribed connection, dialled if need be."""
        link = self.link
        if link is not None and link.error is None:
            return link
        if not self._mutex.acquire(timeout=max(0.0, until - self.runtime.now())):
            raise StoreUnavailable("The inbox is still being connected. Try again later.")
        try:
            if self.link is None or self.link.error is not None:
                self._connect(until)
            link = self.link
            if link is None:
                raise StoreUnavailable("The connection was closed.")
            return link
        finally:
            self._mutex.release()

    def _connect(self, until: float) -> None:
        if self._closed:
            raise closed_error()
        if self.link is not None:
            self.link.close()
            self.link = None
        until = min(until, self.runtime.now() + self._longest)
        self.address = new_address(self.runtime)
        shards = Shards(self.address)
        subscribed = Slot()
        subscribed.ready = self.sharded

        def dispatch(reply: Any) -> None:
            if not subscribed.ready:
                subscribed.settle(reply)
            else:
                self._deliver(reply, shards)

        link = dial_link(self._dial, self.runtime, until, dispatch, self.link_class)
        error: LockError | None = None
        if not self.sharded:
            link.send(subscribe_request(self.address), until)
            link.read_for(subscribed, until)
            error = subscribe_error(subscribed.value, subscribed.ready)
        if self._closed:  # meanwhile, and without waiting for us
            error = closed_error()
        if error is not None:
            link.close()
            raise error
        if not self.sharded:
            link.dispatch = self._take
            link.feed = at_a_glance(link.feed, self.address, link.protocol, self._give)
        self._heard_at = self.runtime.now()
        self._shards = shards
        self.link = link

    async def join(self, slot: int, until: float) -> tuple[Link, str]:
        """A sound connection that listens to the channel of a cluster slot, and that channel."""
        until = min(until, self.runtime.now() + self._longest)
        link, shards = self.sound_link(until), self._shards
        channel = shards.channel(slot)
        if channel in shards.joined:
            return link, channel
        answer = Slot()
        with self._mutex:
            shards.asked.append(answer)
            link.send(shards.request(channel, {box.channel for box in tuple(self.boxes.values())}), until)
        await link.await_slot(answer, until)
        error = link.error or subscribe_error(answer.value, answer.ready)
        if error is not None:
            raise error
        shards.joined.add(channel)
        return link, channel

    def _deliver(self, reply: Any, shards: Shards) -> None:
        """What came on channels of a cluster's slots."""
        if not shards.takes(reply):
            self._take(reply)
            return
        self._heard_at = self.runtime.now()
        if left := left_in(reply):
            for one in tuple(self.boxes.values()):
                if one.channel == left:
                    one.moved()

    def _take(self, reply: Any) -> None:
        found = push_in(reply)
        if found is None:
            self._heard_at = self.runtime.now()
        else:
            self._give(*found)

    def _give(self, holder: str, push: GrantNotification | FirstNotification) -> None:
        """Give a push to whom it is for."""
        self._heard_at = self.runtime.now()
        box = self.boxes.get(holder)
        if box is not None:
            box.push(push)

    def check(self, link: Link) -> None:
        """A connection that is silent for long may be dead without knowing: make it speak."""
        now = self.runtime.now()
        if now - self._heard_at < HEAR_WITHIN:
            return
        if self._pinged_at > self._heard_at:
            if now - self._pinged_at > STALE:
                link.fail("the inbox has been silent for too long")
        elif self._mutex.acquire(False):
            try:
                self._pinged_at = now
                link.send(PING, now)
            finally:
                self._mutex.release()

    def drop(self) -> None:
        if self.link is not None:
            self.link.disconnect("the server is no master any more")

    async def close(self) -> None:
        self._closed = True
        in_time = self._mutex.acquire(timeout=LEAVE_WITHIN)  # else somebody dials, and hangs up when that succeeds
        link, self.link = self.link, None
        if in_time:
            self._mutex.release()
        if link is not None:
            link.close()
        give_up_at = self.runtime.now() + LEAVE_WITHIN
        while self.boxes and self.runtime.now() < give_up_at:
            await self.runtime.sleep(0.002)  # who waited is giving back its place
