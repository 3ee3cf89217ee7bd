"""What travels besides the scripts: subscribing, pushes, and how long an answer may take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from lockfast.errors import StoreError, StoreUnavailable
from lockfast.ports import Runtime
from lockfast.stores.redis.keys import number_in
from lockfast.stores.redis.protocol.error_replies import error_of
from lockfast.stores.redis.protocol.resp import Feed, ReplyError, bulks, pack
from lockfast.values import AUX_PREFIX, FirstNotification, GrantNotification

STALE = 2.0
"""Seconds after which a connection that owes a reply is taken for dead."""
HEAR_WITHIN = 10.0
"""Seconds of silence after which an inbox is made to speak: a push to a dead connection is lost."""
FIRST_GRACE = 1.0
"""Seconds by which a request may outlast its caller's timeout while nothing is known of the link: dialling, TLS and
the handshake take several round trips."""
LEAST_GRACE = 0.08
LEAVE_WITHIN = 0.3
"""Seconds that a closing store gives to those who wait, to leave the queue."""

PING = pack(b"PING")
_MESSAGES = (b"message", b"smessage")


def grace_after(dialled_in: float) -> float:
    """How much longer than its timeout a caller waits for an answer, from how long the dialling took.

    >>> grace_after(0.002), grace_after(0.3), grace_after(9)
    (0.08, 0.6, 1.0)
    """
    return min(FIRST_GRACE, max(LEAST_GRACE, 2 * dialled_in))


class HasError(Protocol):
    """A connection; `error` once it is of no use any more."""

    @property
    def error(self) -> StoreError | None: ...


LinkT = TypeVar("LinkT", bound=HasError)


def sound(wanted: LinkT, current: LinkT | None) -> LinkT:
    """The connection over which a conversation must go on, if it is still the one in use."""
    if current is not wanted or wanted.error is not None:
        raise StoreUnavailable("The connection broke in the midst of a transaction, so nothing was changed.")
    return wanted


def new_address(runtime: Runtime) -> str:
    """A channel that nobody else can guess; new for each connection, so that no old push can arrive on it."""
    return f"{AUX_PREFIX}inbox:{runtime.new_holder_id()}"


def address_in(slot: int, address: str) -> str:
    """The channel of an inbox for the locks of one cluster slot. It hashes to that slot, and has braces: by them the
    scripts know that it is told by SPUBLISH.

    >>> address_in(12182, "lockfast:inbox:x")
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


def at_a_glance(
    feed: Feed, address: str, protocol: int, give: Callable[[str, GrantNotification | FirstNotification], None]
) -> Feed:
    """A `feed` for the inbox at `address`: a grant that comes alone, as nearly every one does, is given away without
    being taken for a reply first. Only what is told to this inbox begins so, since nobody can guess the address.

    >>> feed = at_a_glance(lambda data: [data], "lockfast:inbox:x", 2, lambda holder, push: print(holder, push))
    >>> begin = b"*3\\r\\n$7\\r\\nmessage\\r\\n$16\\r\\nlockfast:inbox:x\\r\\n"
    >>> feed(begin + b"$9\\r\\nmoto 3 17\\r\\n")
    moto Push(turn=3, fence=17)
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


def push_in(reply: Any) -> tuple[str, GrantNotification | FirstNotification] | None:
    """The holder that a message is for and what it says; None for what is no message of ours.

    >>> push_in([b"message", b"lockfast:inbox:x", b"moto 3 17"])
    ('moto', Push(turn=3, fence=17))
    >>> push_in([b"message", b"lockfast:inbox:x", b"moto 3 next 1500"])
    ('moto', Next(turn=3, ttl_left=1.5))
    >>> push_in([b"pong", b""])
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
