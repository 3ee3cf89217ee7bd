"""What a transaction writes, decided from what it read: pure, and the same rules as in the scripts.

Rules kept here, as in `scripts/_grant.lua`: the fence is the server's time, or one more than the last (as many more as
are reserved) if that is not less, or where none is known begins at the time; a repeat gives the same fence and never
shortens; only the holder's own grant is prolonged or removed.
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


class Step(NamedTuple, Generic[T]):
    """What to answer, and what has to be written for it to be true."""

    answer: T
    writes: tuple[bytes, ...] = ()


def peek(keys: Keys) -> list[bytes]:
    """Who holds, and for how long."""
    return [pack(b"GET", keys.lock), pack(b"PTTL", keys.lock)]


def look(keys: Keys) -> list[bytes]:
    """All that a grant depends on."""
    return [pack(b"GET", keys.lock), pack(b"GET", keys.meta), pack(b"PTTL", keys.lock), pack(b"TIME")]


def microseconds(time: Sequence[bytes]) -> int:
    """
    >>> microseconds([b"1700000000", b"42"])
    1700000000000042
    """
    seconds, micros = time
    return int(seconds) * 1_000_000 + int(micros)


def fence_in(meta: bytes | None) -> int:
    """
    >>> fence_in(b"17 abcdef host:1:"), fence_in(None), fence_in(b"nonsense")
    (17, 0, 0)
    """
    digits = (meta or b"").split(b" ", 1)[0]
    return int(digits) if digits.isdigit() else 0


def _grant(claim: Claim, meta: bytes | None, time: Sequence[bytes]) -> Step[int]:
    keys, ttl_ms = keys_of(claim.name), ceil(claim.ttl * 1000)
    now = microseconds(time)
    fence = max(now, (fence_in(meta) or now - 1) + claim.fences)
    about = b"%d %b %b" % (fence, claim.holder[:6].encode(), claim.owner.encode())
    take = pack(b"SET", keys.lock, claim.holder.encode(), b"PX", b"%d" % ttl_ms)
    return Step(fence, (take, pack(b"SET", keys.meta, about, b"PX", b"%d" % (ttl_ms + DAY_MS))))


def _again(claim: Claim, meta: bytes | None, left_ms: int, time: Sequence[bytes]) -> Step[int]:
    """The same grant once more."""
    fence = fence_in(meta)
    if not fence:
        return _grant(claim, meta, time)
    return Step(fence, _prolong(keys_of(claim.name).lock, left_ms, ceil(claim.ttl * 1000)))


def _prolong(lock: bytes, left_ms: int, ttl_ms: int) -> tuple[bytes, ...]:
    return (pack(b"PEXPIRE", lock, b"%d" % ttl_ms),) if left_ms < ttl_ms else ()


def take(
    claim: Claim, held: bytes | None, meta: bytes | None, left_ms: int, time: Sequence[bytes]
) -> Step[tuple[int | None, int]]:
    """The fence, or None and how many milliseconds the other's grant still has."""
    if held is not None and held != claim.holder.encode():
        return Step((None, left_ms))
    step = _grant(claim, meta, time) if held is None else _again(claim, meta, left_ms, time)
    return Step((step.answer, left_ms), step.writes)


def adopt(
    claim: Claim, old_holder: str, held: bytes | None, meta: bytes | None, left_ms: int, time: Sequence[bytes]
) -> Step[int | None]:
    """The fence, or None when the lock is neither's."""
    if held == claim.holder.encode():
        again = _again(claim, meta, left_ms, time)
        return Step(again.answer, again.writes)
    if held != old_holder.encode():
        return Step(None)
    granted = _grant(claim, meta, time)
    return Step(granted.answer, granted.writes)


def release(lock: bytes, holder: str, held: bytes | None) -> Step[bool]:
    """Whether it was the holder's."""
    return Step(True, (pack(b"DEL", lock),)) if held == holder.encode() else Step(False)


def renew(renewals: Sequence[Renewal], told: Sequence[Any]) -> Step[list[bool]]:
    """For each line, by the replies to its `peek`; a key that holds other data is nobody's grant."""
    answers: list[bool] = []
    writes: list[bytes] = []
    for line, held, left_ms in zip(renewals, told[::2], told[1::2], strict=True):
        ours = not isinstance(held, ReplyError) and held == line.holder.encode()
        answers.append(ours)
        if ours:
            keys, ttl_ms = keys_of(line.name), ceil(line.ttl * 1000)
            writes += _prolong(keys.lock, -1 if line.final else left_ms, ttl_ms)  # a last word may shorten
            writes.append(pack(b"PEXPIRE", keys.meta, b"%d" % (ttl_ms + DAY_MS)))
    return Step(answers, tuple(writes))


def force_release(
    keys: Keys, holder: str, held: bytes | None, meta: bytes | None, left_ms: int, time: Sequence[bytes]
) -> Step[bool]:
    """Whether `holder`, as `inspect` tells it, had the lock; then the fence moves on."""
    if held is None or holder not in (held.decode("utf-8", "replace"), clean(held.decode("utf-8", "replace"))):
        return Step(False)
    fence = max(microseconds(time), fence_in(meta) + 1)
    note = pack(b"SET", keys.meta, b"%d - " % fence, b"PX", b"%d" % DAY_MS)
    return Step(True, (pack(b"DEL", keys.lock), note))
