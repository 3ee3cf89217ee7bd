"""What lies in ZooKeeper for one lock.

    /lockfast/=NAME                     the lock; NAME is quoted
    /lockfast/=NAME/holder              who holds: id, owner and ttl; its last change is the beginning of the ttl
    /lockfast/=NAME/w-ID-0000000007     who waits, in the order of the numbers that ZooKeeper gave

The fence is the transaction in which the holder's node was made: ZooKeeper counts these for ever.
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
    """A holder or a waiter, as it was read."""

    path: str
    holder: str
    owner: str
    ttl_ms: int
    attempt: int
    version: int
    made_by: int
    """The transaction that made the node: a holder's fence."""
    made_at_ms: int
    changed_by: int
    changed_at_ms: int

    @classmethod
    def of(cls, path: str, data: bytes, stat: Any) -> Node:
        try:
            told = json.loads(data)
            holder, owner, ttl_ms, attempt = str(told["holder"]), str(told["owner"]), int(told["ttl_ms"]), told["turn"]
        except (ValueError, KeyError, TypeError):  # a stranger's: it holds, without a ttl
            holder, owner, ttl_ms, attempt = data.decode("utf-8", "replace") or "?", "", -1, 0
        return cls(path, holder, owner, ttl_ms, attempt, stat.version, stat.czxid, stat.ctime, stat.mzxid, stat.mtime)

    def left_ms(self, now_ms: int) -> int | None:
        """Milliseconds of its ttl that are left; None when it has none."""
        return None if self.ttl_ms < 0 else self.changed_at_ms + self.ttl_ms - now_ms

    def is_over(self, now_ms: int) -> bool:
        left = self.left_ms(now_ms)
        return left is not None and left < 0

    def with_ttl(self, ttl_ms: int) -> bytes:
        return value(self.holder, self.owner, ttl_ms, self.attempt)

    @property
    def told(self) -> Owner | None:
        return Owner.decode(self.owner)


def value(holder: str, owner: str, ttl_ms: int, attempt: int = 0) -> bytes:
    told = {"holder": holder, "owner": owner, "ttl_ms": ttl_ms, "turn": attempt}
    return json.dumps(told, separators=(",", ":")).encode()


def in_order(children: list[str]) -> list[str]:
    """The waiters among the children, first come first."""
    return sorted((child for child in children if child.startswith("w-")), key=number_of)


def number_of(child: str) -> int:
    """
    >>> number_of("w-moto-0000000007")
    7
    """
    return int(child.rpartition("-")[2])


def waiter_info(node: Node, now_ms: int) -> WaiterInfo:
    return WaiterInfo(clean(node.holder), node.told, max(0, now_ms - node.made_at_ms) / 1000)
