"""How a dialled connection is taken over from the client library, and what it means when dialling failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from lockfast.errors import StoreError, StoreRefused, StoreUnavailable
from lockfast.stores.redis.protocol.error_replies import DENIED, code_of
from lockfast.values import clean

ConnectionFactory = Callable[[float], Any]
"""From a time limit in seconds to an unconnected connection object."""

MIN_CONNECT_TIME = 0.05
"""Seconds that dialling gets at the least, however little time the caller has."""
STALE_AFTER = 2.0
"""Seconds after which a connection that owes a reply is taken for dead."""
MAX_SILENCE = 10.0
"""Seconds of silence after which an inbox is made to speak: a push to a dead connection is lost."""
INITIAL_GRACE = 1.0
"""Seconds by which a request may outlast its caller's timeout while nothing is known of the link: dialling, TLS and
the handshake take several round trips."""
MIN_GRACE = 0.08
CLOSE_TIMEOUT = 0.3
"""Seconds that a closing store gives to those who wait, to leave the queue."""


def grace_after(dialled_in: float) -> float:
    """How much longer than its timeout a caller waits for an answer, from how long the dialling took.

    >>> grace_after(0.002), grace_after(0.3), grace_after(9)
    (0.08, 0.6, 1.0)
    """
    return min(INITIAL_GRACE, max(MIN_GRACE, 2 * dialled_in))


class HasError(Protocol):
    """A connection; `error` once it is of no use any more."""

    @property
    def error(self) -> StoreError | None: ...


LinkT = TypeVar("LinkT", bound=HasError)


def same_link(wanted: LinkT, current: LinkT | None) -> LinkT:
    """The connection over which a conversation must go on, if it is still the one in use."""
    if current is not wanted or wanted.error is not None:
        raise StoreUnavailable("The connection broke in the midst of a transaction, so nothing was changed.")
    return wanted


def protocol_of(connection: Any) -> int:
    """The version of the wire format that a connection speaks: 2 or 3."""
    return 3 if str(getattr(connection, "protocol", 2)) == "3" else 2


def connect_error(error: Exception) -> StoreError:
    """What a failed dial or handshake means; nothing was sent that concerns a lock."""
    if isinstance(error, StoreError):
        return error
    text = clean(str(error), 200)
    code = "NOAUTH" if text.startswith("HELLO must be called") else code_of(text)
    if code in DENIED or "Authentic" in type(error).__name__ or "invalid username-password" in text:
        reason = DENIED.get(code, DENIED["WRONGPASS"])
        return StoreRefused(f"The server refused the connection: {reason}. [{text}]")
    return StoreUnavailable(
        f"No connection to the server, so nothing was changed. Is it running, and is the address right? [{text}]"
    )
