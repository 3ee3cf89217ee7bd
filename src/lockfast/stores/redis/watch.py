"""Changing a value under WATCH: connections for that alone, since what is watched belongs to a connection.

Rules kept here:

- A draft has a connection to itself from its read to its end, so nobody else's transaction can end its watch; if that
  connection breaks, the draft is void, and never goes on over another one that watches nothing.
- A connection whose conversation was left in the midst (an error, a cancellation) is closed; any other is kept for the
  next draft. Each read begins with UNWATCH, so that a draft may be left at any point.
- Read and write are one round trip each. A server that refuses to WATCH is believed: without it no conflict would be
  noticed.
- EXEC that got no answer has an unknown outcome, and is not repeated: it is the caller's to say if twice does harm.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from lockfast.errors import Outcome, StoreUnavailable, closed_error
from lockfast.ports import Runtime
from lockfast.stores.redis.protocol.error_replies import error_of
from lockfast.stores.redis.protocol.resp import ReplyError, pack
from lockfast.stores.redis.transport.connect import MIN_CONNECT_TIME, ConnectionFactory, connect_error
from lockfast.stores.redis.user_client import reply_of
from lockfast.values import shown

_inherited: list[TaskSession] = []

UNWATCH, MULTI, EXEC = pack(b"UNWATCH"), pack(b"MULTI"), pack(b"EXEC")


class Session(Protocol):
    """One connection, for one conversation at a time."""

    async def connect(self, until: float) -> None: ...

    async def exchange(self, requests: list[bytes], until: float) -> list[Any]:
        """A reply for each, an error reply as a `ReplyError`; without one `StoreUnavailable`, outcome unknown."""

    def drop(self) -> None:
        """Close it without another word."""

    def reset(self) -> None:
        """In a forked child, or after the event loop has ended: let go without touching the parent's connection."""


class ThreadSession:
    """`Session` over a blocking connection of the client library."""

    def __init__(self, dial: ConnectionFactory, runtime: Runtime) -> None:
        self._dial = dial
        self._runtime = runtime
        self._connection: Any = None

    async def connect(self, until: float) -> None:
        self._connection = self._dial(max(MIN_CONNECT_TIME, until - self._runtime.now()))
        try:
            self._connection.connect()
        except Exception as error:
            raise connect_error(error) from error

    async def exchange(self, requests: list[bytes], until: float) -> list[Any]:
        try:
            self._connection._sock.settimeout(max(0.001, until - self._runtime.now()))
            self._connection.send_packed_command([b"".join(requests)], check_health=False)
            return [self._reply() for _ in requests]
        except Exception as error:
            raise _no_answer(error) from error

    def _reply(self) -> Any:
        try:
            return self._connection.read_response(disable_decoding=True)
        except Exception as error:
            return reply_of(error)

    def drop(self) -> None:
        self._connection.disconnect()

    def reset(self) -> None:
        self._connection.disconnect()  # in a child the library only closes its copy of the descriptor


class TaskSession:
    """`Session` over an asyncio connection of the client library."""

    def __init__(self, dial: ConnectionFactory, runtime: Runtime) -> None:
        self._dial = dial
        self._runtime = runtime
        self._connection: Any = None

    async def connect(self, until: float) -> None:
        import asyncio

        limit = max(MIN_CONNECT_TIME, until - self._runtime.now())
        self._connection = self._dial(limit)
        try:
            async with asyncio.timeout(limit):
                await self._connection.connect()
        except Exception as error:
            raise connect_error(error) from error

    async def exchange(self, requests: list[bytes], until: float) -> list[Any]:
        import asyncio

        try:
            async with asyncio.timeout(max(0.001, until - self._runtime.now())):
                await self._connection.send_packed_command([b"".join(requests)], check_health=False)
                return [await self._reply() for _ in requests]
        except Exception as error:
            raise _no_answer(error) from error

    async def _reply(self) -> Any:
        try:
            return await self._connection.read_response(disable_decoding=True)
        except Exception as error:
            return reply_of(error)

    def drop(self) -> None:
        # The library's own way waits for a farewell that nobody needs, and cannot be used from here.
        writer = self._connection._writer
        self._connection._reader = self._connection._writer = None
        if writer is not None:
            writer.transport.abort()

    def reset(self) -> None:
        _inherited.append(self)  # its end would write to the parent's connection (TLS) or warn


def _no_answer(error: Exception) -> StoreUnavailable:
    return StoreUnavailable(
        f"The server did not answer; the request may or may not have been carried out. [{shown(str(error))}]",
        outcome=Outcome.UNKNOWN,
    )


class Editor:
    """`ports.Editor`. Invariant: what is in `_idle` owes no reply; there are as many as drafts were open at once."""

    def __init__(self, new_session: Callable[[], Session]) -> None:
        self._new_session = new_session
        self._idle: deque[Session] = deque()
        self._closed = False

    async def watch(self, key: str, until: float) -> Draft:
        """Read a value, and watch it until the draft ends."""
        if self._closed:
            raise closed_error()
        draft = Draft(self, await self._session(until), key)
        await draft.read(until)
        return draft

    async def _session(self, until: float) -> Session:
        try:
            return self._idle.pop()
        except IndexError:
            pass
        session = self._new_session()
        try:
            await session.connect(until)
        except BaseException:
            session.drop()
            raise
        return session

    def keep(self, session: Session) -> None:
        if self._closed:
            session.drop()
        else:
            self._idle.append(session)

    def close(self) -> None:
        self._closed = True
        while self._idle:
            self._idle.pop().drop()

    def reset(self, *, forked: bool) -> None:
        """In a forked child the connections are the parent's, and after a loop has ended they are gone with it."""
        while self._idle:
            self._idle.pop().reset()


class Draft:
    """`ports.Draft`: one value as it was read. Ends with `commit` or `abandon`, exactly once."""

    __slots__ = ("_editor", "_key", "_name", "_session", "value")

    def __init__(self, editor: Editor, session: Session, key: str) -> None:
        self._editor = editor
        self._session = session
        self._key = shown(key)
        self._name = key.encode()
        self.value: bytes | None = None

    async def read(self, until: float) -> None:
        requests = [UNWATCH, pack(b"WATCH", self._name), pack(b"GET", self._name)]
        try:
            replies = await self._converse(requests, until)
        except StoreUnavailable as error:  # reading changes nothing
            raise StoreUnavailable(str(error), outcome=Outcome.NOT_DONE) from error
        self._check(replies)
        self.value = replies[-1]

    async def commit(self, value: bytes, until: float) -> bool:
        replies = await self._converse([MULTI, pack(b"SET", self._name, value, b"KEEPTTL"), EXEC], until)
        self._check(replies)
        self.abandon()
        return replies[-1] is not None

    async def _converse(self, requests: list[bytes], until: float) -> list[Any]:
        try:
            return await self._session.exchange(requests, until)
        except BaseException:
            self._session.drop()
            raise

    def _check(self, replies: list[Any]) -> None:
        for reply in replies:
            if type(reply) is ReplyError:
                self.abandon()
                raise error_of(str(reply), self._key)

    def abandon(self) -> None:
        self._editor.keep(self._session)
