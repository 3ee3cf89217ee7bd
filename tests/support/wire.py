"""A minimal client: one socket, exact bytes, no commands of its own.

Admin commands and tests of the proxy use it, so that they do not depend on the client under test.
"""

import select
import socket
from types import TracebackType
from typing import Any, Self

from tests.support.resp import Argument, Frame, ReplyError, Splitter, Value, encode
from tests.support.waiting import LONG


class WireClient:
    """Speaks RESP2 until `HELLO` changes it. Not thread-safe."""

    def __init__(self, port: int, host: str = "127.0.0.1", timeout: float = LONG) -> None:
        self._socket = socket.create_connection((host, port), timeout)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._splitter = Splitter()
        self._frames: list[Frame] = []

    def call(self, *args: Argument) -> Any:
        """Send one command and return its reply, decoded; raise ReplyError for an error reply."""
        self.send(*args)
        reply = self.receive()
        if isinstance(reply, ReplyError):
            raise reply
        return reply

    def send(self, *args: Argument) -> None:
        self._socket.sendall(encode(*args))

    def receive(self) -> Any:
        """Return the next frame, a reply or a push; raise ConnectionError at the end of the stream."""
        while not self._frames:
            chunk = self._socket.recv(65536)
            if not chunk:
                raise ConnectionError("the stream ended before a reply")
            self._frames = self._splitter.feed(chunk)
        return as_text(self._frames.pop(0).value)

    def rest(self) -> bytes:
        """Return all bytes up to the end of the stream; raise ConnectionResetError after a reset."""
        received = b"".join(frame.raw for frame in self._frames)
        while chunk := self._socket.recv(65536):
            received += chunk
        return received

    @property
    def is_stale(self) -> bool:
        """Whether there is unsolicited input, including the end of the stream."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def as_text(value: Value) -> Any:
    """Decode every byte string in `value`; bytes that are not UTF-8 survive as surrogates."""
    if isinstance(value, bytes):
        return value.decode(errors="surrogateescape")
    if isinstance(value, list):
        return [as_text(item) for item in value]
    if isinstance(value, dict):
        return {as_text(key): as_text(item) for key, item in value.items()}
    return value
