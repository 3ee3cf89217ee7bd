"""Commands of the virtual server: those that the shipped scripts and the locks of the gallery use.

A reply is bytes, an int, None, a list of these, or a `Status`; an error reply is raised as `ReplyError`.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

from lockfast.stores.redis.protocol.resp import ReplyError

if TYPE_CHECKING:
    from verify.virtual_server import VirtualRedis

WRONGTYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"


class Status(NamedTuple):
    """A status reply such as OK: a simple string on the wire, a table inside a script."""

    text: bytes


OK = Status(b"OK")


class Entry(NamedTuple):
    """One key's value: bytes, a sorted tuple of (score, member), or a sorted tuple of (field, value)."""

    kind: str
    value: Any
    expires_ms: int | None = None


def run(server: VirtualRedis, args: list[bytes]) -> Any:
    """Execute one plain command."""
    found = _COMMANDS.get(args[0].upper())
    if found is None:
        raise ReplyError(f"ERR unknown command '{args[0].decode('utf-8', 'replace')}'")
    command, least = found
    if len(args) - 1 < least:
        raise ReplyError(f"ERR wrong number of arguments for '{args[0].decode().lower()}' command")
    return command(server, args[1:])


def _entry(server: VirtualRedis, key: bytes, kind: str) -> Entry | None:
    entry = server.data.get(key)
    if entry is not None and entry.kind != kind:
        raise ReplyError(WRONGTYPE)
    return entry


def _put(server: VirtualRedis, key: bytes, kind: str, value: Any) -> None:
    """Store a value and keep the key's expiry; an empty collection deletes the key."""
    old = server.data.get(key)
    if kind != "string" and not value:
        server.data.pop(key, None)
    else:
        server.data[key] = Entry(kind, value, old.expires_ms if old else None)


def _integer(value: bytes) -> int:
    try:
        return int(value)
    except ValueError:
        raise ReplyError("ERR value is not an integer or out of range") from None


def _double(value: bytes) -> float:
    try:
        return float(value)
    except ValueError:
        raise ReplyError("ERR value is not a valid float") from None


def _shown(score: float) -> bytes:
    return b"%d" % int(score) if score == int(score) else repr(score).encode()


def _get(server: VirtualRedis, args: list[bytes]) -> Any:
    entry = _entry(server, args[0], "string")
    return None if entry is None else entry.value


def _set(server: VirtualRedis, args: list[bytes]) -> Any:
    key, value, *options = args
    flags: set[bytes] = set()
    expires: int | None = None
    at = 0
    while at < len(options):
        word = options[at].upper()
        if word in (b"PX", b"EX"):
            if at + 1 >= len(options):
                raise ReplyError("ERR syntax error")
            expires = _expires(server, options[at + 1], 1 if word == b"PX" else 1000, "set")
            at += 1
        elif word in (b"NX", b"XX", b"GET", b"KEEPTTL"):
            flags.add(word)
        else:
            raise ReplyError("ERR syntax error")
        at += 1
    old = server.data.get(key)
    before = _get(server, [key]) if b"GET" in flags else None
    if (b"NX" in flags and old is not None) or (b"XX" in flags and old is None):
        return before
    if b"KEEPTTL" in flags and old is not None:
        expires = old.expires_ms
    server.data[key] = Entry("string", value, expires)
    return before if b"GET" in flags else OK


def _expires(server: VirtualRedis, value: bytes, unit_ms: int, command: str) -> int:
    number = _integer(value)
    if number <= 0:
        raise ReplyError(f"ERR invalid expire time in '{command}' command")
    return server.now_ms + number * unit_ms


def _setex(unit_ms: int, command: str) -> Callable[[VirtualRedis, list[bytes]], Any]:
    def setex(server: VirtualRedis, args: list[bytes]) -> Any:
        server.data[args[0]] = Entry("string", args[2], _expires(server, args[1], unit_ms, command))
        return OK

    return setex


def _setnx(server: VirtualRedis, args: list[bytes]) -> int:
    return int(_set(server, [args[0], args[1], b"NX"]) is OK)


def _incr(server: VirtualRedis, args: list[bytes]) -> int:
    entry = _entry(server, args[0], "string")
    number = (0 if entry is None else _integer(entry.value)) + 1
    _put(server, args[0], "string", b"%d" % number)
    return number


def _bits(server: VirtualRedis, key: bytes) -> str:
    """The bits of a string, the first one first."""
    entry = _entry(server, key, "string")
    return "" if entry is None else "".join(f"{byte:08b}" for byte in entry.value)


def _setbit(server: VirtualRedis, args: list[bytes]) -> int:
    at, bit = _integer(args[1]), args[2].decode()
    bits = _bits(server, args[0])
    bits = bits.ljust((max(at + 1, len(bits)) + 7) // 8 * 8, "0")
    changed = bits[:at] + bit + bits[at + 1 :]
    value = bytes(int(changed[start : start + 8], 2) for start in range(0, len(changed), 8))
    _put(server, args[0], "string", value)
    return int(bits[at])


def _bitpos(server: VirtualRedis, args: list[bytes]) -> int:
    bits, bit = _bits(server, args[0]), args[1].decode()
    at = bits.find(bit)
    return len(bits) if at < 0 and bit == "0" else at


def _bitcount(server: VirtualRedis, args: list[bytes]) -> int:
    return _bits(server, args[0]).count("1")


def _del(server: VirtualRedis, args: list[bytes]) -> int:
    return sum(server.data.pop(key, None) is not None for key in args)


def _exists(server: VirtualRedis, args: list[bytes]) -> int:
    return sum(key in server.data for key in args)


def _type(server: VirtualRedis, args: list[bytes]) -> Status:
    entry = server.data.get(args[0])
    return Status(b"none" if entry is None else entry.kind.encode())


def _expire(unit_ms: int) -> Callable[[VirtualRedis, list[bytes]], int]:
    def expire(server: VirtualRedis, args: list[bytes]) -> int:
        entry = server.data.get(args[0])
        span = _integer(args[1]) * unit_ms
        if entry is None:
            return 0
        if span <= 0:
            del server.data[args[0]]
        else:
            server.data[args[0]] = entry._replace(expires_ms=server.now_ms + span)
        return 1

    return expire


def _pttl(server: VirtualRedis, args: list[bytes]) -> int:
    entry = server.data.get(args[0])
    if entry is None:
        return -2
    return -1 if entry.expires_ms is None else max(0, entry.expires_ms - server.now_ms)


def _ttl(server: VirtualRedis, args: list[bytes]) -> int:
    left = _pttl(server, args)
    return left if left < 0 else (left + 500) // 1000


def _persist(server: VirtualRedis, args: list[bytes]) -> int:
    entry = server.data.get(args[0])
    if entry is None or entry.expires_ms is None:
        return 0
    server.data[args[0]] = entry._replace(expires_ms=None)
    return 1


def _scores(server: VirtualRedis, key: bytes) -> dict[bytes, float]:
    entry = _entry(server, key, "zset")
    return {} if entry is None else {member: score for score, member in entry.value}


def _save_scores(server: VirtualRedis, key: bytes, scores: dict[bytes, float]) -> None:
    _put(server, key, "zset", tuple(sorted((score, member) for member, score in scores.items())))


def _ranked(server: VirtualRedis, key: bytes) -> list[tuple[float, bytes]]:
    entry = _entry(server, key, "zset")
    return [] if entry is None else list(entry.value)


def _zadd(server: VirtualRedis, args: list[bytes]) -> int:
    if len(args) % 2 == 0:
        raise ReplyError("ERR syntax error")
    pairs = [(_double(args[at]), args[at + 1]) for at in range(1, len(args), 2)]
    scores = _scores(server, args[0])
    added = 0
    for score, member in pairs:
        added += member not in scores
        scores[member] = score
    _save_scores(server, args[0], scores)
    return added


def _zscore(server: VirtualRedis, args: list[bytes]) -> bytes | None:
    score = _scores(server, args[0]).get(args[1])
    return None if score is None else _shown(score)


def _zrem(server: VirtualRedis, args: list[bytes]) -> int:
    scores = _scores(server, args[0])
    removed = sum(scores.pop(member, None) is not None for member in args[1:])
    if removed:
        _save_scores(server, args[0], scores)
    return removed


def _zrank(server: VirtualRedis, args: list[bytes]) -> int | None:
    members = [member for _, member in _ranked(server, args[0])]
    return members.index(args[1]) if args[1] in members else None


def _zrange(backwards: bool) -> Callable[[VirtualRedis, list[bytes]], list[bytes]]:
    def zrange(server: VirtualRedis, args: list[bytes]) -> list[bytes]:
        ranked = _ranked(server, args[0])
        if backwards:
            ranked.reverse()
        start, stop = (number if number >= 0 else number + len(ranked) for number in map(_integer, args[1:3]))
        chosen = ranked[max(0, start) : stop + 1]
        if len(args) > 3 and args[3].upper() == b"WITHSCORES":
            return [word for score, member in chosen for word in (member, _shown(score))]
        return [member for _, member in chosen]

    return zrange


def _zrangebyscore(server: VirtualRedis, args: list[bytes]) -> list[bytes]:
    least, most, *options = args[1:]
    low, high = _double(least.lstrip(b"(")), _double(most.lstrip(b"("))
    chosen = [
        (score, member)
        for score, member in _ranked(server, args[0])
        if (low < score or (low == score and not least.startswith(b"(")))
        and (score < high or (score == high and not most.startswith(b"(")))
    ]
    words = [option.upper() for option in options]
    if b"LIMIT" in words:
        at = words.index(b"LIMIT")
        start, count = _integer(options[at + 1]), _integer(options[at + 2])
        chosen = chosen[start : start + count]
    if b"WITHSCORES" in words:
        return [word for score, member in chosen for word in (member, _shown(score))]
    return [member for _, member in chosen]


def _zpopmin(server: VirtualRedis, args: list[bytes]) -> list[bytes]:
    ranked = _ranked(server, args[0])
    if not ranked:
        return []
    score, member = ranked[0]
    _put(server, args[0], "zset", tuple(ranked[1:]))
    return [member, _shown(score)]


def _zcard(server: VirtualRedis, args: list[bytes]) -> int:
    return len(_ranked(server, args[0]))


def _fields(server: VirtualRedis, key: bytes) -> dict[bytes, bytes]:
    entry = _entry(server, key, "hash")
    return {} if entry is None else dict(entry.value)


def _hset(server: VirtualRedis, args: list[bytes]) -> int:
    if len(args) % 2 == 0:
        raise ReplyError("ERR wrong number of arguments for 'hset' command")
    fields = _fields(server, args[0])
    added = 0
    for at in range(1, len(args), 2):
        added += args[at] not in fields
        fields[args[at]] = args[at + 1]
    _put(server, args[0], "hash", tuple(sorted(fields.items())))
    return added


def _hget(server: VirtualRedis, args: list[bytes]) -> bytes | None:
    return _fields(server, args[0]).get(args[1])


def _hexists(server: VirtualRedis, args: list[bytes]) -> int:
    return int(args[1] in _fields(server, args[0]))


def _hdel(server: VirtualRedis, args: list[bytes]) -> int:
    fields = _fields(server, args[0])
    removed = sum(fields.pop(field, None) is not None for field in args[1:])
    if removed:
        _put(server, args[0], "hash", tuple(sorted(fields.items())))
    return removed


def _hgetall(server: VirtualRedis, args: list[bytes]) -> list[bytes]:
    return [word for pair in sorted(_fields(server, args[0]).items()) for word in pair]


def _publish(server: VirtualRedis, args: list[bytes]) -> int:
    return server.publish(args[0], args[1])


def _time(server: VirtualRedis, args: list[bytes]) -> list[bytes]:
    return [b"%d" % (server.now_us // 1_000_000), b"%d" % (server.now_us % 1_000_000)]


def _scan(server: VirtualRedis, args: list[bytes]) -> list[Any]:
    """Return all keys in one page and ignore COUNT, as a real server may."""
    options = {args[at].upper(): args[at + 1] for at in range(1, len(args) - 1, 2)}
    _integer(args[0])
    pattern = options.get(b"MATCH", b"*").decode("utf-8", "surrogateescape")
    found = [key for key in server.data if fnmatchcase(key.decode("utf-8", "surrogateescape"), pattern)]
    return [b"0", sorted(found)]


def _flush(server: VirtualRedis, args: list[bytes]) -> Status:
    server.data.clear()
    return OK


def _ping(server: VirtualRedis, args: list[bytes]) -> Status:
    return Status(b"PONG")


_COMMANDS: dict[bytes, tuple[Callable[[VirtualRedis, list[bytes]], Any], int]] = {
    b"GET": (_get, 1),
    b"SET": (_set, 2),
    b"SETEX": (_setex(1000, "setex"), 3),
    b"PSETEX": (_setex(1, "psetex"), 3),
    b"SETNX": (_setnx, 2),
    b"INCR": (_incr, 1),
    b"DEL": (_del, 1),
    b"EXISTS": (_exists, 1),
    b"TYPE": (_type, 1),
    b"PEXPIRE": (_expire(1), 2),
    b"EXPIRE": (_expire(1000), 2),
    b"PTTL": (_pttl, 1),
    b"TTL": (_ttl, 1),
    b"PERSIST": (_persist, 1),
    b"ZADD": (_zadd, 3),
    b"ZSCORE": (_zscore, 2),
    b"ZREM": (_zrem, 2),
    b"ZRANK": (_zrank, 2),
    b"ZRANGE": (_zrange(False), 3),
    b"ZREVRANGE": (_zrange(True), 3),
    b"ZRANGEBYSCORE": (_zrangebyscore, 3),
    b"ZPOPMIN": (_zpopmin, 1),
    b"ZCARD": (_zcard, 1),
    b"HSET": (_hset, 3),
    b"HGET": (_hget, 2),
    b"HDEL": (_hdel, 2),
    b"HEXISTS": (_hexists, 2),
    b"SETBIT": (_setbit, 3),
    b"BITPOS": (_bitpos, 2),
    b"BITCOUNT": (_bitcount, 1),
    b"HGETALL": (_hgetall, 1),
    b"PUBLISH": (_publish, 2),
    b"TIME": (_time, 0),
    b"SCAN": (_scan, 1),
    b"FLUSHALL": (_flush, 0),
    b"FLUSHDB": (_flush, 0),
    b"PING": (_ping, 0),
}
