"""One node of a cluster, and the renewals that go there together."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from lockfast.stores.redis.lua import scripts
from lockfast.stores.redis.protocol.resp import ReplyError
from lockfast.stores.redis.store import RedisStore
from lockfast.stores.redis.topology.replicas import ConfirmingStore
from lockfast.values import Renewal

Again = Callable[[Sequence[Renewal], float], Awaitable[Sequence[bool | None]]]
Group = list[tuple[int, Renewal]]


class Node:
    """A store with the connections that it speaks over. `failed` says that the last request got no answer."""

    __slots__ = ("failed", "host", "inbox", "store", "wire")

    def __init__(self, store: RedisStore, wire: Any, inbox: Any, host: str) -> None:
        self.store = store
        self.wire = wire
        self.inbox = inbox
        self.host = host
        self.failed = False

    def leave(self) -> None:
        """It is no master any more: whoever waits there is told to look elsewhere."""
        self.wire.drop()
        self.inbox.drop()


class Renewals:
    """The renewals for one node, a group per slot: a script may touch the keys of one slot only."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._groups: list[Group] = []
        self._posted: Any = None

    def add(self, group: Group) -> None:
        self._groups.append(group)

    async def post(self, until: float) -> None:
        before = scripts.TRACK if self.node.store.capabilities.change_events else ()
        requests = []
        for group in self._groups:
            requests += [*before, scripts.renew_request([line for _, line in group])]
        self._posted = await self.node.wire.post(requests, until)

    async def answers(self, until: float, again: Again) -> list[tuple[int, bool | None]]:
        """For each line its place and the answer; groups that were refused are tried `again`, on their own."""
        replies = await self.node.wire.collect(self._posted, until)
        step = len(replies) // len(self._groups)
        found: list[tuple[int, bool | None]] = []
        for group, reply in zip(self._groups, replies[step - 1 :: step], strict=True):
            lines = [line for _, line in group]
            if isinstance(reply, ReplyError) or not isinstance(reply, list) or len(reply) != len(lines):
                answers = await again(lines, until)
            else:
                answers = await self._confirmed(lines, [answer == 1 for answer in reply], until)
            found += [(at, answer) for (at, _), answer in zip(group, answers, strict=True)]
        return found

    async def _confirmed(
        self, lines: Sequence[Renewal], answers: Sequence[bool | None], until: float
    ) -> Sequence[bool | None]:
        if isinstance(self.node.store, ConfirmingStore):
            return await self.node.store.confirmed_renewals(lines, answers, until)
        return answers
