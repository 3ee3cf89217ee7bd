"""Connecting through redis-py, shared by threads and asyncio: time limits, and what a failure means.

redis-py's connection classes connect, negotiate TLS and authenticate. Then the link takes over their socket.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from lockfast.errors import Outcome, StoreError, StoreRefused, StoreUnavailable
from lockfast.stores.redis.protocol.error_replies import DENIED, code_of
from lockfast.values import clean

ConnectionFactory = Callable[[float], Any]
"""Makes a redis-py connection, not yet connected, with a connect timeout in seconds."""

MIN_CONNECT_TIME = 0.05
"""Seconds granted to connecting, however close the caller's deadline is."""
STALE_AFTER = 2.0
"""Seconds after which a connection with an unanswered request counts as dead."""
MAX_SILENCE = 10.0
"""Seconds without data after which an inbox sends PING: notifications to a dead connection are lost."""
INITIAL_GRACE = 1.0
"""Grace before the first connection, in seconds: TCP, TLS and the handshake take several round trips."""
MIN_GRACE = 0.08
CLOSE_TIMEOUT = 0.3
"""Seconds that waiters get to leave the queue when the store closes."""


def grace_after(connect_seconds: float) -> float:
    """Seconds that a request may outlast its caller's timeout, from the time it took to connect.

    >>> grace_after(0.002), grace_after(0.3), grace_after(9)
    (0.08, 0.6, 1.0)
    """
    return min(INITIAL_GRACE, max(MIN_GRACE, 2 * connect_seconds))


class Link(Protocol):
    """One connection. `error` is set once it has failed."""

    @property
    def error(self) -> StoreError | None: ...

    def fail(self, why: str) -> None: ...


LinkT = TypeVar("LinkT", bound=Link)


def same_link(wanted: LinkT, current: LinkT | None) -> LinkT:
    """Return `wanted` if it is still the current link: a transaction cannot continue on another connection."""
    if current is not wanted or wanted.error is not None:
        raise StoreUnavailable("The connection broke during a transaction, so nothing was changed. Try again.")
    return wanted


def protocol_of(connection: Any) -> int:
    """The RESP version of a connection: 2 or 3."""
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


def no_reply(why: str) -> StoreUnavailable:
    """The error for a request that was sent and got no reply."""
    return StoreUnavailable(
        f"No reply from the server: {why}. The request may or may not have been executed; try again, or check with "
        "lock.inspect().",
        outcome=Outcome.UNKNOWN,
    )
