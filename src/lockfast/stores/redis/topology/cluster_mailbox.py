"""A mailbox that goes with its lock from node to node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockfast.stores.redis.protocol.error_replies import UnknownCommand
from lockfast.values import FirstNotification, GrantNotification

if TYPE_CHECKING:
    from lockfast.stores.redis.topology.cluster_node import Node


class ClusterMailbox:
    """`ports.Mailbox`. `_box` is the mailbox at the node where this acquisition asked last; the store puts it there
    (`at`) with each request for a place, and puts its address into that request."""

    __slots__ = ("_box", "_boxes", "_holder", "_node")

    address = ""

    def __init__(self, boxes: dict[str, ClusterMailbox], holder: str) -> None:
        self._boxes = boxes
        self._holder = holder
        self._node: Node | None = None
        self._box: Any = None

    async def open(self, until: float) -> None:
        self._boxes[self._holder] = self

    async def at(self, node: Node, slot: int, until: float) -> str:
        """Listen at the node, and give the address there."""
        if self._node is not node or not self._box.connected:
            self._leave()
            self._node, self._box = node, node.inbox.mailbox(self._holder, slot)
            try:
                await self._box.open(until)
            except UnknownCommand:
                # Redis before 7.0: one channel for all, which every node of the cluster is told.
                node.inbox.sharded = False
                node.inbox.drop()
                await self._box.open(until)
        address: str = self._box.address
        return address

    async def wait(self, until: float) -> GrantNotification | FirstNotification | None:
        """None as well when the connection broke or the slot moved: the next request goes where the lock is now."""
        push: GrantNotification | FirstNotification | None = (
            None if self._box is None else await self._box.receive(until)
        )
        return push

    def _leave(self) -> None:
        if self._box is not None:
            self._box.close()

    def close(self) -> None:
        self._boxes.pop(self._holder, None)
        self._leave()
