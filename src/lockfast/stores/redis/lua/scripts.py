"""The Lua scripts, loaded as package data, and the requests that run them.

Every acquisition builds two requests, so their constant parts (digest, keys, ttl, owner) are cached and only the holder
id is inserted. `Script.in_full` turns a request by digest into one with the script's text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha1
from importlib.resources import files
from math import ceil

from lockfast.stores.redis.keys import META_PATTERN, keys_of
from lockfast.stores.redis.protocol.resp import bulks, pack
from lockfast.values import Claim, Enqueue, Renewal


def _read(name: str) -> str:
    """Return a script's text, with the files that it includes."""
    text = files(__package__).joinpath(name).read_text("utf-8")
    return re.sub(r"^ *-- include (\S+)\n", lambda line: _read(line[1]), text, flags=re.MULTILINE)


class Script:
    """One script: its text, its digest, and the start of its requests."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.text = _read(f"{name}.lua").encode()
        self.digest = sha1(self.text, usedforsecurity=False).hexdigest()
        self._by_digest = bulks(b"EVALSHA", self.digest.encode())
        self._by_text = bulks(b"EVAL", self.text)

    def head(self, key_count: int, packed_keys: bytes, arg_count: int) -> bytes:
        """A request up to its arguments; `packed_keys` are encoded with `resp.bulks`."""
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
"""Sent before a renewal: the server then reports external changes of the keys that the renewal reads. If it denies
this, the next renewal detects them."""

_NOT_QUEUED = bulks(b"", b"0", b"")


@lru_cache(maxsize=8192)
def _release_head(name: str, id_size: int) -> bytes:
    """The part of a release before the holder id."""
    return RELEASE.head(4, keys_of(name).packed, 1) + b"$%d\r\n" % id_size


@lru_cache(maxsize=8192)
def _acquire_parts(name: str, ttl: float, owner: str, id_size: int) -> tuple[bytes, bytes]:
    """The parts of an acquisition without a queue entry, before and after the holder id."""
    head = ACQUIRE.head(4, keys_of(name).packed, 7) + b"$%d\r\n" % id_size
    return head, b"\r\n" + bulks(_milliseconds(ttl), owner.encode()) + _NOT_QUEUED + bulks(b"1")


_latest: tuple[Claim | None, Enqueue | None, bytes] = (None, None, b"")


def acquire_request(claim: Claim, enqueue: Enqueue | None) -> bytes:
    name, holder, ttl, owner, fences, floor = claim
    if enqueue is None and fences == 1 and not floor:
        head, tail = _acquire_parts(name, ttl, owner, len(holder))
        return head + holder.encode("ascii") + tail
    return _full_acquire_request(claim, enqueue)


def _full_acquire_request(claim: Claim, enqueue: Enqueue | None) -> bytes:
    """Build the request, or reuse the latest: a quorum sends the same claim to each of its nodes."""
    global _latest
    latest_claim, latest_enqueue, request = _latest
    if claim is latest_claim and enqueue is latest_enqueue:
        return request
    args = bulks(claim.holder.encode("ascii"), _milliseconds(claim.ttl), claim.owner.encode())
    args += _NOT_QUEUED if enqueue is None else _queue_args(enqueue)
    args += bulks(b"%d" % claim.fences)
    if claim.floor:
        args += bulks(b"%d" % claim.floor)
    request = ACQUIRE.head(4, keys_of(claim.name).packed, 8 if claim.floor else 7) + args
    _latest = (claim, enqueue, request)
    return request


def _queue_args(enqueue: Enqueue) -> bytes:
    ticket = b"" if enqueue.ticket is None else b"%d" % enqueue.ticket
    return bulks(enqueue.address.encode(), b"%d" % enqueue.attempt, ticket)


def _milliseconds(seconds: float) -> bytes:
    return b"%d" % ceil(seconds * 1000)


def release_request(name: str, holder: str) -> bytes:
    return _release_head(name, len(holder)) + holder.encode("ascii") + b"\r\n"


def renew_request(renewals: Sequence[Renewal]) -> bytes:
    packed_keys = b"".join([keys_of(line.name).packed_pair for line in renewals])
    args = [arg for line in renewals for arg in (line.holder.encode(), _milliseconds(line.ttl))]
    if any(line.final for line in renewals):
        args.append(b"".join([b"1" if line.final else b"0" for line in renewals]))
    return RENEW.head(2 * len(renewals), packed_keys, len(args)) + bulks(*args)


def adopt_request(claim: Claim, old_holder: str) -> bytes:
    return _claim_request(ADOPT, claim, old_holder.encode())


def reassert_request(claim: Claim, fence: int) -> bytes:
    return _claim_request(REASSERT, claim, b"%d" % fence)


def _claim_request(script: Script, claim: Claim, last_arg: bytes) -> bytes:
    args = bulks(claim.holder.encode(), _milliseconds(claim.ttl), claim.owner.encode(), last_arg)
    return script.head(2, keys_of(claim.name).packed_pair, 4) + args


def inspect_request(name: str, max_waiters: int) -> bytes:
    return INSPECT.head(4, keys_of(name).packed, 1) + bulks(b"%d" % max_waiters)


def list_request(names: Sequence[str]) -> bytes:
    return LIST.head(4 * len(names), b"".join([keys_of(name).packed for name in names]), 0)


def scan_request(cursor: str, count: int) -> bytes:
    return pack(b"SCAN", cursor.encode(), b"MATCH", META_PATTERN, b"COUNT", b"%d" % count)


def force_release_request(name: str, holder: bytes) -> bytes:
    return FORCE_RELEASE.head(4, keys_of(name).packed, 1) + bulks(holder)
