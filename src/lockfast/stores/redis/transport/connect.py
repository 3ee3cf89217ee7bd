"""Connecting through redis-py, shared by threads and asyncio: time limits, and what a failure means.

redis-py's connection classes connect, negotiate TLS and authenticate. Then the link takes over their socket.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from lockfast.errors import Outcome, StoreError, StoreRefused, StoreUnavailable
from lockfast.ports import Runtime
from lockfast.stores.redis.protocol.error_replies import DENIED, code_of
from lockfast.values import clean

ConnectionFactory = Callable[[float], Any]
"""Makes a redis-py connection, not yet connected, with a connect timeout in seconds."""

# All in seconds.
MIN_CONNECT_TIME = 0.05  # for connecting, however close the caller's deadline is
STALE_AFTER = 2.0  # a connection with a request unanswered for so long is dead
MAX_SILENCE = 10.0  # an inbox without data sends PING: notifications to a dead connection are lost
INITIAL_GRACE = 1.0  # before the first connection: TCP, TLS and the handshake take several round trips
MIN_GRACE = 0.08
CLOSE_TIMEOUT = 0.3  # for waiters to leave the queue when the store closes


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

    def disconnect(self, why: str) -> None:
        """Fail and close without blocking."""

    def reset(self, *, forked: bool) -> None: ...


LinkT = TypeVar("LinkT", bound=Link)


class BaseConnector(ABC, Generic[LinkT]):
    """Keeps one link: what a wire and an inbox have in common. After `close()` it never connects again.

    Unless `on_demand`, requests fail at once without a link, and only `connect_link` connects."""

    on_demand = True

    def __init__(self, new_connection: ConnectionFactory, runtime: Runtime, max_wait: float = math.inf) -> None:
        self._new_connection = new_connection
        self.runtime = runtime
        self._max_wait = max_wait
        self._link: LinkT | None = None
        self._closed = False
        self.reset(forked=False)

    @property
    def connected(self) -> bool:
        link = self._link
        return link is not None and link.error is None

    def drop(self) -> None:
        if self._link is not None:
            self._link.disconnect("the server is not the master any more")

    async def open_link(self, until: float) -> LinkT:
        """Return the link; connect if necessary and allowed."""
        link = self._link
        if link is not None and link.error is None:
            return link
        if not self.on_demand:
            raise not_connected()
        return await self.connect_link(until)

    @abstractmethod
    async def connect_link(self, until: float) -> LinkT: ...

    async def close(self) -> None:
        await self._close_link()

    @abstractmethod
    async def _close_link(self) -> None: ...

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
