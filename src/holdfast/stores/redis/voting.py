"""One server as a node of a quorum: the same store over wires that dial only when told to.

Rules kept here: a request to a node that is not connected fails at once, so that it holds up nobody; only `connect`
dials, which the quorum calls in the background; and on threads waits are parked, so that one thread waits on all
nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from holdfast.errors import StoreUnavailable
from holdfast.facts import Facts
from holdfast.stores.redis import facts
from holdfast.stores.redis.asyncio import TaskInbox, TaskWire
from holdfast.stores.redis.store import Inbox, RedisStore, Wire
from holdfast.stores.redis.tasklink import TaskLink


def not_connected() -> StoreUnavailable:
    """What a node answers that is not there."""
    return StoreUnavailable("There is no connection to the server at the moment, so nothing was sent.")


class VotingWire(Wire, Protocol):
    """A wire whose requests fail at once while it is not connected."""

    @property
    def connected(self) -> bool: ...

    @property
    def silent_since(self) -> float | None:
        """When the oldest request was sent that is not answered yet."""

    async def connect(self, until: float) -> bool:
        """Whether it was dialled anew."""


class VotingInbox(Inbox, Protocol):
    """An inbox whose mailboxes fail at once while it is not connected."""

    async def connect(self, until: float) -> None: ...


class TaskVotingWire(TaskWire):
    """`VotingWire` for asyncio."""

    @property
    def connected(self) -> bool:
        link = self._dialler.link
        return link is not None and link.error is None

    @property
    def silent_since(self) -> float | None:
        return None if self._dialler.link is None else self._dialler.link.silent_since

    async def connect(self, until: float) -> bool:
        before = self._dialler.link
        return await self._dialler.get(until) is not before

    async def ask(self, request: bytes, until: float, before: Sequence[bytes] = ()) -> Any:
        if not self.connected:
            raise not_connected()
        return await super().ask(request, until, before)


class TaskVotingInbox(TaskInbox):
    """`VotingInbox` for asyncio."""

    async def connect(self, until: float) -> None:
        await self._dialler.get(until)

    async def sound_link(self, until: float) -> TaskLink:
        if not self.listening:
            raise not_connected()
        return await super().sound_link(until)


class RedisVoter(RedisStore):
    """`ports.NodeStore` on Redis or Valkey."""

    def __init__(self, wire: VotingWire, inbox: VotingInbox) -> None:
        super().__init__(wire, inbox, reasserts=True)
        self._voting_wire = wire
        self._voting_inbox = inbox

    @property
    def connected(self) -> bool:
        return self._voting_wire.connected

    @property
    def silent_since(self) -> float | None:
        return self._voting_wire.silent_since

    async def connect(self, until: float) -> bool:
        return await self._voting_wire.connect(until)

    async def who(self, until: float) -> Facts:
        return facts.facts_in([await self._voting_wire.ask(facts.WHO, until), None, None, None], 0.0)

    async def connect_inbox(self, until: float) -> None:
        await self._voting_inbox.connect(until)
