"""The Lua scripts, loaded as package data, and the requests that run them.

A request is put together from what is the same each time (the digest, the keys of a name) and the few arguments that
differ, because it is on the way of every acquisition. `in_full` makes of any request the one that carries the script
itself, for a server that does not have it (yet, or any more).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha1
from importlib.resources import files
from math import ceil

from lockfast.stores.redis.keys import EVERY_META, keys_of
from lockfast.stores.redis.protocol.resp import bulks, pack
from lockfast.values import Claim, Enqueue, Renewal


def _read(name: str) -> str:
    """A script's text, with what it includes in the place of the line that says so."""
    text = files(__package__).joinpath(name).read_text("utf-8")
    return re.sub(r"^ *-- include (\S+)\n", lambda line: _read(line[1]), text, flags=re.MULTILINE)


class Script:
    """One script's text, and its two ways to be called."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.text = _read(f"{name}.lua").encode()
        self.digest = sha1(self.text, usedforsecurity=False).hexdigest()
        self._by_digest = bulks(b"EVALSHA", self.digest.encode())
        self._by_text = bulks(b"EVAL", self.text)

    def head(self, key_count: int, packed_keys: bytes, arg_count: int) -> bytes:
        """A request up to its arguments; `packed_keys` are keys as `resp.bulks` writes them."""
        return b"*%d\r\n%b%b%b" % (
            3 + key_count + arg_count,
            self._by_digest,
            bulks(b"%d" % key_count),
            packed_keys,
        )

    def in_full(self, request: bytes) -> bytes:
        """The same request with the script's text instead of its digest."""
        return request.replace(self._by_digest, self._by_text, 1)


ACQUIRE = Script("acquire")
RELEASE = Script("release")
RENEW = Script("renew")
ADOPT = Script("adopt")
REASSERT = Script("reassert")
INSPECT = Script("inspect")
LIST = Script("list")
FORCE_RELEASE = Script("force_release")


TRACK = (pack(b"CLIENT", b"TRACKING", b"ON", b"OPTIN", b"NOLOOP"), pack(b"CLIENT", b"CACHING", b"YES"))
"""Sent in front of a renewal: tell us when anyone else changes what it reads. An account or a server that does not
allow it answers with an error, and a theft is noticed at the next renewal instead."""


_NO_PLACE = bulks(b"", b"0", b"")


@lru_cache(maxsize=8192)
def _plain_release(name: str, id_size: int) -> bytes:
    """What stands before the holder id: joining is several times as quick as formatting."""
    return RELEASE.head(4, keys_of(name).packed, 1) + b"$%d\r\n" % id_size


@lru_cache(maxsize=8192)
def _plain_acquire(name: str, ttl: float, owner: str, id_size: int) -> tuple[bytes, bytes]:
    """What stands before and after the holder id when nothing else is asked for: the same for each use of a lock."""
    head = ACQUIRE.head(4, keys_of(name).packed, 7) + b"$%d\r\n" % id_size
    return head, b"\r\n" + bulks(b"%d" % ceil(ttl * 1000), owner.encode()) + _NO_PLACE + bulks(b"1")


_latest: tuple[Claim | None, Enqueue | None, bytes] = (None, None, b"")


def acquire_request(claim: Claim, enqueue: Enqueue | None) -> bytes:
    name, holder, ttl, owner, fences, floor = claim
    if enqueue is None and fences == 1 and not floor:
        before, after = _plain_acquire(name, ttl, owner, len(holder))
        return before + holder.encode("ascii") + after
    return _full_acquire(claim, enqueue)


def _full_acquire(claim: Claim, enqueue: Enqueue | None) -> bytes:
    """The same bytes again for the same question: a quorum puts it to each of its nodes."""
    global _latest
    latest_ask, latest_place, request = _latest
    if claim is latest_ask and enqueue is latest_place:
        return request
    packed = bulks(claim.holder.encode("ascii"), b"%d" % ceil(claim.ttl * 1000), claim.owner.encode())
    packed += _NO_PLACE if enqueue is None else _packed(enqueue)
    packed += bulks(b"%d" % claim.fences)
    if claim.floor:
        packed += bulks(b"%d" % claim.floor)
    request = ACQUIRE.head(4, keys_of(claim.name).packed, 8 if claim.floor else 7) + packed
    _latest = (claim, enqueue, request)
    return request


def _packed(enqueue: Enqueue) -> bytes:
    ticket = b"" if enqueue.ticket is None else b"%d" % enqueue.ticket
    return bulks(enqueue.address.encode(), b"%d" % enqueue.attempt, ticket)


def release_request(name: str, holder: str) -> bytes:
    return _plain_release(name, len(holder)) + holder.encode("ascii") + b"\r\n"


def renew_request(renewals: Sequence[Renewal]) -> bytes:
    packed_keys = b"".join([keys_of(line.name).packed_pair for line in renewals])
    args = [arg for line in renewals for arg in (line.holder.encode(), b"%d" % ceil(line.ttl * 1000))]
    if any(line.final for line in renewals):
        args.append(b"".join([b"01"[line.final : line.final + 1] for line in renewals]))
    return RENEW.head(2 * len(renewals), packed_keys, len(args)) + bulks(*args)


def adopt_request(claim: Claim, old_holder: str) -> bytes:
    args = (claim.holder.encode(), b"%d" % ceil(claim.ttl * 1000), claim.owner.encode(), old_holder.encode())
    return ADOPT.head(2, keys_of(claim.name).packed_pair, len(args)) + bulks(*args)


def reassert_request(claim: Claim, fence: int) -> bytes:
    args = (claim.holder.encode(), b"%d" % ceil(claim.ttl * 1000), claim.owner.encode(), b"%d" % fence)
    return REASSERT.head(2, keys_of(claim.name).packed_pair, len(args)) + bulks(*args)


def inspect_request(name: str, most: int) -> bytes:
    return INSPECT.head(4, keys_of(name).packed, 1) + bulks(b"%d" % most)


def list_request(names: Sequence[str]) -> bytes:
    return LIST.head(4 * len(names), b"".join([keys_of(name).packed for name in names]), 0)


def scan_request(cursor: str, count: int) -> bytes:
    return pack(b"SCAN", cursor.encode(), b"MATCH", EVERY_META, b"COUNT", b"%d" % count)


def force_release_request(name: str, holder: bytes) -> bytes:
    return FORCE_RELEASE.head(4, keys_of(name).packed, 1) + bulks(holder)
