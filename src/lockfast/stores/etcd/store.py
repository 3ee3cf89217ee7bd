"""`ports.Store` on etcd. Each operation reads a lock in one transaction, decides, and writes in a conditional one.

    lockfast/lock/NAME           the holder id, on the holder's etcd lease; this key alone decides who holds the lock
    lockfast/meta/NAME           owner, start and fence of the grant, same lease; no fence: this key's revision is it
    lockfast/wait/NAME NUL id    one waiter: owner and attempt, on its own lease; ordered by create revision

Rules:

- Every write depends on what was read. A lost race is not an answer: the operation starts again.
- Each holder has its own etcd lease, so a renewal cannot extend another holder's grant. A renewal counts only if the
  lock is on the very lease that was extended. The id of a lease is derived from the holder id, so that a repeated
  request finds its own lease.
- Conditions compare modification revisions, which etcd never repeats, not even for a key that is created again.
- A fence is etcd's revision at the grant, which grows with every change in the cluster.
- A lock is handed off in the transaction that releases it.

Differences to the other stores:

- etcd counts a ttl in whole seconds, and at least about two. A crashed holder's lock is free up to two seconds late.
- etcd does not detect a dead waiter. A crashed waiter may be granted the lock, which then lasts for its ttl. A waiter
  that did not refresh its ticket for its whole ttl loses it.
- A waiter that becomes first in the queue is not notified.
- A free lock has no fence to show.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from math import ceil
from time import time as wall_clock
from typing import Any, NamedTuple

from lockfast import values
from lockfast.errors import StoreError, StoreUnavailable, shown
from lockfast.facts import Facts, Persistence
from lockfast.ports import Capabilities, Mailbox, Runtime, Store
from lockfast.stores.etcd.client import EtcdClient, LeaseExists, LeaseExpired
from lockfast.values import Answer, Claim, Enqueue, Granted, LockInfo, Page, Queued, Renewal, Taken, clean, fits

ROOT = b"lockfast/"
ROUNDS = 50  # how often an operation starts again after a lost race, which means progress for another client
MOST_SHOWN = 1000
PAGE = 50
RENEWALS_PER_READ = 40  # locks read in one transaction; etcd allows 128 operations

Operations = list[dict[str, Any]]


def lock_key(name: str) -> bytes:
    return ROOT + b"lock/" + name.encode()


def meta_key(name: str) -> bytes:
    return ROOT + b"meta/" + name.encode()


def wait_key(name: str, holder: str = "") -> bytes:
    return ROOT + b"wait/" + name.encode() + b"\0" + holder.encode()


def lease_of(holder: str) -> int:
    """The id of a holder's first etcd lease.

    >>> 0 < lease_of("moto") < 2**63
    True
    """
    return 1 + int.from_bytes(sha256(holder.encode()).digest()[:8], "big") % (2**62)


def packed(data: bytes) -> str:
    return base64.b64encode(data).decode()


class Record(NamedTuple):
    """One key of etcd, with its value."""

    key: bytes
    value: bytes
    lease: int
    created: int
    changed: int

    @classmethod
    def of(cls, kv: dict[str, Any]) -> Record:
        return cls(
            base64.b64decode(kv["key"]),
            base64.b64decode(kv.get("value", "")),
            int(kv.get("lease", 0)),
            int(kv.get("create_revision", 0)),
            int(kv.get("mod_revision", 0)),
        )

    @property
    def waiter(self) -> str:
        """The holder id of a waiter's key."""
        return self.key.rpartition(b"\0")[2].decode("utf-8", "replace")

    @property
    def owner(self) -> values.Owner | None:
        return values.Owner.decode(str(self.fields.get("owner", "")))

    def age(self, now: float) -> float | None:
        """Seconds since the time in the value; None if it has none."""
        since = self.fields.get("since")
        return max(0.0, now - since) if isinstance(since, float) else None

    @property
    def fields(self) -> dict[str, Any]:
        """The JSON value; empty for a key that another program wrote."""
        try:
            found = json.loads(self.value)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}


class Snapshot(NamedTuple):
    """A lock as read in one transaction. `own` is the caller's waiter record."""

    lock: Record | None
    meta: Record | None
    queue: tuple[Record, ...]
    waiting: int
    own: Record | None

    @property
    def holder(self) -> str | None:
        return None if self.lock is None else self.lock.value.decode("utf-8", "replace")

    @property
    def fence(self) -> int | None:
        return None if self.meta is None else int(self.meta.fields.get("fence") or self.meta.changed)


def encoded(**fields: Any) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


def is_free(name: str) -> dict[str, Any]:
    return {"key": packed(lock_key(name)), "target": "VERSION", "result": "EQUAL", "version": 0}


def is_held_by(name: str, holder: str) -> dict[str, Any]:
    return {"key": packed(lock_key(name)), "target": "VALUE", "result": "EQUAL", "value": packed(holder.encode())}


def is_unchanged(record: Record) -> dict[str, Any]:
    return {"key": packed(record.key), "target": "MOD", "result": "EQUAL", "mod_revision": record.changed}


def has_no_waiters(name: str) -> dict[str, Any]:
    return {**_queue(name), "target": "CREATE", "result": "EQUAL", "create_revision": 0}


def put(key: bytes, value: bytes, lease: int) -> dict[str, Any]:
    return {"request_put": {"key": packed(key), "value": packed(value), "lease": lease}}


def delete(key: bytes) -> dict[str, Any]:
    return {"request_delete_range": {"key": packed(key)}}


def get(key: bytes) -> dict[str, Any]:
    return {"request_range": {"key": packed(key)}}


def get_queue(name: str, most: int) -> dict[str, Any]:
    return {"request_range": {**_queue(name), "limit": most, "sort_order": "ASCEND", "sort_target": "CREATE"}}


def _queue(name: str) -> dict[str, Any]:
    start = wait_key(name)
    return {"key": packed(start), "range_end": packed(start[:-1] + b"\x01")}


def records_in(found: dict[str, Any]) -> tuple[Record, ...]:
    return tuple(map(Record.of, found.get("kvs", ())))


def record_in(found: dict[str, Any]) -> Record | None:
    return next(iter(records_in(found)), None)


class EtcdMailbox:
    """`ports.Mailbox`: a watch on the lock's key from the revision of the last request answered "queued".

    Any change after `revision` is newer than that answer, so a grant in it answers the request `attempt`.
    """

    address = "watch"

    def __init__(self, client: EtcdClient, runtime: Runtime, holder: str, boxes: dict[str, EtcdMailbox]) -> None:
        self._client = client
        self._runtime = runtime
        self._holder = holder
        self._boxes = boxes
        self.name, self.revision, self.attempt = "", 0, 0

    async def open(self, until: float) -> None:
        """Nothing to do: a watch can start at a past revision."""

    async def wait(self, until: float) -> values.Notification | None:
        request = {"create_request": {"key": packed(lock_key(self.name)), "start_revision": self.revision + 1}}
        watch = self._client.stream("/v3/watch", request, until)
        try:
            async for part in watch:
                freed = False
                for event in part.get("result", {}).get("events", ()):
                    record = Record.of(event["kv"])
                    self.revision = max(self.revision, record.changed)
                    freed = event.get("type") == "DELETE"
                    if record.value == self._holder.encode():
                        return values.GrantNotification(self.attempt, record.changed)
                if freed or self._runtime.now() >= until:
                    return None  # if free: the next request grants the lock to the first waiter
        finally:
            await watch.aclose()
        if self._runtime.now() < until:
            raise StoreUnavailable("etcd ended the watch for a grant. The ticket is kept; the next request retries.")
        return None

    def close(self) -> None:
        self._boxes.pop(self._holder, None)


class EtcdStore(Store):
    """`_leases` has the etcd lease of a holder if it is not the first one."""

    grace = 0.3
    capabilities = Capabilities()

    def __init__(self, client: EtcdClient, runtime: Runtime) -> None:
        self._client = client
        self._runtime = runtime
        self._boxes: dict[str, EtcdMailbox] = {}
        self._leases: dict[str, int] = {}

    def mailbox(self, holder: str) -> Mailbox:
        box = self._boxes[holder] = EtcdMailbox(self._client, self._runtime, holder, self._boxes)
        return box

    async def acquire(self, claim: Claim, enqueue: Enqueue | None, until: float) -> Answer:
        for _ in range(ROUNDS):
            seen = await self._read(claim.name, until, claim.holder)
            if seen.lock is not None and seen.holder == claim.holder:
                renewal = Renewal(claim.name, claim.holder, claim.ttl)
                ttl = await self._keep_alive(seen.lock.lease, until)
                if ttl and seen.fence is not None and await self._ensure_ttl(renewal, ttl, until):
                    return Granted(seen.fence)
            elif seen.lock is None:
                granted = await self._grant_free(claim, seen, until)
                if granted is not None:
                    return granted
            elif enqueue is None:
                return Taken(await self._ttl_left(seen.lock.lease, until))
            else:
                queued = await self._enqueue(claim, enqueue, seen, seen.lock, until)
                if queued is not None:
                    return queued
        raise _too_busy(claim.name)

    async def _grant_free(self, claim: Claim, seen: Snapshot, until: float) -> Granted | None:
        """Grant a free lock to the claim if no other waiter is first, else to that waiter."""
        head = seen.queue[0] if seen.queue else None
        if head is not None and head.waiter != claim.holder:
            await self._hand_off(claim.name, [is_free(claim.name)], head, until)
            return None
        lease = await self._lease(claim.holder, claim.ttl, until)
        is_first = has_no_waiters(claim.name) if head is None else is_unchanged(head)
        conditions = [is_free(claim.name), is_first]
        return await self._grant(claim.name, conditions, claim.holder, claim.owner, lease, until)

    async def _enqueue(
        self, claim: Claim, enqueue: Enqueue, seen: Snapshot, lock: Record, until: float
    ) -> Queued | None:
        lease = await self._lease(claim.holder, claim.ttl, until)
        since = wall_clock() if seen.own is None else seen.own.fields.get("since", wall_clock())
        value = encoded(owner=claim.owner, since=since, attempt=enqueue.attempt)
        entry = put(wait_key(claim.name, claim.holder), value, lease)
        revision = await self._write(claim.name, [is_unchanged(lock)], [entry], until)
        if revision is None:
            return None
        box = self._boxes.get(claim.holder)
        if box is not None:
            box.name, box.revision, box.attempt = claim.name, revision, enqueue.attempt
        first = not seen.queue or seen.queue[0].waiter == claim.holder
        position = 0 if first else max(1, seen.waiting - (seen.own is not None))
        ticket = revision if seen.own is None else seen.own.created
        return Queued(ticket, position, await self._ttl_left(lock.lease, until))

    async def _grant(
        self, name: str, conditions: Operations, holder: str, owner: str, lease: int, until: float
    ) -> Granted | None:
        """Grant the lock to `holder` if all conditions hold. The revision is the fence."""
        writes = [
            put(lock_key(name), holder.encode(), lease),
            put(meta_key(name), encoded(owner=owner, since=wall_clock(), fence=None), lease),
            delete(wait_key(name, holder)),
        ]
        revision = await self._write(name, conditions, writes, until)
        return None if revision is None else Granted(revision)

    async def _hand_off(self, name: str, conditions: Operations, head: Record, until: float) -> bool:
        """Grant the lock to the first waiter if the conditions hold. Remove the waiter if its lease has expired."""
        try:
            owner = str(head.fields.get("owner", ""))
            conditions = [*conditions, is_unchanged(head)]
            return await self._grant(name, conditions, head.waiter, owner, head.lease, until) is not None
        except LeaseExpired:
            await self._transact(name, [is_unchanged(head)], [delete(head.key)], until)
            return False

    async def renew(self, renewals: Sequence[Renewal], until: float) -> list[bool]:
        answers: list[bool] = []
        for start in range(0, len(renewals), RENEWALS_PER_READ):
            batch = renewals[start : start + RENEWALS_PER_READ]
            leases = [self._lease_of(renewal.holder) for renewal in batch]
            ttls = [await self._keep_alive(lease, until) for lease in leases]
            reads = [get(lock_key(renewal.name)) for renewal in batch]
            responses = (await self._transact(batch[0].name, [], reads, until))["responses"]
            locks = [record_in(response["response_range"]) for response in responses]
            for renewal, lease, ttl, lock in zip(batch, leases, ttls, locks, strict=True):
                if lock is None or lock.value != renewal.holder.encode() or not lock.lease:
                    answers.append(False)
                elif lock.lease != lease:  # the reply to the change of its ttl was lost
                    self._leases[renewal.holder] = lock.lease
                    answers += await self.renew([renewal], until)
                else:
                    answers.append(ttl > 0 and await self._ensure_ttl(renewal, ttl, until))
        return answers

    async def _ensure_ttl(self, renewal: Renewal, lease_ttl: int, until: float) -> bool:
        """Move the grant to a new etcd lease if the ttl differs: a lease cannot change its ttl. The fence stays."""
        if not renewal.final and lease_ttl >= ceil(renewal.ttl):
            return True
        reply = await self._client.call("/v3/lease/grant", {"ID": 0, "TTL": ceil(renewal.ttl)}, until)
        lease = int(reply["ID"])  # etcd chose it
        seen = await self._read(renewal.name, until)
        if seen.meta is None:
            return False
        fields = seen.meta.fields
        since = fields.get("since", wall_clock())
        meta = encoded(owner=fields.get("owner", ""), since=since, fence=seen.fence)
        writes = [put(lock_key(renewal.name), renewal.holder.encode(), lease), put(meta_key(renewal.name), meta, lease)]
        conditions = [is_held_by(renewal.name, renewal.holder), is_unchanged(seen.meta)]
        if await self._write(renewal.name, conditions, writes, until) is None:
            return False
        self._leases[renewal.holder] = lease
        return True

    async def release(self, name: str, holder: str, until: float) -> bool:
        released = await self._end_grant(name, holder, until)
        if not released:
            await self._transact(name, [], [delete(wait_key(name, holder))], until)
        await self._end_lease(holder, until)
        return released

    async def _end_grant(self, name: str, holder: str, until: float) -> bool:
        """End the grant of `holder`, and hand the lock off in the same transaction. False if it was not held."""
        for _ in range(ROUNDS):
            seen = await self._read(name, until)
            if seen.holder != holder or seen.lock is None:
                return False
            conditions = [is_unchanged(seen.lock)]
            if seen.queue:
                if await self._hand_off(name, conditions, seen.queue[0], until):
                    return True
                continue
            writes = [delete(lock_key(name)), delete(meta_key(name))]
            if await self._write(name, [*conditions, has_no_waiters(name)], writes, until) is not None:
                return True
        raise _too_busy(name)

    async def force_release(self, name: str, holder: str, until: float) -> bool:
        seen = await self._read(name, until)
        if seen.holder is None or clean(seen.holder) != holder:
            return False
        return await self._end_grant(name, seen.holder, until)

    async def adopt(self, claim: Claim, old_holder: str, until: float) -> Granted | None:
        seen = await self._read(claim.name, until)
        if seen.lock is not None and seen.holder == claim.holder and seen.fence is not None:
            return Granted(seen.fence) if await self._keep_alive(seen.lock.lease, until) else None
        if seen.holder != old_holder:
            return None
        lease = await self._lease(claim.holder, claim.ttl, until)
        conditions = [is_held_by(claim.name, old_holder)]
        granted = await self._grant(claim.name, conditions, claim.holder, claim.owner, lease, until)
        if granted is None:
            await self._end_lease(claim.holder, until)
        return granted

    async def inspect(self, name: str, until: float) -> LockInfo:
        seen = await self._read(name, until, most=MOST_SHOWN)
        now = wall_clock()
        waiters = tuple(values.WaiterInfo(clean(one.waiter), one.owner, one.age(now) or 0.0) for one in seen.queue)
        info = LockInfo(name, fence=seen.fence, waiters=waiters, waiting=seen.waiting)
        if seen.lock is None or seen.holder is None:
            return info
        ttl_left = await self._ttl_left(seen.lock.lease, until)
        owner, held_for = (None, None) if seen.meta is None else (seen.meta.owner, seen.meta.age(now))
        return info._replace(holders=(values.HolderInfo(clean(seen.holder), owner, seen.fence, held_for, ttl_left),))

    async def listing(self, pattern: str, cursor: str, until: float) -> Page:
        start = lock_key(cursor) + b"\0" if cursor else lock_key("")
        end = lock_key("")[:-1] + b"0"  # the character after the slash
        body = {"key": packed(start), "range_end": packed(end), "limit": PAGE, "keys_only": True}
        reply = await self._client.call("/v3/kv/range", body, until, "all locks")
        found = [record.key[len(lock_key("")) :].decode("utf-8", "replace") for record in records_in(reply)]
        infos = [await self.inspect(name, until) for name in found if fits(name, pattern)]
        return Page(tuple(info._replace(waiters=()) for info in infos), found[-1] if reply.get("more") else "")

    async def facts(self, until: float) -> Facts:
        status = await self._client.call("/v3/maintenance/status", {}, until, "the server")
        members = await self._client.call("/v3/cluster/member/list", {}, until, "the cluster")
        leads = status.get("leader") == status.get("header", {}).get("member_id")
        return Facts(
            "etcd",
            version=clean(str(status.get("version", "")), 40) or None,
            role="leader" if leads else "follower",
            persistence=Persistence.FILE,
            replicas=max(0, len(members.get("members", ())) - 1),
        )

    async def cancel_waits(self) -> None:
        self._client.cancel_streams()

    async def close(self) -> None:
        await self._client.close()

    def reset(self, *, forked: bool) -> None:
        self._boxes.clear()
        self._leases.clear()
        self._client.reset()

    async def _read(self, name: str, until: float, own: str = "", most: int = 1) -> Snapshot:
        reads = [get(lock_key(name)), get(meta_key(name)), get_queue(name, most), get(wait_key(name, own or "-"))]
        reply = await self._transact(name, [], reads, until)
        lock, meta, queue, mine = (response["response_range"] for response in reply["responses"])
        waiting = int(queue.get("count", 0))
        return Snapshot(record_in(lock), record_in(meta), records_in(queue), waiting, record_in(mine))

    def _lease_of(self, holder: str) -> int:
        return self._leases.get(holder) or lease_of(holder)

    async def _lease(self, holder: str, ttl: float, until: float) -> int:
        """Create the holder's etcd lease, or renew it; return its id."""
        lease = self._lease_of(holder)
        body = {"ID": lease, "TTL": ceil(ttl)}
        try:
            await self._client.call("/v3/lease/grant", body, until)
        except LeaseExists:
            if not await self._keep_alive(lease, until):  # it expired in between
                await self._client.call("/v3/lease/grant", body, until)
        return lease

    async def _keep_alive(self, lease: int, until: float) -> int:
        """Renew an etcd lease; return its ttl, 0 if it has expired."""
        reply = await self._client.call("/v3/lease/keepalive", {"ID": lease}, until)
        return int(reply.get("result", {}).get("TTL", 0))

    async def _end_lease(self, holder: str, until: float) -> None:
        lease = self._lease_of(holder)
        self._leases.pop(holder, None)
        with suppress(StoreError):  # the lease expires by itself
            await self._client.call("/v3/lease/revoke", {"ID": lease}, until)

    async def _ttl_left(self, lease: int, until: float) -> float | None:
        """The ttl left, rounded up, as etcd rounds down; None for a lock that another program took without a lease."""
        if lease == 0:
            return None
        reply = await self._client.call("/v3/lease/timetolive", {"ID": lease}, until)
        return max(0.0, float(reply.get("TTL", 0)) + 1.0)

    async def _write(self, name: str, conditions: Operations, writes: Operations, until: float) -> int | None:
        """Write if all conditions hold, and return the revision; None after a lost race."""
        reply = await self._transact(name, conditions, writes, until)
        return int(reply["header"]["revision"]) if reply.get("succeeded") else None

    async def _transact(self, name: str, conditions: Operations, then: Operations, until: float) -> dict[str, Any]:
        body = {"compare": conditions, "success": then}
        return await self._client.call("/v3/kv/txn", body, until, f"the lock {shown(name)}")


def _too_busy(name: str) -> StoreUnavailable:
    return StoreUnavailable(f"The lock {shown(name)} changed too often to be read; nothing was changed. Try again.")
