"""Whom a hand-over tells, and in which order; and which releases go out behind a PING."""

from __future__ import annotations

from typing import Any

import pytest

from lockfast.runtime.runner import run
from lockfast.stores.redis.lua.scripts import ACQUIRE, RELEASE, acquire_request, release_request
from lockfast.stores.redis.protocol.notifications import PING
from lockfast.stores.redis.store import RedisStore
from lockfast.stores.redis.topology.quorum_member import RedisMember
from lockfast.values import Claim, Enqueue
from verify.virtual_server import VirtualRedis

TTL = 30.0


class Door:
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

    def listen(self, *inboxes: str) -> None:
        for inbox in inboxes:
            self.server.subscribe(inbox, inbox.encode())

    @property
    def holder(self) -> bytes | None:
        found: bytes | None = self.server.call("GET", "door")
        return found


@pytest.mark.parametrize(
    ("inbox_of_b", "told"),
    [("inbox:B", ["B next", "A granted"]), ("inbox:A", ["A granted", "B next"])],
    ids=["two inboxes", "one inbox"],
)
def test_the_grant_is_told_last_but_first_at_an_inbox_of_both(inbox_of_b: str, told: list[str]) -> None:
    door = Door()
    door.listen("inbox:A", "inbox:B")
    door.request("A", "inbox:A")
    door.request("B", inbox_of_b)
    door.server.execute(release_request("door", "X"))
    words = [message.payload.decode().split() for message in door.server.messages]
    assert [f"{one[0]} {'next' if 'next' in one else 'granted'}" for one in words] == told
    assert door.holder == b"A"


def test_who_asks_is_not_passed_over_though_its_inbox_is_down() -> None:
    door = Door()
    door.listen("inbox:B")
    for holder in ("dead", "A", "B"):
        door.request(holder, f"inbox:{holder}")
    door.server.call("DEL", "door")
    assert isinstance(door.request("A", "inbox:A", attempt=2), int)
    assert door.holder == b"A"


class Wire:
    """Takes note of what is sent, and answers what it is told to."""

    def __init__(self, reply: Any) -> None:
        self.reply = reply
        self.sent: list[list[bytes]] = []
        self.on_push: Any = None
        self.has_sessions = False

    async def request(self, request: bytes, until: float, before: Any = ()) -> Any:
        self.sent.append([*before, request])
        return self.reply


def wait_in_line(store: RedisStore, holder: str, asks: int = 1) -> None:
    for attempt in range(asks):
        run(store.acquire(Claim("door", holder, TTL, ""), Enqueue("inbox", attempt + 1, None), 0.0))


@pytest.mark.parametrize(("ahead", "pings"), [(0, [1, 1, 1, 1]), (3, [0, 1, 0, 1])], ids=["first", "behind others"])
@pytest.mark.parametrize("asks", [1, 2, 3])
def test_a_release_has_a_ping_in_front_or_every_other_has(ahead: int, pings: list[int], asks: int) -> None:
    wire: Any = Wire([1000, 7, ahead])
    store = RedisStore(wire, None)  # type: ignore[arg-type] # nobody is told anything here
    for holder in "ABCD":
        wait_in_line(store, holder, asks)
    wire.reply, wire.sent = 1, []
    for holder in "ABCD":
        assert run(store.release("door", holder, 0.0))
    assert [sent.count(PING) for sent in wire.sent] == pings
    assert [sent[-1] for sent in wire.sent] == [release_request("door", holder) for holder in "ABCD"]
    assert not store.prepared_releases


def test_a_voter_of_a_quorum_keeps_no_release_ready() -> None:
    """Its releases are others, and would never take it up."""
    wire: Any = Wire([1000, 7, 0])
    store = RedisMember(wire, None)  # type: ignore[arg-type] # nobody is told anything here
    wait_in_line(store, "A")
    assert not store.prepared_releases
