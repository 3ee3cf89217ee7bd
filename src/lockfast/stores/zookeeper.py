"""`ports.Store` on ZooKeeper 3.5 or later, through kazoo.

Each operation reads a lock's nodes, decides, and writes in one transaction if they are unchanged:

    /lockfast/=NAME                     the lock; NAME is quoted
    /lockfast/=NAME/holder              the grant: holder id, owner, ttl and grant id; its last change starts the ttl
    /lockfast/=NAME/g-GRANT             exists as long as the grant with that id
    /lockfast/=NAME/w-ID-0000000007     a waiter; ordered by the sequence number that ZooKeeper appends

Rules:

- A grant is no ephemeral node. Those end with the session, and a session can end before a lease does, so a holder with
  a short network failure would lose its lock.
- The fence is the transaction id that created the holder's node: ZooKeeper never repeats one. The version of a node is
  no such id, as it starts at 0 when the node is created again, and a delayed write could match a later grant. So every
  grant has a random id, and every write depends on the node of that id.
- Every write depends on the grant and the version that were read. A lost race is not an answer: the operation starts
  again.
- Time is ZooKeeper's alone: the timestamp of a node that it writes.
- A lock is handed off in the transaction that releases it.

Differences to the other stores:

- ZooKeeper does not detect a dead waiter. A crashed waiter may be granted the lock, which then lasts for its ttl. A
  waiter that did not refresh its ticket for its whole ttl loses it.
- A waiter that becomes first in the queue is not notified.
- A free lock has no fence to show.
- The nodes of a crashed holder stay, as a free lock, until the name is used again.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from math import ceil
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urlsplit

from lockfast import values
from lockfast.errors import ConfigurationError, Outcome, StoreRefused, StoreUnavailable, closed_error, shown
from lockfast.facts import Facts, Persistence
from lockfast.ports import Capabilities, Mailbox, Runtime, Store
from lockfast.values import Answer, Claim, Enqueue, Granted, LockInfo, Page, Queued, Renewal, Taken, clean, fits

kazoo_log = logging.getLogger("lockfast.kazoo")
kazoo_log.setLevel(logging.CRITICAL)  # our errors report the same

SESSION_SECONDS = 10.0  # how long ZooKeeper keeps a silent session; only watches depend on it
LEAST_LIMIT = 0.02  # seconds that a request gets at least, even if its caller has less time left
ROOT = "/lockfast"
ROUNDS = 50  # how often an operation starts again after a lost race, which means progress for another client
ANY_VERSION = -1
MOST_SHOWN = 200
PAGE = 50


def lock_path(name: str) -> str:
    return f"{ROOT}/={quote(name, safe='')}"


def holder_path(name: str) -> str:
    return f"{lock_path(name)}/holder"


def grant_path(name: str, grant: str) -> str:
    return f"{lock_path(name)}/g-{grant}"


def waiter_prefix(holder: str) -> str:
    return f"w-{quote(holder, safe='')}-"


class Node(NamedTuple):
    """A holder or a waiter, as read. `created_by` is a transaction id. A waiter has no `grant`."""

    path: str
    holder: str
    owner: str
    ttl_ms: int
    attempt: int
    grant: str
    version: int
    created_by: int
    created_at_ms: int
    changed_at_ms: int

    @classmethod
    def of(cls, path: str, data: bytes, stat: Any) -> Node:
        try:
            fields = json.loads(data)
            known = str(fields["holder"]), str(fields["owner"]), int(fields["ttl_ms"]), int(fields["attempt"])
            grant = str(fields["grant"])
        except (ValueError, KeyError, TypeError):  # written by another program: it holds the lock without a ttl
            known, grant = (data.decode("utf-8", "replace") or "?", "", -1, 0), ""
        return cls(path, *known, grant, stat.version, stat.czxid, stat.ctime, stat.mtime)

    def ttl_left(self, now_ms: int) -> float | None:
        """Seconds of the ttl that are left; None without a ttl."""
        return None if self.ttl_ms < 0 else (self.changed_at_ms + self.ttl_ms - now_ms) / 1000

    def is_expired(self, now_ms: int) -> bool:
        left = self.ttl_left(now_ms)
        return left is not None and left < 0

    def age(self, now_ms: int) -> float:
        """Seconds since the node was created."""
        return max(0, now_ms - self.created_at_ms) / 1000


def value(claim: Claim, attempt: int = 0, grant: str = "") -> bytes:
    ttl_ms = ceil(round(claim.ttl * 1000, 6))  # 2.007 * 1000 is a little more than 2007
    fields = {"holder": claim.holder, "owner": claim.owner, "ttl_ms": ttl_ms, "attempt": attempt, "grant": grant}
    return json.dumps(fields, separators=(",", ":")).encode()


def waiters_in(children: list[str]) -> list[str]:
    """The waiters among the children of a lock, in order."""
    return sorted((child for child in children if child.startswith("w-")), key=ticket_of)


def ticket_of(child: str) -> int:
    """
    >>> ticket_of("w-moto-0000000007")
    7
    """
    return int(child.rpartition("-")[2])


class Session:
    """One kazoo client, in both flavours, started at the first request.

    kazoo sends requests from its own thread. It keeps a request while it is disconnected, and may send it after its
    caller has gone. So a request without a reply in time has an unknown outcome.
    """

    def __init__(self, url: str, runtime: Runtime, flavour: str) -> None:
        try:
            import kazoo.client
            import kazoo.exceptions
        except ImportError as error:
            raise ConfigurationError(
                "A ZooKeeper URL needs kazoo, which is not installed. Run: pip install 'lockfast[zookeeper]'"
            ) from error
        self._new_client = kazoo.client.KazooClient
        self._errors: Any = kazoo.exceptions
        self._runtime = runtime
        self._is_async = flavour == "asyncio"
        self._mutex = runtime.mutex()
        self._client: Any = None
        self._connected: Any = None
        self._closed = False
        try:
            parts = urlsplit(url)
            hosts = parts.netloc.rpartition("@")[2].split(",")
            ports = [urlsplit(f"//{host}").port for host in hosts]  # raises ValueError for an invalid port
            if not all(hosts) or 0 in ports or parts.path not in ("", "/") or parts.query or parts.fragment:
                raise ValueError
        except ValueError:
            raise ConfigurationError(
                "This ZooKeeper URL is not valid. It should look like zookeeper://user:password@host1:2181,host2:2181."
            ) from None
        self._login = f"{unquote(parts.username)}:{unquote(parts.password or '')}" if parts.username else None
        self._hosts = ",".join(hosts)
        self.shown = clean(f"zookeeper://{self._hosts}")

    def _started(self) -> Any:
        with self._mutex:
            if self._closed:
                raise closed_error()
            if self._client is None:
                auth = [("digest", self._login)] if self._login else None
                self._client = self._new_client(self._hosts, timeout=SESSION_SECONDS, auth_data=auth, logger=kazoo_log)
                self._connected = self._client.start_async()
            return self._client

    async def request(self, send: Callable[[Any], Any], until: float) -> Any:
        """Call `send(client)` and return the reply; None if a node is missing or another client changed it first."""
        client = self._started()
        limit = max(LEAST_LIMIT, until - self._runtime.now())
        if not self._connected.is_set() and not await self._call(self._connected.wait, limit):
            raise StoreUnavailable(
                "Cannot connect to ZooKeeper; nothing was changed. Check that it is running, and the address."
            )
        errors = self._errors
        try:
            if self._is_async:
                return await self._reply(send(client), limit)
            return send(client).get(block=True, timeout=limit)
        except (errors.NoNodeError, errors.NodeExistsError, errors.BadVersionError, errors.NotEmptyError):
            return None
        except (TimeoutError, client.handler.timeout_exception) as error:
            raise _unknown("it did not reply in time") from error
        except (errors.ConnectionLoss, errors.SessionExpiredError, errors.ConnectionClosedError) as error:
            raise _unknown("the connection was lost") from error
        except (errors.NoAuthError, errors.AuthFailedError) as error:
            raise StoreRefused(
                "ZooKeeper refused the request; nothing was changed. Give the account all rights on the nodes below "
                "/lockfast."
            ) from error

    async def _call(self, blocking: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of kazoo that blocks; on asyncio, in a worker thread."""
        return await asyncio.to_thread(blocking, *arguments) if self._is_async else blocking(*arguments)

    async def _reply(self, reply: Any, limit: float) -> Any:
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()
        reply.rawlink(lambda _: loop.call_soon_threadsafe(arrived.set))
        async with asyncio.timeout(limit):
            await arrived.wait()
        return reply.get(block=False)

    async def close(self) -> None:
        with self._mutex:
            self._closed = True
            client, self._client = self._client, None
        if client is not None:
            await self._call(client.stop)
            await self._call(client.close)

    def reset(self) -> None:
        self._mutex = self._runtime.mutex()
        self._client = None


def _unknown(reason: str) -> StoreUnavailable:
    return StoreUnavailable(
        f"No reply from ZooKeeper: {reason}. The request may or may not have been executed.", outcome=Outcome.UNKNOWN
    )


class ZooKeeperMailbox:
    """`ports.Mailbox`: a watch on the holder's node.

    `written_by` is the transaction that wrote the ticket for the request `attempt`, the last one answered "queued". A
    holder's node created after it is newer than that answer, so a grant in it answers that request.
    """

    address = "watch"

    def __init__(self, store: ZooKeeperStore, runtime: Runtime, holder: str) -> None:
        self._store = store
        self._waker = runtime.waker()
        self.wake = self._waker.wake
        self._holder = holder
        self.name, self.attempt, self.written_by = "", 0, 0

    async def open(self, until: float) -> None:
        """Nothing to do: `wait` reads the node before it waits."""

    async def wait(self, until: float) -> values.Notification | None:
        while True:
            if self._store.waits_cancelled:
                raise closed_error()
            node = await self._store.read_holder(self.name, until, lambda _: self.wake())
            if node is None:
                return None  # free: the next request grants the lock to the first waiter
            if node.holder == self._holder and node.created_by > self.written_by:
                return values.GrantNotification(self.attempt, node.created_by)
            if not await self._waker.wait(until):
                return None

    def close(self) -> None:
        self._store.boxes.pop(self._holder, None)


class ZooKeeperStore(Store):
    """`boxes` has the mailbox of every waiting acquisition."""

    grace = 0.3
    capabilities = Capabilities()

    def __init__(self, session: Session, runtime: Runtime) -> None:
        self._session = session
        self._runtime = runtime
        self.boxes: dict[str, ZooKeeperMailbox] = {}
        self.waits_cancelled = False

    def mailbox(self, holder: str) -> Mailbox:
        box = self.boxes[holder] = ZooKeeperMailbox(self, self._runtime, holder)
        return box

    async def acquire(self, claim: Claim, enqueue: Enqueue | None, until: float) -> Answer:
        for _ in range(ROUNDS):
            held = await self.read_holder(claim.name, until)
            if held is not None and held.holder == claim.holder:
                if await self._renew_node(claim.name, held, claim.ttl, until):
                    return Granted(held.created_by)
                continue
            now_ms = await self._clock(until)
            if held is None or held.is_expired(now_ms):
                await self._grant_next(claim.name, held, now_ms, until, claim)
                continue
            if enqueue is None:
                return Taken(held.ttl_left(now_ms))
            queued = await self._enqueue(claim, enqueue, held, held.ttl_left(now_ms), until)
            if queued is not None:
                return queued
        raise _too_busy(claim.name)

    async def _enqueue(
        self, claim: Claim, enqueue: Enqueue, held: Node, ttl_left: float | None, until: float
    ) -> Queued | None:
        """Create or refresh the ticket. None if the lock changed meanwhile: its release may have missed the ticket."""
        request, folder, prefix = self._session.request, lock_path(claim.name), waiter_prefix(claim.holder)
        data = value(claim, enqueue.attempt)
        own = next((child for child in await self._waiters(claim.name, until) if child.startswith(prefix)), None)
        if own is None:
            path = f"{folder}/{prefix}"
            created = await request(lambda one: one.create_async(path, data, sequence=True, makepath=True), until)
            if created is None:
                return None
            own = created.rpartition("/")[2]
        stat = await request(lambda client: client.set_async(f"{folder}/{own}", data), until)
        current = await self.read_holder(claim.name, until)
        if stat is None or current is None or current.created_by != held.created_by:
            return None
        box = self.boxes.get(claim.holder)
        if box is not None:
            box.name, box.attempt, box.written_by = claim.name, enqueue.attempt, stat.mzxid
        order = await self._waiters(claim.name, until)
        return Queued(ticket_of(own), order.index(own) if own in order else 0, ttl_left)

    async def _grant_next(self, name: str, old: Node | None, now_ms: int, until: float, claim: Claim | None) -> bool:
        """Replace the ended grant `old` by one for the first live waiter or for `claim`. False if the lock changed."""
        children = await self._children(lock_path(name), until)
        # Grant nodes without a holder's node are left over from an external deletion.
        ended = [child[2:] for child in children if child.startswith("g-")] if old is None else [old.grant]
        for child in waiters_in(children):
            waiter = await self._node(f"{lock_path(name)}/{child}", until)
            if waiter is None:
                continue
            if waiter.is_expired(now_ms) and (claim is None or waiter.holder != claim.holder):
                await self._delete(waiter.path, until, waiter.version)
                continue
            new = Claim(name, waiter.holder, waiter.ttl_ms / 1000, waiter.owner)
            return await self._replace(name, old, ended, new, waiter, until)
        return await self._replace(name, old, ended, claim, None, until)

    async def _replace(
        self, name: str, old: Node | None, ended: Sequence[str], new: Claim | None, waiter: Node | None, until: float
    ) -> bool:
        """In one transaction: delete the grants `ended` and their node `old`, grant to `new`, and delete its ticket."""

        def change(transaction: Any) -> None:
            for grant in filter(None, ended):
                transaction.delete(grant_path(name, grant))
            if old is not None:
                transaction.delete(old.path, old.version)
            if new is not None:
                grant = self._runtime.new_holder_id()
                transaction.create(holder_path(name), value(new, grant=grant))
                transaction.create(grant_path(name, grant))
            if waiter is not None:
                transaction.delete(waiter.path, waiter.version)

        if old is None:
            await self._session.request(lambda client: client.ensure_path_async(lock_path(name)), until)
        return await self._transact(change, until)

    async def renew(self, renewals: Sequence[Renewal], until: float) -> list[bool]:
        return [await self._renew(renewal, until) for renewal in renewals]

    async def _renew(self, renewal: Renewal, until: float) -> bool:
        for _ in range(ROUNDS):
            held = await self.read_holder(renewal.name, until)
            if held is None or held.holder != renewal.holder:
                return False
            if held.is_expired(await self._clock(until)):
                return False
            if await self._renew_node(renewal.name, held, renewal.ttl, until, final=renewal.final):
                return True
        raise _too_busy(renewal.name)

    async def _renew_node(self, name: str, held: Node, ttl: float, until: float, *, final: bool = False) -> bool:
        """Restart the ttl. Only a final renewal may shorten it."""
        claim = Claim(name, held.holder, ttl if final else max(ttl, held.ttl_ms / 1000), held.owner)
        data = value(claim, held.attempt, held.grant)

        def change(transaction: Any) -> None:
            transaction.check(grant_path(name, held.grant), ANY_VERSION)
            transaction.set_data(held.path, data, held.version)

        return await self._transact(change, until)

    async def release(self, name: str, holder: str, until: float) -> bool:
        released = await self._end_grant(name, holder, until)
        prefix = waiter_prefix(holder)
        if not released:
            for child in await self._waiters(name, until):
                if child.startswith(prefix):
                    await self._delete(f"{lock_path(name)}/{child}", until)
        await self._delete(lock_path(name), until)  # fails while it has children
        return released

    async def _end_grant(self, name: str, holder: str, until: float) -> bool:
        """End the grant of `holder`, and hand the lock off in the same transaction. False if it was not held."""
        for _ in range(ROUNDS):
            held = await self.read_holder(name, until)
            now_ms = 0 if held is None else await self._clock(until)
            if held is None or held.holder != holder or held.is_expired(now_ms):
                return False
            if await self._grant_next(name, held, now_ms, until, None):
                return True
        raise _too_busy(name)

    async def force_release(self, name: str, holder: str, until: float) -> bool:
        held = await self.read_holder(name, until)
        if held is None or clean(held.holder) != holder:
            return False
        return await self._end_grant(name, held.holder, until)

    async def adopt(self, claim: Claim, old_holder: str, until: float) -> Granted | None:
        for _ in range(ROUNDS):
            held = await self.read_holder(claim.name, until)
            if held is not None and held.holder == claim.holder:
                if await self._renew_node(claim.name, held, claim.ttl, until):
                    return Granted(held.created_by)
                continue
            if held is None or held.holder != old_holder or held.is_expired(await self._clock(until)):
                return None
            await self._replace(claim.name, held, [held.grant], claim, None, until)
        raise _too_busy(claim.name)

    async def inspect(self, name: str, until: float) -> LockInfo:
        now_ms = await self._clock(until)
        order = await self._waiters(name, until)
        found = [await self._node(f"{lock_path(name)}/{child}", until) for child in order[:MOST_SHOWN]]
        live = [node for node in found if node is not None and not node.is_expired(now_ms)]
        waiters = tuple(
            values.WaiterInfo(clean(node.holder), values.Owner.decode(node.owner), node.age(now_ms)) for node in live
        )
        info = LockInfo(name, waiters=waiters, waiting=len(live) + max(0, len(order) - MOST_SHOWN))
        held = await self.read_holder(name, until)
        if held is None or held.is_expired(now_ms):
            return info
        owner, fence = values.Owner.decode(held.owner), held.created_by
        holder = values.HolderInfo(clean(held.holder), owner, fence, held.age(now_ms), held.ttl_left(now_ms))
        return info._replace(fence=fence, holders=(holder,))

    async def listing(self, pattern: str, cursor: str, until: float) -> Page:
        children = await self._children(ROOT, until)
        names = sorted(unquote(child[1:]) for child in children if child.startswith("="))
        rest = [name for name in names if name > cursor]
        part = rest[:PAGE]
        infos = [await self.inspect(name, until) for name in part if fits(name, pattern)]
        used = tuple(info._replace(waiters=()) for info in infos if info.locked or info.waiting)
        return Page(used, part[-1] if len(rest) > PAGE else "")

    async def facts(self, until: float) -> Facts:
        await self._clock(until)
        return Facts("zookeeper", persistence=Persistence.FILE)

    async def cancel_waits(self) -> None:
        self.waits_cancelled = True
        for box in list(self.boxes.values()):
            box.wake()

    async def close(self) -> None:
        await self._session.close()

    def reset(self, *, forked: bool) -> None:
        self.boxes.clear()
        self._session.reset()

    async def read_holder(self, name: str, until: float, watch: Callable[[Any], None] | None = None) -> Node | None:
        return await self._node(holder_path(name), until, watch)

    async def _node(self, path: str, until: float, watch: Callable[[Any], None] | None = None) -> Node | None:
        found = await self._session.request(lambda client: client.get_async(path, watch=watch), until)
        return None if found is None else Node.of(path, *found)

    async def _children(self, path: str, until: float) -> list[str]:
        return await self._session.request(lambda client: client.get_children_async(path), until) or []

    async def _waiters(self, name: str, until: float) -> list[str]:
        return waiters_in(await self._children(lock_path(name), until))

    async def _clock(self, until: float) -> int:
        """ZooKeeper's time in milliseconds: the timestamp of a write."""
        while (stat := await self._session.request(lambda client: client.set_async(ROOT, b""), until)) is None:
            await self._session.request(lambda client: client.ensure_path_async(ROOT), until)
        return int(stat.mtime)

    async def _delete(self, path: str, until: float, version: int = ANY_VERSION) -> None:
        await self._session.request(lambda client: client.delete_async(path, version), until)

    async def _transact(self, change: Callable[[Any], None], until: float) -> bool:
        """Execute all operations of `change` or none. False after a lost race."""

        def send(client: Any) -> Any:
            transaction = client.transaction()
            change(transaction)
            return transaction.commit_async()

        return not any(isinstance(result, Exception) for result in await self._session.request(send, until))


def _too_busy(name: str) -> StoreUnavailable:
    return StoreUnavailable(f"The lock {shown(name)} changed too often to be read; nothing was changed. Try again.")
