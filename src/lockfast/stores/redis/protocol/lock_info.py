"""What the server tells of a lock, as `LockInfo`."""

from __future__ import annotations

from typing import Any

from lockfast.values import LockInfo, Owner, WaiterInfo, clean


def info_of(name: str, reply: list[Any]) -> LockInfo:
    exists, holder, pttl, meta, now_us, waiting = reply[:6]
    fence, holder_start, owner = _meta(meta)
    waiters = [_waiter(*reply[at : at + 3], now_us=now_us) for at in range(6, len(reply), 3)]
    common = {"fence": fence, "waiters": tuple(waiters), "waiting": waiting}
    if not exists:
        return LockInfo(name, **common)
    who = clean(holder.decode("utf-8", "replace"))
    by_us = holder_start is not None and holder[:6] == holder_start
    return LockInfo(
        name,
        holder=who,
        owner=owner if by_us else None,
        held_for=max(0.0, (now_us - fence) / 1e6) if by_us and fence is not None else None,
        ttl_left=None if pttl < 0 else pttl / 1000,
        **common,
    )


def _meta(value: bytes) -> tuple[int | None, bytes | None, Owner | None]:
    """The parts of `meta`; a key that strangers wrote into tells nothing. A fence is also when it was granted."""
    parts = value.split(b" ", 2)
    if len(parts) < 3 or not parts[0].isdigit():
        return None, None, None
    return int(parts[0]), parts[1], Owner.decode(parts[2].decode("utf-8", "replace"))


def _waiter(holder: bytes, ticket: bytes, entry: bytes, *, now_us: int) -> WaiterInfo:
    parts = entry.split(b" ", 5)
    owner = Owner.decode(parts[5].decode("utf-8", "replace")) if len(parts) == 6 else None
    return WaiterInfo(clean(holder.decode("utf-8", "replace")), owner, max(0.0, (now_us - int(ticket)) / 1e6))
