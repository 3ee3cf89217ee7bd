"""What a Redis or Valkey server tells about itself, read into `Facts`.

Rules kept here: an account that may not ask (INFO, CONFIG, TIME) gets unknowns, not errors; text of the server's is
cleaned; nothing here changes anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lockfast.facts import Facts, Persistence
from lockfast.stores.redis.protocol.resp import ReplyError, pack
from lockfast.values import clean

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
