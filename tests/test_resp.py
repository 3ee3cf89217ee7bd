"""Both reply readers, ours and the one of hiredis, return the same replies for the same bytes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lockfast
from lockfast import aio
from lockfast.stores.redis.protocol.notifications import grant_fast_path, notification_in
from lockfast.stores.redis.protocol.resp import Pushed, Reader, ReplyError, bulks, new_reader, pack
from lockfast.stores.redis.transport import tasks, threads
from lockfast.values import GrantNotification
from tests.support.servers import Server

INBOX = "lockfast:inbox:abcdefghijklmnopqrst"

REPLIES: list[tuple[bytes, Any]] = [
    (b":0\r\n", 0),
    (b":-17\r\n", -17),
    (b":1794771109402614\r\n", 1794771109402614),
    (b"+OK\r\n", b"OK"),
    (b"$5\r\nhello\r\n", b"hello"),
    (b"$0\r\n\r\n", b""),
    (b"$4\r\na\r\nb\r\n", b"a\r\nb"),
    (b"$-1\r\n", None),
    (b"*-1\r\n", None),
    (b"_\r\n", None),
    (b"#t\r\n", True),
    (b"#f\r\n", False),
    (b"*0\r\n", []),
    (b"*3\r\n:1\r\n$1\r\nx\r\n*1\r\n:2\r\n", [1, b"x", [2]]),
    (b">3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$1\r\np\r\n", [b"message", b"c", b"p"]),
    (b"*3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$4\r\nm 17\r\n", [b"message", b"c", b"m 17"]),
    (b"*3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$4\r\na\r\nb\r\n", [b"message", b"c", b"a\r\nb"]),
    (b"*3\r\n$7\r\nmessage\r\n$4\r\na\r\nb\r\n$3\r\nm\r\n\r\n", [b"message", b"a\r\nb", b"m\r\n"]),
    (b"*3\r\n$7\r\nmessage\r\n$0\r\n\r\n$0\r\n\r\n", [b"message", b"", b""]),
    (b"*3\r\n$7\r\nmessage\r\n:1\r\n$1\r\nx\r\n", [b"message", 1, b"x"]),
    (b"*3\r\n$7\r\nmessage\r\n:2\r\n$5\r\nx1\r\na\r\n", [b"message", 2, b"x1\r\na"]),
    (b">2\r\n$10\r\ninvalidate\r\n*1\r\n$1\r\nk\r\n", [b"invalidate", [b"k"]]),
]


def _same(reply: Any, wanted: Any) -> bool:
    return bool(reply == wanted) and type(reply) is not ReplyError


@pytest.mark.parametrize("make", [Reader, new_reader], ids=["ours", "hiredis"])
@given(data=st.data())
def test_replies_do_not_depend_on_how_the_stream_is_split(make: Any, data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(REPLIES), min_size=1, max_size=6))
    wire = b"".join(one for one, _ in chosen)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(wire)), max_size=8)) | {len(wire)})
    reader, got, start = make(), [], 0
    for cut in cuts:
        got += reader.feed(wire[start:cut])
        start = cut
    assert len(got) == len(chosen)
    for reply, (sent, wanted) in zip(got, chosen, strict=True):
        assert _same(reply, wanted)
        assert (type(reply) is Pushed) == sent.startswith(b">")


def _message(text: bytes, mark: bytes) -> bytes:
    return mark + b"3\r\n" + bulks(b"message", INBOX.encode(), text)


@pytest.mark.parametrize("make", [Reader, new_reader], ids=["ours", "hiredis"])
@pytest.mark.parametrize("protocol", [2, 3])
@given(data=st.data())
def test_the_fast_path_delivers_the_same_notifications(make: Any, protocol: int, data: st.DataObject) -> None:
    """However the stream is split, and between other messages."""
    mark = b">" if protocol == 3 else b"*"
    grants = [_message(text, mark) for text in (b"moto 3 17", b"ana 1 1794771109402614", b"bob 12 9")]
    others = [
        _message(text, mark)
        for text in (b"moto 3 next 1500", b"moto 3 x", b"", b"a\r\nb c d", b"a b 3\r\n", b"\xff 1 2")
    ]
    pong = b"+PONG\r\n" if protocol == 3 else b"*2\r\n$4\r\npong\r\n$0\r\n\r\n"
    wire = b"".join(data.draw(st.lists(st.sampled_from([*grants, *others, pong]), min_size=1, max_size=6)))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(wire)), max_size=8)) | {len(wire)})
    expected = [found for reply in make().feed(wire) if (found := notification_in(reply)) is not None]
    received: list[Any] = []
    feed = grant_fast_path(make().feed, INBOX, protocol, lambda holder, grant: received.append((holder, grant)))
    for start, cut in zip([0, *cuts], cuts, strict=False):
        received += [found for reply in feed(wire[start:cut]) if (found := notification_in(reply)) is not None]
    assert received == expected


def test_a_single_grant_is_not_returned_as_a_reply() -> None:
    received: list[Any] = []
    feed = grant_fast_path(Reader().feed, INBOX, 3, lambda holder, grant: received.append((holder, grant)))
    assert feed(_message(b"moto 3 17", b">")) == ()
    assert received == [("moto", GrantNotification(3, 17))]


@pytest.mark.parametrize("make", [Reader, new_reader], ids=["ours", "hiredis"])
def test_an_error_is_a_reply_and_keeps_its_text(make: Any) -> None:
    (reply,) = make().feed(b"-NOSCRIPT No matching script.\r\n")
    assert type(reply) is ReplyError
    assert str(reply) == "NOSCRIPT No matching script."


def test_the_two_readers_differ() -> None:
    assert type(new_reader()) is not Reader


def test_requests_are_length_prefixed() -> None:
    assert pack(b"SET", b"a b", b"") == b"*3\r\n$3\r\nSET\r\n$3\r\na b\r\n$0\r\n\r\n"


@pytest.fixture
def without_hiredis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "new_reader", Reader)
    monkeypatch.setattr(tasks, "new_reader", Reader)


@pytest.mark.usefixtures("without_hiredis")
def test_a_lock_works_without_hiredis_on_threads(valkey: Server) -> None:
    with lockfast.connect(valkey.url) as locks, locks.lock("plain", label="é x") as lease:
        info = locks.lock("plain").inspect()
        assert info.holder == lease.holder
        assert info.owner is not None
        assert info.owner.label == "é x"
        assert locks.lock("plain").acquire(timeout=0.05) is None


@pytest.mark.usefixtures("without_hiredis")
def test_a_lock_works_without_hiredis_on_asyncio(valkey: Server) -> None:
    async def main() -> None:
        async with aio.connect(valkey.url) as locks, locks.lock("plain"):
            assert await locks.lock("plain").acquire(timeout=0.05) is None

    asyncio.run(main())
