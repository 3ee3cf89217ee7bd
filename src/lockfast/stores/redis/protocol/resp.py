"""RESP, the wire format of Redis: encode requests, decode replies (RESP2 and RESP3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Feed = Callable[[bytes], Sequence[Any]]  # takes received bytes, returns the replies that they complete

_ONE = b":1\r\n"  # the reply to nearly every release


class ReplyError(Exception):
    """An error reply. The reader returns it like any other reply."""


class Pushed(list[Any]):
    """A RESP3 push: a message that answers no request."""


def pack(*args: bytes) -> bytes:
    """Encode one request.

    >>> pack(b"GET", b"x")
    b'*2\\r\\n$3\\r\\nGET\\r\\n$1\\r\\nx\\r\\n'
    """
    return b"*%d\r\n" % len(args) + bulks(*args)


def bulks(*args: bytes) -> bytes:
    """Encode arguments only, to append to a request whose argument count is already written."""
    return b"".join([b"$%d\r\n%b\r\n" % (len(arg), arg) for arg in args])


class Reader:
    """Decodes a byte stream. An incomplete reply is kept until the rest arrives.

    >>> reader = Reader()
    >>> reader.feed(b"*2\\r\\n:1\\r\\n$2\\r\\no")
    []
    >>> reader.feed(b"k\\r\\n+PONG\\r\\n")
    [[1, b'ok'], b'PONG']
    """

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Any]:
        if self._rest:
            data = self._rest + data
        elif data == _ONE:
            return [1]
        elif data[0] == 58 and data[-1] == 10:
            try:
                return [int(data[1:])]  # a single integer, as most replies are
            except ValueError:
                pass
        replies = []
        at, end = 0, len(data)
        while at < end:
            try:
                reply, at = _read(data, at)
            except _Incomplete:
                break
            replies.append(reply)
        self._rest = data[at:]
        return replies


def new_reader() -> Reader:
    """A reader; the compiled one of hiredis if it is installed."""
    try:
        return _HiredisReader()
    except ImportError:
        return Reader()


class _HiredisReader(Reader):
    """A single integer, as most replies are, bypasses the compiled reader, which would take four calls.

    That is safe only while `_clean`: the compiled reader holds no part of a reply, and cannot tell by itself.
    """

    __slots__ = ("_clean", "_push", "_reader")

    def __init__(self) -> None:
        import hiredis

        self._clean = True
        self._push = hiredis.PushNotification
        self._reader = hiredis.Reader(replyError=ReplyError, notEnoughData=_Incomplete)

    def feed(self, data: bytes) -> list[Any]:
        if self._clean and data == _ONE:
            return [1]
        number = None
        if data[0] == 58 and data[-1] == 10:
            try:
                number = int(data[1:])
                if self._clean:
                    return [number]
            except ValueError:
                pass  # more than one reply
        reader = self._reader
        reader.feed(data)
        replies: list[Any] = []
        while (reply := reader.gets()) is not _Incomplete:
            replies.append(Pushed(reply) if type(reply) is self._push else reply)
        self._clean = number is not None and replies == [number]
        return replies


class _Incomplete(Exception):
    pass


_AGGREGATES = {ord("*"), ord(">"), ord("~"), ord("%"), ord("|")}
_BULKS = {ord("$"), ord("="), ord("!")}


def _read(data: bytes, at: int) -> tuple[Any, int]:
    stop = data.find(b"\r\n", at)
    if stop < 0:
        raise _Incomplete
    kind = data[at]
    line = data[at + 1 : stop]
    at = stop + 2
    if kind == 58:  # ":", the most frequent type
        return int(line), at
    if kind in _AGGREGATES:
        return _read_many(kind, int(line), data, at)
    if kind in _BULKS:
        return _read_bulk(kind, int(line), data, at)
    if kind == 45:  # "-"
        return ReplyError(line.decode("utf-8", "replace")), at
    if kind == 95:  # "_"
        return None, at
    if kind == 35:  # "#"
        return line == b"t", at
    return line, at  # "+", and number types that our scripts never return


def _read_many(kind: int, count: int, data: bytes, at: int) -> tuple[Any, int]:
    if count < 0:
        return None, at
    if kind in (37, 124):  # "%" and "|" count pairs
        count *= 2
    items: list[Any] = Pushed() if kind == 62 else []
    for _ in range(count):
        item, at = _read(data, at)
        items.append(item)
    if kind == 124:  # "|": attributes precede the reply that they describe
        return _read(data, at)
    return items, at


def _read_bulk(kind: int, size: int, data: bytes, at: int) -> tuple[Any, int]:
    if size < 0:
        return None, at
    stop = at + size
    if len(data) < stop + 2:
        raise _Incomplete
    value = data[at:stop]
    return (ReplyError(value.decode("utf-8", "replace")) if kind == 33 else value), stop + 2
