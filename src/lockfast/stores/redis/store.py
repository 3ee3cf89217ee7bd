"""The store itself, once for both colours: each operation is one request over a `Wire`.

Rules kept here: a request is idempotent, so it may be repeated by whoever got no answer; scripts that the server has
forgotten are sent again in full, once; every error reply has a decided meaning (`replies.py`).
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from lockfast.errors import StoreError, StoreProtocolError, StoreRefused
from lockfast.facts import Facts, Topology
from lockfast.ports import Capabilities, Mailbox, Store, WatchedValue
from lockfast.stores.redis.keys import name_of
from lockfast.stores.redis.lua import scripts
from lockfast.stores.redis.lua.scripts import Script
from lockfast.stores.redis.protocol import replies as facts
from lockfast.stores.redis.protocol.error_replies import NOT_MASTER, code_of, error_of
from lockfast.stores.redis.protocol.notifications import PING
from lockfast.stores.redis.protocol.replies import info_of
from lockfast.stores.redis.protocol.resp import ReplyError
from lockfast.values import (
    Answer,
    Claim,
    Enqueue,
    Granted,
    LockInfo,
    Page,
    Queued,
    Renewal,
    Taken,
    clean,
    fits,
    shown,
)

if TYPE_CHECKING:
    from lockfast.stores.redis.watch import WatchConnections

T = TypeVar("T")

MOST_SHOWN = 1000
SCAN_COUNT = 500
"""Keys that the server looks at for one part of a survey: well under a millisecond of its time."""
MOST_READY = 1000
"""Holders that waited, for whom the store keeps a release ready."""
LEAD = (PING,)
KNOWN = 6
"""Values that `survey.lua` gives for each lock."""


class Wire(Protocol):
    """One connection that carries the requests of many callers, in order."""

    @property
    def grace(self) -> float:
        """Seconds that an answer may take on this link, generously."""

    @property
    def connected(self) -> bool:
        """Whether the connection is sound as far as is known."""

    @property
    def pushes(self) -> bool:
        """Whether the server can tell us things unasked on this connection (RESP3)."""

    on_push: Callable[[Any], None] | None
    """Called with what it told."""

    def request(self, request: bytes, until: float, before: Sequence[bytes] = ()) -> Awaitable[Any]:
        """The reply (an error reply as a `ReplyError` value); `StoreUnavailable` when none came in time. Requests
        `before` it go out with it, and their replies do not matter."""

    def poll_events(self) -> None:
        """Read what has come unasked, without waiting."""

    has_sessions: bool
    """Whether `session()` works."""

    def session(self) -> Any:
        """Return a connection of its own to the same server, for WATCH."""

    def drop(self) -> None:
        """Close the connection; the next request dials anew."""

    async def close(self) -> None: ...

    def reset(self, *, forked: bool) -> None: ...


class Inbox(Protocol):
    """One subscribed connection that receives the pushes for all acquisitions of a client."""

    @property
    def listening(self) -> bool: ...

    def mailbox(self, holder: str) -> Mailbox: ...

    def drop(self) -> None:
        """Close the connection; the next mailbox dials anew."""

    async def close(self) -> None: ...

    def reset(self, *, forked: bool) -> None: ...


class Otherwise(Protocol):
    """What answers an operation that was refused, or raises the refusal."""

    async def __call__(self, refusal: StoreError, operation: Callable[[RedisStore], Awaitable[T]], /) -> T: ...


class RedisStore(Store):
    """`ports.Store` on Redis or Valkey. What stands `before` a request goes out in front of it (ASKING, in a cluster).

    `topology` says what stands behind the address; `reasserts`, whether a grant that the server forgot is taken back in
    (see `core/renew.py`)."""

    def __init__(
        self, wire: Wire, inbox: Inbox, *, topology: Topology = Topology.SINGLE, reasserts: bool = False
    ) -> None:
        self.wire = wire
        self.inbox = inbox
        self._topology = topology
        self._reasserts = reasserts
        self._tell: Callable[[str | None], None] | None = None
        self._watches: WatchConnections | None = None
        self.otherwise: Otherwise | None = None
        self.ready: dict[tuple[str, str], tuple[bytes, Sequence[bytes]]] = {}
        self._leads = True
        self._capabilities = self._all_capabilities()
        wire.on_push = self._told

    @property
    def grace(self) -> float:
        return self.wire.grace

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities[self.wire.pushes]

    def _all_capabilities(self, *, replica_acks: bool = False) -> tuple[Capabilities, Capabilities]:
        """Without and with RESP3, which is known once the wire is connected.

        There are no fence blocks where a failover can happen: two masters may grant for a moment, and then only their
        clocks order the fences. The fences of a block are as old as its grant.
        """
        single = self._topology is Topology.SINGLE and not (replica_acks or self._reasserts)
        first = Capabilities(
            fence_blocks=single, replica_acks=replica_acks, reassert=self._reasserts, values=self.wire.has_sessions
        )
        return first, first._replace(change_events=True)

    @property
    def inbox_open(self) -> bool:
        return self.inbox.listening

    async def watch(self, key: str, until: float) -> WatchedValue:
        """Uses connections of its own, like that of the wire; they are made when first needed."""
        if self._watches is None:
            from lockfast.stores.redis.watch import WatchConnections

            self._watches = WatchConnections(self.wire.session)
        return await self._watches.watch(key, until)

    def mailbox(self, holder: str) -> Mailbox:
        return self.inbox.mailbox(holder)

    async def _run(self, script: Script, request: bytes, name: str, until: float, before: Sequence[bytes] = ()) -> Any:
        reply = await self.wire.request(request, until, before)
        if type(reply) is ReplyError:
            return await self._mend(reply, script, request, name, until, before)
        return reply

    async def _mend(
        self,
        reply: ReplyError,
        script: Script,
        request: bytes,
        name: str,
        until: float,
        before: Sequence[bytes] = (),
    ) -> Any:
        """The answer after all, if it was only the script that the server did not have; else its meaning."""
        again: Any = reply
        if code_of(str(reply)) == "NOSCRIPT":
            again = await self.wire.request(script.in_full(request), until, before)
        if type(again) is not ReplyError:
            return again
        if code_of(str(again)) in NOT_MASTER:
            self.wire.drop()
        raise error_of(str(again), shown(name))

    async def acquire(
        self, claim: Claim, enqueue: Enqueue | None, until: float, before: Sequence[bytes] = ()
    ) -> Answer:
        request = scripts.acquire_request(claim, enqueue)
        reply = await self.wire.request(request, until, before)
        if type(reply) is int:
            return tuple.__new__(Granted, (reply, None))
        return await self.answer(reply, request, claim, enqueue, until, before)

    async def answer(
        self,
        reply: Any,
        request: bytes,
        claim: Claim,
        enqueue: Enqueue | None,
        until: float,
        before: Sequence[bytes] = (),
    ) -> Answer:
        """What a reply to `acquire` means, and perhaps another instead of it."""
        if type(reply) is ReplyError:
            try:
                reply = await self._mend(reply, scripts.ACQUIRE, request, claim.name, until, before)
            except (StoreRefused, StoreProtocolError) as refusal:
                return await self._otherwise(refusal, lambda store: store.acquire(claim, enqueue, until))
        if type(reply) is int:
            return Granted(reply)
        try:
            left = None if reply[0] < 0 else reply[0] / 1000
            if enqueue is None:
                return Taken(left)
            self._prepare_release(claim, reply[2])
            return Queued(reply[1], reply[2], left)
        except (TypeError, IndexError):
            raise _nonsense(claim.name, reply) from None

    async def renew(
        self, renewals: Sequence[Renewal], until: float, before: Sequence[bytes] = ()
    ) -> Sequence[bool | None]:
        name = renewals[0].name
        request = scripts.renew_request(renewals)
        if self.capabilities.change_events:
            before = (*scripts.TRACK, *before)
        reply = await self.wire.request(request, until, before)
        if type(reply) is ReplyError:
            reply = await self._mend(reply, scripts.RENEW, request, name, until, before)
        if not isinstance(reply, list) or len(reply) != len(renewals):
            raise _nonsense(name, reply)
        return [answer == 1 for answer in reply]

    @property
    def connected(self) -> bool:
        """Whether a request can go out without dialling first, which takes its time."""
        return self.wire.connected

    def on_change(self, callback: Callable[[str | None], None]) -> None:
        self._tell = callback

    def poll_events(self) -> None:
        self.wire.poll_events()

    def _told(self, push: Any) -> None:
        """The server says which keys changed that we read under tracking; none named means all of them."""
        if self._tell is None or not push or push[0] != b"invalidate":
            return
        for key in push[1] or [None]:
            self._tell(None if key is None else key.decode("utf-8", "replace"))

    async def release(self, name: str, holder: str, until: float, before: Sequence[bytes] = ()) -> bool:
        ready = self.ready.pop((name, holder), None) if self.ready else None
        if ready is None:
            request = scripts.release_request(name, holder)
        else:
            request, before = ready[0], (*ready[1], *before)
        reply = await self.wire.request(request, until, before)
        if type(reply) is int:
            return reply == 1
        return await self.released(reply, request, name, holder, until, before)

    async def released(
        self, reply: Any, request: bytes, name: str, holder: str, until: float, before: Sequence[bytes] = ()
    ) -> bool:
        """What a reply to `release` means, and perhaps another instead of it."""
        try:
            if type(reply) is ReplyError:
                reply = await self._mend(reply, scripts.RELEASE, request, name, until, before)
            return type(reply) is int and reply == 1
        except (StoreRefused, StoreProtocolError) as refusal:
            return await self._otherwise(refusal, lambda store: store.release(name, holder, until))

    def _prepare_release(self, claim: Claim, ahead: int) -> None:
        """This holder waits behind so many. Its release is made ready while there is time, and may go out after a PING.

        A server writes what it has for its clients in the reverse of the order in which that came up: the push to
        whoever is next would go out after the reply to the release, and a core be woken up for that first. Behind a
        PING there is a reply to be written already, so the push goes out before it. That takes a fifth off the way from
        release to held. In longer queues, where it would be a third request for each acquisition, every other has it.
        """
        key = claim.name, claim.holder
        if key in self.ready:
            return  # it asks again, as all who wait do now and then
        if len(self.ready) >= MOST_READY:  # of very many, or of those that were lost and never given back
            self.ready.clear()
        self._leads = ahead == 0 or not self._leads
        self.ready[key] = scripts.release_request(claim.name, claim.holder), LEAD if self._leads else ()

    async def _otherwise(self, refusal: StoreError, operation: Callable[[RedisStore], Awaitable[T]]) -> T:
        if self.otherwise is None:
            raise refusal
        return await self.otherwise(refusal, operation)

    async def adopt(self, claim: Claim, old_holder: str, until: float, before: Sequence[bytes] = ()) -> Granted | None:
        reply = await self._run(scripts.ADOPT, scripts.adopt_request(claim, old_holder), claim.name, until, before)
        return Granted(reply) if reply else None

    async def reassert(self, claim: Claim, fence: int, until: float, before: Sequence[bytes] = ()) -> bool:
        reply = await self._run(scripts.REASSERT, scripts.reassert_request(claim, fence), claim.name, until, before)
        return bool(reply == 1)

    async def inspect(self, name: str, until: float, before: Sequence[bytes] = ()) -> LockInfo:
        reply = await self._run(scripts.INSPECT, scripts.inspect_request(name, MOST_SHOWN), name, until, before)
        try:
            return info_of(name, reply)
        except (TypeError, ValueError, IndexError):
            raise _nonsense(name, reply) from None

    async def facts(self, until: float) -> Facts:
        replies = [await self.wire.request(request, until) for request in facts.REQUESTS]
        return facts.facts_in(replies, time.time())._replace(topology=self._topology)

    async def listing(self, pattern: str, cursor: str, until: float) -> Page:
        names, after = await self.scan(pattern, cursor, until)
        return Page(await self.known(names, until), after)

    async def scan(self, pattern: str, cursor: str, until: float) -> tuple[list[str], str]:
        """Some of the names that fit, and where to go on ('' at the end)."""
        reply = await self.wire.request(scripts.scan_request(cursor or "0", SCAN_COUNT), until)
        if type(reply) is ReplyError:
            raise error_of(str(reply), shown(pattern))
        try:
            after, keys = reply[0].decode("ascii"), reply[1]
            names = [name for name in map(name_of, keys) if name is not None and fits(name, pattern)]
        except (TypeError, AttributeError, IndexError, UnicodeDecodeError):
            raise _nonsense(pattern, reply) from None
        return names, "" if after == "0" else after

    async def known(self, names: list[str], until: float) -> tuple[LockInfo, ...]:
        """What is known of these locks; in a cluster they must be of one slot."""
        if not names:
            return ()
        reply = await self._run(scripts.LIST, scripts.list_request(names), names[0], until)
        try:
            return tuple(info_of(name, reply[KNOWN * at : KNOWN * (at + 1)]) for at, name in enumerate(names))
        except (TypeError, ValueError, IndexError):
            raise _nonsense(names[0], reply) from None

    async def force_release(self, name: str, holder: str, until: float, before: Sequence[bytes] = ()) -> bool:
        reply = await self._run(
            scripts.FORCE_RELEASE, scripts.force_release_request(name, holder.encode()), name, until, before
        )
        if isinstance(reply, bytes) and clean(reply.decode("utf-8", "replace")) == holder:
            # Another program's lock, whose value had to be cleaned before it was shown.
            reply = await self._run(
                scripts.FORCE_RELEASE, scripts.force_release_request(name, reply), name, until, before
            )
        return bool(reply == 1)

    def disconnect(self) -> None:
        """Close the connections; the next request dials anew."""
        self.inbox.drop()
        self.wire.drop()

    async def cancel_waits(self) -> None:
        """Who waits is told that this is being closed, and gives back its place over the wire."""
        await self.inbox.close()

    async def close(self) -> None:
        await self.cancel_waits()
        await self.wire.close()
        if self._watches is not None:
            self._watches.close()

    def reset(self, *, forked: bool) -> None:
        if self._watches is not None:
            self._watches.reset()
        self.inbox.reset(forked=forked)
        self.wire.reset(forked=forked)


def _nonsense(name: str, reply: object) -> StoreError:
    return StoreProtocolError(
        f"The server's answer about the lock {shown(name)} makes no sense ({shown(reply)}): is it Redis 6.2 or later?"
    )
