"""The nodes of a lock: their paths, their data, and a lock as read."""

from __future__ import annotations

import json
from collections.abc import Iterable
from math import ceil
from typing import Any, NamedTuple
from urllib.parse import quote

from lockfast import values
from lockfast.admission import LiveGrant, free_at
from lockfast.values import Claim, Mode

ROOT = "/lockfast"


def lock_path(name: str) -> str:
    return f"{ROOT}/={quote(name, safe='')}"


def grant_prefix(holder: str) -> str:
    return f"grant:{quote(holder, safe='')}:"


def waiter_prefix(holder: str) -> str:
    return f"waiter:{quote(holder, safe='')}:"


class Node(NamedTuple):
    """A grant or a waiter, as read. `created_by` is a transaction id. A waiter has no slots."""

    path: str
    holder: str
    owner: str
    ttl_ms: int
    weight: int
    limit: int
    slots: tuple[int, ...]
    version: int
    created_by: int
    created_at_ms: int
    changed_at_ms: int

    @classmethod
    def of(cls, path: str, data: bytes, stat: Any) -> Node:
        try:
            fields = json.loads(data)
            known = str(fields["holder"]), str(fields["owner"]), int(fields["ttl_ms"])
            shape = int(fields["weight"]), int(fields["limit"]), tuple(map(int, fields["slots"]))
        except (ValueError, KeyError, TypeError):  # written by another program: it holds the lock without a ttl
            known, shape = (data.decode("utf-8", "replace") or "?", "", -1), (0, 0, ())
        return cls(path, *known, *shape, stat.version, stat.czxid, stat.ctime, stat.mtime)

    @property
    def mode(self) -> Mode:
        return values.mode_of(self.weight, self.limit)

    @property
    def ends_at_ms(self) -> int | None:
        """When the ttl ends; None without a ttl."""
        return None if self.ttl_ms < 0 else self.changed_at_ms + self.ttl_ms

    def is_expired(self, now_ms: int) -> bool:
        return self.ends_at_ms is not None and self.ends_at_ms < now_ms

    def age(self, now_ms: int) -> float:
        """Seconds since the node was created."""
        return max(0, now_ms - self.created_at_ms) / 1000

    def claim(self, name: str) -> Claim:
        return Claim(name, self.holder, self.ttl_ms / 1000, self.owner, weight=self.weight, limit=self.limit)


def node_data(claim: Claim, slots: tuple[int, ...] = ()) -> bytes:
    ttl_ms = ceil(round(claim.ttl * 1000, 6))  # 2.007 * 1000 is a little more than 2007
    fields = {"holder": claim.holder, "owner": claim.owner, "ttl_ms": ttl_ms}
    shape = {"weight": claim.weight, "limit": claim.limit, "slots": slots}
    return json.dumps({**fields, **shape}, separators=(",", ":")).encode()


def extended(held: Node, ttl: float, *, final: bool = False) -> bytes:
    """The data of a grant that is renewed. Only a final renewal may shorten the ttl."""
    claim = held.claim("")
    return node_data(claim._replace(ttl=ttl if final else max(ttl, claim.ttl)), held.slots)


def ticket_of(path: str) -> int:
    """
    >>> ticket_of("/lockfast/=a/waiter:moto:0000000007")
    7
    """
    return int(path.rpartition(":")[2])


class Children(NamedTuple):
    """The paths below a lock's node, and the version of that node. Without a lock's node there are no `ids`."""

    name: str
    version: int = 0
    ids: tuple[str, ...] = ()
    grants: tuple[str, ...] = ()
    waiters: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, version: int, children: Iterable[str]) -> Children:
        """Waiters are in the order of the queue."""
        kinds: dict[str, list[str]] = {"id": [], "grant": [], "waiter": [], "": []}
        for child in children:
            kinds.get(child.partition(":")[0], kinds[""]).append(f"{lock_path(name)}/{child}")
        kinds["waiter"].sort(key=ticket_of)
        return cls(name, version, *map(tuple, kinds.values()))

    def starting(self, prefix: str) -> list[str]:
        """The paths of grants or waiters whose names start with `prefix`."""
        start = f"{lock_path(self.name)}/{prefix}"
        return [path for path in (*self.grants, *self.waiters) if path.startswith(start)]


class State(NamedTuple):
    """A lock as read. Its grants are in the order of their fences."""

    children: Children
    grants: list[Node]
    expired: list[Node]
    now_ms: int

    @property
    def live(self) -> list[LiveGrant]:
        return list(map(live_grant, self.grants))

    def grant_of(self, holder: str) -> Node | None:
        return next((node for node in self.grants if node.holder == holder), None)

    def ttl_left(self, claim: Claim) -> float | None:
        """Seconds until expired grants may let the claim in."""
        ends_at = free_at(self.live, claim)
        return None if ends_at is None else ends_at - self.now_ms / 1000


def live_grant(node: Node) -> LiveGrant:
    return LiveGrant(node.mode, node.slots, None if node.ends_at_ms is None else node.ends_at_ms / 1000)


class NewGrant(NamedTuple):
    """A claim that is admitted, and its ticket if it has one."""

    claim: Claim
    slots: tuple[int, ...]
    path: str
    ticket: str | None


class Plan(NamedTuple):
    """How to serve the queue: the grants to create, in order, and the dead tickets to delete."""

    new: list[NewGrant]
    gone: list[Node]
