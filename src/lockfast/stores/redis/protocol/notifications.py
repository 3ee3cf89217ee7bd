"""Subscriptions and notifications on the inbox connection.

A notification is a published message: "holder attempt fence" for a grant, "holder attempt next ttl_ms" for a waiter
that is now first in the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lockfast.errors import StoreError, StoreUnavailable
from lockfast.ports import Runtime
from lockfast.stores.redis.keys import tag_in_slot
from lockfast.stores.redis.protocol.error_replies import error_of
from lockfast.stores.redis.protocol.resp import Feed, ReplyError, bulks, pack
from lockfast.values import AUX_PREFIX, FirstNotification, GrantNotification

PING = pack(b"PING")


def new_address(runtime: Runtime) -> str:
    """An unguessable channel. Each connection has its own, so no old notification can arrive on it."""
    return f"{AUX_PREFIX}inbox:{runtime.new_holder_id()}"


def shard_channel(slot: int, address: str) -> str:
    """The channel of an inbox for one cluster slot. It hashes to that slot; its braces select SPUBLISH in the scripts.

    >>> shard_channel(12182, "lockfast:inbox:x")
    'lockfast:inbox:x:{43681}'
    """
    return f"{address}:{{{tag_in_slot(slot).decode()}}}"


def subscribe_request(address: str) -> bytes:
    return pack(b"SSUBSCRIBE" if "{" in address else b"SUBSCRIBE", address.encode())


def subscribe_error(reply: Any, replied: bool) -> StoreError | None:
    """The error in the reply to a subscription, or for a missing reply."""
    if not replied:
        return StoreUnavailable(
            "The server did not confirm the subscription of the inbox in time, so the lock cannot be waited for. "
            "Try again."
        )
    if isinstance(reply, ReplyError):
        return error_of(str(reply), f"channel {AUX_PREFIX}inbox:*")
    return None


def grant_fast_path(
    feed: Feed, address: str, protocol: int, notify: Callable[[str, GrantNotification | FirstNotification], None]
) -> Feed:
    """Wrap `feed` for the inbox at `address`: a grant that arrives alone is delivered without parsing a reply.

    Only messages to this inbox match, because nobody can guess its address.

    >>> feed = grant_fast_path(lambda data: [data], "lockfast:inbox:x", 2, lambda holder, grant: print(holder, grant))
    >>> start = b"*3\\r\\n$7\\r\\nmessage\\r\\n$16\\r\\nlockfast:inbox:x\\r\\n"
    >>> feed(start + b"$9\\r\\nmoto 3 17\\r\\n")
    moto GrantNotification(attempt=3, fence=17, slots=())
    ()
    >>> feed(b"+PONG\\r\\n")
    [b'+PONG\\r\\n']
    """
    start = b"%b3\r\n%b$" % (b">" if protocol == 3 else b"*", bulks(b"message", address.encode()))
    offset = len(start)

    def fast_feed(data: bytes) -> Sequence[Any]:
        if data.startswith(start):
            try:
                size, name, attempt, fence = data[offset:].split()
                alone = len(data) == offset + len(size) + int(size) + 4  # two line ends
                holder, grant = name.decode("ascii"), tuple.__new__(GrantNotification, (int(attempt), int(fence), ()))
            except ValueError:
                alone = False
            if alone:
                notify(holder, grant)
                return ()
        return feed(data)

    return fast_feed


def notification_in(reply: Any) -> tuple[str, GrantNotification | FirstNotification] | None:
    """The holder and the notification in a message; None for anything else.

    >>> notification_in([b"message", b"lockfast:inbox:x", b"moto 3 17"])
    ('moto', GrantNotification(attempt=3, fence=17, slots=()))
    >>> notification_in([b"message", b"lockfast:inbox:x", b"moto 3 next 1500"])
    ('moto', FirstNotification(attempt=3, ttl_left=1.5))
    >>> notification_in([b"message", b"lockfast:inbox:x", b"moto 3 17 0,2"])
    ('moto', GrantNotification(attempt=3, fence=17, slots=(0, 2)))
    >>> notification_in([b"pong", b""])
    """
    try:
        kind, _, text = reply
        if kind not in (b"message", b"smessage"):
            return None
        words = text.decode("ascii").split(" ")
        if len(words) == 3:
            holder, attempt, fence = words
            return holder, tuple.__new__(GrantNotification, (int(attempt), int(fence), ()))
        holder, attempt, word, rest = words
        if word != "next":
            return holder, GrantNotification(int(attempt), int(word), tuple(int(slot) for slot in rest.split(",")))
        ttl_left = int(rest) / 1000
        return holder, FirstNotification(int(attempt), ttl_left if ttl_left >= 0 else None)
    except (ValueError, TypeError, AttributeError):
        return None
