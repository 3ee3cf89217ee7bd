"""`ports.Store` on etcd. Each operation reads a lock in one transaction, decides, and writes in a conditional one.

`records.py` describes the keys, and builds the transactions.

Rules:

- Every write depends on what was read. A lost race is not an answer: the operation starts again, from the state that
  the rejected transaction returned.
- Each grant has its own etcd lease, so a renewal cannot extend another holder's grant. A renewal counts only if the
  grant is on the very lease that was extended. The id of a lease is derived from the holder id, so that a repeated
  request finds its own lease.
- Conditions compare revisions, which etcd never repeats, not even for a key that is created again.
- A fence is 128 times etcd's revision at the grant, which grows with every change in the cluster, plus the position
  among the claims that were granted together.
- The change that admits waiters (a release, a departure, a downgrade) grants to them in the same transaction.
- A waiter reads the lock in the transaction that enqueues it. So either the waiter sees a release, or the release sees
  the waiter.
- Holders that release at the same moment may each see the other. Then the waiter learns from its watch that it would be
  admitted, and sends its claim again.

Differences to the other stores:

- etcd counts a ttl in whole seconds, and at least about two. A crashed holder's lock is free up to two seconds late.
- etcd does not detect a dead waiter. A crashed waiter may be granted the lock, which then lasts for its ttl. A waiter
  that did not refresh its ticket for its whole ttl loses it.
- A waiter that becomes first in the queue is not notified.
- A free lock has no fence to show.
- etcd tells the remaining ttl of one lease per request. A claim that is kept out by shared grants learns their whole
  ttl, and `inspect()` shows the remaining ttl of the first holders only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from math import ceil
from time import time as wall_clock
from typing import Any

from lockfast import values
from lockfast.admission import admit, free_at, refuse_other_mode
from lockfast.errors import Outcome, StoreError, StoreUnavailable, shown
from lockfast.facts import Facts, Persistence
from lockfast.ports import Capabilities, Mailbox, Runtime, Store
from lockfast.stores.etcd import records
from lockfast.stores.etcd.client import EtcdClient, LeaseExists, LeaseExpired
from lockfast.stores.etcd.mailbox import EtcdMailbox
from lockfast.stores.etcd.records import (
    BATCH,
    Admitted,
    Operations,
    Record,
    Snapshot,
    Step,
    fence_at,
    lease_of,
    lock_key,
    packed,
    record_in,
    wait_key,
)
from lockfast.values import Answer, Claim, Enqueue, Granted, LockInfo, Mode, Page, Queued, Renewal, Taken, clean, fits

ROUNDS = 50  # how often an operation starts again after a lost race, which means progress for another client
MOST_SHOWN = 1000
MOST_LISTED = 100
MOST_TTLS = 50  # holders whose remaining ttl `inspect()` asks for, with a request each
PAGE = 50
RENEWALS_PER_READ = 40  # grants read in one transaction, with three operations each; etcd allows 128
MOST_AT_ONCE = 30  # locks that `acquire_all()` reads in one transaction, with four operations each


class Request:
    """One call of `acquire()`.

    `lease` is its etcd lease, 0 before it needs one. `lost_race`: another client was faster. `borrowed_ticket`: the
    claim is in the queue although its caller does not wait.
    """

    lease = 0
    lost_race = borrowed_ticket = False

    def __init__(self, claim: Claim, enqueue: Enqueue | None, until: float) -> None:
        self.claim, self.enqueue, self.until = claim, enqueue, until


class EtcdStore(Store):
    """`_leases` has the etcd lease of a holder if it is not the first one."""

    grace = 0.3
    capabilities = Capabilities(readers=True, permits=True, batches=True)

    def __init__(self, client: EtcdClient, runtime: Runtime) -> None:
        self._client = client
        self._runtime = runtime
        self._boxes: dict[str, EtcdMailbox] = {}
        self._leases: dict[str, int] = {}

    def mailbox(self, holder: str) -> Mailbox:
        box = self._boxes[holder] = EtcdMailbox(self._client, self._runtime, holder, self._boxes)
        return box

    async def acquire(self, claim: Claim, enqueue: Enqueue | None, until: float) -> Answer:
        request = Request(claim, enqueue, until)
        try:
            seen = await self._read(claim.name, until, claim.holder)
            for _ in range(ROUNDS):
                answer = await self._answer(request, seen)
                if not isinstance(answer, Snapshot):
                    return answer
                seen = answer
            raise _too_busy(claim.name)
        except StoreUnavailable as error:
            if request.lease:
                error.outcome = Outcome.UNKNOWN  # an earlier step may have left a grant or a ticket
            raise

    async def _answer(self, request: Request, seen: Snapshot) -> Answer | Snapshot:
        """Act on what was read; return the lock as it is now if that was out of date."""
        claim, until = request.claim, request.until
        own = seen.grant_of(claim.holder)
        if own is not None:
            is_kept = own.lease == request.lease or await self._extend(claim, own, until)
            granted = seen.granted(own) if is_kept else None
            return granted or await self._read(claim.name, until, claim.holder)
        if seen.own is None:
            refuse_other_mode(seen.live, claim)
        head = seen.queue[0] if seen.queue else None
        is_first = head is None or head.holder == claim.holder
        slots = admit(seen.live, claim, queued_before=not is_first)
        if slots is not None and claim.limit and request.lost_race and seen.own is None:
            # Each grant of permits makes all clients that claim some at that moment lose the race. One transaction can
            # grant to the whole queue.
            request.borrowed_ticket = request.enqueue is None
            return await self._enqueue(request, seen)
        if slots is not None:
            return await self._grant(request, slots, seen)
        if head is not None and not is_first and admit(seen.live, head.claim) is not None:
            await self._serve(claim.name, until, BATCH if head.claim.weight else 2)
            return await self._read(claim.name, until, claim.holder)
        if request.enqueue is not None:
            return await self._enqueue(request, seen)
        if request.borrowed_ticket and not await self._withdraw(claim, until):
            return await self._read(claim.name, until, claim.holder)
        return Taken(await self._free_in(claim, seen, until))

    async def _extend(self, claim: Claim, own: Record, until: float) -> bool:
        """Extend a grant of the claim to its full ttl from now. False if it has ended."""
        shared = own.mode is not Mode.EXCLUSIVE
        return (await self.renew([Renewal(claim.name, claim.holder, claim.ttl, shared=shared)], until))[0]

    async def _withdraw(self, claim: Claim, until: float) -> bool:
        """Remove the ticket of a claim. False if it has become a grant, or has expired."""

        def end(seen: Snapshot) -> Step | None:
            return None if seen.own is None else Step(seen.own)

        return await self._change(claim.name, claim.holder, until, end) is not None

    async def _grant(self, request: Request, slots: tuple[int, ...], seen: Snapshot) -> Granted | Snapshot:
        """Grant a claim that is admitted. Its own ticket is first in the queue, or the queue is empty."""
        claim, until = request.claim, request.until
        request.lease = request.lease or await self._lease(claim.holder, claim.ttl, until)
        conditions, writes = records.granting(seen, [Admitted(claim, slots, request.lease, seen.own)])
        if seen.own is None:
            conditions.append(records.no_waiter_added(seen))
        done = await self._write(claim.name, conditions, writes, until, claim.holder)
        if isinstance(done, Snapshot):
            request.lost_race = True
            return done
        if claim.weight and seen.waiting > 1:
            await self._serve_rest(claim.name, until)
        return Granted(fence_at(done), slots=slots)

    async def _enqueue(self, request: Request, seen: Snapshot) -> Queued | Snapshot:
        """Write the ticket, and read the lock in the same transaction: a release before it is not missed."""
        claim, until, name = request.claim, request.until, request.claim.name
        attempt = 0 if request.enqueue is None else request.enqueue.attempt
        request.lease = request.lease or await self._lease(claim.holder, claim.ttl, until)
        key, grant_key = wait_key(name, claim.holder), records.grant_key(name, claim.mode, claim.holder)
        there = next((one for one in seen.grants if one.key == grant_key), None)
        conditions = [records.is_at(key, seen.own), records.is_at(grant_key, there)]
        ticket = records.put(key, records.ticket_value(claim, attempt, seen.own), request.lease)
        reads = records.lock_reads(name, claim.holder, 1)
        reply = await self._transact(name, conditions, [ticket, *reads], until, otherwise=reads)
        after = records.snapshot_in(name, int(reply["header"]["revision"]), reply["responses"][-len(reads) :])
        if not reply.get("succeeded") or after.own is None or request.enqueue is None:
            return after
        if admit(after.live, after.queue[0].claim) is not None:
            return after
        box = self._boxes.get(claim.holder)
        if box is not None:
            box.queued(claim, after, attempt)
        position = 0 if after.queue[0].holder == claim.holder else max(1, after.waiting - 1)
        return Queued(after.own.created, position, await self._free_in(claim, after, until))

    async def _free_in(self, claim: Claim, seen: Snapshot, until: float) -> float | None:
        """In how many seconds expired grants may let the claim in, at the latest."""
        exclusive = next((one for one in seen.grants if one.mode is Mode.EXCLUSIVE), None)
        if exclusive is not None:
            return await self._ttl_left(exclusive.lease, until)
        return free_at(seen.live, claim)

    async def _change(
        self, name: str, holder: str, until: float, step_in: Callable[[Snapshot], Step | None], most: int = 2
    ) -> Step | None:
        """Execute the step that `step_in` finds, and grant to the waiters that it admits, in one transaction.

        None if there is nothing to do.
        """
        batch = BATCH
        seen = await self._read(name, until, holder, most)
        for _ in range(ROUNDS):
            step = step_in(seen)
            if step is None:
                return None
            heads = step.heads(seen)[:batch]
            more_follow = len(heads) == batch or step.admits_unread(seen, heads)
            if more_follow and most < BATCH:
                most = BATCH
                seen = await self._read(name, until, holder, most)
                continue
            if not heads and step == Step():
                return step
            try:
                done = await self._write(name, *step.transaction(seen, heads), until, holder, most)
            except LeaseExpired:
                if not heads:
                    raise
                if batch == 1:
                    await self._remove_ticket(heads[0], until)
                batch = 1  # find the waiter without a lease
                done = await self._read(name, until, holder, most)
            if not isinstance(done, Snapshot):
                if more_follow:
                    await self._serve_rest(name, until)
                return step
            seen = done
        raise _too_busy(name)

    async def _serve(self, name: str, until: float, most: int = BATCH) -> None:
        """Grant from the head of the queue while it is admitted; `most` is how many waiters to read first."""
        await self._change(name, "", until, lambda seen: Step(), most)

    async def _serve_rest(self, name: str, until: float) -> None:
        """After a change that is done: grant to the next waiters, too. If that fails, their watches wake them."""
        with suppress(StoreUnavailable):
            await self._serve(name, until)

    async def _remove_ticket(self, head: Admitted, until: float) -> None:
        if head.ticket is not None:
            conditions = [records.is_unchanged(head.ticket)]
            await self._transact(head.claim.name, conditions, [records.delete(head.ticket.key)], until)

    async def acquire_all(self, claims: Sequence[Claim], until: float) -> list[Granted] | None:
        if len(claims) > MOST_AT_ONCE:
            return None
        for _ in range(ROUNDS):
            locks = await self._read_all(claims, until)
            owned = [seen.grant_of(claim.holder) for claim, seen in zip(claims, locks, strict=True)]
            slots = [
                admit(seen.live, claim, queued_before=bool(seen.queue))
                for claim, seen in zip(claims, locks, strict=True)
            ]
            if any(own is None and one is None for own, one in zip(owned, slots, strict=True)):
                return None
            granted = await self._grant_all(claims, locks, owned, slots, until)
            if granted is not None:
                return granted
        raise _too_busy(claims[0].name)

    async def _grant_all(
        self,
        claims: Sequence[Claim],
        locks: Sequence[Snapshot],
        owned: Sequence[Record | None],
        slots: Sequence[tuple[int, ...] | None],
        until: float,
    ) -> list[Granted] | None:
        """Grant the claims without a grant, in one transaction, and extend the others; None after a lost race."""
        conditions: Operations = []
        writes: Operations = []
        repeated: list[Granted | None] = []
        for claim, seen, own, mine in zip(claims, locks, owned, slots, strict=True):
            repeated.append(None if own is None else seen.granted(own))
            if own is not None and not await self._extend(claim, own, until):
                return None
            if own is None:
                lease = await self._lease(claim.holder, claim.ttl, until)
                needed, puts = records.granting(seen, [Admitted(claim, mine or (), lease)])
                conditions += [*needed, records.no_waiter_added(seen)]
                writes += puts
        done = await self._write(claims[0].name, conditions, writes, until)
        if isinstance(done, Snapshot):
            return None
        return [again or Granted(fence_at(done), slots=mine or ()) for again, mine in zip(repeated, slots, strict=True)]

    async def downgrade(self, claim: Claim, until: float) -> bool:
        renewal = Renewal(claim.name, claim.holder, claim.ttl, shared=True)
        if not (await self.renew([renewal], until))[0]:
            return False

        def to_reader(seen: Snapshot) -> Step | None:
            own = seen.grant_of(claim.holder)
            if own is None or own.mode is Mode.PERMITS:
                return None
            return Step() if own.mode is Mode.READ else Step(own, records.reader_after(seen, own, claim.ttl))

        return await self._change(claim.name, claim.holder, until, to_reader) is not None

    async def renew(self, renewals: Sequence[Renewal], until: float) -> list[bool]:
        answers: list[bool] = []
        for start in range(0, len(renewals), RENEWALS_PER_READ):
            batch = renewals[start : start + RENEWALS_PER_READ]
            leases = [self._lease_of(renewal.holder) for renewal in batch]
            ttls = [await self._keep_alive(lease, until) for lease in leases]
            grants = await self._read_grants(batch, until)
            for renewal, lease, ttl, grant in zip(batch, leases, ttls, grants, strict=True):
                if grant is None or not grant.lease:
                    answers.append(False)
                elif grant.lease != lease:  # the reply to the change of its ttl was lost
                    self._leases[renewal.holder] = grant.lease
                    answers += await self.renew([renewal], until)
                else:
                    answers.append(ttl > 0 and await self._ensure_ttl(renewal, ttl, until))
        return answers

    async def _read_grants(self, renewals: Sequence[Renewal], until: float) -> list[Record | None]:
        """The grant of each renewal. A shared one may still be exclusive, if its holder is about to downgrade."""
        modes = [tuple(Mode) if renewal.shared else (Mode.EXCLUSIVE,) for renewal in renewals]
        reads = [
            records.get(records.grant_key(renewal.name, mode, renewal.holder))
            for renewal, possible in zip(renewals, modes, strict=True)
            for mode in possible
        ]
        reply = await self._transact(renewals[0].name, [], reads, until)
        found = iter([record_in(response["response_range"]) for response in reply["responses"]])
        grants: list[Record | None] = []
        for renewal, possible in zip(renewals, modes, strict=True):
            theirs = [next(found) for _ in possible]
            grants.append(next((one for one in theirs if one is not None and one.holder == renewal.holder), None))
        return grants

    async def _ensure_ttl(self, renewal: Renewal, lease_ttl: int, until: float) -> bool:
        """Move the grant to a new etcd lease if the ttl differs: a lease cannot change its ttl. The fence stays."""
        if not renewal.final and lease_ttl >= ceil(renewal.ttl):
            return True
        reply = await self._client.call("/v3/lease/grant", {"ID": 0, "TTL": ceil(renewal.ttl)}, until)
        lease = int(reply["ID"])  # etcd chose it
        seen = await self._read(renewal.name, until)
        for _ in range(ROUNDS):
            own = seen.grant_of(renewal.holder)
            if own is None or seen.fence_of(own) is None:
                return False
            done = await self._write(renewal.name, *records.moved(seen, own, lease, renewal.ttl), until)
            if not isinstance(done, Snapshot):
                self._leases[renewal.holder] = lease
                return True
            seen = done
        raise _too_busy(renewal.name)

    async def release(self, name: str, holder: str, until: float) -> bool:
        def end(seen: Snapshot) -> Step | None:
            own = seen.grant_of(holder) or seen.own
            return None if own is None else Step(own)

        step = await self._change(name, holder, until, end)
        await self._end_lease(holder, until)
        return step is not None and step.ended is not None and not step.ended.is_ticket

    async def force_release(self, name: str, holder: str, until: float) -> bool:
        def end(seen: Snapshot) -> Step | None:
            theirs = next((one for one in seen.grants if clean(one.holder) == holder), None)
            return None if theirs is None else Step(theirs)

        return await self._change(name, "", until, end) is not None

    async def adopt(self, claim: Claim, old_holder: str, until: float) -> Granted | None:
        seen = await self._read(claim.name, until)
        for _ in range(ROUNDS):
            own, old = seen.grant_of(claim.holder), seen.grant_of(old_holder)
            if own is not None:
                return seen.granted(own) if await self._extend(claim, own, until) else None
            if old is None or old.mode is not claim.mode:
                return None
            lease, slots = await self._lease(claim.holder, claim.ttl, until), old.live.slots
            writes = records.grant_writes(claim, slots, lease)
            if claim.weight:
                writes.append(records.delete(old.key))
            done = await self._write(claim.name, [records.is_unchanged(old)], writes, until)
            if not isinstance(done, Snapshot):
                return Granted(fence_at(done), slots=slots)
            seen = done
        raise _too_busy(claim.name)

    async def inspect(self, name: str, until: float) -> LockInfo:
        seen = await self._read(name, until, most=MOST_SHOWN)
        return await self._info(seen, MOST_SHOWN, MOST_TTLS, until)

    async def _info(self, seen: Snapshot, most: int, ttls: int, until: float) -> LockInfo:
        """Describe a lock with `most` holders, and with the remaining ttl of the first `ttls` of them."""
        now = wall_clock()
        grants = sorted(seen.grants, key=lambda one: seen.fence_of(one) or 0)
        holders = []
        for number, one in enumerate(grants[:most]):
            live, about = one.live, one if one.mode is not Mode.EXCLUSIVE else seen.meta
            left = await self._ttl_left(one.lease, until) if number < ttls else live.expires_at
            owner, held_for = (None, None) if about is None else (about.owner, about.age(now))
            fence = seen.fence_of(one)
            holders.append(values.HolderInfo(clean(one.holder), owner, fence, held_for, left, live.mode, live.slots))
        waiters = tuple(
            values.waiter_info(one.claim._replace(holder=clean(one.holder)), one.owner, one.age(now) or 0.0)
            for one in seen.queue
        )
        last = max((seen.fence_of(one) or 0 for one in grants), default=0)
        return LockInfo(seen.name, tuple(holders), last or None, waiters, seen.waiting)

    async def listing(self, pattern: str, cursor: str, until: float) -> Page:
        start = lock_key(cursor) + b"\x01" if cursor else lock_key("")  # after the shared grants of the last name
        end = lock_key("")[:-1] + b"0"  # the character after the slash
        body = {"key": packed(start), "range_end": packed(end), "limit": PAGE, "keys_only": True}
        reply = await self._client.call("/v3/kv/range", body, until, "all locks")
        keys = [record.key[len(lock_key("")) :].partition(b"\0")[0] for record in records.records_in(reply)]
        found = [key.decode("utf-8", "replace") for key in dict.fromkeys(keys)]
        infos = []
        for name in found:
            if fits(name, pattern):
                info = await self._info(await self._read(name, until), MOST_LISTED, 1, until)
                infos.append(info._replace(waiters=()))
        return Page(tuple(infos), found[-1] if reply.get("more") else "")

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
        """Read a lock, with the waiter `own` and the first `most` waiters."""
        reply = await self._transact(name, [], records.lock_reads(name, own, most), until)
        return records.snapshot_in(name, int(reply["header"]["revision"]), reply["responses"])

    async def _read_all(self, claims: Sequence[Claim], until: float) -> list[Snapshot]:
        reads = [records.lock_reads(claim.name, claim.holder, 1) for claim in claims]
        reply = await self._transact(claims[0].name, [], [one for each in reads for one in each], until)
        revision, found = int(reply["header"]["revision"]), iter(reply["responses"])
        return [
            records.snapshot_in(claim.name, revision, [next(found) for _ in each])
            for claim, each in zip(claims, reads, strict=True)
        ]

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

    async def _write(
        self, name: str, conditions: Operations, writes: Operations, until: float, own: str = "", most: int = 1
    ) -> int | Snapshot:
        """Write if all conditions hold, and return the revision; after a lost race, the lock as it is now."""
        reply = await self._transact(name, conditions, writes, until, records.lock_reads(name, own, most))
        revision = int(reply["header"]["revision"])
        return revision if reply.get("succeeded") else records.snapshot_in(name, revision, reply["responses"])

    async def _transact(
        self, name: str, conditions: Operations, then: Operations, until: float, otherwise: Sequence[Any] = ()
    ) -> dict[str, Any]:
        body = {"compare": conditions, "success": then, "failure": list(otherwise)}
        return await self._client.call("/v3/kv/txn", body, until, f"the lock {shown(name)}")


def _too_busy(name: str) -> StoreUnavailable:
    return StoreUnavailable(f"The lock {shown(name)} changed too often to be read; nothing was changed. Try again.")
