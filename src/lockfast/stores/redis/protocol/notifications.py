"""What travels besides the scripts: subscribing, pushes, and how long an answer may take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lockfast.errors import StoreError, StoreUnavailable
from lockfast.ports import Runtime
from lockfast.stores.redis.keys import number_in
from lockfast.stores.redis.protocol.error_replies import error_of
from lockfast.stores.redis.protocol.resp import Feed, ReplyError, bulks, pack
from lockfast.values import AUX_PREFIX, FirstNotification, GrantNotification

PING = pack(b"PING")
_MESSAGES = (b"message", b"smessage")


def new_address(runtime: Runtime) -> str:
    """A channel that nobody else can guess; new for each connection, so that no old push can arrive on it."""
    return f"{AUX_PREFIX}inbox:{runtime.new_holder_id()}"


def shard_channel(slot: int, address: str) -> str:
    """The channel of an inbox for the locks of one cluster slot. It hashes to that slot, and has braces: by them the
    scripts know that it is told by SPUBLISH.

    >>> shard_channel(12182, "lockfast:inbox:x")
    'lockfast:inbox:x:{43681}'
    """
    return f"{address}:{{{number_in(slot).decode()}}}"


def subscribe_request(address: str) -> bytes:
    return pack(b"SSUBSCRIBE" if "{" in address else b"SUBSCRIBE", address.encode())


def subscribe_error(reply: Any, came: bool) -> StoreError | None:
    """What is wrong with the answer to SUBSCRIBE, if anything."""
    if not came:
        return StoreUnavailable("The server did not answer the subscription of the inbox in time.")
    if isinstance(reply, ReplyError):
        return error_of(str(reply), f"channel {AUX_PREFIX}inbox:*")
    return None


def grant_fast_path(
    feed: Feed, address: str, protocol: int, give: Callable[[str, GrantNotification | FirstNotification], None]
) -> Feed:
    """A `feed` for the inbox at `address`: a grant that comes alone, as nearly every one does, is given away without
    being taken for a reply first. Only what is told to this inbox begins so, since nobody can guess the address.

    >>> feed = grant_fast_path(lambda data: [data], "lockfast:inbox:x", 2, lambda holder, push: print(holder, push))
    >>> begin = b"*3\\r\\n$7\\r\\nmessage\\r\\n$16\\r\\nlockfast:inbox:x\\r\\n"
    >>> feed(begin + b"$9\\r\\nmoto 3 17\\r\\n")
    moto GrantNotification(attempt=3, fence=17)
    ()
    >>> feed(b"+PONG\\r\\n")
    [b'+PONG\\r\\n']
    """
    begin = b"%b3\r\n%b$" % (b">" if protocol == 3 else b"*", bulks(b"message", address.encode()))
    begins = len(begin)

    def glance(data: bytes) -> Sequence[Any]:
        if data.startswith(begin):
            try:
                size, name, attempt, fence = data[begins:].split()
                alone = len(data) == begins + len(size) + int(size) + 4  # two ends of lines
                holder, push = name.decode("ascii"), tuple.__new__(GrantNotification, (int(attempt), int(fence)))
            except ValueError:
                alone = False  # none of ours: the general way tells
            if alone:
                give(holder, push)
                return ()
        return feed(data)

    return glance


def notification_in(reply: Any) -> tuple[str, GrantNotification | FirstNotification] | None:
    """The holder that a message is for and what it says; None for what is no message of ours.

    >>> notification_in([b"message", b"lockfast:inbox:x", b"moto 3 17"])
    ('moto', GrantNotification(attempt=3, fence=17))
    >>> notification_in([b"message", b"lockfast:inbox:x", b"moto 3 next 1500"])
    ('moto', FirstNotification(attempt=3, ttl_left=1.5))
    >>> notification_in([b"pong", b""])
    """
    try:
        kind, _, text = reply
        if kind not in _MESSAGES:
            return None
        words = text.decode("ascii").split(" ")
        if len(words) == 3:
            holder, attempt, fence = words
            return holder, tuple.__new__(GrantNotification, (int(attempt), int(fence)))
        holder, attempt, news, ttl_ms = words
        left = int(ttl_ms) / 1000
        return (holder, FirstNotification(int(attempt), left if left >= 0 else None)) if news == "next" else None
    except (ValueError, TypeError, AttributeError):
        return None
