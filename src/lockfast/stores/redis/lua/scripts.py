"""The Lua scripts, loaded as package data, and the requests that run them.

`Script.in_full` turns a request by digest into one with the script's text. The two requests of every cycle are built in
`store.py`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import sha1
from importlib.resources import files
from math import ceil

from lockfast.stores.redis.keys import META_PATTERN, keys_of
from lockfast.stores.redis.protocol.resp import bulks, pack
from lockfast.values import Claim, Renewal


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


def milliseconds(seconds: float) -> bytes:
    return b"%d" % ceil(seconds * 1000)


def renew_request(renewals: Sequence[Renewal]) -> bytes:
    packed_keys = b"".join([keys_of(line.name).packed_pair for line in renewals])
    args = [arg for line in renewals for arg in (line.holder.encode(), milliseconds(line.ttl))]
    if any(line.final for line in renewals):
        args.append(b"".join([b"1" if line.final else b"0" for line in renewals]))
    return RENEW.head(2 * len(renewals), packed_keys, len(args)) + bulks(*args)


def adopt_request(claim: Claim, old_holder: str) -> bytes:
    return _claim_request(ADOPT, claim, old_holder.encode())


def reassert_request(claim: Claim, fence: int) -> bytes:
    return _claim_request(REASSERT, claim, b"%d" % fence)


def _claim_request(script: Script, claim: Claim, last_arg: bytes) -> bytes:
    args = bulks(claim.holder.encode(), milliseconds(claim.ttl), claim.owner.encode(), last_arg)
    return script.head(2, keys_of(claim.name).packed_pair, 4) + args


def inspect_request(name: str, max_waiters: int) -> bytes:
    return INSPECT.head(4, keys_of(name).packed, 1) + bulks(b"%d" % max_waiters)


def list_request(names: Sequence[str]) -> bytes:
    return LIST.head(4 * len(names), b"".join([keys_of(name).packed for name in names]), 0)


def scan_request(cursor: str, count: int) -> bytes:
    return pack(b"SCAN", cursor.encode(), b"MATCH", META_PATTERN, b"COUNT", b"%d" % count)


def force_release_request(name: str, holder: bytes) -> bytes:
    return FORCE_RELEASE.head(4, keys_of(name).packed, 1) + bulks(holder)
