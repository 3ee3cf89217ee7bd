"""One server as a node of a quorum: the same store over wires that dial only when told to.

Rules kept here: a request to a node that is not connected fails at once, so that it holds up nobody; only `connect`
dials, which the quorum calls in the background; and on threads waits are parked, so that one thread waits on all
nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from lockfast.errors import StoreUnavailable
from lockfast.facts import Facts
from lockfast.stores.redis.lua import scripts
from lockfast.stores.redis.protocol import replies as facts
from lockfast.stores.redis.protocol.resp import pack
from lockfast.stores.redis.store import Inbox, RedisStore, Wire
from lockfast.stores.redis.transport.task_inbox import TaskInbox
from lockfast.stores.redis.transport.tasks import TaskLink, TaskWire
from lockfast.values import AUX_PREFIX, Claim

LOAD = tuple(pack(b"SCRIPT", b"LOAD", script.text) for script in (scripts.ACQUIRE, scripts.RENEW))
"""Sent in front; an account that may not do so has its scripts loaded by being used."""

MARK_MS = b"5000"


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
        link = self._connector.link
        return link is not None and link.error is None

    @property
    def silent_since(self) -> float | None:
        return None if self._connector.link is None else self._connector.link.silent_since

    async def connect(self, until: float) -> bool:
        before = self._connector.link
        return await self._connector.get(until) is not before

    async def request(self, request: bytes, until: float, before: Sequence[bytes] = ()) -> Any:
        if not self.connected:
            raise not_connected()
        return await super().request(request, until, before)


class TaskVotingInbox(TaskInbox):
    """`VotingInbox` for asyncio."""

    async def connect(self, until: float) -> None:
        await self._connector.get(until)

    async def open_link(self, until: float) -> TaskLink:
        if not self.listening:
            raise not_connected()
        return await super().open_link(until)


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

    async def identity(self, until: float) -> Facts:
        # A quorum stops listening once a majority has answered, and so would not hear that a script is missing.
        info = await self._voting_wire.request(facts.WHO, until, before=LOAD)
        return facts.facts_in([info, None, None, None], 0.0)

    async def probe(self, secret: str, number: int, until: float) -> int | None:
        key = f"{AUX_PREFIX}twin:{secret}".encode()
        put = pack(b"SET", key, b"%d" % number, b"NX", b"PX", MARK_MS)
        found = await self._voting_wire.request(pack(b"GET", key), until, before=(put,))
        return int(found) if isinstance(found, bytes) and found.isdigit() else None

    async def release(self, name: str, holder: str, until: float, before: Sequence[bytes] = ()) -> bool:
        """Always with the script itself: what nobody hears the answer to must not depend on a second request."""
        request = scripts.RELEASE.in_full(scripts.release_request(name, holder))
        return bool(await self._run(scripts.RELEASE, request, name, until, before) == 1)

    def _prepare_release(self, claim: Claim, ahead: int) -> None: ...  # nothing, as a release is another here

    async def connect_inbox(self, until: float) -> None:
        await self._voting_inbox.connect(until)
