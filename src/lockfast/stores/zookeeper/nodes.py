"""The nodes of one lock in ZooKeeper.

    /lockfast/=NAME                     the lock; NAME is quoted
    /lockfast/=NAME/holder              the grant: holder id, owner and ttl; the ttl starts at the node's last change
    /lockfast/=NAME/w-ID-0000000007     a waiter; ordered by the sequence number that ZooKeeper appends

The fence is the transaction id that created the holder's node. ZooKeeper never repeats one.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from lockfast.values import Owner, WaiterInfo, clean

ROOT = "/lockfast"


def lock_path(name: str) -> str:
    return f"{ROOT}/={quote(name, safe='')}"


def holder_path(name: str) -> str:
    return f"{lock_path(name)}/holder"


def waiter_prefix(name: str, holder: str) -> str:
    return f"{lock_path(name)}/w-{quote(holder, safe='')}-"


def name_in(child: str) -> str:
    return unquote(child[1:])


class Node(NamedTuple):
    """A holder or a waiter, as read. `created_by` and `changed_by` are transaction ids."""

    path: str
    holder: str
    owner: str
    ttl_ms: int
    attempt: int
    version: int
    created_by: int
    created_at_ms: int
    changed_by: int
    changed_at_ms: int

    @classmethod
    def of(cls, path: str, data: bytes, stat: Any) -> Node:
        try:
            fields = json.loads(data)
            values = str(fields["holder"]), str(fields["owner"]), int(fields["ttl_ms"]), int(fields["attempt"])
        except (ValueError, KeyError, TypeError):  # written by another program: it holds the lock without a ttl
            values = data.decode("utf-8", "replace") or "?", "", -1, 0
        return cls(path, *values, stat.version, stat.czxid, stat.ctime, stat.mzxid, stat.mtime)

    def left_ms(self, now_ms: int) -> int | None:
        """Milliseconds of the ttl that are left; None without a ttl."""
        return None if self.ttl_ms < 0 else self.changed_at_ms + self.ttl_ms - now_ms

    def is_expired(self, now_ms: int) -> bool:
        left = self.left_ms(now_ms)
        return left is not None and left < 0

    def with_ttl(self, ttl_ms: int) -> bytes:
        return value(self.holder, self.owner, ttl_ms, self.attempt)


def value(holder: str, owner: str, ttl_ms: int, attempt: int = 0) -> bytes:
    fields = {"holder": holder, "owner": owner, "ttl_ms": ttl_ms, "attempt": attempt}
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


def waiter_info(node: Node, now_ms: int) -> WaiterInfo:
    return WaiterInfo(clean(node.holder), Owner.decode(node.owner), max(0, now_ms - node.created_at_ms) / 1000)
