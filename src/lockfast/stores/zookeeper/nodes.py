"""The nodes of one lock in ZooKeeper.

    /lockfast/=NAME                     the lock; NAME is quoted
    /lockfast/=NAME/holder              the grant: holder id, owner, ttl and grant id; its last change starts the ttl
    /lockfast/=NAME/g-GRANT             exists as long as the grant with that id
    /lockfast/=NAME/w-ID-0000000007     a waiter; ordered by the sequence number that ZooKeeper appends

The fence is the transaction id that created the holder's node: ZooKeeper never repeats one. The version of a node is no
such id, as it starts at 0 when the node is created again, and a delayed write could match a later grant. So every grant
has a random id, and every write depends on the node of that id.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from lockfast.values import Owner, WaiterInfo, clean

ROOT = "/lockfast"

Holder = tuple[str, str, int]
"""Holder id, owner, and ttl in milliseconds."""


def lock_path(name: str) -> str:
    return f"{ROOT}/={quote(name, safe='')}"


def holder_path(name: str) -> str:
    return f"{lock_path(name)}/holder"


def grant_path(name: str, grant: str) -> str:
    return f"{lock_path(name)}/g-{grant}"


def waiter_prefix(name: str, holder: str) -> str:
    return f"{lock_path(name)}/w-{quote(holder, safe='')}-"


def name_in(child: str) -> str:
    return unquote(child[1:])


class Node(NamedTuple):
    """A holder or a waiter, as read. `created_by` and `changed_by` are transaction ids. A waiter has no `grant`."""

    path: str
    holder: str
    owner: str
    ttl_ms: int
    attempt: int
    grant: str
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
            grant = str(fields["grant"])
        except (ValueError, KeyError, TypeError):  # written by another program: it holds the lock without a ttl
            values, grant = (data.decode("utf-8", "replace") or "?", "", -1, 0), ""
        return cls(path, *values, grant, stat.version, stat.czxid, stat.ctime, stat.mzxid, stat.mtime)

    def left_ms(self, now_ms: int) -> int | None:
        """Milliseconds of the ttl that are left; None without a ttl."""
        return None if self.ttl_ms < 0 else self.changed_at_ms + self.ttl_ms - now_ms

    def is_expired(self, now_ms: int) -> bool:
        left = self.left_ms(now_ms)
        return left is not None and left < 0

    @property
    def as_holder(self) -> Holder:
        return self.holder, self.owner, self.ttl_ms

    def with_ttl(self, ttl_ms: int) -> bytes:
        return value(self.holder, self.owner, ttl_ms, self.attempt, self.grant)


def value(holder: str, owner: str, ttl_ms: int, attempt: int = 0, grant: str = "") -> bytes:
    fields = {"holder": holder, "owner": owner, "ttl_ms": ttl_ms, "attempt": attempt, "grant": grant}
    return json.dumps(fields, separators=(",", ":")).encode()


def waiters_in(children: list[str]) -> list[str]:
    """The waiters among the children of a lock, in order."""
    return sorted((child for child in children if child.startswith("w-")), key=ticket_of)


def grants_in(children: list[str]) -> list[str]:
    """The grant ids among the children of a lock."""
    return [child.removeprefix("g-") for child in children if child.startswith("g-")]


def ticket_of(child: str) -> int:
    """
    >>> ticket_of("w-moto-0000000007")
    7
    """
    return int(child.rpartition("-")[2])


def waiter_info(node: Node, now_ms: int) -> WaiterInfo:
    return WaiterInfo(clean(node.holder), Owner.decode(node.owner), max(0, now_ms - node.created_at_ms) / 1000)
