"""Which waiters a hand-off notifies, in which order, and which releases are sent after a PING."""

from __future__ import annotations

from typing import Any

import pytest

from lockfast.runtime.base import run
from lockfast.stores.redis.lua.scripts import ACQUIRE, RELEASE
from lockfast.stores.redis.protocol.notifications import PING
from lockfast.stores.redis.store import RedisMember, RedisStore, acquire_request, release_request
from lockfast.values import Claim, Enqueue
from verify.virtual_server import VirtualRedis

TTL = 30.0


class HeldLock:
    """A server with one lock, which X holds."""

    def __init__(self) -> None:
        self.server = VirtualRedis()
        self.server.load([ACQUIRE.text, RELEASE.text])
        self.tickets: dict[str, int] = {}
        self.server.execute(acquire_request(Claim("door", "X", TTL, ""), None))

    def request(self, holder: str, inbox: str, attempt: int = 1) -> Any:
        enqueue = Enqueue(inbox, attempt, self.tickets.get(holder))
        reply = self.server.execute(acquire_request(Claim("door", holder, TTL, ""), enqueue))
        if isinstance(reply, list):
            self.tickets[holder] = reply[1]
        return reply

    def subscribe(self, *inboxes: str) -> None:
        for inbox in inboxes:
            self.server.subscribe(inbox, inbox.encode())

    @property
    def holder(self) -> bytes | None:
        found: bytes | None = self.server.call("GET", "door")
        return found


@pytest.mark.parametrize(
    ("inbox_of_b", "messages"),
    [("inbox:B", ["B next", "A granted"]), ("inbox:A", ["A granted", "B next"])],
    ids=["two inboxes", "one inbox"],
)
def test_the_grant_is_published_last_except_to_a_shared_inbox(inbox_of_b: str, messages: list[str]) -> None:
    lock = HeldLock()
    lock.subscribe("inbox:A", "inbox:B")
    lock.request("A", "inbox:A")
    lock.request("B", inbox_of_b)
    lock.server.execute(release_request("door", "X"))
    words = [message.payload.decode().split() for message in lock.server.messages]
    assert [f"{one[0]} {'next' if 'next' in one else 'granted'}" for one in words] == messages
    assert lock.holder == b"A"


def test_the_caller_is_not_skipped_though_its_inbox_is_down() -> None:
    lock = HeldLock()
    lock.subscribe("inbox:B")
    for holder in ("dead", "A", "B"):
        lock.request(holder, f"inbox:{holder}")
    lock.server.call("DEL", "door")
    assert isinstance(lock.request("A", "inbox:A", attempt=2), int)
    assert lock.holder == b"A"


class Wire:
    """Records the requests, and returns a fixed reply."""

    def __init__(self, reply: Any) -> None:
        self.reply = reply
        self.sent: list[list[bytes]] = []
        self.on_push: Any = None
        self.watch_connection: Any = None

    async def request(self, request: bytes, until: float, before: Any = ()) -> Any:
        self.sent.append([*before, request])
        return self.reply


def enqueue(store: RedisStore, holder: str, attempts: int = 1) -> None:
    for attempt in range(attempts):
        run(store.acquire(Claim("door", holder, TTL, ""), Enqueue("inbox", attempt + 1, None), 0.0))


@pytest.mark.parametrize(("position", "pings"), [(0, [1, 1, 1, 1]), (3, [0, 1, 0, 1])], ids=["first", "behind others"])
@pytest.mark.parametrize("attempts", [1, 2, 3])
def test_which_releases_follow_a_ping(position: int, pings: list[int], attempts: int) -> None:
    wire: Any = Wire([1000, 7, position])
    store = RedisStore(wire, None)  # type: ignore[arg-type] # this test needs no inbox
    for holder in "ABCD":
        enqueue(store, holder, attempts)
    wire.reply, wire.sent = 1, []
    for holder in "ABCD":
        assert run(store.release("door", holder, 0.0))
    assert [sent.count(PING) for sent in wire.sent] == pings
    assert [sent[-1] for sent in wire.sent] == [release_request("door", holder) for holder in "ABCD"]
    assert not store.prepared_releases


def test_a_quorum_member_prepares_no_release() -> None:
    """Its releases carry the script, so they would never use a prepared one."""
    wire: Any = Wire([1000, 7, 0])
    store = RedisMember(wire, None)  # type: ignore[arg-type] # this test needs no inbox
    enqueue(store, "A")
    assert not store.prepared_releases
