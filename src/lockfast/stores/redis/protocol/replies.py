"""What a Redis or Valkey server tells about itself, read into `Facts`.

Rules kept here: an account that may not ask (INFO, CONFIG, TIME) gets unknowns, not errors; text of the server's is
cleaned; nothing here changes anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lockfast.facts import Facts, Persistence
from lockfast.stores.redis.protocol.resp import ReplyError, pack
from lockfast.values import LockInfo, Owner, WaiterInfo, clean

REQUESTS = (
    pack(b"INFO"),
    pack(b"CONFIG", b"GET", b"save"),
    pack(b"CONFIG", b"GET", b"appendfsync"),
    pack(b"TIME"),
)

WHO = pack(b"INFO", b"server")


def facts_in(replies: Sequence[Any], wall: float) -> Facts:
    """The facts in the replies to `REQUESTS`; `wall` is our own time of day when the last of them came."""
    info, save, fsync, time = replies
    told = _fields(info)
    role = told.get("role")
    return Facts(
        "valkey" if "valkey_version" in told else "redis",
        version=told.get("valkey_version") or told.get("redis_version"),
        role="replica" if role == "slave" else role,
        persistence=_persistence(told, _setting(save), _setting(fsync)),
        eviction=told.get("maxmemory_policy"),
        memory_limit=_number(told.get("maxmemory")),
        replicas=_number(told.get("connected_slaves")),
        clock=_seconds(told.get("server_time_usec")),
        clock_offset=_offset(time, wall),
        uptime=_number(told.get("uptime_in_seconds")),
        identity=told.get("run_id"),
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
    """The value in a reply to CONFIG GET, which is a list in RESP2 and a map in RESP3; None when it is not told."""
    if isinstance(reply, Mapping):
        reply = [part for pair in reply.items() for part in pair]
    if isinstance(reply, ReplyError) or not isinstance(reply, list) or len(reply) < 2:
        return None
    return reply[1].decode("utf-8", "replace") if isinstance(reply[1], bytes) else None


def _persistence(told: Mapping[str, str], save: str | None, fsync: str | None) -> Persistence | None:
    """The log is what counts; snapshots are what is left without it.

    >>> _persistence({"aof_enabled": "1"}, None, "always").name, _persistence({"aof_enabled": "0"}, "", None).name
    ('LOG_ALWAYS', 'NONE')
    """
    if told.get("aof_enabled") == "1":
        return Persistence.LOG_ALWAYS if fsync == "always" else Persistence.LOG
    if save is None or "aof_enabled" not in told:
        return None
    return Persistence.SNAPSHOTS if save else Persistence.NONE


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdecimal() else None


def _seconds(microseconds: str | None) -> float | None:
    number = _number(microseconds)
    return None if number is None else number / 1e6


def _offset(time: Any, wall: float) -> float | None:
    if not isinstance(time, list) or len(time) != 2:
        return None
    seconds, micros = (int(part) for part in time)
    return round(seconds + micros / 1e6 - wall, 3)


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
