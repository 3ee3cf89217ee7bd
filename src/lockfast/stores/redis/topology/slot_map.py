"""Which node of a cluster has which slots, as a node tells it; pure.

A node that does not know its own name leaves the host out: then it is the host that was asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lockfast.stores.redis.protocol.resp import pack

Address = tuple[str, int]

SLOTS_REQUEST = pack(b"CLUSTER", b"SLOTS")
ASKING = pack(b"ASKING")


def owners_in(reply: Any, asked: str) -> dict[int, Address]:
    """The master of each slot, from a reply to CLUSTER SLOTS.

    >>> owners_in([[0, 1, [b"10.0.0.1", 6379, b"id"]], [2, 2, [b"", 6380, b"id"], [b"x", 1, b"replica"]]], "seed")
    {0: ('10.0.0.1', 6379), 1: ('10.0.0.1', 6379), 2: ('seed', 6380)}
    """
    return {slot: address for first, last, address in _ranges(reply, asked) for slot in range(first, last + 1)}


def _ranges(reply: Any, asked: str) -> Iterator[tuple[int, int, Address]]:
    for first, last, (host, port, *_), *_ in reply:
        name = host.decode("utf-8", "replace") if isinstance(host, bytes) else ""
        yield first, last, (name if name not in ("", "?") else asked, port)
