"""Optimistic updates of a value: WATCH, GET, then MULTI, SET, EXEC.

Rules:

- Each watched value has a connection of its own until it ends, because a WATCH belongs to its connection. If the
  connection breaks, the watched value is void: it never continues over a connection that watches nothing.
- A connection is closed after an error or a cancellation in the middle of an exchange; otherwise the next watched
  value reuses it. Each read starts with UNWATCH, so a watched value may be abandoned at any point.
- Read and write take one round trip each. If the server denies WATCH, the update fails: conflicts would go unnoticed.
- EXEC without a reply has an unknown outcome and is not repeated: only the caller knows whether writing twice is safe.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from lockfast.errors import Outcome, StoreUnavailable, closed_error, shown
from lockfast.ports import Runtime
from lockfast.stores.redis.protocol.error_replies import error_of
from lockfast.stores.redis.protocol.resp import ReplyError, pack
from lockfast.stores.redis.transport.connect import MIN_CONNECT_TIME, ConnectionFactory, connect_error
from lockfast.stores.redis.user_client import reply_of, settled

# Connections of the parent process, never collected: __del__ would write to its TLS connection, or warn.
_inherited: list[TaskWatchConnection] = []

UNWATCH, MULTI, EXEC = pack(b"UNWATCH"), pack(b"MULTI"), pack(b"EXEC")


@dataclass(eq=False)
class WatchConnection(ABC):
    """A connection of the client library, for one exchange at a time."""

    _new_connection: ConnectionFactory
    _runtime: Runtime
    _connection: Any = None

    async def connect(self, until: float) -> None:
        limit = max(MIN_CONNECT_TIME, until - self._runtime.now())
        self._connection = self._new_connection(limit)
        try:
            async with self._time_limit(limit):
                await settled(self._connection.connect())
        except Exception as error:
            raise connect_error(error) from error

    async def exchange(self, requests: list[bytes], until: float) -> list[Any]:
        """A reply for each request; error replies are `ReplyError` values."""
        try:
            async with self._time_limit(max(0.001, until - self._runtime.now())):
                await settled(self._connection.send_packed_command([b"".join(requests)], check_health=False))
                return [await self._reply() for _ in requests]
        except Exception as error:
            raise StoreUnavailable(
                "The server did not answer, so the outcome of the request is unknown. Read the value before you try "
                f"again. [{shown(str(error))}]",
                outcome=Outcome.UNKNOWN,
            ) from error

    async def _reply(self) -> Any:
        try:
            return await settled(self._connection.read_response(disable_decoding=True))
        except Exception as error:
            return reply_of(error)

    @abstractmethod
    def _time_limit(self, seconds: float) -> AbstractAsyncContextManager[Any]: ...

    @abstractmethod
    def close(self) -> None:
        """Close without waiting."""

    @abstractmethod
    def reset(self) -> None:
        """In a forked child, or after the event loop was closed: drop the connection without touching it."""


class ThreadWatchConnection(WatchConnection):
    @asynccontextmanager
    async def _time_limit(self, seconds: float) -> AsyncIterator[None]:
        if self._connection._sock is not None:
            self._connection._sock.settimeout(seconds)
        yield

    def close(self) -> None:
        self._connection.disconnect()

    reset = close  # in a forked child, the library only closes its copy of the descriptor


class TaskWatchConnection(WatchConnection):
    def _time_limit(self, seconds: float) -> asyncio.Timeout:
        return asyncio.timeout(seconds)

    def close(self) -> None:
        # The library's disconnect() is a coroutine that waits for the transport to close.
        writer = self._connection._writer
        self._connection._reader = self._connection._writer = None
        if writer is not None:
            writer.transport.abort()

    def reset(self) -> None:
        _inherited.append(self)


class WatchConnections:
    """The idle connections of one store. Invariant: none of them owes a reply."""

    def __init__(self, new_connection: Callable[[], WatchConnection]) -> None:
        self._new_connection = new_connection
        self._idle: deque[WatchConnection] = deque()
        self._closed = False

    async def watch(self, key: str, until: float) -> WatchedKeyValue:
        if self._closed:
            raise closed_error()
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._new_connection()
            try:
                await connection.connect(until)
            except BaseException:
                connection.close()
                raise
        watched = WatchedKeyValue(self, connection, key)
        await watched.read(until)
        return watched

    def put_back(self, connection: WatchConnection) -> None:
        if self._closed:
            connection.close()
        else:
            self._idle.append(connection)

    def close(self) -> None:
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    def reset(self) -> None:
        """In a forked child, or after the event loop was closed."""
        while self._idle:
            self._idle.pop().reset()


@dataclass(eq=False)
class WatchedKeyValue:
    """`ports.WatchedValue`."""

    _connections: WatchConnections
    _connection: WatchConnection
    _key: str
    value: bytes | None = None

    async def read(self, until: float) -> None:
        key = self._key.encode()
        try:
            replies = await self._exchange([UNWATCH, pack(b"WATCH", key), pack(b"GET", key)], until)
        except StoreUnavailable as error:  # a read changes nothing
            raise StoreUnavailable(str(error), outcome=Outcome.NOT_DONE) from error
        self.value = replies[-1]

    async def commit(self, value: bytes, until: float) -> bool:
        replies = await self._exchange([MULTI, pack(b"SET", self._key.encode(), value, b"KEEPTTL"), EXEC], until)
        self.abandon()
        return replies[-1] is not None

    async def _exchange(self, requests: list[bytes], until: float) -> list[Any]:
        try:
            replies = await self._connection.exchange(requests, until)
        except BaseException:
            self._connection.close()
            raise
        for reply in replies:
            if type(reply) is ReplyError:
                self.abandon()
                raise error_of(str(reply), shown(self._key))
        return replies

    def abandon(self) -> None:
        self._connections.put_back(self._connection)
