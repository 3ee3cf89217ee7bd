"""The inbox for threads: one subscribed connection, and a mailbox for each acquisition."""

from __future__ import annotations

import math
import threading
from typing import Any

from lockfast.errors import LockError, StoreUnavailable, closed_error
from lockfast.ports import Runtime
from lockfast.stores.redis.protocol.notifications import (
    PING,
    grant_fast_path,
    new_address,
    notification_in,
    subscribe_error,
    subscribe_request,
)
from lockfast.stores.redis.topology.shard_channels import Shards, left_in
from lockfast.stores.redis.transport.connect import CLOSE_TIMEOUT, MAX_SILENCE, STALE_AFTER, ConnectionFactory
from lockfast.stores.redis.transport.mailbox import BaseMailbox
from lockfast.stores.redis.transport.threads import PendingReply, ThreadLink, connect_link
from lockfast.values import FirstNotification, GrantNotification


class ThreadInbox:
    """`store.Inbox`. Invariant: whoever is in `mailboxes` gets its pushes as long as `link` is connected."""

    link_class = ThreadLink

    def __init__(
        self, dial: ConnectionFactory, runtime: Runtime, longest: float = math.inf, sharded: bool = False
    ) -> None:
        self._dial = dial
        self.runtime = runtime
        self._longest = longest
        self.sharded = sharded
        self.address = ""
        self.link: ThreadLink | None = None
        self.reset(forked=False)

    def reset(self, *, forked: bool) -> None:
        link, self.link = self.link, None
        self._mutex = threading.Lock()
        self.mailboxes: dict[str, ThreadMailbox] = {}
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

    async def open_link(self, until: float) -> ThreadLink:
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
        subscribed = PendingReply()
        subscribed.ready = self.sharded

        def dispatch(reply: Any) -> None:
            if not subscribed.ready:
                subscribed.settle(reply)
            else:
                self._deliver(reply, shards)

        link = connect_link(self._dial, self.runtime, until, dispatch, self.link_class)
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
            link.feed = grant_fast_path(link.feed, self.address, link.protocol, self._give)
        self._heard_at = self.runtime.now()
        self._shards = shards
        self.link = link

    async def join(self, slot: int, until: float) -> tuple[ThreadLink, str]:
        """A connected connection that listens to the channel of a cluster slot, and that channel."""
        until = min(until, self.runtime.now() + self._longest)
        link, shards = await self.open_link(until), self._shards
        channel = shards.channel(slot)
        if channel in shards.joined:
            return link, channel
        answer = PendingReply()
        with self._mutex:
            shards.asked.append(answer)
            link.send(shards.request(channel, {box.channel for box in tuple(self.mailboxes.values())}), until)
        await link.wait_for(answer, until)
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
            for one in tuple(self.mailboxes.values()):
                if one.channel == left:
                    one.moved()

    def _take(self, reply: Any) -> None:
        found = notification_in(reply)
        if found is None:
            self._heard_at = self.runtime.now()
        else:
            self._give(*found)

    def _give(self, holder: str, notification: GrantNotification | FirstNotification) -> None:
        """Give a notification to whom it is for."""
        self._heard_at = self.runtime.now()
        box = self.mailboxes.get(holder)
        if box is not None:
            box.deliver(notification)

    def check(self, link: ThreadLink) -> None:
        """A connection that is silent for long may be dead without knowing: make it speak."""
        now = self.runtime.now()
        if now - self._heard_at < MAX_SILENCE:
            return
        if self._pinged_at > self._heard_at:
            if now - self._pinged_at > STALE_AFTER:
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
        in_time = self._mutex.acquire(timeout=CLOSE_TIMEOUT)  # else somebody dials, and hangs up when that succeeds
        link, self.link = self.link, None
        if in_time:
            self._mutex.release()
        if link is not None:
            link.close()
        give_up_at = self.runtime.now() + CLOSE_TIMEOUT
        while self.mailboxes and self.runtime.now() < give_up_at:
            await self.runtime.sleep(0.002)  # who waited is giving back its place


class ThreadMailbox(BaseMailbox[ThreadLink]):
    """`ports.Mailbox`."""

    __slots__ = ("_reply",)

    _inbox: ThreadInbox

    def __init__(self, inbox: ThreadInbox, holder: str, slot: int | None = None) -> None:
        super().__init__(inbox, holder, slot)
        self._reply = PendingReply()

    async def open(self, until: float) -> None:
        self._inbox.mailboxes[self.holder] = self
        if self.slot is None or not self._inbox.sharded:
            self._link = await self._inbox.open_link(until)
        else:
            self._link, self.channel = await self._inbox.join(self.slot, until)

    def wake(self) -> None:
        self._reply.settle(None)

    async def receive(self, until: float) -> GrantNotification | FirstNotification | None:
        """The next notification; None when `until` passed, or when this mailbox is not `connected`."""
        link = self._link
        self._reply.ready = False  # before looking: a notification that comes now is seen in one place or the other
        if not self._notifications and link is not None and self.connected:
            self._inbox.check(link)
            await link.wait_for(self._reply, until)
        return self._notifications.popleft() if self._notifications else None

    async def wait(self, until: float) -> GrantNotification | FirstNotification | None:
        notification = await self.receive(until)
        if notification is None and not self.connected:
            self._link = await self._inbox.open_link(until)  # a notification may have come while nobody listened
        return notification
