"""Replies of a Redis or Valkey server as values: `LockInfo` of a lock, `Facts` of the server.

Rules: a server that denies INFO, CONFIG or TIME yields unknown facts, not errors. Text that strangers can choose is
cleaned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lockfast.facts import Facts, Persistence
from lockfast.stores.redis.protocol.resp import pack
from lockfast.values import HolderInfo, LockInfo, Mode, Owner, WaiterInfo, clean, mode_of

INFO_FIELDS = 7  # values per lock in a reply to `list.lua`; `inspect.lua` adds three per waiter
MODES = {b"lockfast:read": Mode.READ, b"lockfast:permits": Mode.PERMITS}
"""The value of a lock key while shared grants are live, and the mode of these grants."""
FACTS_REQUESTS = (
    pack(b"INFO"),
    pack(b"CONFIG", b"GET", b"save"),
    pack(b"CONFIG", b"GET", b"appendfsync"),
    pack(b"TIME"),
)
IDENTITY_REQUEST = pack(b"INFO", b"server")


def info_of(name: str, reply: list[Any]) -> LockInfo:
    """Read a reply to `inspect.lua`, or one lock's part of a reply to `list.lua`."""
    exists, holder, pttl, meta, now_us, waiting, shared = reply[:INFO_FIELDS]
    fence, holder_start, owner = _meta(meta)
    rows = [reply[at : at + 3] for at in range(INFO_FIELDS, len(reply), 3)]
    waiters = [_waiter(now_us, *row) for row in rows if not _expired(now_us, row[2])]
    common = {"fence": fence, "waiters": tuple(waiters), "waiting": waiting - len(rows) + len(waiters)}
    if not exists:
        return LockInfo(name, **common)
    mode = MODES.get(holder)
    if mode is not None:
        holders = [_shared_holder(now_us, mode, *shared[at : at + 3]) for at in range(0, len(shared), 3)]
        return LockInfo(name, tuple(sorted(holders, key=lambda one: one.fence or 0)), **common)
    ours = holder_start is not None and holder[:6] == holder_start
    held_for = max(0.0, (now_us - fence) / 1e6) if ours and fence is not None else None
    ttl_left = None if pttl < 0 else pttl / 1000
    info = HolderInfo(_text(holder), owner if ours else None, fence if ours else None, held_for, ttl_left)
    return LockInfo(name, (info,), **common)


def _meta(value: bytes) -> tuple[int | None, bytes | None, Owner | None]:
    """The fence (which is also the time of the grant), the start of the holder id, and the owner; Nones if foreign."""
    parts = value.split(b" ", 2)
    if len(parts) < 3 or not parts[0].isdigit():
        return None, None, None
    return int(parts[0]), parts[1], Owner.decode(parts[2].decode("utf-8", "replace"))


def _shared_holder(now_us: int, mode: Mode, holder: bytes, deadline: bytes, entry: bytes) -> HolderInfo:
    fence, _, _, slots, owner = entry.split(b" ", 4)
    left, held_for = (int(deadline) - now_us) / 1e6, max(0.0, (now_us - int(fence)) / 1e6)
    decoded = Owner.decode(owner.decode("utf-8", "replace"))
    return HolderInfo(_text(holder), decoded, int(fence), held_for, left, mode, slots_in(slots))


def slots_in(text: bytes) -> tuple[int, ...]:
    """The slots in a grant of permits.

    >>> slots_in(b"0,3"), slots_in(b"-")
    ((0, 3), ())
    """
    return () if text == b"-" else tuple(map(int, text.split(b",")))


def _expired(now_us: int, entry: bytes) -> bool:
    """Whether the ticket of a waiter has expired."""
    parts = entry.split(b" ", 3)
    return len(parts) == 4 and int(parts[2]) * 1000 <= now_us


def _waiter(now_us: int, holder: bytes, ticket: bytes, entry: bytes) -> WaiterInfo:
    parts = entry.split(b" ", 7)
    waiting_for = max(0.0, (now_us - int(ticket)) / 1e6)
    if len(parts) < 8:
        return WaiterInfo(_text(holder), None, waiting_for)
    weight, limit = int(parts[5]), int(parts[6])
    owner = Owner.decode(parts[7].decode("utf-8", "replace"))
    return WaiterInfo(_text(holder), owner, waiting_for, mode_of(weight, limit), weight if limit else 0)


def _text(value: bytes) -> str:
    return clean(value.decode("utf-8", "replace"))


def facts_in(replies: Sequence[Any], wall_time: float) -> Facts:
    """Read the replies to `FACTS_REQUESTS`; `wall_time` is the local time of day at the last of them."""
    info, save, fsync, server_time = replies
    fields = _fields(info)
    role = fields.get("role")
    clock_us = _number(fields.get("server_time_usec"))
    return Facts(
        "valkey" if "valkey_version" in fields else "redis",
        version=fields.get("valkey_version") or fields.get("redis_version"),
        role="replica" if role == "slave" else role,
        persistence=_persistence(fields, _setting(save), _setting(fsync)),
        eviction=fields.get("maxmemory_policy"),
        memory_limit=_number(fields.get("maxmemory")),
        replicas=_number(fields.get("connected_slaves")),
        clock=None if clock_us is None else clock_us / 1e6,
        clock_offset=_offset(server_time, wall_time),
        uptime=_number(fields.get("uptime_in_seconds")),
        identity=fields.get("run_id"),
    )


def _fields(info: Any) -> dict[str, str]:
    """The lines of an INFO reply.

    >>> _fields(b"# Server\\r\\nrun_id:abc\\r\\n")
    {'run_id': 'abc'}
    """
    if not isinstance(info, bytes):
        return {}
    lines = (line.partition(":") for line in info.decode("utf-8", "replace").splitlines())
    return {field: clean(value) for field, separator, value in lines if separator}


def _setting(reply: Any) -> str | None:
    """The value in a CONFIG GET reply, a list in RESP2 and a map in RESP3; None if it is missing."""
    if isinstance(reply, Mapping):
        reply = [part for pair in reply.items() for part in pair]
    if not isinstance(reply, list) or len(reply) < 2 or not isinstance(reply[1], bytes):
        return None
    return reply[1].decode("utf-8", "replace")


def _persistence(fields: Mapping[str, str], save: str | None, fsync: str | None) -> Persistence | None:
    """The append-only file decides; without it, snapshots.

    >>> _persistence({"aof_enabled": "1"}, None, "always").name, _persistence({"aof_enabled": "0"}, "", None).name
    ('LOG_ALWAYS', 'NONE')
    """
    if fields.get("aof_enabled") == "1":
        return Persistence.LOG_ALWAYS if fsync == "always" else Persistence.LOG
    if save is None or "aof_enabled" not in fields:
        return None
    return Persistence.SNAPSHOTS if save else Persistence.NONE


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdecimal() else None


def _offset(server_time: Any, wall_time: float) -> float | None:
    """Seconds by which the server's clock is ahead of the local one, from a TIME reply."""
    if not isinstance(server_time, list) or len(server_time) != 2:
        return None
    seconds, micros = (int(part) for part in server_time)
    return round(seconds + micros / 1e6 - wall_time, 3)
