"""The inbox for asyncio: one subscribed connection, and a mailbox for each acquisition."""

from __future__ import annotations

import math
from typing import Any

from lockfast.ports import Runtime, Waker
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
from lockfast.stores.redis.transport.tasks import CONNECT_TIMEOUT, Connector, TaskLink, connect_task_link
from lockfast.values import FirstNotification, GrantNotification


class TaskInbox:
    """`store.Inbox` for asyncio."""

    def __init__(
        self, dial: ConnectionFactory, runtime: Runtime, longest: float = math.inf, sharded: bool = False
    ) -> None:
        self._dial = dial
        self.runtime = runtime
        self._longest = longest
        self.sharded = sharded
        self._shards = Shards("")
        self.address = ""
        self.mailboxes: dict[str, TaskMailbox] = {}
        self._connector = Connector(self._connect, runtime)
        self._pinged_at = 0.0

    @property
    def listening(self) -> bool:
        return self._connector.link is not None and self._connector.link.error is None

    def mailbox(self, holder: str, slot: int | None = None) -> TaskMailbox:
        return TaskMailbox(self, holder, slot)

    async def open_link(self, until: float) -> TaskLink:
        return await self._connector.get(until)

    async def _connect(self) -> TaskLink:
        limit = min(CONNECT_TIMEOUT, self._longest)
        link = await connect_task_link(self._dial, self.runtime, limit)
        address = new_address(self.runtime)
        shards = Shards(address)
        if self.sharded:
            link.subscribed = True
        else:
            error = subscribe_error(await link.subscribe(subscribe_request(address), limit), True)
            if error is not None:
                link.fail("the subscription was refused")
                raise error
            link.feed = grant_fast_path(link.feed, address, link.protocol, self._give)
        link.on_push = lambda reply: self._deliver(reply, shards)
        link.on_failure = self._failed
        self.address, self._shards = address, shards
        return link

    async def join(self, slot: int, until: float) -> tuple[TaskLink, str]:
        """A connected connection that listens to the channel of a cluster slot, and that channel."""
        until = min(until, self.runtime.now() + self._longest)
        link, shards = await self.open_link(until), self._shards
        channel = shards.channel(slot)
        if channel in shards.joined:
            return link, channel
        answer = _Answer(self.runtime.waker())
        shards.asked.append(answer)
        link.send(shards.request(channel, {box.channel for box in self.mailboxes.values()}))
        await answer.waker.wait(until)
        error = link.error or subscribe_error(answer.value, answer.ready)
        if error is not None:
            raise error
        shards.joined.add(channel)
        return link, channel

    def _deliver(self, reply: Any, shards: Shards) -> None:
        if self.sharded and shards.takes(reply):
            if left := left_in(reply):
                for one in self.mailboxes.values():
                    if one.channel == left:
                        one.moved()
            return
        found = notification_in(reply)
        if found is not None:
            self._give(*found)

    def _give(self, holder: str, notification: GrantNotification | FirstNotification) -> None:
        box = self.mailboxes.get(holder)
        if box is not None:
            box.deliver(notification)

    def _failed(self) -> None:
        for box in self.mailboxes.values():
            box.wake()
        for answer in self._shards.asked:
            answer.settle(None)

    def drop(self) -> None:
        if self._connector.link is not None:
            self._connector.link.fail("the server is no master any more")

    def check(self, link: TaskLink) -> None:
        """A connection that is silent for long may be dead without knowing: make it speak."""
        now = self.runtime.now()
        if now - link.heard_at < MAX_SILENCE:
            return
        if self._pinged_at > link.heard_at:
            if now - self._pinged_at > STALE_AFTER:
                link.fail("the inbox has been silent for too long")
        else:
            self._pinged_at = now
            link.send(PING)

    async def close(self) -> None:
        await self._connector.close()
        give_up_at = self.runtime.now() + CLOSE_TIMEOUT
        while self.mailboxes and self.runtime.now() < give_up_at:
            await self.runtime.sleep(0.002)  # who waited is giving back its place

    def reset(self, *, forked: bool) -> None:
        self.mailboxes.clear()
        self._connector.reset(forked=forked)


class _Answer:
    """The answer to a subscription, and how to wake whoever waits for it."""

    def __init__(self, waker: Waker) -> None:
        self.waker = waker
        self.value: Any = None
        self.ready = False

    def settle(self, value: Any) -> None:
        self.value, self.ready = value, True
        self.waker.wake()


class TaskMailbox(BaseMailbox[TaskLink]):
    """`ports.Mailbox`."""

    __slots__ = ("_waker",)

    _inbox: TaskInbox

    def __init__(self, inbox: TaskInbox, holder: str, slot: int | None = None) -> None:
        super().__init__(inbox, holder, slot)
        self._waker: Waker | None = None

    async def open(self, until: float) -> None:
        self._inbox.mailboxes[self.holder] = self
        if self.slot is None or not self._inbox.sharded:
            self._link = await self._inbox.open_link(until)
        else:
            self._link, self.channel = await self._inbox.join(self.slot, until)

    def wake(self) -> None:
        if self._waker is not None:
            self._waker.wake()

    async def receive(self, until: float) -> GrantNotification | FirstNotification | None:
        """The next notification; None when `until` passed, or when this mailbox is not `connected`."""
        link = self._link
        if not self._notifications and link is not None and self.connected:
            self._inbox.check(link)
            if self._waker is None:
                self._waker = self._inbox.runtime.waker()
            await self._waker.wait(until)
        return self._notifications.popleft() if self._notifications else None

    async def wait(self, until: float) -> GrantNotification | FirstNotification | None:
        notification = await self.receive(until)
        if notification is None and not self.connected:
            self._link = await self._inbox.open_link(until)  # a notification may have come while nobody listened
        return notification
