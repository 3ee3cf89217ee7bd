"""The sharded channels of one inbox connection in a cluster: one per slot with a waiter.

A sharded channel belongs to the node of its slot, and scripts publish to it with SPUBLISH, so a hand-off stays within
its shard. When the slot moves, the server ends the subscription and reports that.

Rules:

- Replies to SSUBSCRIBE arrive in the order of the requests.
- A channel without waiters stays subscribed for later use, until there are `MAX_CHANNELS`.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from lockfast.stores.redis.protocol.notifications import shard_channel, subscribe_request
from lockfast.stores.redis.protocol.resp import ReplyError, pack

MAX_CHANNELS = 1000


class ShardChannels:
    """`subscribed`: the subscribed channels. `pending`: one pending reply per unanswered SSUBSCRIBE, in order."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.subscribed: set[str] = set()
        self.pending: deque[Any] = deque()

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

    def handle(self, reply: Any) -> bool:
        """Process a reply about subscriptions; False if it is a notification about a lock."""
        if isinstance(reply, ReplyError) or (isinstance(reply, list) and reply[0] == b"ssubscribe"):
            if self.pending:
                self.pending.popleft().settle(reply)
            return True
        channel = ended_channel(reply)
        self.subscribed.discard(channel)
        return bool(channel)


def ended_channel(reply: Any) -> str:
    """The channel whose subscription the server ended; empty for any other reply.

    >>> ended_channel([b"sunsubscribe", b"lockfast:inbox:x:{1}", 0])
    'lockfast:inbox:x:{1}'
    """
    if not isinstance(reply, list) or len(reply) < 2 or reply[0] != b"sunsubscribe" or reply[1] is None:
        return ""
    return str(reply[1].decode("utf-8", "replace"))
