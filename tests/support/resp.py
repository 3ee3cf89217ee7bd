"""Frames of the Redis wire protocol: RESP2 and RESP3, requests and replies.

A frame keeps its exact bytes next to its value, so that the proxy forwards it unchanged. Streamed aggregates (`$?`,
`*?`) are not supported: no server sends them.
"""

from typing import NamedTuple, TypeAlias

Argument: TypeAlias = str | bytes | int | float
Value: TypeAlias = "bytes | int | float | bool | ReplyError | list[Value] | dict[Value, Value] | None"

NUMBERS = {b":": int, b"(": int, b",": float}
BULKS = (b"$", b"=", b"!")
# How many frames one counted element takes: a map's element is a key and a value.
AGGREGATES = {b"*": 1, b"~": 1, b">": 1, b"%": 2, b"|": 2}
PUSH = b">"


class ReplyError(Exception):
    """An error reply: `str()` is the server's own text."""


class ProtocolError(Exception):
    """The bytes are not a frame."""


class Incomplete(Exception):
    """The rest of the frame has not arrived yet."""


class Frame(NamedTuple):
    raw: bytes
    value: Value

    @property
    def is_push(self) -> bool:
        return self.raw[:1] == PUSH


def encode(*args: Argument) -> bytes:
    """Encode a request."""
    parts = [arg if isinstance(arg, bytes) else str(arg).encode() for arg in args]
    return b"".join([b"*%d\r\n" % len(parts), *(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)])


def parse(data: bytes | bytearray, start: int = 0) -> tuple[Value, int]:
    """Parse the frame at `start`; return its value and its end."""
    line_end = data.find(b"\r\n", start)
    if line_end < 0:
        raise Incomplete
    kind, line, end = bytes(data[start : start + 1]), bytes(data[start + 1 : line_end]), line_end + 2
    if kind in NUMBERS:
        return NUMBERS[kind](line), end
    if kind in BULKS:
        return _parse_bulk(kind, int(line), data, end)
    if kind in AGGREGATES:
        return _parse_aggregate(kind, int(line), data, end)
    match kind:
        case b"+":
            return line, end
        case b"-":
            return ReplyError(line.decode(errors="replace")), end
        case b"_":
            return None, end
        case b"#":
            return line == b"t", end
    raise ProtocolError(f"no frame starts with {kind!r}")


def _parse_bulk(kind: bytes, length: int, data: bytes | bytearray, start: int) -> tuple[Value, int]:
    if length < 0:
        return None, start
    end = start + length + 2
    if len(data) < end:
        raise Incomplete
    content = bytes(data[start : end - 2])
    if kind == b"!":
        return ReplyError(content.decode(errors="replace")), end
    return content, end


def _parse_aggregate(kind: bytes, count: int, data: bytes | bytearray, end: int) -> tuple[Value, int]:
    if count < 0:
        return None, end
    items: list[Value] = []
    for _ in range(count * AGGREGATES[kind]):
        item, end = parse(data, end)
        items.append(item)
    if kind == b"|":
        # An attribute belongs to the reply after it; both are one frame.
        return parse(data, end)
    if kind == b"%":
        return dict(zip(items[::2], items[1::2], strict=True)), end
    return items, end


class Splitter:
    """Splits a stream into frames; with `inline`, a request may also be a plain line such as `PING`."""

    def __init__(self, *, inline: bool = False) -> None:
        self._inline = inline
        self._data = bytearray()

    def feed(self, chunk: bytes) -> list[Frame]:
        self._data += chunk
        frames: list[Frame] = []
        start = 0
        try:
            while start < len(self._data):
                value, end = self._next(start)
                frames.append(Frame(bytes(self._data[start:end]), value))
                start = end
        except Incomplete:
            pass
        del self._data[:start]
        return frames

    def _next(self, start: int) -> tuple[Value, int]:
        if not self._inline or self._data.startswith(b"*", start):
            return parse(self._data, start)
        line_end = self._data.find(b"\n", start)
        if line_end < 0:
            raise Incomplete
        return [bytes(word) for word in self._data[start:line_end].split()], line_end + 1
