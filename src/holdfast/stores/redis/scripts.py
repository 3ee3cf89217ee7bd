"""The Lua scripts, loaded as package data, and the requests that run them."""

from __future__ import annotations

from hashlib import sha1
from importlib.resources import files

from holdfast.stores.redis.resp import bulks


class Script:
    """One script: by its digest, or in full for a server that does not have it (yet, or any more)."""

    def __init__(self, name: str, *, grants: bool) -> None:
        folder = files(__package__).joinpath("scripts")
        own = folder.joinpath(f"{name}.lua").read_text("utf-8")
        shared = folder.joinpath("_shared.lua").read_text("utf-8") if grants else ""
        self.name = name
        self.text = (shared + own).encode()
        self._by_digest = bulks(b"EVALSHA", sha1(self.text, usedforsecurity=False).hexdigest().encode())
        self._in_full = bulks(b"EVAL", self.text)

    def request(self, key_count: int, packed_keys: bytes, *args: bytes, in_full: bool = False) -> bytes:
        """The request that runs the script; `packed_keys` are keys as `resp.bulks` writes them."""
        head = self._in_full if in_full else self._by_digest
        return b"*%d\r\n%b%b%b%b" % (
            3 + key_count + len(args),
            head,
            bulks(b"%d" % key_count),
            packed_keys,
            bulks(*args),
        )


ACQUIRE = Script("acquire", grants=True)
RELEASE = Script("release", grants=True)
RENEW = Script("renew", grants=False)
ADOPT = Script("adopt", grants=True)
INSPECT = Script("inspect", grants=False)
