"""A client connection and its connection to the server.

Each direction is read immediately and forwarded in order. So the proxy sees a request, or the end of the stream, even
while it holds an earlier frame, and frames behind a held or delayed one wait as in a TCP stream. A held request is
delivered even if its client has disconnected meanwhile, as a network would.
"""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from tests.support.conversation import Conversation, push_args
from tests.support.faults import Direction, Ledger, Rule, Then
from tests.support.resp import Frame, Splitter

CONNECT_SECONDS = 10.0
CLOSE_SECONDS = 1.0


@dataclass(frozen=True)
class End:
    """The two streams to one peer."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def frames(self, splitter: Splitter) -> AsyncIterator[Frame]:
        """Yield frames until the stream ends or is reset."""
        while True:
            try:
                chunk = await self.reader.read(65536)
            except OSError:
                return
            if not chunk:
                return
            for frame in splitter.feed(chunk):
                yield frame

    async def send(self, data: bytes) -> None:
        try:
            self.writer.write(data)
            await self.writer.drain()
        except OSError:
            pass  # the peer disconnected; its reader notices

    async def close(self) -> None:
        self.writer.close()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self.writer.wait_closed()
        except (OSError, TimeoutError):
            self.writer.transport.abort()


class Flow:
    """A gate for one direction of all links."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._open = asyncio.Event()
        self._open.set()

    def stall(self) -> None:
        self._open.clear()

    def unstall(self) -> None:
        self._open.set()

    async def wait(self) -> None:
        if self._open.is_set():
            return
        self._ledger.count(stalled=1)
        try:
            while not self._open.is_set():
                await self._open.wait()
        finally:
            self._ledger.count(stalled=-1)


@dataclass(frozen=True, slots=True)
class Parcel:
    """A frame in transit, with the rules bound to it."""

    raw: bytes
    rule: Rule | None
    args: list[bytes] = field(default_factory=list)
    reply_rule: Rule | None = None
    arrived_at: float = field(default_factory=lambda: asyncio.get_running_loop().time())


class Link:
    def __init__(
        self, ledger: Ledger, flows: dict[Direction, Flow], client: socket.socket, upstream: tuple[str, int]
    ) -> None:
        self._ledger = ledger
        self._flows = flows
        self._socket = client
        self._upstream = upstream
        self._conversation = Conversation()
        # None marks the end of the stream.
        self._to_server: asyncio.Queue[Parcel | None] = asyncio.Queue()
        self._to_client: asyncio.Queue[Parcel | None] = asyncio.Queue()
        self._silent: set[Direction] = set()
        self._ended = asyncio.Event()
        self._client_is_open = True
        ledger.count(connections=1)

    async def run(self) -> None:
        """Forward frames until the stream of the server has been forwarded completely, or `end` is called."""
        try:
            self._client = End(*await asyncio.open_connection(sock=self._socket))
        except BaseException:
            self._client_left()
            self._socket.close()
            raise
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                server = End(*await asyncio.open_connection(*self._upstream))
        except OSError:
            self._prepare_reset()
        else:
            await self._forward(server)
        finally:
            self._client_left()
            await self._client.close()

    async def _forward(self, server: End) -> None:
        jobs = (
            self._read_requests(),
            self._forward_requests(server),
            self._read_replies(server),
            self._forward_replies(),
        )
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(job) for job in jobs]
                await self._ended.wait()
                for task in tasks:
                    task.cancel()
        finally:
            await server.close()

    def end(self, *, reset: bool = False) -> None:
        if reset:
            self._prepare_reset()
        self._ended.set()

    def _prepare_reset(self) -> None:
        """Turn the next close into a reset: a linger time of 0 s discards the stream."""
        with contextlib.suppress(OSError):  # already closed
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def _client_left(self) -> None:
        if self._client_is_open:
            self._client_is_open = False
            self._ledger.count(connections=-1)

    async def _read_requests(self) -> None:
        async for frame in self._client.frames(Splitter(inline=True)):
            args = push_args(frame)
            rule, reply_rule = self._ledger.see_request(args)
            self._to_server.put_nowait(Parcel(frame.raw, rule, args, reply_rule))
        self._client_left()
        self._to_server.put_nowait(None)

    async def _forward_requests(self, server: End) -> None:
        while (parcel := await self._to_server.get()) is not None:
            if await self._passes(parcel, "to_server"):
                self._conversation.request(parcel.args, parcel.reply_rule)
                await server.send(parcel.raw)
        await self._flows["to_server"].wait()
        # Close only this half: the server executes everything it received before it closes the other.
        with contextlib.suppress(OSError):  # the server disconnected, and its transport has not noticed
            if not server.writer.is_closing():
                server.writer.write_eof()

    async def _read_replies(self, server: End) -> None:
        async for frame in server.frames(Splitter()):
            pending = self._conversation.answer(frame)
            rule = pending.rule if pending is not None else self._ledger.see_push(push_args(frame))
            self._to_client.put_nowait(Parcel(frame.raw, rule))
        self._to_client.put_nowait(None)

    async def _forward_replies(self) -> None:
        while (parcel := await self._to_client.get()) is not None:
            if not await self._passes(parcel, "to_client"):
                continue
            if parcel.rule is not None and parcel.rule.effect == "half":
                await self._client.send(parcel.raw[: len(parcel.raw) // 2])
                self.end()
                return
            await self._client.send(parcel.raw)
        await self._flows["to_client"].wait()
        self.end()

    async def _passes(self, parcel: Parcel, direction: Direction) -> bool:
        """Apply the rule of a parcel, including its delay; return False if the parcel is dropped."""
        if direction in self._silent or self._ended.is_set():
            return False
        rule = parcel.rule
        if rule is not None:
            self._ledger.hit(rule)
            if rule.effect == "drop":
                self._after_drop(rule.then, direction)
                return False
            if rule.effect == "hold":
                await rule.gate.wait()
            elif rule.effect == "delay":
                due = parcel.arrived_at + rule.seconds
                await asyncio.sleep(due - asyncio.get_running_loop().time())
        await self._flows[direction].wait()
        return True

    def _after_drop(self, then: Then, direction: Direction) -> None:
        if then == "silence":
            self._silent.add(direction)
        elif then != "continue":
            self.end(reset=then == "reset")
