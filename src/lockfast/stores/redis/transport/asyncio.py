"""The wire and the inbox for asyncio: two connections, shared by all tasks of a client.

Rules kept here: as in `threads.py`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from lockfast.ports import Runtime, Waker
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
from lockfast.stores.redis.topology.shard_channels import Shards, left_in
from lockfast.stores.redis.transport.dial import Dial
from lockfast.stores.redis.transport.mailbox import BaseMailbox
from lockfast.stores.redis.transport.task_link import DIAL_WITHIN, Dialler, TaskLink, dial_task_link
from lockfast.values import FirstNotification, GrantNotification

if TYPE_CHECKING:
    from lockfast.stores.redis.watch import TaskSession


class TaskWire:
    """`store.Wire` for asyncio."""

    def __init__(self, dial: Dial, runtime: Runtime, longest: float = math.inf) -> None:
        self._dial = dial
        self._runtime = runtime
        self._longest = longest
        self._dialler = Dialler(self._connect, runtime)
        self.grace = FIRST_GRACE
        self.pushes = False
        self.on_push: Callable[[Any], None] | None = None

    async def _connect(self) -> TaskLink:
        started = self._runtime.now()
        link = await dial_task_link(self._dial, self._runtime, min(DIAL_WITHIN, self._longest))
        self.grace = grace_after(self._runtime.now() - started)
        self.pushes = link.protocol == 3
        link.on_push = self.on_push
        return link

    def request(self, request: bytes, until: float, before: Sequence[bytes] = ()) -> Awaitable[Any]:
        link = self._dialler.link
        if link is None or link.error is not None:
            return self._dial_and_ask(request, until, before)
        return link.request(request, self._bounded(until) if self._longest < math.inf else until, before)

    async def _dial_and_ask(self, request: bytes, until: float, before: Sequence[bytes]) -> Any:
        link = await self._dialler.get(until)
        return await link.request(request, self._bounded(until), before)

    def _bounded(self, until: float) -> float:
        return min(until, self._runtime.now() + self._longest)

    async def post(
        self, requests: Sequence[bytes], until: float, on: TaskLink | None = None
    ) -> tuple[TaskLink, list[asyncio.Future[Any]]]:
        link = await self._dialler.get(until) if on is None else sound(on, self._dialler.link)
        return link, link.post(requests)

    async def collect(self, posted: tuple[TaskLink, list[asyncio.Future[Any]]], until: float) -> list[Any]:
        link, futures = posted
        return await link.collect(futures, until)

    @property
    def connected(self) -> bool:
        link = self._dialler.link
        return link is not None and link.error is None

    def session(self) -> TaskSession:
        """A connection of its own, to the same place."""
        from lockfast.stores.redis.watch import TaskSession

        return TaskSession(self._dial, self._runtime)

    def listen(self) -> None:
        return  # the event loop reads by itself

    def drop(self) -> None:
        if self._dialler.link is not None:
            self._dialler.link.fail("the server is no master any more")

    async def close(self) -> None:
        await self._dialler.close()

    def reset(self, *, forked: bool) -> None:
        self._dialler.reset(forked=forked)


class TaskInbox:
    """`store.Inbox` for asyncio."""

    def __init__(self, dial: Dial, runtime: Runtime, longest: float = math.inf, sharded: bool = False) -> None:
        self._dial = dial
        self.runtime = runtime
        self._longest = longest
        self.sharded = sharded
        self._shards = Shards("")
        self.address = ""
        self.boxes: dict[str, TaskMailbox] = {}
        self._dialler = Dialler(self._connect, runtime)
        self._pinged_at = 0.0

    @property
    def listening(self) -> bool:
        return self._dialler.link is not None and self._dialler.link.error is None

    def mailbox(self, holder: str, slot: int | None = None) -> TaskMailbox:
        return TaskMailbox(self, holder, slot)

    async def sound_link(self, until: float) -> TaskLink:
        return await self._dialler.get(until)

    async def _connect(self) -> TaskLink:
        limit = min(DIAL_WITHIN, self._longest)
        link = await dial_task_link(self._dial, self.runtime, limit)
        address = new_address(self.runtime)
        shards = Shards(address)
        if self.sharded:
            link.subscribed = True
        else:
            error = subscribe_error(await link.subscribe(subscribe_request(address), limit), True)
            if error is not None:
                link.fail("the subscription was refused")
                raise error
            link.feed = at_a_glance(link.feed, address, link.protocol, self._give)
        link.on_push = lambda reply: self._deliver(reply, shards)
        link.on_failure = self._failed
        self.address, self._shards = address, shards
        return link

    async def join(self, slot: int, until: float) -> tuple[TaskLink, str]:
        """A sound connection that listens to the channel of a cluster slot, and that channel."""
        until = min(until, self.runtime.now() + self._longest)
        link, shards = await self.sound_link(until), self._shards
        channel = shards.channel(slot)
        if channel in shards.joined:
            return link, channel
        answer = _Answer(self.runtime.waker())
        shards.asked.append(answer)
        link.send(shards.request(channel, {box.channel for box in self.boxes.values()}))
        await answer.waker.wait(until)
        error = link.error or subscribe_error(answer.value, answer.ready)
        if error is not None:
            raise error
        shards.joined.add(channel)
        return link, channel

    def _deliver(self, reply: Any, shards: Shards) -> None:
        if self.sharded and shards.takes(reply):
            if left := left_in(reply):
                for one in self.boxes.values():
                    if one.channel == left:
                        one.moved()
            return
        found = push_in(reply)
        if found is not None:
            self._give(*found)

    def _give(self, holder: str, push: GrantNotification | FirstNotification) -> None:
        box = self.boxes.get(holder)
        if box is not None:
            box.push(push)

    def _failed(self) -> None:
        for box in self.boxes.values():
            box.wake()
        for answer in self._shards.asked:
            answer.settle(None)

    def drop(self) -> None:
        if self._dialler.link is not None:
            self._dialler.link.fail("the server is no master any more")

    def check(self, link: TaskLink) -> None:
        """A connection that is silent for long may be dead without knowing: make it speak."""
        now = self.runtime.now()
        if now - link.heard_at < HEAR_WITHIN:
            return
        if self._pinged_at > link.heard_at:
            if now - self._pinged_at > STALE:
                link.fail("the inbox has been silent for too long")
        else:
            self._pinged_at = now
            link.send(PING)

    async def close(self) -> None:
        await self._dialler.close()
        give_up_at = self.runtime.now() + LEAVE_WITHIN
        while self.boxes and self.runtime.now() < give_up_at:
            await self.runtime.sleep(0.002)  # who waited is giving back its place

    def reset(self, *, forked: bool) -> None:
        self.boxes.clear()
        self._dialler.reset(forked=forked)


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
        self._inbox.boxes[self.holder] = self
        if self.slot is None or not self._inbox.sharded:
            self._link = await self._inbox.sound_link(until)
        else:
            self._link, self.channel = await self._inbox.join(self.slot, until)

    def wake(self) -> None:
        if self._waker is not None:
            self._waker.wake()

    async def hear(self, until: float) -> GrantNotification | FirstNotification | None:
        """The next push; None when `until` passed, or when this mailbox is not `sound`."""
        link = self._link
        if not self._pushes and link is not None and self.sound:
            self._inbox.check(link)
            if self._waker is None:
                self._waker = self._inbox.runtime.waker()
            await self._waker.wait(until)
        return self._pushes.popleft() if self._pushes else None

    async def wait(self, until: float) -> GrantNotification | FirstNotification | None:
        push = await self.hear(until)
        if push is None and not self.sound:
            self._link = await self._inbox.sound_link(until)  # a push may have come while nobody listened
        return push
