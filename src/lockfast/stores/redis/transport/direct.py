"""The two requests of every cycle without a coroutine, for threads.

Rules kept here: these are the requests that `store.py` sends, with the same answers. When anything but the usual reply
comes, that module goes on from there; with TLS, which is read in another way, it always does.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from lockfast.stores.redis.lua.scripts import acquire_request, release_request
from lockfast.values import Answer, Claim

if TYPE_CHECKING:
    from lockfast.stores.redis.store import RedisStore
    from lockfast.stores.redis.transport.threads import PendingReply, ThreadLink, ThreadWire


Sent: TypeAlias = "tuple[ThreadLink, PendingReply]"


class DirectRequests:
    """`ports.Direct` for a store on one server. `_latest` is who asked last, and its release: made ready while the
    server was at work."""

    __slots__ = ("_latest", "_store", "_wire")

    def __init__(self, store: RedisStore, wire: ThreadWire) -> None:
        self._store = store
        self._wire = wire
        self._latest = ("", b"")

    def request(self, claim: Claim, now: float, until: float) -> Sent:
        sent = self._wire.submit(acquire_request(claim, None), now, until)
        self._latest = claim.holder, release_request(claim.name, claim.holder)
        return sent

    def answer(self, sent: Sent, claim: Claim, until: float) -> int | Coroutine[Any, Any, Answer]:
        reply = self._wire.fetch(sent, until)
        return reply if type(reply) is int else self._answer(sent, claim, until)

    async def _answer(self, sent: Sent, claim: Claim, until: float) -> Answer:
        reply = await self._wire.reply(sent, until)
        return await self._store.answer(reply, acquire_request(claim, None), claim, None, until)

    def release(self, name: str, holder: str, now: float, until: float) -> bool | Coroutine[Any, Any, bool]:
        store = self._store
        whose, request = self._latest
        before: Sequence[bytes] = ()
        ready = store.ready.pop((name, holder), None) if store.ready else None
        if ready is not None:
            request, before = ready
        elif whose != holder:
            request = release_request(name, holder)
        sent = self._wire.submit(request, now, until, before)
        reply = self._wire.fetch(sent, until)
        return reply == 1 if type(reply) is int else self._released(sent, request, name, holder, until)

    async def _released(self, sent: Sent, request: bytes, name: str, holder: str, until: float) -> bool:
        return await self._store.released(await self._wire.reply(sent, until), request, name, holder, until)
