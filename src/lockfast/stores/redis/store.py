"""`ports.Store` on Redis or Valkey, for both flavours. Each operation is one request over a `Wire`.

Rules:

- Every request is idempotent by holder id, so a caller without a reply may repeat it.
- If the server does not have a script (NOSCRIPT), the store sends the script's text, once.
- Every error reply has a defined meaning, see `protocol/error_replies.py`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from copy import copy
from functools import lru_cache
from typing import Any, Protocol, Self, TypeVar

from lockfast.admission import other_mode_error
from lockfast.errors import StoreError, StoreProtocolError, StoreRefused, StoreUnavailable, shown
from lockfast.facts import Facts, Topology
from lockfast.ports import Capabilities, Mailbox, Runtime, Store, Waker, WatchedValue
from lockfast.stores.redis.keys import MARK_PREFIX, META_PATTERN, keys_of, name_of
from lockfast.stores.redis.lua import scripts
from lockfast.stores.redis.lua.scripts import Script
from lockfast.stores.redis.protocol.error_replies import NOT_MASTER, code_of, error_of
from lockfast.stores.redis.protocol.notifications import PING
from lockfast.stores.redis.protocol.replies import (
    FACTS_REQUESTS,
    IDENTITY_REQUEST,
    INFO_FIELDS,
    MODES,
    facts_in,
    info_of,
    slots_in,
)
from lockfast.stores.redis.protocol.resp import ReplyError, bulks, pack
from lockfast.stores.redis.watch import WatchConnection, WatchConnections
from lockfast.values import Answer, Claim, Enqueue, Granted, LockInfo, Page, Queued, Renewal, Taken, clean, fits

T = TypeVar("T")

MAX_SHOWN = 1000  # holders, and waiters, of one lock
MAX_HOLDERS_LISTED = 100  # of each lock in a listing
MAX_PREPARED_RELEASES = 1000
SCAN_COUNT = b"500"  # keys that the server scans for one page of a listing: well under a millisecond of its time


class Connection(Protocol):
    """What a wire and an inbox have in common."""

    @property
    def connected(self) -> bool: ...

    def drop(self) -> None:
        """Close the connection. The next use reconnects."""

    async def close(self) -> None: ...

    def reset(self, *, forked: bool) -> None: ...


class Wire(Connection, Protocol):
    """One connection that carries the requests of many callers, in order."""

    grace: float  # seconds that a reply may take on this connection, with a wide margin
    pushes: bool  # whether the server can send messages that answer no request (RESP3)
    on_push: Callable[[Any], None] | None  # receives those messages

    def request(self, request: bytes, until: float, before: Sequence[bytes] = ()) -> Awaitable[Any]:
        """Send the requests `before` and then `request`; return its reply and drop the others.

        An error reply is returned as a `ReplyError`. Raises `StoreUnavailable` if no reply arrives in time.
        """

    def poll_events(self) -> None:
        """Process messages that have arrived. Does not block."""

    def watch_connection(self) -> WatchConnection:
        """Return a separate connection to the same server, not connected yet."""


class Inbox(Connection, Protocol):
    """One subscribed connection that receives the notifications for all acquisitions of a client."""

    def mailbox(self, holder: str) -> Mailbox: ...


class TransportWire(Wire, Protocol):
    """What the wires of `transport/` offer to a quorum and to transactions."""

    @property
    def silent_since(self) -> float | None:
        """When the oldest unanswered request was sent; None if there is none."""

    async def connect(self, until: float) -> bool: ...

    async def post(self, requests: Sequence[bytes], until: float, on: Any = None) -> Any:
        """Send the requests together. Pass the result to `collect`; its first item is the connection.

        With `on`, use that connection; if it is gone, raise `StoreUnavailable` with nothing sent."""

    async def collect(self, posted: Any, until: float) -> list[Any]:
        """Return a reply for each request."""


class TransportInbox(Inbox, Protocol):
    async def connect(self, until: float) -> bool: ...


# The two requests of every cycle. Their constant parts (digest, keys, ttl, owner) are cached, so that only the holder
# id is inserted.


@lru_cache(maxsize=8192)
def _release_head(name: str, id_size: int) -> bytes:
    return scripts.RELEASE.head(7, keys_of(name).packed, 1) + b"$%d\r\n" % id_size


@lru_cache(maxsize=8192)
def _acquire_parts(name: str, ttl: float, owner: str, weight: int, limit: int, id_size: int) -> tuple[bytes, bytes]:
    """The parts of an acquisition without a queue entry, before and after the holder id."""
    head = scripts.ACQUIRE.head(7, keys_of(name).packed, 9) + b"$%d\r\n" % id_size
    return head, b"\r\n" + bulks(
        scripts.milliseconds(ttl), owner.encode(), b"", b"0", b"", b"1", b"%d" % weight, b"%d" % limit
    )


def acquire_request(claim: Claim, enqueue: Enqueue | None) -> bytes:
    name, holder, ttl, owner, fences, floor, weight, limit = claim
    if enqueue is None and fences == 1 and not floor:
        head, tail = _acquire_parts(name, ttl, owner, weight, limit, len(holder))
        return head + holder.encode("ascii") + tail
    return _full_acquire_request(claim, enqueue)


@lru_cache(maxsize=1)  # a quorum sends the same claim to each of its nodes
def _full_acquire_request(claim: Claim, enqueue: Enqueue | None) -> bytes:
    args = [*scripts.claim_args(claim)]
    if enqueue is None:
        args += b"", b"0", b""
    else:
        ticket = b"" if enqueue.ticket is None else b"%d" % enqueue.ticket
        args += enqueue.address.encode(), b"%d" % enqueue.attempt, ticket
    args += b"%d" % claim.fences, b"%d" % claim.weight, b"%d" % claim.limit
    if claim.floor:
        args.append(b"%d" % claim.floor)
    return scripts.ACQUIRE.request([claim.name], *args)


def release_request(name: str, holder: str) -> bytes:
    return _release_head(name, len(holder)) + holder.encode("ascii") + b"\r\n"


class RedisStore(Store):
    """The store on one server, or on the master of several.

    `topology` says which. If `reasserts`, a renewal restores a grant that a failover
    lost. `substitute` answers all requests once the server has denied scripts, see `fallback/transactions.py`.
    """

    substitute: RedisStore | None = None

    def __init__(
        self, wire: Wire, inbox: Inbox, *, topology: Topology = Topology.SINGLE, reasserts: bool = False
    ) -> None:
        self.wire = wire
        self.inbox = inbox
        self.prepared_releases: dict[tuple[str, str], tuple[bytes, Sequence[bytes]]] = {}
        self._last_had_ping = True
        self._prefix: tuple[bytes, ...] = ()
        self._topology = topology
        self._reasserts = reasserts
        self._changed: Callable[[str | None], None] | None = None
        self._watches = WatchConnections(wire.watch_connection)
        self._capabilities = self._all_capabilities()
        wire.on_push = self._on_push

    @property
    def grace(self) -> float:
        return self.wire.grace

    @property
    def connected(self) -> bool:
        return self.wire.connected

    @property
    def inbox_open(self) -> bool:
        return self.inbox.connected

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities[self.wire.pushes] if self.substitute is None else self.substitute.capabilities

    def _all_capabilities(self, *, replica_acks: bool = False) -> tuple[Capabilities, Capabilities]:
        """Return the capabilities without and with RESP3; which apply is known once the wire is connected.

        Fences follow the server's clock. After a failover two masters may grant for a moment, and only their clocks
        keep the fences of both in order. A fence of a block may be used long after it was reserved, so it could be
        lower than one that the other master granted before.
        Where a failover can happen, there are therefore no fence blocks.
        """
        single = self._topology is Topology.SINGLE and not (replica_acks or self._reasserts)
        first = Capabilities(
            fence_blocks=single,
            replica_acks=replica_acks,
            reassert=self._reasserts,
            values=True,
            readers=True,
            permits=True,
            batches=not replica_acks,
        )
        return first, first._replace(change_events=True)

    def with_prefix(self, *requests: bytes) -> Self:
        """Return the same store, which sends `requests` before each of its own, such as ASKING in a cluster."""
        twin = copy(self)
        twin._prefix = requests
        return twin

    def mailbox(self, holder: str) -> Mailbox:
        return self.inbox.mailbox(holder)

    async def acquire(self, claim: Claim, enqueue: Enqueue | None, until: float) -> Answer:
        if self.substitute is not None:
            return await self.substitute.acquire(claim, enqueue, until)
        request = acquire_request(claim, enqueue)
        reply = await self.wire.request(request, until, self._prefix)
        if type(reply) is int:
            return tuple.__new__(Granted, (reply, None, ()))
        if type(reply) is ReplyError:
            try:
                reply = await self._recover(reply, scripts.ACQUIRE, request, claim.name, until, self._prefix)
            except (StoreRefused, StoreProtocolError) as denial:
                return await self._fall_back(denial, lambda store: store.acquire(claim, enqueue, until))
        if type(reply) is int or type(reply) is bytes:
            return _granted(claim.name, reply)
        try:
            if type(reply[0]) is bytes:
                raise other_mode_error(claim.name, MODES[reply[0]])
            ttl_left = None if reply[0] < 0 else reply[0] / 1000
            if enqueue is None:
                return Taken(ttl_left)
            self._prepare_release(claim, reply[2])
            return Queued(reply[1], reply[2], ttl_left)
        except (TypeError, LookupError):
            raise _unexpected(claim.name, reply) from None

    async def acquire_all(self, claims: Sequence[Claim], until: float) -> Sequence[Granted] | None:
        if self.substitute is not None:
            return None
        args = [
            arg for claim in claims for arg in (*scripts.claim_args(claim), b"%d" % claim.weight, b"%d" % claim.limit)
        ]
        name = claims[0].name
        request = scripts.ACQUIRE_ALL.request([claim.name for claim in claims], *args)
        try:
            reply = await self._run(scripts.ACQUIRE_ALL, request, name, until)
        except (StoreRefused, StoreProtocolError) as denial:
            return await self._fall_back(denial, lambda store: store.acquire_all(claims, until))
        if not isinstance(reply, list) or len(reply) not in (0, len(claims)):
            raise _unexpected(name, reply)
        return [_granted(name, one) for one in reply] or None

    async def downgrade(self, claim: Claim, until: float) -> bool:
        if self.substitute is not None:
            return await self.substitute.downgrade(claim, until)
        request = scripts.claim_request(scripts.DOWNGRADE, claim)
        try:
            reply = await self._run(scripts.DOWNGRADE, request, claim.name, until)
        except (StoreRefused, StoreProtocolError) as denial:
            return await self._fall_back(denial, lambda store: store.downgrade(claim, until))
        return type(reply) is int and reply == 1

    async def release(self, name: str, holder: str, until: float) -> bool:
        if self.substitute is not None:
            return await self.substitute.release(name, holder, until)
        prepared = self.prepared_releases.pop((name, holder), None) if self.prepared_releases else None
        if prepared is None:
            request, before = release_request(name, holder), self._prefix
        else:
            request, before = prepared[0], (*prepared[1], *self._prefix)
        reply = await self.wire.request(request, until, before)
        if type(reply) is ReplyError:
            try:
                reply = await self._recover(reply, scripts.RELEASE, request, name, until, before)
            except (StoreRefused, StoreProtocolError) as denial:
                return await self._fall_back(denial, lambda store: store.release(name, holder, until))
        return type(reply) is int and reply == 1

    def _prepare_release(self, claim: Claim, position: int) -> None:
        """Build a waiter's release while it waits, and perhaps put a PING in front of it.

        A server keeps a list of the clients that it has output for, and writes first to the client that joined last.
        Without a PING that is this client: the script notifies the next waiter, and then the release gets its reply.
        With a PING, this client joins before the script runs, so the waiter joins last and is written to first. That
        takes a fifth off the time from release to grant. But a PING is a third request, beside acquire and release. So
        if others are ahead in the queue, only every second release has one.
        """
        key = claim.name, claim.holder
        if key in self.prepared_releases:
            return  # a repeated request
        if len(self.prepared_releases) >= MAX_PREPARED_RELEASES:  # most belong to lost leases, never released
            self.prepared_releases.clear()
        self._last_had_ping = position == 0 or not self._last_had_ping
        self.prepared_releases[key] = (
            release_request(claim.name, claim.holder),
            (PING,) if self._last_had_ping else (),
        )

    async def renew(self, renewals: Sequence[Renewal], until: float) -> Sequence[bool | None]:
        if self.substitute is not None:
            return await self.substitute.renew(renewals, until)
        name, shared = renewals[0].name, renewals[0].shared
        if any(one.shared is not shared for one in renewals):
            return await self._renew_in_two(renewals, until)
        script = scripts.renew_script(renewals)
        try:
            reply = await self._run(script, scripts.renew_request(renewals), name, until, self.tracking(renewals))
        except (StoreRefused, StoreProtocolError) as denial:
            return await self._fall_back(denial, lambda store: store.renew(renewals, until))
        if not isinstance(reply, list) or len(reply) != len(renewals):
            raise _unexpected(name, reply)
        return [answer == 1 for answer in reply]

    def tracking(self, renewals: Sequence[Renewal]) -> Sequence[bytes]:
        """The requests to send before renewals, so that the server reports external changes.

        Empty for shared grants: otherwise every change by another reader would be reported.
        """
        return scripts.TRACK if self.capabilities.change_events and not renewals[0].shared else ()

    async def _renew_in_two(self, renewals: Sequence[Renewal], until: float) -> Sequence[bool | None]:
        """Renew the exclusive grants and the shared ones: they need different scripts."""
        answers: dict[int, bool | None] = {}
        for shared in (False, True):
            chosen = [number for number, one in enumerate(renewals) if one.shared is shared]
            answers.update(zip(chosen, await self.renew([renewals[number] for number in chosen], until), strict=True))
        return [answers[number] for number in range(len(renewals))]

    async def adopt(self, claim: Claim, old_holder: str, until: float) -> Granted | None:
        weight, limit = b"%d" % claim.weight, b"%d" % claim.limit
        request = scripts.claim_request(scripts.ADOPT, claim, old_holder.encode(), weight, limit)
        reply = await self._run(scripts.ADOPT, request, claim.name, until)
        return _granted(claim.name, reply) if reply else None

    async def reassert(self, claim: Claim, fence: int, until: float) -> bool:
        request = scripts.claim_request(scripts.REASSERT, claim, b"%d" % fence)
        return bool(await self._run(scripts.REASSERT, request, claim.name, until) == 1)

    async def force_release(self, name: str, holder: str, until: float) -> bool:
        request = scripts.FORCE_RELEASE.request([name], holder.encode())
        reply = await self._run(scripts.FORCE_RELEASE, request, name, until)
        if isinstance(reply, bytes) and clean(reply.decode("utf-8", "replace")) == holder:
            # Another program's lock: `holder` is its value without control characters. Repeat with the real one.
            request = scripts.FORCE_RELEASE.request([name], reply)
            reply = await self._run(scripts.FORCE_RELEASE, request, name, until)
        return bool(reply == 1)

    async def inspect(self, name: str, until: float) -> LockInfo:
        request = scripts.INSPECT.request([name], b"%d" % MAX_SHOWN)
        reply = await self._run(scripts.INSPECT, request, name, until)
        try:
            return info_of(name, reply)
        except (TypeError, ValueError, IndexError):
            raise _unexpected(name, reply) from None

    async def listing(self, pattern: str, cursor: str, until: float) -> Page:
        names, after = await self.scan(pattern, cursor, until)
        return Page(await self.infos(names, until), after)

    async def scan(self, pattern: str, cursor: str, until: float) -> tuple[list[str], str]:
        """Return some of the names that match, and the next cursor ('' at the end)."""
        request = pack(b"SCAN", (cursor or "0").encode(), b"MATCH", META_PATTERN, b"COUNT", SCAN_COUNT)
        reply = await self.wire.request(request, until)
        if type(reply) is ReplyError:
            raise error_of(str(reply), shown(pattern))
        try:
            after, keys = reply[0].decode("ascii"), reply[1]
            names = [name for name in map(name_of, keys) if name is not None and fits(name, pattern)]
        except (TypeError, AttributeError, IndexError, UnicodeDecodeError):
            raise _unexpected(pattern, reply) from None
        return names, "" if after == "0" else after

    async def infos(self, names: list[str], until: float) -> tuple[LockInfo, ...]:
        """Inspect several locks, without their waiters. In a cluster they must share a slot."""
        if not names:
            return ()
        reply = await self._run(scripts.LIST, scripts.LIST.request(names, b"%d" % MAX_HOLDERS_LISTED), names[0], until)
        try:
            parts = [reply[at : at + INFO_FIELDS] for at in range(0, INFO_FIELDS * len(names), INFO_FIELDS)]
            return tuple(info_of(name, part) for name, part in zip(names, parts, strict=True))
        except (TypeError, ValueError, IndexError):
            raise _unexpected(names[0], reply) from None

    async def facts(self, until: float) -> Facts:
        replies = [await self.wire.request(request, until) for request in FACTS_REQUESTS]
        return facts_in(replies, time.time())._replace(topology=self._topology)

    async def watch(self, key: str, until: float) -> WatchedValue:
        return await self._watches.watch(key, until)

    async def _run(self, script: Script, request: bytes, name: str, until: float, before: Sequence[bytes] = ()) -> Any:
        before = (*before, *self._prefix)
        reply = await self.wire.request(request, until, before)
        if type(reply) is ReplyError:
            return await self._recover(reply, script, request, name, until, before)
        return reply

    async def _recover(
        self, reply: ReplyError, script: Script, request: bytes, name: str, until: float, before: Sequence[bytes]
    ) -> Any:
        """Repeat the request with the script's text if the server lacks the script; raise any other error."""
        if code_of(str(reply)) == "NOSCRIPT":
            repeated = await self.wire.request(script.in_full(request), until, before)
            if type(repeated) is not ReplyError:
                return repeated
            reply = repeated
        raise self._error(reply, name)

    def _error(self, reply: ReplyError, name: str) -> StoreError:
        """The error for an error reply. If the server is no master, disconnect from it."""
        if code_of(str(reply)) in NOT_MASTER:
            self.wire.drop()
        return error_of(str(reply), shown(name))

    async def _fall_back(self, denial: StoreError, operation: Callable[[RedisStore], Awaitable[T]]) -> T:
        """Raise `denial`. A subclass may answer the request in another way."""
        raise denial

    def on_change(self, callback: Callable[[str | None], None]) -> None:
        self._changed = callback

    def poll_events(self) -> None:
        self.wire.poll_events()

    def _on_push(self, message: Any) -> None:
        """Report keys that somebody else changed. The server names none if it flushed its tracking table."""
        if self._changed is None or not message or message[0] != b"invalidate":
            return
        for key in message[1] or [None]:
            self._changed(None if key is None else key.decode("utf-8", "replace"))

    def disconnect(self) -> None:
        self.inbox.drop()
        self.wire.drop()

    async def cancel_waits(self) -> None:
        await self.inbox.close()

    async def close(self) -> None:
        await self.cancel_waits()
        await self.wire.close()
        self._watches.close()

    def reset(self, *, forked: bool) -> None:
        self._watches.reset()
        self.inbox.reset(forked=forked)
        self.wire.reset(forked=forked)


class RedisMember(RedisStore):
    """`ports.MemberStore`: one server as a member of a quorum."""

    wire: TransportWire
    inbox: TransportInbox

    def __init__(self, wire: TransportWire, inbox: TransportInbox) -> None:
        super().__init__(wire, inbox, reasserts=True)

    @property
    def silent_since(self) -> float | None:
        return self.wire.silent_since

    async def connect(self, until: float) -> bool:
        return await self.wire.connect(until)

    async def connect_inbox(self, until: float) -> None:
        await self.inbox.connect(until)

    async def identity(self, until: float) -> Facts:
        # Load the scripts first: a quorum stops waiting after a majority of replies, so it could miss a NOSCRIPT reply.
        info = await self.wire.request(IDENTITY_REQUEST, until, before=scripts.LOAD)
        return facts_in([info, None, None, None], 0.0)

    async def mark(self, secret: str, number: int, until: float) -> int | None:
        key = MARK_PREFIX + secret.encode()
        put = pack(b"SET", key, b"%d" % number, b"NX", b"PX", b"5000")
        found = await self.wire.request(pack(b"GET", key), until, before=(put,))
        return int(found) if isinstance(found, bytes) and found.isdigit() else None

    async def release(self, name: str, holder: str, until: float) -> bool:
        """Send the script's text at once: the quorum may have stopped waiting when a NOSCRIPT reply arrives."""
        request = scripts.RELEASE.in_full(release_request(name, holder))
        return bool(await self._run(scripts.RELEASE, request, name, until) == 1)

    def _prepare_release(self, claim: Claim, position: int) -> None:
        return  # `release` above does not use prepared requests


class MutexBusy(StoreUnavailable):
    """A `FairMutex` stayed locked."""


class FairMutex:
    """A mutex in both flavours, first come, first served.

    Invariant: `_locked` stays set while the mutex passes to the first of `_waiting`."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.reset()

    def reset(self) -> None:
        """Unlock and drop all waiters: in a forked child they do not exist."""
        self._mutex = self._runtime.mutex()
        self._waiting: deque[Waker | None] = deque()
        self._locked = False

    @asynccontextmanager
    async def held(self, until: float) -> AsyncIterator[None]:
        """Hold the mutex inside the block. Raise `MutexBusy` if it is still locked at `until`."""
        with self._mutex:
            waker = self._runtime.waker() if self._locked else None
            if waker is not None:
                self._waiting.append(waker)
            self._locked = True
        try:
            if waker is not None and not await waker.wait(until):
                raise MutexBusy("The connection is busy with other requests, so nothing was sent. Try again.")
            yield
        finally:
            self._leave(waker)

    def _leave(self, waker: Waker | None) -> None:
        following = None
        with self._mutex:
            if waker in self._waiting:  # it gave up
                self._waiting.remove(waker)
            elif self._waiting:
                following = self._waiting.popleft()
            else:
                self._locked = False
        if following is not None:
            following.wake()


def _granted(name: str, reply: object) -> Granted:
    """Read a fence, or b"fence slots" with permits."""
    if type(reply) is int:
        return Granted(reply)
    try:
        fence, slots = reply.split(b" ")  # type: ignore[attr-defined]
        return Granted(int(fence), slots=slots_in(slots))
    except (AttributeError, TypeError, ValueError):
        raise _unexpected(name, reply) from None


def _unexpected(name: str, reply: object) -> StoreError:
    return StoreProtocolError(
        f"The server's reply about the lock {shown(name)} is unexpected, so the state of the lock is "
        f"unknown. Use Redis 6.2 or later, or Valkey. [{shown(reply)}]"
    )
