"""The inbox and the mailbox for asyncio. The event loop reads the connection, see `tasks.py`."""

from __future__ import annotations

import math
from typing import Any

from lockfast.errors import StoreError
from lockfast.ports import Runtime, Waker
from lockfast.stores.redis.protocol.notifications import (
    PING,
    grant_fast_path,
    new_address,
    subscribe_error,
    subscribe_request,
)
from lockfast.stores.redis.transport.connect import ConnectionFactory
from lockfast.stores.redis.transport.inbox import BaseInbox, BaseMailbox
from lockfast.stores.redis.transport.shard_channels import ShardChannels
from lockfast.stores.redis.transport.tasks import CONNECT_TIMEOUT, Connector, TaskLink, connect_task_link


class TaskInbox(BaseInbox[TaskLink]):
    """`store.Inbox` for asyncio."""

    def __init__(
        self, new_connection: ConnectionFactory, runtime: Runtime, max_wait: float = math.inf, sharded: bool = False
    ) -> None:
        super().__init__(new_connection, runtime, max_wait, sharded)
        self._connector = Connector(self._connect, runtime)

    def reset(self, *, forked: bool) -> None:
        self.mailboxes.clear()
        self._connector.reset(forked=forked)

    @property
    def listening(self) -> bool:
        return self._connector.connected

    def mailbox(self, holder: str, slot: int | None = None) -> TaskMailbox:
        return TaskMailbox(self, holder, slot)

    async def open_link(self, until: float) -> TaskLink:
        return await self._connector.get(until)

    async def _connect(self) -> TaskLink:
        limit = min(CONNECT_TIMEOUT, self._max_wait)
        link = await connect_task_link(self._new_connection, self.runtime, limit)
        address = new_address(self.runtime)
        shards = ShardChannels(address)
        if self.sharded:
            link.subscribed = True
        else:
            error = subscribe_error(await link.subscribe(subscribe_request(address), limit), True)
            if error is not None:
                link.fail("the server rejected the subscription")
                raise error
            link.feed = grant_fast_path(link.feed, address, link.protocol, self.notify)
        link.on_push = lambda reply: self.receive(reply, shards)
        link.on_failure = self._wake_all
        self._heard_at = self.runtime.now()
        self.address, self._shards = address, shards
        return link

    async def _subscribe(
        self, link: TaskLink, shards: ShardChannels, request: bytes, until: float
    ) -> StoreError | None:
        answer = _Answer(self.runtime.waker())
        shards.pending.append(answer)
        link.send(request)
        await answer.waker.wait(until)
        return link.error or subscribe_error(answer.value, answer.ready)

    def _wake_all(self) -> None:
        for mailbox in self.mailboxes.values():
            mailbox.wake()
        for answer in self._shards.pending:
            answer.settle(None)

    def _ping(self, link: TaskLink, now: float) -> None:
        self._pinged_at = now
        link.send(PING)

    def drop(self) -> None:
        self._connector.drop()

    async def close(self) -> None:
        await self._connector.close()
        await self._await_leavers()


class _Answer:
    """The reply to a subscription, and the waker of the task that waits for it."""

    def __init__(self, waker: Waker) -> None:
        self.waker = waker
        self.value: Any = None
        self.ready = False

    def settle(self, value: Any) -> None:
        self.value, self.ready = value, True
        self.waker.wake()


class TaskMailbox(BaseMailbox[TaskLink]):
    """`ports.Mailbox` for asyncio."""

    __slots__ = ("_waker",)

    def __init__(self, inbox: TaskInbox, holder: str, slot: int | None = None) -> None:
        super().__init__(inbox, holder, slot)
        self._waker: Waker | None = None

    def wake(self) -> None:
        if self._waker is not None:
            self._waker.wake()

    async def _sleep(self, link: TaskLink, until: float) -> None:
        if self._waker is None:
            self._waker = self._inbox.runtime.waker()
        await self._waker.wait(until)
