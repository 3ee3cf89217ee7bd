"""`ports.Store` on etcd: each operation reads a lock in one transaction, decides, and writes in another that holds only
if nothing changed in between.

Rules kept here: every write is conditional on what was read, so a lost race is no answer but another round; an etcd
lease is the holder's own, so a renewal can reach nobody else's grant; a lock is handed on in the step that frees it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from time import time as wall_clock
from typing import Any

from lockfast.errors import StoreUnavailable
from lockfast.facts import Facts, Persistence
from lockfast.ports import Capabilities, Mailbox, Runtime, Store
from lockfast.stores.etcd import records
from lockfast.stores.etcd.calls import MISSING, PRECONDITION, Answered, Calls, meaning_of
from lockfast.stores.etcd.mailbox import EtcdMailbox
from lockfast.stores.etcd.records import Record, Seen, lease_of, lock_key, meta_key, wait_key
from lockfast.values import (
    Answer,
    Claim,
    Enqueue,
    Granted,
    LockInfo,
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
"""How often an operation starts anew because others were quicker; each time somebody got on."""
MOST_SHOWN = 1000
PAGE = 50
AT_ONCE = 40
"""Locks that one transaction reads for a renewal; etcd allows 128 operations."""


class EtcdStore(Store):
    """Invariant: `_longer` has the generation of a holder's etcd lease, where that is not the first."""

    grace = 0.3
    capabilities = Capabilities()

    def __init__(self, calls: Calls, runtime: Runtime) -> None:
        self._calls = calls
        self._runtime = runtime
        self._boxes: dict[str, EtcdMailbox] = {}
        self._longer: dict[str, int] = {}

    def mailbox(self, holder: str) -> Mailbox:
        box = EtcdMailbox(self._calls, self._runtime, holder, self._boxes)
        self._boxes[holder] = box
        return box

    async def acquire(self, claim: Claim, enqueue: Enqueue | None, until: float) -> Answer:
        for _ in range(ROUNDS):
            seen = await self._look(claim.name, until, claim.holder)
            if seen.holder == claim.holder:
                line = Renewal(claim.name, claim.holder, claim.ttl)
                kept = await self._keep_alive(claim.holder, until)
                if kept and seen.fence is not None and await self._at_least(line, kept, until):
                    return Granted(seen.fence)
            elif seen.lock is None:
                granted = await self._take_or_hand_on(claim, seen, until)
                if granted is not None:
                    return granted
            elif enqueue is None:
                return Taken(await self._ttl_left(seen.lock.lease, until))
            else:
                queued = await self._join(claim, enqueue, seen, seen.lock, until)
                if queued is not None:
                    return queued
        raise _too_busy(claim.name)

    async def _take_or_hand_on(self, claim: Claim, seen: Seen, until: float) -> Granted | None:
        """Take a free lock if nobody is before us, else give it to whoever is first."""
        head = seen.queue[0] if seen.queue else None
        if head is not None and records.holder_in(head) != claim.holder:
            await self._hand_over(claim.name, [records.is_free(claim.name)], head, until)
            return None
        lease = await self._lease(claim.holder, claim.ttl, until)
        nobody_first = records.nobody_waits(claim.name) if head is None else records.is_unchanged(head)
        revision = await self._grant(
            claim.name, [records.is_free(claim.name), nobody_first], claim.holder, claim.owner, lease, until
        )
        return None if revision is None else Granted(revision)

    async def _join(self, claim: Claim, enqueue: Enqueue, seen: Seen, lock: Record, until: float) -> Queued | None:
        lease = await self._lease(claim.holder, claim.ttl, until)
        since = wall_clock() if seen.own is None else seen.own.told.get("since", wall_clock())
        entry = records.put(
            wait_key(claim.name, claim.holder), records.wait_value(claim.owner, since, enqueue.attempt), lease
        )
        answer = await self._transact(claim.name, [records.is_unchanged(lock)], [entry], until)
        if not answer.get("succeeded"):
            return None
        revision = int(answer["header"]["revision"])
        box = self._boxes.get(claim.holder)
        if box is not None:
            box.name, box.revision, box.attempt = claim.name, revision, enqueue.attempt
        first = bool(seen.queue) and records.holder_in(seen.queue[0]) == claim.holder
        position = 0 if first or not seen.queue else max(1, seen.waiting - (seen.own is not None))
        ticket = revision if seen.own is None else seen.own.created
        return Queued(ticket, position, await self._ttl_left(lock.lease, until))

    async def _grant(
        self, name: str, if_: list[dict[str, Any]], holder: str, owner: str, lease: int, until: float
    ) -> int | None:
        """Make `holder` the holder if all of `if_` holds; the fence."""
        writes = [
            records.put(lock_key(name), holder.encode(), lease),
            records.put(meta_key(name), records.meta_value(owner, wall_clock()), lease),
            records.delete(wait_key(name, holder)),
        ]
        answer = await self._transact(name, if_, writes, until)
        return int(answer["header"]["revision"]) if answer.get("succeeded") else None

    async def _hand_over(self, name: str, if_: list[dict[str, Any]], head: Record, until: float) -> bool:
        """Give the lock to who waits first; True if that was done. A waiter whose lease is over is removed."""
        try:
            owner = str(head.told.get("owner", ""))
            same = [*if_, records.is_unchanged(head)]
            return await self._grant(name, same, records.holder_in(head), owner, head.lease, until) is not None
        except _Gone:
            await self._transact(name, [records.is_unchanged(head)], [records.delete(head.key)], until)
            return False

    async def renew(self, renewals: Sequence[Renewal], until: float) -> list[bool]:
        answers: list[bool] = []
        for start in range(0, len(renewals), AT_ONCE):
            lines = renewals[start : start + AT_ONCE]
            alive = [await self._keep_alive(line.holder, until) for line in lines]
            held = await self._held([line.name for line in lines], until)
            for line, granted_ttl, lock in zip(lines, alive, held, strict=True):
                ours = granted_ttl > 0 and lock is not None and lock.value == line.holder.encode()
                answers.append(ours and await self._at_least(line, granted_ttl, until))
        return answers

    async def _held(self, names: Sequence[str], until: float) -> list[Record | None]:
        answer = await self._transact(names[0], [], [records.get(lock_key(name)) for name in names], until)
        return [next(iter(records.records_in(response)), None) for response in answer["responses"]]

    async def _at_least(self, line: Renewal, granted_ttl: int, until: float) -> bool:
        """An etcd lease has one length for life: for another length another lease takes its place; the fence stays."""
        if not line.final and granted_ttl >= ceil(line.ttl):
            return True
        generation = self._longer.get(line.holder, 0) + 1
        lease = await self._new_lease(lease_of(line.holder, generation), line.ttl, until)
        seen = await self._look(line.name, until)
        if seen.meta is None:
            return False
        told = seen.meta.told
        since = told.get("since", wall_clock())
        writes = [
            records.put(lock_key(line.name), line.holder.encode(), lease),
            records.put(meta_key(line.name), records.meta_value(told.get("owner", ""), since, seen.fence), lease),
        ]
        if_ = [records.is_held_by(line.name, line.holder), records.is_unchanged(seen.meta)]
        answer = await self._transact(line.name, if_, writes, until)
        self._longer[line.holder] = generation
        return bool(answer.get("succeeded"))

    async def release(self, name: str, holder: str, until: float) -> bool:
        box = self._boxes.pop(holder, None)
        if box is not None:
            box.close()
        released = await self._free(name, holder, until)
        if not released:
            await self._transact(name, [], [records.delete(wait_key(name, holder))], until)
        await self._end_lease(holder, until)
        return released

    async def _free(self, name: str, holder: str, until: float) -> bool:
        """End the grant of `holder`, and hand the lock on in the same step; True if it had the lock."""
        for _ in range(ROUNDS):
            seen = await self._look(name, until)
            if seen.holder != holder or seen.lock is None:
                return False
            if_ = [records.is_unchanged(seen.lock)]
            if seen.queue:
                if await self._hand_over(name, if_, seen.queue[0], until):
                    return True
                continue
            writes = [records.delete(lock_key(name)), records.delete(meta_key(name))]
            answer = await self._transact(name, [*if_, records.nobody_waits(name)], writes, until)
            if answer.get("succeeded"):
                return True
        raise _too_busy(name)

    async def force_release(self, name: str, holder: str, until: float) -> bool:
        seen = await self._look(name, until)
        if seen.holder is None or clean(seen.holder) != holder:
            return False
        return await self._free(name, seen.holder, until)

    async def adopt(self, claim: Claim, old_holder: str, until: float) -> Granted | None:
        seen = await self._look(claim.name, until)
        if seen.holder == claim.holder and seen.fence is not None:
            await self._keep_alive(claim.holder, until)
            return Granted(seen.fence)
        if seen.holder != old_holder:
            return None
        lease = await self._lease(claim.holder, claim.ttl, until)
        if_ = [records.is_held_by(claim.name, old_holder)]
        revision = await self._grant(claim.name, if_, claim.holder, claim.owner, lease, until)
        if revision is None:
            await self._end_lease(claim.holder, until)
        return None if revision is None else Granted(revision)

    async def inspect(self, name: str, until: float) -> LockInfo:
        seen = await self._look(name, until, most=MOST_SHOWN)
        now = wall_clock()
        waiters = tuple(records.waiter_info(record, now) for record in seen.queue)
        if seen.lock is None or seen.holder is None:
            return LockInfo(name, fence=seen.fence, waiters=waiters, waiting=seen.waiting)
        told = {} if seen.meta is None else seen.meta.told
        since = told.get("since")
        return LockInfo(
            name,
            holder=clean(seen.holder),
            owner=Owner.decode(str(told.get("owner", ""))),
            fence=seen.fence,
            held_for=max(0.0, now - since) if isinstance(since, float) else None,
            ttl_left=await self._ttl_left(seen.lock.lease, until),
            waiters=waiters,
            waiting=seen.waiting,
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
        answer = await self._call("/v3/kv/range", body, "all locks", until)
        found = [Record.of(kv).key[len(lock_key("")) :].decode("utf-8", "replace") for kv in answer.get("kvs", ())]
        infos = [await self.inspect(name, until) for name in found if fits(name, pattern)]
        return Page(tuple(info._replace(waiters=()) for info in infos), found[-1] if answer.get("more") else "")

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

    def on_change(self, tell: Callable[[str | None], None]) -> None:
        """etcd could tell, by a watch per lock; a theft is noticed at the next renewal instead."""

    def listen(self) -> None:
        """Nothing comes unasked."""

    def disconnect(self) -> None:
        """Left to its client library, and to `close`."""

    async def cancel_waits(self) -> None:
        """Who waits is sent away by `close`, and what it is given until then goes back as all else does."""

    async def close(self) -> None:
        await self._calls.close()

    def reset(self, *, forked: bool) -> None:
        self._boxes.clear()
        self._longer.clear()
        self._calls.reset()

    async def _look(self, name: str, until: float, own: str = "", most: int = 1) -> Seen:
        reads = [
            records.get(lock_key(name)),
            records.get(meta_key(name)),
            records.get_queue(name, most),
            records.get(wait_key(name, own or "-")),
        ]
        answer = await self._transact(name, [], reads, until)
        lock, meta, queue, mine = map(records.records_in, answer["responses"])
        waiting = int(answer["responses"][2]["response_range"].get("count", 0))
        first = (next(iter(found), None) for found in (lock, meta, mine))
        return Seen(int(answer["header"]["revision"]), next(first), next(first), queue, waiting, next(first))

    async def _lease(self, holder: str, ttl: float, until: float) -> int:
        """The holder's etcd lease, new or with its full time again."""
        return await self._new_lease(lease_of(holder, self._longer.get(holder, 0)), ttl, until)

    async def _new_lease(self, lease: int, ttl: float, until: float) -> int:
        body = {"ID": lease, "TTL": ceil(ttl)}
        try:
            await self._calls.call("/v3/lease/grant", body, until)
        except Answered as error:
            if error.code != PRECONDITION:
                raise meaning_of(error, "a lease") from error
            answer = await self._call("/v3/lease/keepalive", {"ID": lease}, "a lease", until)
            if "TTL" not in answer.get("result", {}):  # it ran out in between
                await self._call("/v3/lease/grant", body, "a lease", until)
        return lease

    async def _keep_alive(self, holder: str, until: float) -> int:
        """The seconds for which the holder's lease was prolonged; 0 when it is gone."""
        lease = lease_of(holder, self._longer.get(holder, 0))
        answer = await self._call("/v3/lease/keepalive", {"ID": lease}, "a lease", until)
        return int(answer.get("result", {}).get("TTL", 0))

    async def _end_lease(self, holder: str, until: float) -> None:
        generation = self._longer.pop(holder, 0)
        try:
            await self._calls.call("/v3/lease/revoke", {"ID": lease_of(holder, generation)}, until)
        except (Answered, StoreUnavailable):
            pass  # it ends by itself

    async def _ttl_left(self, lease: int, until: float) -> float | None:
        """etcd counts down in whole seconds, rounded down; None for a lock that something else took without a lease."""
        if lease == 0:
            return None
        answer = await self._call("/v3/lease/timetolive", {"ID": lease}, "a lease", until)
        return max(0.0, float(answer.get("TTL", 0)) + 1.0)

    async def _transact(
        self,
        name: str,
        if_: list[dict[str, Any]],
        then: list[dict[str, Any]],
        until: float,
    ) -> dict[str, Any]:
        body = {"compare": if_, "success": then}
        try:
            return await self._calls.call("/v3/kv/txn", body, until)
        except Answered as error:
            if error.code == MISSING:
                raise _Gone from error
            raise meaning_of(error, f"the lock {shown(name)}") from error

    async def _call(self, path: str, body: dict[str, Any], about: str, until: float) -> dict[str, Any]:
        try:
            return await self._calls.call(path, body, until)
        except Answered as error:
            raise meaning_of(error, about) from error


class _Gone(StoreUnavailable):
    """The etcd lease that a write was to hang on is over."""

    def __init__(self) -> None:
        super().__init__("The lease ended before the lock was written, so nothing was changed. Try again.")


def _too_busy(name: str) -> StoreUnavailable:
    return StoreUnavailable(f"The lock {shown(name)} changed hands too often to be read. Nothing was changed.")
