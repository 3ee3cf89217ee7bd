"""`ports.Store` on etcd. Each operation reads a lock in one transaction, decides, and writes in a conditional one.

Rules:

- Every write depends on what was read. A lost race is not an answer: the operation starts again.
- Each holder has its own etcd lease, so a renewal cannot extend another holder's grant. A renewal counts only if the
  lock is on the very lease that was extended.
- Conditions compare modification revisions, which etcd never repeats, not even for a key that is created again.
- A lock is handed off in the transaction that releases it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from time import time as wall_clock
from typing import Any

from lockfast.errors import StoreUnavailable
from lockfast.facts import Facts, Persistence
from lockfast.ports import Capabilities, Mailbox, Runtime, Store
from lockfast.stores.etcd import records
from lockfast.stores.etcd.client import NOT_FOUND, PRECONDITION, EtcdClient, EtcdError, store_error
from lockfast.stores.etcd.records import Record, Snapshot, lease_of, lock_key, meta_key, wait_key
from lockfast.values import (
    Answer,
    Claim,
    Enqueue,
    Granted,
    GrantNotification,
    LockInfo,
    Notification,
    Owner,
    Page,
    Queued,
    Renewal,
    Taken,
    clean,
    fits,
    shown,
)

ROUNDS = 50
"""How often an operation starts again after a lost race. Each lost race means progress for another client."""
MOST_SHOWN = 1000
PAGE = 50
LEAVE_WITHIN = 0.3
"""Seconds that `cancel_waits` gives the waiters to leave the queue."""
RENEWALS_PER_READ = 40
"""Locks read in one transaction; etcd allows 128 operations."""

Operations = list[dict[str, Any]]


class EtcdMailbox:
    """`ports.Mailbox`: a watch on the lock's key from the revision of the last request answered "queued".

    Any change after `revision` is newer than that answer, so a grant in it answers the request `attempt`.
    """

    def __init__(self, client: EtcdClient, runtime: Runtime, holder: str, boxes: dict[str, EtcdMailbox]) -> None:
        self._client = client
        self._runtime = runtime
        self._holder = holder
        self._boxes = boxes
        self.name = ""
        self.revision = 0
        self.attempt = 0

    @property
    def address(self) -> str:
        return "watch"

    async def open(self, until: float) -> None:
        """Nothing to do: a watch can start at a past revision."""

    async def wait(self, until: float) -> Notification | None:
        request = {"create_request": {"key": records.packed(lock_key(self.name)), "start_revision": self.revision + 1}}
        watch = self._client.stream("/v3/watch", request, until)
        try:
            async for part in watch:
                freed = False
                for event in part.get("result", {}).get("events", ()):
                    record = Record.of(event["kv"])
                    self.revision = max(self.revision, record.changed)
                    freed = event.get("type") == "DELETE"
                    if record.value == self._holder.encode():
                        return GrantNotification(self.attempt, record.changed)
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
        if head is not None and records.holder_in(head) != claim.holder:
            await self._hand_off(claim.name, [records.is_free(claim.name)], head, until)
            return None
        lease = await self._lease(claim.holder, claim.ttl, until)
        is_first = records.has_no_waiters(claim.name) if head is None else records.is_unchanged(head)
        conditions = [records.is_free(claim.name), is_first]
        revision = await self._grant(claim.name, conditions, claim.holder, claim.owner, lease, until)
        return None if revision is None else Granted(revision)

    async def _enqueue(
        self, claim: Claim, enqueue: Enqueue, seen: Snapshot, lock: Record, until: float
    ) -> Queued | None:
        lease = await self._lease(claim.holder, claim.ttl, until)
        since = wall_clock() if seen.own is None else seen.own.fields.get("since", wall_clock())
        value = records.wait_value(claim.owner, since, enqueue.attempt)
        entry = records.put(wait_key(claim.name, claim.holder), value, lease)
        reply = await self._transact(claim.name, [records.is_unchanged(lock)], [entry], until)
        if not reply.get("succeeded"):
            return None
        revision = int(reply["header"]["revision"])
        box = self._boxes.get(claim.holder)
        if box is not None:
            box.name, box.revision, box.attempt = claim.name, revision, enqueue.attempt
        first = bool(seen.queue) and records.holder_in(seen.queue[0]) == claim.holder
        position = 0 if first or not seen.queue else max(1, seen.waiting - (seen.own is not None))
        ticket = revision if seen.own is None else seen.own.created
        return Queued(ticket, position, await self._ttl_left(lock.lease, until))

    async def _grant(
        self, name: str, conditions: Operations, holder: str, owner: str, lease: int, until: float
    ) -> int | None:
        """Grant the lock to `holder` if all conditions hold; return the fence."""
        writes = [
            records.put(lock_key(name), holder.encode(), lease),
            records.put(meta_key(name), records.meta_value(owner, wall_clock()), lease),
            records.delete(wait_key(name, holder)),
        ]
        reply = await self._transact(name, conditions, writes, until)
        return int(reply["header"]["revision"]) if reply.get("succeeded") else None

    async def _hand_off(self, name: str, conditions: Operations, head: Record, until: float) -> bool:
        """Grant the lock to the first waiter if the conditions hold. Remove the waiter if its lease has expired."""
        try:
            owner = str(head.fields.get("owner", ""))
            conditions = [*conditions, records.is_unchanged(head)]
            return await self._grant(name, conditions, records.holder_in(head), owner, head.lease, until) is not None
        except _LeaseExpired:
            await self._transact(name, [records.is_unchanged(head)], [records.delete(head.key)], until)
            return False

    async def renew(self, renewals: Sequence[Renewal], until: float) -> list[bool]:
        answers: list[bool] = []
        for start in range(0, len(renewals), RENEWALS_PER_READ):
            batch = renewals[start : start + RENEWALS_PER_READ]
            leases = [self._lease_of(renewal.holder) for renewal in batch]
            ttls = [await self._keep_alive(lease, until) for lease in leases]
            locks = await self._read_locks([renewal.name for renewal in batch], until)
            for renewal, lease, ttl, lock in zip(batch, leases, ttls, locks, strict=True):
                if lock is None or lock.value != renewal.holder.encode() or not lock.lease:
                    answers.append(False)
                elif lock.lease != lease:  # the reply to the change of its ttl was lost
                    self._leases[renewal.holder] = lock.lease
                    answers += await self.renew([renewal], until)
                else:
                    answers.append(ttl > 0 and await self._ensure_ttl(renewal, ttl, until))
        return answers

    async def _read_locks(self, names: Sequence[str], until: float) -> list[Record | None]:
        reply = await self._transact(names[0], [], [records.get(lock_key(name)) for name in names], until)
        return [next(iter(records.records_in(response)), None) for response in reply["responses"]]

    async def _ensure_ttl(self, renewal: Renewal, lease_ttl: int, until: float) -> bool:
        """Move the grant to a new etcd lease if the ttl differs: a lease cannot change its ttl. The fence stays."""
        if not renewal.final and lease_ttl >= ceil(renewal.ttl):
            return True
        reply = await self._call("/v3/lease/grant", {"ID": 0, "TTL": ceil(renewal.ttl)}, "a lease", until)
        lease = int(reply["ID"])  # etcd chose it
        seen = await self._read(renewal.name, until)
        if seen.meta is None:
            return False
        fields = seen.meta.fields
        meta = records.meta_value(fields.get("owner", ""), fields.get("since", wall_clock()), seen.fence)
        writes = [
            records.put(lock_key(renewal.name), renewal.holder.encode(), lease),
            records.put(meta_key(renewal.name), meta, lease),
        ]
        conditions = [records.is_held_by(renewal.name, renewal.holder), records.is_unchanged(seen.meta)]
        reply = await self._transact(renewal.name, conditions, writes, until)
        if not reply.get("succeeded"):
            return False
        self._leases[renewal.holder] = lease
        return True

    async def release(self, name: str, holder: str, until: float) -> bool:
        released = await self._end_grant(name, holder, until)
        if not released:
            await self._transact(name, [], [records.delete(wait_key(name, holder))], until)
        await self._end_lease(holder, until)
        return released

    async def _end_grant(self, name: str, holder: str, until: float) -> bool:
        """End the grant of `holder`, and hand the lock off in the same transaction. False if it was not held."""
        for _ in range(ROUNDS):
            seen = await self._read(name, until)
            if seen.holder != holder or seen.lock is None:
                return False
            conditions = [records.is_unchanged(seen.lock)]
            if seen.queue:
                if await self._hand_off(name, conditions, seen.queue[0], until):
                    return True
                continue
            writes = [records.delete(lock_key(name)), records.delete(meta_key(name))]
            reply = await self._transact(name, [*conditions, records.has_no_waiters(name)], writes, until)
            if reply.get("succeeded"):
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
        conditions = [records.is_held_by(claim.name, old_holder)]
        revision = await self._grant(claim.name, conditions, claim.holder, claim.owner, lease, until)
        if revision is None:
            await self._end_lease(claim.holder, until)
        return None if revision is None else Granted(revision)

    async def inspect(self, name: str, until: float) -> LockInfo:
        seen = await self._read(name, until, most=MOST_SHOWN)
        now = wall_clock()
        waiters = tuple(records.waiter_info(record, now) for record in seen.queue)
        info = LockInfo(name, fence=seen.fence, waiters=waiters, waiting=seen.waiting)
        if seen.lock is None or seen.holder is None:
            return info
        fields = {} if seen.meta is None else seen.meta.fields
        since = fields.get("since")
        return info._replace(
            holder=clean(seen.holder),
            owner=Owner.decode(str(fields.get("owner", ""))),
            held_for=max(0.0, now - since) if isinstance(since, float) else None,
            ttl_left=await self._ttl_left(seen.lock.lease, until),
        )

    async def listing(self, pattern: str, cursor: str, until: float) -> Page:
        start = lock_key(cursor) + b"\0" if cursor else lock_key("")
        body = {
            "key": records.packed(start),
            "range_end": records.packed(lock_key("")[:-1] + b"0"),  # the character after the slash
            "limit": PAGE,
            "keys_only": True,
            "sort_order": "ASCEND",
            "sort_target": "KEY",
        }
        reply = await self._call("/v3/kv/range", body, "all locks", until)
        found = [Record.of(kv).key[len(lock_key("")) :].decode("utf-8", "replace") for kv in reply.get("kvs", ())]
        infos = [await self.inspect(name, until) for name in found if fits(name, pattern)]
        return Page(tuple(info._replace(waiters=()) for info in infos), found[-1] if reply.get("more") else "")

    async def facts(self, until: float) -> Facts:
        status = await self._call("/v3/maintenance/status", {}, "the server", until)
        members = await self._call("/v3/cluster/member/list", {}, "the cluster", until)
        leads = status.get("leader") == status.get("header", {}).get("member_id")
        return Facts(
            "etcd",
            version=clean(str(status.get("version", "")), 40) or None,
            role="leader" if leads else "follower",
            persistence=Persistence.FILE,
            replicas=max(0, len(members.get("members", ())) - 1),
        )

    async def cancel_waits(self) -> None:
        """Cancel all waits, and give the waiters a moment to leave the queue."""
        self._client.cancel_streams()
        give_up_at = self._runtime.now() + LEAVE_WITHIN
        while self._boxes and self._runtime.now() < give_up_at:
            await self._runtime.sleep(0.005)

    async def close(self) -> None:
        await self._client.close()

    def reset(self, *, forked: bool) -> None:
        self._boxes.clear()
        self._leases.clear()
        self._client.reset()

    async def _read(self, name: str, until: float, own: str = "", most: int = 1) -> Snapshot:
        reads = [
            records.get(lock_key(name)),
            records.get(meta_key(name)),
            records.get_queue(name, most),
            records.get(wait_key(name, own or "-")),
        ]
        reply = await self._transact(name, [], reads, until)
        lock, meta, queue, mine = map(records.records_in, reply["responses"])
        waiting = int(reply["responses"][2]["response_range"].get("count", 0))
        first = (next(iter(found), None) for found in (lock, meta, mine))
        return Snapshot(int(reply["header"]["revision"]), next(first), next(first), queue, waiting, next(first))

    def _lease_of(self, holder: str) -> int:
        return self._leases.get(holder) or lease_of(holder)

    async def _lease(self, holder: str, ttl: float, until: float) -> int:
        """Create the holder's etcd lease, or renew it; return its id."""
        lease = self._lease_of(holder)
        body = {"ID": lease, "TTL": ceil(ttl)}
        try:
            await self._client.call("/v3/lease/grant", body, until)
        except EtcdError as error:
            if error.code != PRECONDITION:
                raise store_error(error, "a lease") from error
            if not await self._keep_alive(lease, until):  # it expired in between
                await self._call("/v3/lease/grant", body, "a lease", until)
        return lease

    async def _keep_alive(self, lease: int, until: float) -> int:
        """Renew an etcd lease; return its ttl, 0 if it has expired."""
        reply = await self._call("/v3/lease/keepalive", {"ID": lease}, "a lease", until)
        return int(reply.get("result", {}).get("TTL", 0))

    async def _end_lease(self, holder: str, until: float) -> None:
        lease = self._lease_of(holder)
        self._leases.pop(holder, None)
        try:
            await self._client.call("/v3/lease/revoke", {"ID": lease}, until)
        except (EtcdError, StoreUnavailable):
            pass  # it expires by itself

    async def _ttl_left(self, lease: int, until: float) -> float | None:
        """The ttl left, rounded up, as etcd rounds down; None for a lock that another program took without a lease."""
        if lease == 0:
            return None
        reply = await self._call("/v3/lease/timetolive", {"ID": lease}, "a lease", until)
        return max(0.0, float(reply.get("TTL", 0)) + 1.0)

    async def _transact(self, name: str, conditions: Operations, then: Operations, until: float) -> dict[str, Any]:
        try:
            return await self._client.call("/v3/kv/txn", {"compare": conditions, "success": then}, until)
        except EtcdError as error:
            if error.code == NOT_FOUND:
                raise _LeaseExpired from error
            raise store_error(error, f"the lock {shown(name)}") from error

    async def _call(self, path: str, body: dict[str, Any], about: str, until: float) -> dict[str, Any]:
        try:
            return await self._client.call(path, body, until)
        except EtcdError as error:
            raise store_error(error, about) from error


class _LeaseExpired(StoreUnavailable):
    """The etcd lease of a write has expired."""

    def __init__(self) -> None:
        super().__init__("The etcd lease expired before the lock was written; nothing was changed. Try again.")


def _too_busy(name: str) -> StoreUnavailable:
    return StoreUnavailable(f"The lock {shown(name)} changed too often to be read; nothing was changed. Try again.")
