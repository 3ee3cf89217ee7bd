"""One connection for threads: what an interrupt or the end of it must not do."""

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.runtime.threads import ThreadRuntime
from holdfast.stores.redis.link import Link, Slot


@pytest.fixture
def link() -> Iterator[Link]:
    ours, theirs = socket.socketpair()
    connection = SimpleNamespace(_sock=ours, protocol=2, disconnect=ours.close)
    yield Link(connection, ThreadRuntime(), lambda _: None)
    ours.close()
    theirs.close()


def interrupted() -> Iterator[Slot]:
    yield Slot()
    raise KeyboardInterrupt


def test_an_interrupt_between_slot_and_request_ends_the_connection(link: Link) -> None:
    """A slot without a request would take the reply of the next one."""
    slots: Any = interrupted()
    with pytest.raises(KeyboardInterrupt):
        link.send(b"*1\r\n$4\r\nPING\r\n", ThreadRuntime().now() + 1, slots)
    assert link.error is not None


def test_an_interrupt_while_sending_ends_the_connection(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(data: bytes) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(link, "write", write)
    with pytest.raises(KeyboardInterrupt):
        link.send(b"*1\r\n$4\r\nPING\r\n", ThreadRuntime().now() + 1, [Slot()])
    assert link.error is not None
