"""A virtual server behind the shipped asyncio connection: no socket, no process, in the virtual time of the event loop.

`dial` returns the same kind of connection as the client library: its transport is taken over after the handshake.
Requests reach the server `LATENCY` seconds later, in order, and so do the replies.
"""

import asyncio
from typing import Any

from lockfast.stores.redis.protocol.resp import Reader, ReplyError
from lockfast.testing.sandbox import START
from verify.virtual_server import START_US, VirtualRedis

LATENCY = 0.001


def encoded(reply: Any) -> bytes:
    """Return a reply as the server writes it."""
    if isinstance(reply, ReplyError):
        return b"-%s\r\n" % str(reply).encode()
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if reply is None:
        return b"$-1\r\n"
    if isinstance(reply, list):
        return b"*%d\r\n%s" % (len(reply), b"".join(map(encoded, reply)))
    return b"$%d\r\n%s\r\n" % (len(reply), reply)


class LoopServer:
    """A `VirtualRedis` in the running event loop."""

    def __init__(self) -> None:
        self.redis = VirtualRedis()
        self._lines: dict[str, Line] = {}

    def dial(self, limit: float) -> "Connection":
        line = Line(self, f"line{len(self._lines) + 1}")
        self._lines[line.name] = line
        return Connection(line)

    def receive(self, line: "Line", data: bytes) -> None:
        self.redis.now_us = START_US + round((asyncio.get_running_loop().time() - START) * 1e6)
        for words in line.reader.feed(data):
            if words[0] == b"SUBSCRIBE":
                self.redis.subscribe(line.name, words[1])
                line.answer([b"subscribe", words[1], 1])
            else:
                line.answer(self.redis.run([bytes(word) for word in words]))
            for message in self.redis.messages:
                self._lines[message.subscriber].answer([b"message", message.channel, message.payload])
            self.redis.messages.clear()

    def traces(self, holders: set[str]) -> list[bytes]:
        """The keys that name one of these holders, as holder or waiter."""
        self.redis.snapshot()
        return [
            key
            for key, entry in self.redis.data.items()
            if not key.endswith(b":m") and any(holder in str(entry.value) for holder in holders)
        ]


class Line:
    """The transport of one connection, as a `TaskLink` uses it."""

    def __init__(self, server: LoopServer, name: str) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._protocol: Any = None
        self._open = True
        self.name = name
        self.reader = Reader()

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol

    def write(self, data: bytes) -> None:
        if self._open:
            self._loop.call_later(LATENCY, self._server.receive, self, data)

    def answer(self, reply: Any) -> None:
        self._loop.call_later(LATENCY, self._deliver, encoded(reply))

    def _deliver(self, data: bytes) -> None:
        if self._open:
            self._protocol.data_received(data)

    def abort(self) -> None:
        if self._open:
            self._open = False
            self._server.redis.unsubscribe(self.name)


class Connection:
    """A connection of redis-py, as far as lockfast uses it: it connects, and then its transport is taken over."""

    protocol = 2

    def __init__(self, line: Line) -> None:
        self._line = line
        self._reader: Any = None
        self._writer: Any = None

    async def connect(self) -> None:
        await asyncio.sleep(LATENCY)
        self._writer = Writer(self._line)

    async def disconnect(self, nowait: bool = False) -> None:
        self._line.abort()


class Writer:
    def __init__(self, transport: Line) -> None:
        self.transport = transport
