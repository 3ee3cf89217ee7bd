"""The keys of a lock in etcd, what they say, and the operations of transactions on them. No I/O.

    lockfast/lock/NAME                     the holder id of an exclusive grant, on the holder's etcd lease
    lockfast/lock/NAME NUL permits NUL id  one grant of permits: owner, start, ttl, slots; on its own etcd lease
    lockfast/lock/NAME NUL read NUL id     one grant of a reader, the same way
    lockfast/meta/NAME                     owner, start and fence of an exclusive grant, on the same lease
    lockfast/wait/NAME NUL id              one waiter: its claim and its attempt, on its own lease; ordered by create
                                           revision

Rules:

- A key under `lock/` is a live grant, and nothing else is: etcd deletes it when its lease expires.
- A decision stays right when grants end. So a grant depends only on the condition that none was added since the lock
  was read, in the modes that exclude it. Readers do not compete with readers.
- The keys of readers sort last, so that one range has all grants that exclude a reader.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from hashlib import sha256
from time import time as wall_clock
from typing import Any, NamedTuple

from lockfast.admission import LiveGrant, admit
from lockfast.values import Claim, Granted, Mode, Owner

ROOT = b"lockfast/"
FENCES_PER_REVISION = 128
"""One transaction, which is one revision, may grant several claims; etcd allows 128 operations in it."""
BATCH = 60  # waiters that one transaction grants at most, with two operations each

Operations = list[dict[str, Any]]
Range = tuple[bytes, bytes]
"""The first key of a range, and the one after its last."""


def lock_key(name: str) -> bytes:
    return ROOT + b"lock/" + name.encode()


def meta_key(name: str) -> bytes:
    return ROOT + b"meta/" + name.encode()


def wait_key(name: str, holder: str = "") -> bytes:
    return ROOT + b"wait/" + name.encode() + b"\0" + holder.encode()


def shared_key(name: str, mode: Mode, holder: str = "") -> bytes:
    return b"\0".join((lock_key(name), mode.value.encode(), holder.encode()))


def grant_key(name: str, mode: Mode, holder: str) -> bytes:
    return lock_key(name) if mode is Mode.EXCLUSIVE else shared_key(name, mode, holder)


def all_grants(name: str) -> Range:
    return lock_key(name), lock_key(name) + b"\x01"


def all_waiters(name: str) -> Range:
    return wait_key(name), wait_key(name)[:-1] + b"\x01"


def lease_of(holder: str) -> int:
    """The id of a holder's first etcd lease.

    >>> 0 < lease_of("moto") < 2**63
    True
    """
    return 1 + int.from_bytes(sha256(holder.encode()).digest()[:8], "big") % (2**62)


def fence_at(revision: int, place: int = 0) -> int:
    """The fence of a grant at this revision; `place` numbers the grants of one transaction.

    >>> fence_at(1000) < fence_at(1000, 1) < fence_at(1001)
    True
    """
    return revision * FENCES_PER_REVISION + place


def packed(data: bytes) -> str:
    return base64.b64encode(data).decode()


def encoded(**fields: Any) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


class Record(NamedTuple):
    """One key of etcd, with its value: a grant, the meta of one, or a waiter."""

    key: bytes
    value: bytes
    lease: int
    created: int = 0
    changed: int = 0

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
    def is_ticket(self) -> bool:
        return self.key.startswith(ROOT + b"wait/")

    @property
    def mode(self) -> Mode:
        """The mode of a grant."""
        parts = self.key.split(b"\0")
        return Mode(parts[1].decode()) if len(parts) == 3 else Mode.EXCLUSIVE

    @property
    def holder(self) -> str:
        """The holder id of a grant or of a waiter."""
        is_exclusive = b"\0" not in self.key
        return (self.value if is_exclusive else self.key.rpartition(b"\0")[2]).decode("utf-8", "replace")

    @property
    def fields(self) -> dict[str, Any]:
        """The JSON value; empty for a key that another program wrote."""
        try:
            found = json.loads(self.value)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def owner(self) -> Owner | None:
        return Owner.decode(str(self.fields.get("owner", "")))

    def age(self, now: float) -> float | None:
        """Seconds since the time in the value; None if it has none."""
        since = self.fields.get("since")
        return max(0.0, now - since) if isinstance(since, float) else None

    @property
    def shared_fence(self) -> int:
        """The fence of a shared grant. One that was exclusive before keeps the fence that it had."""
        fields = self.fields
        return int(fields.get("fence") or fence_at(self.created, int(fields.get("place", 0))))

    @property
    def live(self) -> LiveGrant:
        """The grant, for admission. It expires after its ttl at the latest, unless it is renewed."""
        if self.mode is Mode.EXCLUSIVE:
            return LiveGrant(Mode.EXCLUSIVE, (), None)
        fields = self.fields
        return LiveGrant(self.mode, tuple(fields.get("slots", ())), float(fields.get("ttl", 0)))

    @property
    def claim(self) -> Claim:
        """The claim of a waiter."""
        fields, name = self.fields, self.key[len(wait_key("")) - 1 :].partition(b"\0")[0].decode("utf-8", "replace")
        weight, limit = int(fields.get("weight", 0)), int(fields.get("limit", 0))
        ttl, owner = float(fields.get("ttl", 0)), str(fields.get("owner", ""))
        return Claim(name, self.holder, ttl, owner, weight=weight, limit=limit)


class Snapshot(NamedTuple):
    """A lock as read in one transaction, at `revision`. `own` is the caller's waiter record."""

    name: str
    revision: int
    grants: tuple[Record, ...]
    meta: Record | None
    queue: tuple[Record, ...]
    waiting: int
    own: Record | None

    @property
    def live(self) -> list[LiveGrant]:
        return [one.live for one in self.grants]

    def grant_of(self, holder: str) -> Record | None:
        return next((one for one in self.grants if one.holder == holder), None)

    def fence_of(self, grant: Record) -> int | None:
        """The fence of a grant; None if another program wrote it."""
        if grant.mode is not Mode.EXCLUSIVE:
            return grant.shared_fence
        return None if self.meta is None else int(self.meta.fields.get("fence") or fence_at(self.meta.changed))

    def granted(self, grant: Record) -> Granted | None:
        fence = self.fence_of(grant)
        return None if fence is None else Granted(fence, slots=grant.live.slots)


class Admitted(NamedTuple):
    """A claim to be granted, the etcd lease of its grant, and its ticket if it waited."""

    claim: Claim
    slots: tuple[int, ...]
    lease: int
    ticket: Record | None = None


class Step(NamedTuple):
    """A change of a lock: the grant or the ticket that ends, and the grant that takes the place of an ended one."""

    ended: Record | None = None
    added: Record | None = None

    def heads(self, seen: Snapshot) -> list[Admitted]:
        """The waiters that the change admits, in order."""
        live = [one.live for one in seen.grants if one != self.ended]
        if self.added is not None:
            live.append(self.added.live)
        admitted: list[Admitted] = []
        for ticket in self.queue(seen)[:BATCH]:
            claim = ticket.claim
            slots = admit(live, claim)
            if slots is None:
                break
            admitted.append(Admitted(claim, slots, ticket.lease, ticket))
            live.append(LiveGrant(claim.mode, slots, None))
        return admitted

    def queue(self, seen: Snapshot) -> list[Record]:
        return [one for one in seen.queue if one != self.ended]

    def admits_unread(self, seen: Snapshot, heads: Sequence[Admitted]) -> bool:
        """Whether the change may admit waiters behind those that were read, too."""
        has_unread = len(seen.queue) < seen.waiting
        return has_unread and len(heads) == len(self.queue(seen)) and all(one.claim.weight for one in heads)

    def transaction(self, seen: Snapshot, heads: Sequence[Admitted]) -> tuple[Operations, Operations]:
        """The conditions and the writes of the change."""
        conditions, writes = granting(seen, heads)
        is_handed_off = bool(heads) and heads[0].claim.mode is Mode.EXCLUSIVE
        if len(heads) == len(self.queue(seen)) and not is_handed_off:
            conditions.append(no_waiter_added(seen))  # the change might admit it, too
        if self.added is not None:
            writes.append(put(self.added.key, self.added.value, self.added.lease))
        if self.ended is not None:
            conditions.append(is_unchanged(self.ended))
            if self.ended.key != lock_key(seen.name):
                writes.append(delete(self.ended.key))
            elif not is_handed_off:  # else the new grant has overwritten both keys
                writes += [delete(self.ended.key), delete(meta_key(seen.name))]
        return conditions, writes


def granting(seen: Snapshot, admitted: Sequence[Admitted]) -> tuple[Operations, Operations]:
    """The conditions and the writes of grants to claims that were admitted together."""
    conditions: Operations = []
    writes: Operations = []
    if admitted:
        conditions.append(none_added(seen, admitted[0].claim.mode))
    for place, (claim, slots, lease, ticket) in enumerate(admitted):
        writes += grant_writes(claim, slots, lease, place)
        if ticket is not None:
            conditions.append(is_unchanged(ticket))
            writes.append(delete(ticket.key))
    return conditions, writes


def grant_writes(claim: Claim, slots: tuple[int, ...], lease: int, place: int = 0) -> Operations:
    """Write a grant; the revision of the transaction decides its fence."""
    now = wall_clock()
    if claim.mode is Mode.EXCLUSIVE:
        meta = encoded(owner=claim.owner, since=now, fence=None)
        return [put(lock_key(claim.name), claim.holder.encode(), lease), put(meta_key(claim.name), meta, lease)]
    value = encoded(owner=claim.owner, since=now, ttl=claim.ttl, slots=slots, place=place)
    return [put(shared_key(claim.name, claim.mode, claim.holder), value, lease)]


def ticket_value(claim: Claim, attempt: int, before: Record | None) -> bytes:
    """The value of a waiter's record; one that waits already keeps its start."""
    fields = {} if before is None else before.fields
    shape = {"ttl": claim.ttl, "weight": claim.weight, "limit": claim.limit}
    return encoded(owner=claim.owner, since=fields.get("since", wall_clock()), attempt=attempt, **shape)


def moved(seen: Snapshot, grant: Record, lease: int, ttl: float) -> tuple[Operations, Operations]:
    """The conditions and the writes that move a grant to another etcd lease. The fence stays."""
    conditions = [is_unchanged(grant)]
    if grant.mode is not Mode.EXCLUSIVE:
        return conditions, [put(grant.key, encoded(**{**grant.fields, "ttl": ttl}), lease)]
    writes = [put(grant.key, grant.value, lease)]
    if seen.meta is not None:
        meta = encoded(**{**seen.meta.fields, "fence": seen.fence_of(grant)})
        conditions.append(is_unchanged(seen.meta))
        writes.append(put(seen.meta.key, meta, lease))
    return conditions, writes


def reader_after(seen: Snapshot, grant: Record, ttl: float) -> Record:
    """The grant of a reader that replaces an exclusive grant, with the same fence."""
    fields = seen.meta.fields if seen.meta is not None else {}
    since = fields.get("since", wall_clock())
    value = encoded(owner=fields.get("owner", ""), since=since, ttl=ttl, slots=(), fence=seen.fence_of(grant))
    return Record(shared_key(seen.name, Mode.READ, grant.holder), value, grant.lease)


def is_unchanged(record: Record) -> dict[str, Any]:
    return is_at(record.key, record)


def is_at(key: bytes, record: Record | None) -> dict[str, Any]:
    """The key is as it was read: None if it was absent."""
    revision = 0 if record is None else record.changed
    return {"key": packed(key), "target": "MOD", "result": "EQUAL", "mod_revision": revision}


def none_added(seen: Snapshot, mode: Mode) -> dict[str, Any]:
    """No grant that excludes a claim of this mode was added since the lock was read."""
    start, end = all_grants(seen.name)
    if mode is Mode.READ:
        end = shared_key(seen.name, Mode.READ)
    return {**_keys((start, end)), "target": "MOD", "result": "LESS", "mod_revision": seen.revision + 1}


def no_waiter_added(seen: Snapshot) -> dict[str, Any]:
    waiters = _keys(all_waiters(seen.name))
    return {**waiters, "target": "CREATE", "result": "LESS", "create_revision": seen.revision + 1}


def put(key: bytes, value: bytes, lease: int) -> dict[str, Any]:
    return {"request_put": {"key": packed(key), "value": packed(value), "lease": lease}}


def delete(key: bytes) -> dict[str, Any]:
    return {"request_delete_range": {"key": packed(key)}}


def get(key: bytes) -> dict[str, Any]:
    return {"request_range": {"key": packed(key)}}


def lock_reads(name: str, own: str, most: int) -> Operations:
    """Read a lock: its grants, and of its queue the first waiters, their number, and the waiter `own`."""
    order = {"limit": most, "sort_order": "ASCEND", "sort_target": "CREATE"}
    return [
        {"request_range": _keys(all_grants(name))},
        get(meta_key(name)),
        {"request_range": {**_keys(all_waiters(name)), **order}},
        get(wait_key(name, own or "-")),
    ]


def snapshot_in(name: str, revision: int, responses: Sequence[dict[str, Any]]) -> Snapshot:
    """The result of `lock_reads`."""
    grants, meta, queue, own = (response["response_range"] for response in responses)
    waiting = int(queue.get("count", 0))
    return Snapshot(name, revision, records_in(grants), record_in(meta), records_in(queue), waiting, record_in(own))


def _keys(keys: Range) -> dict[str, Any]:
    return {"key": packed(keys[0]), "range_end": packed(keys[1])}


def records_in(found: dict[str, Any]) -> tuple[Record, ...]:
    return tuple(map(Record.of, found.get("kvs", ())))


def record_in(found: dict[str, Any]) -> Record | None:
    return next(iter(records_in(found)), None)
