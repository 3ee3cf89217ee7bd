"""Connections in both flavours: connect through redis-py, fail, receive notifications.

redis-py's connection classes connect, negotiate TLS and authenticate. Then the link takes over their socket. An inbox
is one subscribed connection on which a client receives all its notifications. Each acquisition has a mailbox, its end
of the inbox. In a cluster an inbox subscribes to one sharded channel per slot with a waiter, at the node of that slot,
and scripts publish to it with SPUBLISH; otherwise to one channel.

Rules:

- If a mailbox may have missed a notification, `wait` returns None, and the core repeats its request.
- Replies to SSUBSCRIBE arrive in the order of the requests. When a slot moves, the server ends the subscription.
- A sharded channel without waiters stays subscribed for later use, until there are `MAX_CHANNELS`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from lockfast.errors import Outcome, StoreError, StoreRefused, StoreUnavailable
from lockfast.ports import Runtime, Waker
from lockfast.stores.redis.protocol.error_replies import DENIED, code_of
from lockfast.stores.redis.protocol.notifications import notification_in, shard_channel, subscribe_request
from lockfast.stores.redis.protocol.resp import ReplyError, pack
from lockfast.values import Notification, clean

ConnectionFactory = Callable[[float], Any]
"""Makes a redis-py connection, not yet connected, with a connect timeout in seconds."""

# All in seconds.
MIN_CONNECT_TIME = 0.05  # for connecting, however close the caller's deadline is
STALE_AFTER = 2.0  # a connection with a request unanswered for so long is dead
MAX_SILENCE = 10.0  # an inbox without data sends PING: notifications to a dead connection are lost
INITIAL_GRACE = 1.0  # before the first connection: TCP, TLS and the handshake take several round trips
MIN_GRACE = 0.08
CLOSE_TIMEOUT = 0.3  # for waiters to leave the queue when the store closes

MAX_CHANNELS = 1000


def grace_after(connect_seconds: float) -> float:
    """Seconds that a request may outlast its caller's timeout, from the time it took to connect.

    >>> grace_after(0.002), grace_after(0.3), grace_after(9)
    (0.08, 0.6, 1.0)
    """
    return min(INITIAL_GRACE, max(MIN_GRACE, 2 * connect_seconds))


class PendingReply:
    """A reply that a thread or task waits for. The reader sets `value` and `ready`.

    Every request of a thread makes one, so the initial values are class attributes.
    """

    ready = False
    value: Any = None
    sent_at = 0.0
    waker: Waker | None = None

    def settle(self, value: Any) -> None:
        self.value = value
        self.ready = True
        self.wake()

    def wake(self) -> bool:
        waker = self.waker  # read once: the waiting thread removes it when it stops waiting
        if waker is not None:
            waker.wake()
        return waker is not None


class Link(Protocol):
    """One connection. `error` is set once it has failed."""

    @property
    def error(self) -> StoreError | None: ...

    def fail(self, why: str) -> None: ...

    def disconnect(self, why: str) -> None:
        """Fail and close without blocking."""

    async def wait_for(self, pending: PendingReply, until: float) -> None:
        """Return when `pending` is ready, the link has failed, or `until` has passed."""

    def reset(self, *, forked: bool) -> None: ...


LinkT = TypeVar("LinkT", bound=Link)


class BaseConnector(ABC, Generic[LinkT]):
    """Keeps one link: what a wire and an inbox have in common. After `close()` it never connects again.

    For a member of a quorum, only `connect` connects; without a link, requests fail at once."""

    def __init__(
        self, new_connection: ConnectionFactory, runtime: Runtime, max_wait: float = math.inf, *, member: bool = False
    ) -> None:
        self._new_connection = new_connection
        self.runtime = runtime
        self._max_wait = max_wait
        self._member = member
        self._link: LinkT | None = None
        self._closed = False
        self.reset(forked=False)

    def drop(self) -> None:
        link = self._link  # another thread may close it
        if link is not None:
            link.disconnect("the server is not the master any more")

    async def open_link(self, until: float) -> LinkT:
        """Return the link; connect if necessary and allowed."""
        link = self._link
        if link is not None and link.error is None:
            return link
        if self._member:
            raise not_connected()
        return await self.connect_link(until)

    async def connect(self, until: float) -> bool:
        """Connect unless connected; True if the connection is new."""
        before = self._link
        return await self.connect_link(until) is not before

    @abstractmethod
    async def connect_link(self, until: float) -> LinkT: ...

    async def close(self) -> None:
        self._closed = True

    def reset(self, *, forked: bool) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.reset(forked=forked)


def same_link(wanted: LinkT, current: LinkT | None) -> LinkT:
    """Return `wanted` if it is still the current link: a transaction cannot continue on another connection."""
    if current is not wanted or wanted.error is not None:
        raise StoreUnavailable("The connection broke during a transaction, so nothing was changed. Try again.")
    return wanted


def protocol_of(connection: Any) -> int:
    return 3 if str(getattr(connection, "protocol", 2)) == "3" else 2


def connect_error(error: Exception) -> StoreError:
    """The error to raise if connecting or the handshake failed. No request was sent."""
    if isinstance(error, StoreError):
        return error
    text = clean(str(error), 200)
    code = "NOAUTH" if text.startswith("HELLO must be called") else code_of(text)
    if code in DENIED or "Authentic" in type(error).__name__ or "invalid username-password" in text:
        reason = DENIED.get(code, DENIED["WRONGPASS"])
        return StoreRefused(f"The server refused the connection, so nothing was changed: {reason}. [{text}]")
    return StoreUnavailable(
        f"No connection to the server, so nothing was changed. Is it running, and is the address right? [{text}]"
    )


def not_connected() -> StoreUnavailable:
    return StoreUnavailable("There is no connection to the server, so nothing was sent. It is being reconnected.")


def no_reply(why: str) -> StoreUnavailable:
    """The error for a request that was sent and got no reply."""
    return StoreUnavailable(
        f"No reply from the server: {why}. The request may or may not have been executed; try again, or check with "
        "lock.inspect().",
        outcome=Outcome.UNKNOWN,
    )


class Channels:
    """The subscriptions of one inbox connection. `pending` has one pending reply per unanswered request, in order."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.subscribed: set[str] = set()  # the sharded channels
        self.pending: deque[PendingReply] = deque()

    def channel(self, slot: int) -> str:
        return shard_channel(slot, self._address)

    def request(self, channel: str, in_use: set[str]) -> bytes:
        """The request to subscribe to `channel`. With too many channels, it also unsubscribes from the unused ones."""
        request = subscribe_request(channel)
        if len(self.subscribed) < MAX_CHANNELS:
            return request
        idle = self.subscribed - in_use
        self.subscribed -= idle
        return request + pack(b"SUNSUBSCRIBE", *(one.encode() for one in idle)) if idle else request

    def expect_reply(self) -> PendingReply:
        answer = PendingReply()
        self.pending.append(answer)
        return answer

    def settle(self, reply: Any) -> bool:
        """Whether this is the reply to a subscription, which is passed to the caller that waits for it."""
        subscribed = isinstance(reply, list) and reply[0] in (b"subscribe", b"ssubscribe")
        if not subscribed and not isinstance(reply, ReplyError):
            return False
        self.pending.popleft().settle(reply)
        return True


def ended_channel(reply: Any) -> str:
    """The channel whose subscription the server ended; empty for any other reply.

    >>> ended_channel([b"sunsubscribe", b"lockfast:inbox:x:{1}", 0])
    'lockfast:inbox:x:{1}'
    """
    if not isinstance(reply, list) or len(reply) < 2 or reply[0] != b"sunsubscribe" or reply[1] is None:
        return ""
    return str(reply[1].decode("utf-8", "replace"))


class BaseInbox(BaseConnector[LinkT]):
    """`store.Inbox`. A mailbox in `mailboxes` receives its notifications as long as the link works."""

    sharded = False
    address = ""
    _heard_at = _pinged_at = 0.0

    def reset(self, *, forked: bool) -> None:
        self._channels = Channels("")
        self.mailboxes: dict[str, InboxMailbox[LinkT]] = {}
        super().reset(forked=forked)

    def mailbox(self, holder: str, slot: int | None = None) -> InboxMailbox[LinkT]:
        return InboxMailbox(self, holder, slot)

    @abstractmethod
    async def _subscribe(self, link: LinkT, channels: Channels, request: bytes, until: float) -> None:
        """Send SSUBSCRIBE and wait for its reply; raise the error in it."""

    @abstractmethod
    def _ping(self, link: LinkT, now: float) -> None: ...

    async def open_channel(self, slot: int, until: float) -> tuple[LinkT, str]:
        """Subscribe to the channel of a cluster slot; return the connection and the channel."""
        until = min(until, self.runtime.now() + self._max_wait)
        link, channels = await self.open_link(until), self._channels
        channel = channels.channel(slot)
        if channel not in channels.subscribed:
            in_use = {mailbox.channel for mailbox in tuple(self.mailboxes.values())}
            await self._subscribe(link, channels, channels.request(channel, in_use), until)
            channels.subscribed.add(channel)
        return link, channel

    def receive(self, reply: Any, channels: Channels) -> None:
        self._heard_at = self.runtime.now()
        if channels.pending and channels.settle(reply):
            return
        if self.sharded and (ended := ended_channel(reply)):
            channels.subscribed.discard(ended)
            for mailbox in tuple(self.mailboxes.values()):
                if mailbox.channel == ended:
                    mailbox.slot_moved()
        found = notification_in(reply)
        if found is not None:
            self.notify(*found)

    def notify(self, holder: str, notification: Notification) -> None:
        self._heard_at = self.runtime.now()
        mailbox = self.mailboxes.get(holder)
        if mailbox is not None:
            mailbox.deliver(notification)

    def check_alive(self, link: LinkT) -> None:
        """Send PING on a silent connection, and fail it if the server does not answer."""
        now = self.runtime.now()
        if now - self._heard_at < MAX_SILENCE:
            return
        if self._pinged_at <= self._heard_at:
            self._ping(link, now)
        elif now - self._pinged_at > STALE_AFTER:
            link.fail("the inbox has received nothing for too long")

    async def close(self) -> None:
        """Close the connection, and give waiters the time to leave the queue."""
        await super().close()
        deadline = self.runtime.now() + CLOSE_TIMEOUT
        while self.mailboxes and self.runtime.now() < deadline:
            await self.runtime.sleep(0.002)


class InboxMailbox(Generic[LinkT]):
    """`ports.Mailbox`. `_link` is the connection at the last request; `channel` is set if it belongs to one `slot`."""

    __slots__ = ("_inbox", "_link", "_notifications", "_woken", "channel", "holder", "slot")

    def __init__(self, inbox: BaseInbox[LinkT], holder: str, slot: int | None = None) -> None:
        self._inbox = inbox
        self.holder = holder
        self.slot = slot
        self.channel = ""
        self._notifications: deque[Notification] = deque()
        self._woken = PendingReply()
        self._link: LinkT | None = None

    @property
    def address(self) -> str:
        return self.channel or self._inbox.address

    @property
    def connected(self) -> bool:
        link = self._link
        return link is not None and link.error is None and bool(self.channel or not self._inbox.sharded)

    async def open(self, until: float) -> None:
        self._inbox.mailboxes[self.holder] = self
        if self.slot is None or not self._inbox.sharded:
            self._link = await self._inbox.open_link(until)
        else:
            self._link, self.channel = await self._inbox.open_channel(self.slot, until)

    async def receive(self, until: float) -> Notification | None:
        """Return the next notification; None once `until` has passed or the mailbox is not `connected`."""
        link = self._link
        self._woken.ready = False  # before the notifications are checked, so that no wake-up is lost
        if not self._notifications and link is not None and self.connected:
            self._inbox.check_alive(link)
            await link.wait_for(self._woken, until)
        return self._notifications.popleft() if self._notifications else None

    async def wait(self, until: float) -> Notification | None:
        notification = await self.receive(until)
        if notification is None and not self.connected:
            self._link = await self._inbox.open_link(until)
        return notification

    def deliver(self, notification: Notification) -> None:
        self._notifications.append(notification)
        self.wake()

    def slot_moved(self) -> None:
        """The slot moved to another node, so the server ended the subscription."""
        self.channel = ""
        self.wake()

    def wake(self) -> None:
        self._woken.settle(None)

    def close(self) -> None:
        self._inbox.mailboxes.pop(self.holder, None)
