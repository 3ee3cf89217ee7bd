"""The channels of one inbox connection in a cluster: one per slot whose locks somebody waits for.

A sharded channel lives on the node that owns its slot, and the scripts tell it with SPUBLISH; so a hand-over stays
within its shard. When the slot moves, the server ends the subscription and says so.

Rules kept here: answers to SSUBSCRIBE come in the order of the requests; a channel that nobody waits on is left
subscribed, since it will be wanted again, until there are `MOST_CHANNELS`.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

from lockfast.stores.redis.protocol.notifications import shard_channel, subscribe_request
from lockfast.stores.redis.protocol.resp import ReplyError, pack

MOST_CHANNELS = 1000


class Settles(Protocol):
    """Whoever waits for the answer to a subscription."""

    def settle(self, value: Any) -> None: ...


class Shards:
    """Invariant: `asked` has one entry per SSUBSCRIBE that was not answered yet, in order."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.joined: set[str] = set()
        self.asked: deque[Settles] = deque()

    def channel(self, slot: int) -> str:
        return shard_channel(slot, self._address)

    def request(self, channel: str, in_use: set[str]) -> bytes:
        """What to send to listen to `channel`; with too many of them, others that are not in use are left."""
        request = subscribe_request(channel)
        if len(self.joined) < MOST_CHANNELS:
            return request
        idle = self.joined - in_use
        self.joined -= idle
        return request + pack(b"SUNSUBSCRIBE", *(one.encode() for one in idle)) if idle else request

    def takes(self, reply: Any) -> bool:
        """Whether the reply speaks of subscriptions, and not of a lock."""
        if isinstance(reply, ReplyError) or (isinstance(reply, list) and reply[0] == b"ssubscribe"):
            if self.asked:
                self.asked.popleft().settle(reply)
            return True
        channel = left_in(reply)
        self.joined.discard(channel)
        return bool(channel)


def left_in(reply: Any) -> str:
    """The channel whose subscription the server ended, if that is what it says.

    >>> left_in([b"sunsubscribe", b"lockfast:inbox:x:{1}", 0])
    'lockfast:inbox:x:{1}'
    """
    if not isinstance(reply, list) or len(reply) < 2 or reply[0] != b"sunsubscribe" or reply[1] is None:
        return ""
    return str(reply[1].decode("utf-8", "replace"))
