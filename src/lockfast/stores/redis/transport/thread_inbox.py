"""The inbox and the mailbox for threads. A waiting thread reads the connection itself, see `threads.py`."""

from __future__ import annotations

import math
import threading
from typing import Any

from lockfast.errors import LockError, StoreError, StoreUnavailable, closed_error
from lockfast.ports import Runtime
from lockfast.stores.redis.protocol.notifications import (
    PING,
    grant_fast_path,
    new_address,
    subscribe_error,
    subscribe_request,
)
from lockfast.stores.redis.transport.connect import CLOSE_TIMEOUT, ConnectionFactory
from lockfast.stores.redis.transport.inbox import BaseInbox, BaseMailbox
from lockfast.stores.redis.transport.shard_channels import ShardChannels
from lockfast.stores.redis.transport.threads import PendingReply, ThreadLink, connect_link


class ThreadInbox(BaseInbox[ThreadLink]):
    """A thread holds `_mutex` while it connects or sends."""

    link_class = ThreadLink

    def __init__(
        self, new_connection: ConnectionFactory, runtime: Runtime, max_wait: float = math.inf, sharded: bool = False
    ) -> None:
        super().__init__(new_connection, runtime, max_wait, sharded)
        self.link: ThreadLink | None = None
        self.reset(forked=False)

    def reset(self, *, forked: bool) -> None:
        link, self.link = self.link, None
        self._mutex = threading.Lock()
        self.mailboxes = {}
        self._closed = False
        if link is not None:
            link.reset()

    @property
    def listening(self) -> bool:
        return self.link is not None and self.link.error is None

    def mailbox(self, holder: str, slot: int | None = None) -> ThreadMailbox:
        return ThreadMailbox(self, holder, slot)

    async def open_link(self, until: float) -> ThreadLink:
        link = self.link
        if link is not None and link.error is None:
            return link
        if not self._mutex.acquire(timeout=max(0.0, until - self.runtime.now())):
            raise StoreUnavailable(
                "Another thread is still connecting the inbox, so this one cannot wait for the lock yet. Try again."
            )
        try:
            link = self.link
            return self._connect(until) if link is None or link.error is not None else link
        finally:
            self._mutex.release()

    def _connect(self, until: float) -> ThreadLink:
        if self._closed:
            raise closed_error()
        if self.link is not None:
            self.link.close()
            self.link = None
        until = min(until, self.runtime.now() + self._max_wait)
        self.address = new_address(self.runtime)
        shards = ShardChannels(self.address)
        subscribed = PendingReply()
        subscribed.ready = self.sharded

        def dispatch(reply: Any) -> None:
            if subscribed.ready:
                self.receive(reply, shards)
            else:
                subscribed.settle(reply)

        link = connect_link(self._new_connection, self.runtime, until, dispatch, self.link_class)
        error: LockError | None = None
        if not self.sharded:
            link.send(subscribe_request(self.address), until)
            link.read(subscribed, until, self.runtime.now())
            error = subscribe_error(subscribed.value, subscribed.ready)
        if self._closed:  # close() does not wait for a slow connect
            error = closed_error()
        if error is not None:
            link.close()
            raise error
        if not self.sharded:
            link.feed = grant_fast_path(link.feed, self.address, link.protocol, self.notify)
        self._heard_at = self.runtime.now()
        self._shards = shards
        self.link = link
        return link

    async def _subscribe(
        self, link: ThreadLink, shards: ShardChannels, request: bytes, until: float
    ) -> StoreError | None:
        answer = PendingReply()
        with self._mutex:
            shards.pending.append(answer)
            link.send(request, until)
        await link.wait_for(answer, until)
        return link.error or subscribe_error(answer.value, answer.ready)

    def _ping(self, link: ThreadLink, now: float) -> None:
        if self._mutex.acquire(False):
            try:
                self._pinged_at = now
                link.send(PING, now)
            finally:
                self._mutex.release()

    def drop(self) -> None:
        if self.link is not None:
            self.link.disconnect("the server is not the master any more")

    async def close(self) -> None:
        self._closed = True
        locked = self._mutex.acquire(timeout=CLOSE_TIMEOUT)  # if not, a thread connects, and will see `_closed`
        link, self.link = self.link, None
        if locked:
            self._mutex.release()
        if link is not None:
            link.close()
        await self._await_leavers()


class ThreadMailbox(BaseMailbox[ThreadLink]):
    """`ports.Mailbox` for threads."""

    __slots__ = ("_woken",)

    def __init__(self, inbox: ThreadInbox, holder: str, slot: int | None = None) -> None:
        super().__init__(inbox, holder, slot)
        self._woken = PendingReply()

    def wake(self) -> None:
        self._woken.settle(None)

    def _prepare_sleep(self) -> None:
        self._woken.ready = False

    async def _sleep(self, link: ThreadLink, until: float) -> None:
        await link.wait_for(self._woken, until)
