"""What a transaction writes, decided from the values it read. Pure functions.

The rules are those of `lua/_grant.lua`:

- A fence is the server's time in microseconds, or `claim.fences` more than the last fence if that is greater.
- A repeated claim gets the same fence and never a shorter ttl.
- Only the holder's own grant is extended or removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any, Generic, NamedTuple, TypeVar

from lockfast.stores.redis.keys import Keys, keys_of
from lockfast.stores.redis.protocol.resp import ReplyError, pack
from lockfast.values import Claim, Renewal, clean

T = TypeVar("T")

DAY_MS = 86_400_000
"""How long the fence of a free lock is remembered, in milliseconds."""


class Decision(NamedTuple, Generic[T]):
    """The answer, and the commands that make it true."""

    answer: T
    writes: tuple[bytes, ...] = ()


class Found(NamedTuple):
    """The replies to `grant_reads`."""

    holder: bytes | None
    meta: bytes | None
    left_ms: int
    time: Sequence[bytes]

    @property
    def now_us(self) -> int:
        """
        >>> Found(None, None, -2, [b"1700000000", b"42"]).now_us
        1700000000000042
        """
        seconds, microseconds = self.time
        return int(seconds) * 1_000_000 + int(microseconds)

    @property
    def fence(self) -> int:
        """
        >>> [Found(None, meta, -2, []).fence for meta in (b"17 abcdef host:1:", None, b"other data")]
        [17, 0, 0]
        """
        digits = (self.meta or b"").split(b" ", 1)[0]
        return int(digits) if digits.isdigit() else 0


def holder_reads(keys: Keys) -> list[bytes]:
    """Read the holder and the ttl left."""
    return [pack(b"GET", keys.lock), pack(b"PTTL", keys.lock)]


def grant_reads(keys: Keys) -> list[bytes]:
    """Read everything that a grant depends on."""
    return [pack(b"GET", keys.lock), pack(b"GET", keys.meta), pack(b"PTTL", keys.lock), pack(b"TIME")]


def acquire(claim: Claim, found: Found) -> Decision[int | None]:
    """The fence; None if another holder has the lock."""
    if found.holder is None:
        return _grant(claim, found)
    return _repeat(claim, found) if found.holder == claim.holder.encode() else Decision(None)


def adopt(claim: Claim, old_holder: str, found: Found) -> Decision[int | None]:
    """The fence; None if neither holder has the lock."""
    if found.holder == claim.holder.encode():
        return _repeat(claim, found)
    return _grant(claim, found) if found.holder == old_holder.encode() else Decision(None)


def _grant(claim: Claim, found: Found) -> Decision[int | None]:
    keys, ttl_ms = keys_of(claim.name), ceil(claim.ttl * 1000)
    fence = max(found.now_us, (found.fence or found.now_us - 1) + claim.fences)
    meta = b"%d %b %b" % (fence, claim.holder[:6].encode(), claim.owner.encode())
    lock = pack(b"SET", keys.lock, claim.holder.encode(), b"PX", b"%d" % ttl_ms)
    return Decision(fence, (lock, pack(b"SET", keys.meta, meta, b"PX", b"%d" % (ttl_ms + DAY_MS))))


def _repeat(claim: Claim, found: Found) -> Decision[int | None]:
    if not found.fence:
        return _grant(claim, found)
    return Decision(found.fence, _extend(keys_of(claim.name).lock, found.left_ms, ceil(claim.ttl * 1000)))


def _extend(lock: bytes, left_ms: int, ttl_ms: int) -> tuple[bytes, ...]:
    return (pack(b"PEXPIRE", lock, b"%d" % ttl_ms),) if left_ms < ttl_ms else ()


def release(lock: bytes, holder: str, found: bytes | None) -> Decision[bool]:
    """Whether `holder` had the lock."""
    return Decision(True, (pack(b"DEL", lock),)) if found == holder.encode() else Decision(False)


def renew(renewals: Sequence[Renewal], replies: Sequence[Any]) -> Decision[list[bool]]:
    """For each renewal, from the replies to its `holder_reads`. A key with other data is not the holder's."""
    answers: list[bool] = []
    writes: list[bytes] = []
    for renewal, holder, left_ms in zip(renewals, replies[::2], replies[1::2], strict=True):
        held = not isinstance(holder, ReplyError) and holder == renewal.holder.encode()
        answers.append(held)
        if held:
            keys, ttl_ms = keys_of(renewal.name), ceil(renewal.ttl * 1000)
            writes += _extend(keys.lock, -1 if renewal.final else left_ms, ttl_ms)  # a final renewal may shorten
            writes.append(pack(b"PEXPIRE", keys.meta, b"%d" % (ttl_ms + DAY_MS)))
    return Decision(answers, tuple(writes))


def force_release(keys: Keys, holder: str, found: Found) -> Decision[bool]:
    """Whether `holder`, as `inspect` shows it, had the lock. If so, the fence advances."""
    held = (found.holder or b"").decode("utf-8", "replace")
    if found.holder is None or holder not in (held, clean(held)):
        return Decision(False)
    fence = max(found.now_us, found.fence + 1)
    meta = pack(b"SET", keys.meta, b"%d - " % fence, b"PX", b"%d" % DAY_MS)
    return Decision(True, (pack(b"DEL", keys.lock), meta))
