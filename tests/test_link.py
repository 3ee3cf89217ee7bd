"""The connection of the threads: interrupts, full buffers and short deadlines."""

import socket
import ssl
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from lockfast.runtime.base import run
from lockfast.runtime.threads import ThreadRuntime
from lockfast.stores.redis.transport.connect import PendingReply
from lockfast.stores.redis.transport.threads import ThreadLink, ThreadWire


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


class Clock:
    """A runtime whose time passes only when a test moves it."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def link(ends: tuple[socket.socket, socket.socket], clock: Clock) -> ThreadLink:
    connection = SimpleNamespace(_sock=ends[0], protocol=2, disconnect=ends[0].close)
    return ThreadLink(connection, clock, lambda _: None)  # type: ignore[arg-type] # nothing else of it is used


@pytest.fixture
def peer(ends: tuple[socket.socket, socket.socket]) -> socket.socket:
    return ends[1]


def interrupted() -> Iterator[PendingReply]:
    yield PendingReply()
    raise KeyboardInterrupt


def test_an_interrupt_between_entry_and_request_fails_the_link(link: ThreadLink) -> None:
    """An entry without a request would take the reply to the next one."""
    replies: Any = interrupted()
    with pytest.raises(KeyboardInterrupt):
        link.send(b"*1\r\n$4\r\nPING\r\n", ThreadRuntime().now() + 1, replies)
    assert link.error is not None


def interrupt(data: bytes) -> int:
    raise KeyboardInterrupt


def test_an_interrupt_while_sending_fails_the_link(link: ThreadLink) -> None:
    link.write = interrupt
    with pytest.raises(KeyboardInterrupt):
        link.send(b"*1\r\n$4\r\nPING\r\n", ThreadRuntime().now() + 1, [PendingReply()])
    assert link.error is not None


def test_an_interrupt_while_reading_fails_the_link(link: ThreadLink, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupted read may have taken half a reply; no other thread may read the rest as a whole one."""
    monkeypatch.setattr(link, "_receive", interrupt)
    with pytest.raises(KeyboardInterrupt):
        link.read(PendingReply(), 101.0, 100.0)
    assert link.error is not None
    assert not link.reading.locked()


# The wire: its fast path, and the slow path that a request takes together with others.


@pytest.fixture
def wire(link: ThreadLink, clock: Clock) -> ThreadWire:
    wire = ThreadWire(lambda limit: None, clock)  # type: ignore[arg-type] # nothing else of it is used
    wire._link = link
    return wire


@pytest.mark.parametrize("full", [BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError])
@pytest.mark.parametrize("before", [(), (b"before ",)], ids=["alone", "behind another"])
def test_a_full_buffer_is_waited_for(
    full: type[OSError], before: tuple[bytes, ...], link: ThreadLink, wire: ThreadWire, peer: socket.socket
) -> None:
    """TLS reports it with errors of its own."""
    shipped, failures = link.write, [full()]

    def write(data: bytes) -> int:
        if failures:
            raise failures.pop()
        return shipped(data)

    link.write = write
    peer.sendall(b":1\r\n" * (len(before) + 1))
    assert run(wire.request(b"request", 101.0, before)) == 1
    assert peer.recv(100) == b"".join(before) + b"request"
    assert link.error is None


@pytest.mark.parametrize("before", [(), (b"before",)], ids=["alone", "behind another"])
def test_an_interrupt_does_not_leave_the_wire_locked(
    before: tuple[bytes, ...], link: ThreadLink, wire: ThreadWire
) -> None:
    link.write = interrupt
    with pytest.raises(KeyboardInterrupt):
        run(wire.request(b"request", 101.0, before))
    assert link.error is not None
    assert not wire._mutex.locked()


def test_requests_in_front_have_replies_of_their_own(link: ThreadLink, wire: ThreadWire, peer: socket.socket) -> None:
    peer.sendall(b":1\r\n:2\r\n:3\r\n")
    assert run(wire.request(b"request", 101.0, (b"one ", b"two "))) == 3
    assert peer.recv(100) == b"one two request"
    assert not link.unanswered


def test_a_read_does_not_outlast_the_deadline(
    link: ThreadLink, wire: ThreadWire, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sending took long, so the time left is shorter than one blocking read: poll() waits instead."""

    def write(data: bytes) -> int:
        if data == b"request":
            return 1
        clock.time += 0.9
        return len(data)

    link.write = write

    def read_once() -> None:
        raise AssertionError("it blocked in a read")

    polled: list[float] = []

    def readable(until: float) -> bool:
        polled.append(until)
        clock.time = until
        return False

    monkeypatch.setattr(link, "read_once", read_once)
    monkeypatch.setattr(link, "_await_readable", readable)
    with pytest.raises(ConnectionError, match="did not answer in time"):
        run(wire.request(b"request", 101.0))
    assert set(polled) == {101.0}
    assert link.error is None
