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

from lockfast.stores.redis.keys import keys_of
from lockfast.stores.redis.protocol.resp import bulks, pack
from lockfast.values import Claim, Renewal


def _read(name: str) -> str:
    """Return a script's text, with the files that it includes."""
    text = files(__package__).joinpath(name).read_text("utf-8")
    return re.sub(r"^ *-- include (\S+)\n", lambda line: _read(line[1]), text, flags=re.MULTILINE)


class Script:
    """One script: its text, its digest and its requests. `keys` of each lock, all 7 or 2, are passed to it."""

    def __init__(self, name: str, *, keys: int = 7) -> None:
        self.name = name
        self._keys = keys
        self.text = _read(f"{name}.lua").encode()
        self.digest = sha1(self.text, usedforsecurity=False).hexdigest()
        self._by_digest = bulks(b"EVALSHA", self.digest.encode())
        self._by_text = bulks(b"EVAL", self.text)

    def head(self, key_count: int, packed_keys: bytes, arg_count: int) -> bytes:
        """A request up to its arguments; `packed_keys` are encoded with `resp.bulks`."""
        return b"*%d\r\n%b%b%b" % (3 + key_count + arg_count, self._by_digest, bulks(b"%d" % key_count), packed_keys)

    def request(self, names: Sequence[str], *args: bytes) -> bytes:
        keys = [keys_of(name) for name in names]
        packed = b"".join([one.packed if self._keys == 7 else one.packed_pair for one in keys])
        return self.head(self._keys * len(names), packed, len(args)) + bulks(*args)

    def in_full(self, request: bytes) -> bytes:
        """The same request with the script's text instead of its digest."""
        return request.replace(self._by_digest, self._by_text, 1)


ACQUIRE = Script("acquire")
RELEASE = Script("release")
RENEW = Script("renew", keys=2)
RENEW_SHARED = Script("renew_shared")
ADOPT = Script("adopt")
DOWNGRADE = Script("downgrade")
ACQUIRE_ALL = Script("acquire_all")
REASSERT = Script("reassert", keys=2)
INSPECT = Script("inspect")
LIST = Script("list")
FORCE_RELEASE = Script("force_release")

TRACK = (pack(b"CLIENT", b"TRACKING", b"ON", b"OPTIN", b"NOLOOP"), pack(b"CLIENT", b"CACHING", b"YES"))
"""Sent before a renewal: the server then reports external changes of the keys that the renewal reads. If it denies
this, the next renewal detects them."""
LOAD = tuple(pack(b"SCRIPT", b"LOAD", script.text) for script in (ACQUIRE, RENEW, RENEW_SHARED, DOWNGRADE))
"""Sent before the first request of a quorum. If the account may not load scripts, the first use of each loads it."""


def milliseconds(seconds: float) -> bytes:
    return b"%d" % ceil(seconds * 1000)


def renew_request(renewals: Sequence[Renewal]) -> bytes:
    """A request for renewals that are all shared, or all not."""
    args = [arg for line in renewals for arg in (line.holder.encode(), milliseconds(line.ttl))]
    if any(line.final for line in renewals):
        args.append(b"".join([b"1" if line.final else b"0" for line in renewals]))
    return renew_script(renewals).request([line.name for line in renewals], *args)


def renew_script(renewals: Sequence[Renewal]) -> Script:
    return RENEW_SHARED if renewals[0].shared else RENEW


def claim_request(script: Script, claim: Claim, *more: bytes) -> bytes:
    return script.request([claim.name], *claim_args(claim), *more)


def claim_args(claim: Claim) -> tuple[bytes, bytes, bytes]:
    return claim.holder.encode(), milliseconds(claim.ttl), claim.owner.encode()
