"""How a dialled connection is taken over from the client library, and what it means when dialling failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockfast.errors import StoreError, StoreRefused, StoreUnavailable
from lockfast.stores.redis.protocol.error_replies import REFUSED, code_of
from lockfast.values import clean

Dial = Callable[[float], Any]
"""From a time limit in seconds to an unconnected connection object."""

LEAST_DIAL = 0.05
"""Seconds that dialling gets at the least, however little time the caller has."""


def protocol_of(connection: Any) -> int:
    """The version of the wire format that a connection speaks: 2 or 3."""
    return 3 if str(getattr(connection, "protocol", 2)) == "3" else 2


def dialling_error(error: Exception) -> StoreError:
    """What a failed dial or handshake means; nothing was sent that concerns a lock."""
    if isinstance(error, StoreError):
        return error
    text = clean(str(error), 200)
    code = "NOAUTH" if text.startswith("HELLO must be called") else code_of(text)
    if code in REFUSED or "Authentic" in type(error).__name__ or "invalid username-password" in text:
        reason = REFUSED.get(code, REFUSED["WRONGPASS"])
        return StoreRefused(f"The server refused the connection: {reason}. [{text}]")
    return StoreUnavailable(
        f"No connection to the server, so nothing was changed. Is it running, and is the address right? [{text}]"
    )
