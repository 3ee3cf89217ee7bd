"""The nodes of a cluster: their slots, batches of renewals, and mailboxes that follow a lock from node to node."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from lockfast.stores.redis.lua import scripts
from lockfast.stores.redis.protocol.error_replies import UnknownCommand
from lockfast.stores.redis.protocol.resp import ReplyError
from lockfast.stores.redis.store import RedisStore
from lockfast.stores.redis.topology.replicas import AcknowledgedStore
from lockfast.stores.redis.urls import Address
from lockfast.values import Notification, Renewal

RenewAgain = Callable[[Sequence[Renewal], float], Awaitable[Sequence[bool | None]]]


def slot_owners(reply: Any, asked_host: str) -> dict[int, Address]:
    """The master of each slot, from a reply to CLUSTER SLOTS. A node may omit its own host: then it is `asked_host`.

    >>> slot_owners([[0, 1, [b"10.0.0.1", 6379, b"id"]], [2, 2, [b"", 6380, b"id"], [b"x", 1, b"replica"]]], "seed")
    {0: ('10.0.0.1', 6379), 1: ('10.0.0.1', 6379), 2: ('seed', 6380)}
    """
    owners: dict[int, Address] = {}
    for first, last, (host, port, *_), *_ in reply:
        name = host.decode("utf-8", "replace") if isinstance(host, bytes) else ""
        address = (name if name not in ("", "?") else asked_host, port)
        owners.update(dict.fromkeys(range(first, last + 1), address))
    return owners


class ClusterNode:
    """One node: its store and connections. `failed` is set while its last request got no answer."""

    __slots__ = ("failed", "host", "inbox", "store", "wire")

    def __init__(self, store: RedisStore, wire: Any, inbox: Any, host: str) -> None:
        self.store = store
        self.wire = wire
        self.inbox = inbox
        self.host = host
        self.failed = False

    def disconnect(self) -> None:
        """Close the connections, which wakes the waiters there."""
        self.wire.drop()
        self.inbox.drop()


class NodeRenewals:
    """The renewals for one node, in groups by slot: a script may touch the keys of one slot only."""

    def __init__(self, node: ClusterNode) -> None:
        self.node = node
        self._groups: list[list[tuple[int, Renewal]]] = []
        self._posted: Any = None

    def add(self, group: list[tuple[int, Renewal]]) -> None:
        """Add numbered renewals of one slot."""
        self._groups.append(group)

    async def post(self, until: float) -> None:
        before = scripts.TRACK if self.node.store.capabilities.change_events else ()
        requests: list[bytes] = []
        for group in self._groups:
            requests += [*before, scripts.renew_request([renewal for _, renewal in group])]
        self._posted = await self.node.wire.post(requests, until)

    async def answers(self, until: float, renew_again: RenewAgain) -> list[tuple[int, bool | None]]:
        """The number of each renewal and its answer. A group that was rejected is renewed again, alone."""
        replies = await self.node.wire.collect(self._posted, until)
        width = len(replies) // len(self._groups)
        answered: list[tuple[int, bool | None]] = []
        for group, reply in zip(self._groups, replies[width - 1 :: width], strict=True):
            renewals = [renewal for _, renewal in group]
            answers: Sequence[bool | None]
            if isinstance(reply, ReplyError) or not isinstance(reply, list) or len(reply) != len(renewals):
                answers = await renew_again(renewals, until)
            else:
                answers = [answer == 1 for answer in reply]
                if isinstance(self.node.store, AcknowledgedStore):
                    answers = await self.node.store.acknowledged_renewals(renewals, answers, until)
            answered += [(number, answer) for (number, _), answer in zip(group, answers, strict=True)]
        return answered


class ClusterMailbox:
    """`ports.Mailbox`. `_box` is the mailbox at the node of the last request.

    `ClusterStore.acquire` moves it with `open_at` before each request that enqueues, and sends the address there."""

    __slots__ = ("_box", "_boxes", "_holder", "_node")

    address = ""

    def __init__(self, boxes: dict[str, ClusterMailbox], holder: str) -> None:
        self._boxes = boxes
        self._holder = holder
        self._node: ClusterNode | None = None
        self._box: Any = None

    async def open(self, until: float) -> None:
        self._boxes[self._holder] = self

    async def open_at(self, node: ClusterNode, slot: int, until: float) -> str:
        """Subscribe at the node, and return the address there."""
        if self._node is not node or not self._box.connected:
            self._close_box()
            self._node, self._box = node, node.inbox.mailbox(self._holder, slot)
            try:
                await self._box.open(until)
            except UnknownCommand:
                # Redis before 7.0 has no sharded channels: use an ordinary one, which reaches every node.
                node.inbox.sharded = False
                node.inbox.drop()
                await self._box.open(until)
        address: str = self._box.address
        return address

    async def wait(self, until: float) -> Notification | None:
        """None also if the connection broke or the slot moved: the next request goes to the new node."""
        received: Notification | None = None if self._box is None else await self._box.receive(until)
        return received

    def _close_box(self) -> None:
        if self._box is not None:
            self._box.close()

    def close(self) -> None:
        self._boxes.pop(self._holder, None)
        self._close_box()
