"""One Redis or Valkey server as a member of a quorum.

A request to a server that is not connected fails at once, so that it delays no caller. Only `connect` connects, and the
quorum calls it in the background.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockfast.errors import StoreUnavailable
from lockfast.facts import Facts
from lockfast.ports import Runtime
from lockfast.stores.redis.lua import scripts
from lockfast.stores.redis.protocol import replies
from lockfast.stores.redis.protocol.resp import pack
from lockfast.stores.redis.store import RedisStore, release_request
from lockfast.stores.redis.transport.connect import ConnectionFactory
from lockfast.stores.redis.transport.multi_wait import MultiWaitLink
from lockfast.stores.redis.transport.task_inbox import TaskInbox
from lockfast.stores.redis.transport.tasks import TaskLink, TaskWire
from lockfast.stores.redis.transport.thread_inbox import ThreadInbox
from lockfast.stores.redis.transport.threads import ThreadLink, ThreadWire
from lockfast.values import AUX_PREFIX, Claim

LOAD = tuple(pack(b"SCRIPT", b"LOAD", script.text) for script in (scripts.ACQUIRE, scripts.RENEW))
"""Sent before the first request. If the account may not load scripts, the first use of each loads it."""
MARK_MS = b"5000"
UNREAD_AFTER = 0.02
"""Seconds after which a reply that no thread waits for is read, to find out whether it has arrived."""


def not_connected() -> StoreUnavailable:
    return StoreUnavailable("There is no connection to the server, so nothing was sent. It is being reconnected.")


class TaskMemberWire(TaskWire):
    """A wire for asyncio whose requests fail at once while it is not connected."""

    @property
    def silent_since(self) -> float | None:
        """When the oldest unanswered request was sent; None if there is none."""
        return None if self._connector.link is None else self._connector.link.silent_since

    async def connect(self, until: float) -> bool:
        """Connect unless connected; True if the connection is new."""
        before = self._connector.link
        return await self._connector.get(until) is not before

    async def request(self, request: bytes, until: float, before: Sequence[bytes] = ()) -> Any:
        if not self.connected:
            raise not_connected()
        return await super().request(request, until, before)


class TaskMemberInbox(TaskInbox):
    """An inbox for asyncio whose mailboxes fail to open while it is not connected."""

    async def connect(self, until: float) -> None:
        await self._connector.get(until)

    async def open_link(self, until: float) -> TaskLink:
        if not self.listening:
            raise not_connected()
        return await super().open_link(until)


class ThreadMemberWire(ThreadWire):
    """`TaskMemberWire` for threads."""

    link_class = MultiWaitLink
    _may_connect = False

    @property
    def silent_since(self) -> float | None:
        if self._link is None:
            return None
        unanswered = self._link.unanswered
        try:
            sent_at = unanswered[0].sent_at
            if self._runtime.now() - sent_at > UNREAD_AFTER:
                self.poll_events()
                sent_at = unanswered[0].sent_at
            return sent_at
        except IndexError:
            return None

    async def connect(self, until: float) -> bool:
        with self._mutex:
            if self.connected:
                return False
            self._may_connect = True
            try:
                self._connect(until)
            finally:
                self._may_connect = False
            return True

    def _connect(self, until: float) -> ThreadLink:
        if not self._may_connect:
            raise not_connected()
        return super()._connect(until)


class ThreadMemberInbox(ThreadInbox):
    """`TaskMemberInbox` for threads."""

    link_class = MultiWaitLink

    async def connect(self, until: float) -> None:
        await super().open_link(until)

    async def open_link(self, until: float) -> ThreadLink:
        if not self.listening:
            raise not_connected()
        return await super().open_link(until)


class RedisMember(RedisStore):
    """`ports.MemberStore` on Redis or Valkey."""

    def __init__(self, wire: TaskMemberWire | ThreadMemberWire, inbox: TaskMemberInbox | ThreadMemberInbox) -> None:
        super().__init__(wire, inbox, reasserts=True)
        self._member_wire = wire
        self._member_inbox = inbox

    @property
    def silent_since(self) -> float | None:
        return self._member_wire.silent_since

    async def connect(self, until: float) -> bool:
        return await self._member_wire.connect(until)

    async def identity(self, until: float) -> Facts:
        # A quorum does not wait for replies beyond a majority, so it could miss that a script must be loaded.
        info = await self.wire.request(replies.IDENTITY_REQUEST, until, before=LOAD)
        return replies.facts_in([info, None, None, None], 0.0)

    async def mark(self, secret: str, number: int, until: float) -> int | None:
        key = f"{AUX_PREFIX}twin:{secret}".encode()
        put = pack(b"SET", key, b"%d" % number, b"NX", b"PX", MARK_MS)
        found = await self.wire.request(pack(b"GET", key), until, before=(put,))
        return int(found) if isinstance(found, bytes) and found.isdigit() else None

    async def release(self, name: str, holder: str, until: float) -> bool:
        """Send the whole script: nobody may be waiting for the reply that it has to be loaded first."""
        request = scripts.RELEASE.in_full(release_request(name, holder))
        return bool(await self._run(scripts.RELEASE, request, name, until) == 1)

    def _prepare_release(
        self, claim: Claim, position: int
    ) -> None: ...  # `release` above does not use prepared requests

    async def connect_inbox(self, until: float) -> None:
        await self._member_inbox.connect(until)


def redis_member(connection_factory: ConnectionFactory, runtime: Runtime, flavour: str) -> RedisMember:
    if flavour == "threads":
        return RedisMember(
            ThreadMemberWire(connection_factory, runtime), ThreadMemberInbox(connection_factory, runtime)
        )
    return RedisMember(TaskMemberWire(connection_factory, runtime), TaskMemberInbox(connection_factory, runtime))
