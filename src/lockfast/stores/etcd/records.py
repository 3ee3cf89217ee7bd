"""The keys of one lock in etcd, and the parts of transactions on them.

    lockfast/lock/NAME           the holder id, on the holder's etcd lease; this key alone decides who holds the lock
    lockfast/meta/NAME           owner, start and fence of the grant, same lease; no fence: this key's revision is it
    lockfast/wait/NAME NUL id    one waiter: owner and attempt, on its own lease; ordered by create revision

The id of an etcd lease is derived from the holder id, so that a repeated request finds its own lease. A fence is etcd's
revision at the grant, which grows with every change in the cluster.
"""

from __future__ import annotations

import base64
import json
from hashlib import sha256
from typing import Any, NamedTuple

from lockfast.values import Owner, WaiterInfo, clean

ROOT = b"lockfast/"


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
    def fields(self) -> dict[str, Any]:
        """The JSON value; empty for a key that another program wrote."""
        try:
            found = json.loads(self.value)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}


class Snapshot(NamedTuple):
    """A lock as read in one transaction. `own` is the caller's waiter record."""

    revision: int
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
        if self.meta is None:
            return None
        return int(self.meta.fields.get("fence") or self.meta.changed)


def meta_value(owner: str, since: float, fence: int | None = None) -> bytes:
    return json.dumps({"owner": owner, "since": since, "fence": fence}, separators=(",", ":")).encode()


def wait_value(owner: str, since: float, attempt: int) -> bytes:
    return json.dumps({"owner": owner, "since": since, "attempt": attempt}, separators=(",", ":")).encode()


def holder_in(record: Record) -> str:
    return record.key.rpartition(b"\0")[2].decode("utf-8", "replace")


def waiter_info(record: Record, now: float) -> WaiterInfo:
    fields = record.fields
    since = fields.get("since")
    waiting_for = max(0.0, now - since) if isinstance(since, float) else 0.0
    return WaiterInfo(clean(holder_in(record)), Owner.decode(str(fields.get("owner", ""))), waiting_for)


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


def records_in(response: dict[str, Any]) -> tuple[Record, ...]:
    return tuple(map(Record.of, response["response_range"].get("kvs", ())))
