"""One connection for threads: what an interrupt or the end of it must not do."""

import socket
import ssl
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from lockfast.runtime.threads import ThreadRuntime
from lockfast.stores.redis.transport.threads import PendingReply, ThreadLink, ThreadWire


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def link(ends: tuple[socket.socket, socket.socket]) -> ThreadLink:
    connection = SimpleNamespace(_sock=ends[0], protocol=2, disconnect=ends[0].close)
    return ThreadLink(connection, ThreadRuntime(), lambda _: None)


@pytest.fixture
def peer(ends: tuple[socket.socket, socket.socket]) -> socket.socket:
    return ends[1]


def interrupted() -> Iterator[PendingReply]:
    yield PendingReply()
    raise KeyboardInterrupt


def test_an_interrupt_between_slot_and_request_ends_the_connection(link: ThreadLink) -> None:
    """A pending without a request would take the reply of the next one."""
    replies: Any = interrupted()
    with pytest.raises(KeyboardInterrupt):
        link.send(b"*1\r\n$4\r\nPING\r\n", ThreadRuntime().now() + 1, replies)
    assert link.error is not None


def test_an_interrupt_while_sending_ends_the_connection(link: ThreadLink, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(data: bytes) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(link, "write", write)
    with pytest.raises(KeyboardInterrupt):
        link.send(b"*1\r\n$4\r\nPING\r\n", ThreadRuntime().now() + 1, [PendingReply()])
    assert link.error is not None


# What a wire does in few steps, and the link in more.


class Clock:
    """A runtime whose time stands still, but for what is said to take some."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time


@pytest.fixture
def wire(link: ThreadLink) -> ThreadWire:
    wire = ThreadWire(lambda limit: None, Clock())  # type: ignore[arg-type] # no more of it is used
    wire._link = link
    return wire


@pytest.mark.parametrize("full", [BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError])
def test_a_full_buffer_is_waited_for(
    full: type[OSError], link: ThreadLink, wire: ThreadWire, peer: socket.socket
) -> None:
    """With TLS too, which says so in its own way."""
    shipped, failures = link.write, [full()]

    def write(data: bytes) -> int:
        if failures:
            raise failures.pop()
        return shipped(data)

    link.write = write
    wire.submit(b"request", 100.0, 101.0)
    assert peer.recv(100) == b"request"
    assert link.error is None


def test_an_interrupt_leaves_the_wire_to_the_next(link: ThreadLink, wire: ThreadWire) -> None:
    def write(data: bytes) -> int:
        raise KeyboardInterrupt

    link.write = write
    for before in ((), (b"before",)):
        link.error = None
        with pytest.raises(KeyboardInterrupt):
            wire.submit(b"request", 100.0, 101.0, before)
        assert link.error is not None
        assert not wire._mutex.locked()


def test_what_goes_out_before_has_replies_of_its_own(link: ThreadLink, wire: ThreadWire, peer: socket.socket) -> None:
    sent = wire.submit(b"request", 100.0, 101.0, (b"one ", b"two "))
    assert peer.recv(100) == b"one two request"
    peer.sendall(b":1\r\n:2\r\n:3\r\n")
    assert wire.fetch(sent, 101.0) == 3
    assert not link.unanswered


def test_a_reply_is_not_waited_for_in_a_read_that_outlasts_the_limit(link: ThreadLink, wire: ThreadWire) -> None:
    """Sending took long, so that little time is left."""

    def write(data: bytes) -> int:
        if data == b"request":
            return 1
        wire._runtime.time += 0.9  # type: ignore[attr-defined]
        return len(data)

    link.write = write

    def read_once() -> None:
        raise AssertionError("it was read")

    link.read_once = read_once  # type: ignore[method-assign]
    sent = wire.submit(b"request", 100.0, 101.0)
    assert wire.fetch(sent, 101.0) is None
    assert link.error is None
