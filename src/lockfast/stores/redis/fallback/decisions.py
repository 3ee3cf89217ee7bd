"""What a transaction writes: pure functions from the replies of the server to an answer and the writes for it.

They follow `lua/_fence.lua` and `lua/_shared.lua`: a fence is the server's time in microseconds, or `claim.fences` more
than the last fence if that is greater; a repeated claim gets the same fence and never a shorter ttl.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from typing import Any, Generic, NamedTuple, TypeVar

from lockfast.admission import LiveGrant, admit, free_at, refuse_other_mode
from lockfast.stores.redis.keys import Keys, keys_of
from lockfast.stores.redis.protocol.replies import MODES, slots_in
from lockfast.stores.redis.protocol.resp import ReplyError, pack
from lockfast.values import Claim, Granted, Mode, Renewal, clean, mode_of

T = TypeVar("T")

DAY_MS = 86_400_000  # for which the fence of a free lock is remembered
AUX_MS = 10_000  # by which the keys of shared grants outlast the lock, as in `lua/_shared.lua`
MARKERS = {mode: marker for marker, mode in MODES.items()}


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


def decide_acquire(claim: Claim, found: Found) -> Decision[int | None]:
    """The fence; None if another holder has the lock."""
    if found.holder is None:
        return _grant(claim, found)
    return _repeat(claim, found) if found.holder == claim.holder.encode() else Decision(None)


def decide_adopt(claim: Claim, old_holder: str, found: Found) -> Decision[int | None]:
    """The fence; None if neither holder has the lock."""
    if found.holder == claim.holder.encode():
        return _repeat(claim, found)
    return _grant(claim, found) if found.holder == old_holder.encode() else Decision(None)


def _grant(claim: Claim, found: Found) -> Decision[int | None]:
    fence = _next_fence(claim, found)
    lock = pack(b"SET", keys_of(claim.name).lock, claim.holder.encode(), b"PX", b"%d" % _ms(claim.ttl))
    return Decision(fence, (lock, _describe(claim, fence)))


def _next_fence(claim: Claim, found: Found) -> int:
    return max(found.now_us, (found.fence or found.now_us - 1) + claim.fences)


def _describe(claim: Claim, fence: int) -> bytes:
    """Write the metadata of a new grant."""
    meta = b"%d %b %b" % (fence, claim.holder[:6].encode(), claim.owner.encode())
    return pack(b"SET", keys_of(claim.name).meta, meta, b"PX", b"%d" % (_ms(claim.ttl) + DAY_MS))


def _advance_fence(keys: Keys, found: Found) -> bytes:
    """Write the metadata after a forced release."""
    fence = max(found.now_us, found.fence + 1)
    return pack(b"SET", keys.meta, b"%d - " % fence, b"PX", b"%d" % DAY_MS)


def _repeat(claim: Claim, found: Found) -> Decision[int | None]:
    if not found.fence:
        return _grant(claim, found)
    return Decision(found.fence, _extend(keys_of(claim.name).lock, found.left_ms, _ms(claim.ttl)))


def _extend(lock: bytes, left_ms: int, ttl_ms: int) -> tuple[bytes, ...]:
    return (pack(b"PEXPIRE", lock, b"%d" % ttl_ms),) if left_ms < ttl_ms else ()


def decide_renew(renewals: Sequence[Renewal], replies: Sequence[Any]) -> Decision[list[bool]]:
    """For each renewal, from the replies to its `holder_reads`. A key with other data is not the holder's."""
    answers: list[bool] = []
    writes: list[bytes] = []
    for renewal, holder, left_ms in zip(renewals, replies[::2], replies[1::2], strict=True):
        held = not isinstance(holder, ReplyError) and holder == renewal.holder.encode()
        answers.append(held)
        if held:
            keys, ttl_ms = keys_of(renewal.name), _ms(renewal.ttl)
            writes += _extend(keys.lock, -1 if renewal.final else left_ms, ttl_ms)  # a final renewal may shorten
            writes.append(pack(b"PEXPIRE", keys.meta, b"%d" % (ttl_ms + DAY_MS)))
    return Decision(answers, tuple(writes))


def decide_force_release(keys: Keys, holder: str, found: Found) -> Decision[bool | None]:
    """Whether `holder`, as `inspect` shows it, had the lock; None if it is shared. If so, the fence advances."""
    if found.holder in MODES:
        return Decision(None)
    held = (found.holder or b"").decode("utf-8", "replace")
    if found.holder is None or holder not in (held, clean(held)):
        return Decision(False)
    return Decision(True, (pack(b"DEL", keys.lock), _advance_fence(keys, found)))


# Shared grants


def shared_reads(keys: Keys) -> list[bytes]:
    """Read everything that a shared grant depends on."""
    return [
        *grant_reads(keys),
        pack(b"ZRANGE", keys.grants, b"0", b"-1", b"WITHSCORES"),
        pack(b"HGETALL", keys.details),
        pack(b"EXISTS", keys.queue),
    ]


def pairs(reply: Any) -> Iterable[tuple[bytes, Any]]:
    """The pairs in a reply to HGETALL or ZRANGE ... WITHSCORES, in RESP2 or RESP3; none in an error reply.

    >>> [list(pairs(reply)) for reply in ([b"a", b"1"], [[b"a", 1.0]], {b"a": b"1"})]
    [[(b'a', b'1')], [(b'a', 1.0)], [(b'a', b'1')]]
    """
    if isinstance(reply, ReplyError):
        return ()
    if isinstance(reply, Mapping):
        return reply.items()
    if reply and isinstance(reply[0], list):
        return [(first, second) for first, second in reply]
    return zip(reply[::2], reply[1::2], strict=True)


class SharedGrant(NamedTuple):
    """One shared grant: its entry in `details` and its score in `grants`."""

    fence: int
    weight: int
    limit: int
    slots: tuple[int, ...]
    owner: bytes
    deadline_us: int

    @classmethod
    def read(cls, entry: bytes, score: Any) -> SharedGrant:
        """
        >>> SharedGrant.read(b"17 2 4 0,3 host:1:", b"1700000000000042")
        SharedGrant(fence=17, weight=2, limit=4, slots=(0, 3), owner=b'host:1:', deadline_us=1700000000000042)
        """
        fence, weight, limit, slots, owner = entry.split(b" ", 4)
        return cls(int(fence), int(weight), int(limit), slots_in(slots), owner, int(float(score)))

    @property
    def entry(self) -> bytes:
        slots = ",".join(map(str, self.slots)) or "-"
        return b"%d %d %d %b %b" % (self.fence, self.weight, self.limit, slots.encode(), self.owner)

    @property
    def granted(self) -> Granted:
        return Granted(self.fence, slots=self.slots)


class SharedLock:
    """A lock with shared grants, as read. The methods change it; `decision()` has the writes.

    `stored` are all grants as read, `grants` the live ones with their changes. A lock is `damaged` if the server has
    evicted some of its keys: nobody is admitted until it expires.

    While others share the lock, newcomers do not overtake the queue of script clients: a stream of readers could keep a
    waiting writer out for ever.
    """

    def __init__(self, name: str, replies: Sequence[Any]) -> None:
        holder, meta, left_ms, time, scores, details, queued = replies
        self._keys = keys_of(name)
        self.found = Found(holder, meta if isinstance(meta, bytes) else None, left_ms, time)
        self._now_us = self.found.now_us
        self._queued = queued == 1
        self._mode = None if isinstance(holder, ReplyError) else MODES.get(holder)
        entries, ends = dict(pairs(details)), dict(pairs(scores)) if self._mode else {}
        self._stored = {one: SharedGrant.read(entries.get(one, b"0 1 0 - "), ends[one]) for one in ends}
        self._damaged = self._mode is not None and (not ends or any(one not in entries for one in ends))
        self._grants = {one: grant for one, grant in self._stored.items() if grant.deadline_us > self._now_us}
        self._writes: list[bytes] = []

    def acquire(self, claim: Claim, *, waits: bool) -> Granted | None:
        """None if the claim must wait. One that `waits` already may have been overtaken by the other shared mode."""
        own = self._grants.get(claim.holder.encode())
        if own is not None:
            self._keep(claim.holder, claim.ttl)
            return own.granted
        live = self._live()
        if not waits:
            refuse_other_mode(live, claim)
        slots = None if self._damaged else admit(live, claim, queued_before=self._queued and bool(live))
        return None if slots is None else self._add(claim, slots)

    def free_in(self, claim: Claim) -> float | None:
        """In how many seconds expired grants may let the claim in; None if never."""
        if self._damaged:
            return self.found.left_ms / 1000
        ends = free_at(self._live(), claim)
        return None if ends is None else ends - self._now_us / 1e6

    def adopt(self, claim: Claim, old_holder: str) -> Granted | None:
        own = self._grants.get(claim.holder.encode())
        if own is not None:
            self._keep(claim.holder, claim.ttl)
            return own.granted
        old = self._grants.get(old_holder.encode())
        if old is None or self._mode is not claim.mode:
            return None
        del self._grants[old_holder.encode()]
        return self._add(claim._replace(weight=old.weight, limit=old.limit), old.slots)

    def downgrade(self, claim: Claim) -> bool:
        holder = claim.holder.encode()
        if self.found.holder == holder:
            left_ms = max(_ms(claim.ttl), self.found.left_ms)
            fence, self._mode = max(1, self.found.fence), Mode.READ
            self._grants[holder] = SharedGrant(fence, 1, 0, (), claim.owner.encode(), self._now_us + left_ms * 1000)
            return True
        return self._mode is Mode.READ and self._keep(claim.holder, claim.ttl)

    def renew(self, renewal: Renewal) -> bool:
        """A grant that is about to be downgraded may still be exclusive."""
        ttl_ms = _ms(renewal.ttl)
        if self.found.holder == renewal.holder.encode():
            self._writes += _extend(self._keys.lock, -1 if renewal.final else self.found.left_ms, ttl_ms)
        elif not self._keep(renewal.holder, renewal.ttl, final=renewal.final):
            return False
        self._writes.append(pack(b"PEXPIRE", self._keys.meta, b"%d" % (ttl_ms + DAY_MS)))
        return True

    def release(self, holder: str) -> bool:
        return self._grants.pop(holder.encode(), None) is not None

    def force_release(self, holder: str) -> bool:
        released = self.release(holder)
        if released:
            self._writes.append(_advance_fence(self._keys, self.found))
        return released

    def rows(self) -> list[Any]:
        """The live grants as in a reply to `lua/inspect.lua`: holder, deadline and entry of each."""
        return [part for holder, one in self._grants.items() for part in (holder, one.deadline_us, one.entry)]

    def decision(self, answer: T) -> Decision[T]:
        """The answer, with the writes for all changes. The last grant takes the lock with it."""
        changed = {one: grant for one, grant in self._grants.items() if self._stored.get(one) != grant}
        gone = [one for one in self._stored if one not in self._grants]
        keys, writes = self._keys, self._writes
        if self._grants and (changed or gone):
            return Decision(answer, (*writes, *self._changes(changed, gone), *self._ttls()))
        if gone:
            writes.append(pack(b"DEL", keys.lock, keys.grants, keys.details, keys.slots))
        return Decision(answer, tuple(writes))

    def _changes(self, changed: Mapping[bytes, SharedGrant], gone: Sequence[bytes]) -> Iterable[bytes]:
        keys = self._keys
        if not self._stored:  # expired grants may have left them
            yield pack(b"DEL", keys.grants, keys.details, keys.slots)
        if gone:
            yield pack(b"ZREM", keys.grants, *gone)
            yield pack(b"HDEL", keys.details, *gone)
        for holder, grant in changed.items():
            if holder not in self._stored:
                yield pack(b"HSET", keys.details, holder, grant.entry)
            yield pack(b"ZADD", keys.grants, b"%d" % grant.deadline_us, holder)

    def _ttls(self) -> Iterable[bytes]:
        """Let the lock last as long as the longest grant, and its other keys a little longer."""
        keys, mode = self._keys, self._mode
        longest = max(grant.deadline_us for grant in self._grants.values())
        ttl_ms = -((self._now_us - longest) // 1000)
        ttl, aux_ttl = b"%d" % ttl_ms, b"%d" % (ttl_ms + AUX_MS)
        if mode is not None and self.found.holder != MARKERS[mode]:
            yield pack(b"SET", keys.lock, MARKERS[mode], b"PX", ttl)
        else:
            yield pack(b"PEXPIRE", keys.lock, ttl)
        used, before = _slots(self._grants), _slots(self._stored)
        if used == before:
            yield pack(b"PEXPIRE", keys.slots, aux_ttl)
        else:
            yield pack(b"SET", keys.slots, bitmap(used), b"PX", aux_ttl)
        yield pack(b"PEXPIRE", keys.grants, aux_ttl)
        yield pack(b"PEXPIRE", keys.details, aux_ttl)

    def _live(self) -> list[LiveGrant]:
        if self._mode is not None:
            return [LiveGrant(self._mode, one.slots, one.deadline_us / 1e6) for one in self._grants.values()]
        if self.found.holder is None:
            return []
        left_ms = self.found.left_ms
        return [LiveGrant(Mode.EXCLUSIVE, (), None if left_ms < 0 else self._now_us / 1e6 + left_ms / 1000)]

    def _keep(self, holder: str, ttl: float, *, final: bool = False) -> bool:
        """Extend a grant; a final renewal may shorten it. False if the holder has none."""
        own = self._grants.get(holder.encode())
        if own is None:
            return False
        deadline = self._now_us + _ms(ttl) * 1000
        self._grants[holder.encode()] = own._replace(deadline_us=deadline if final else max(deadline, own.deadline_us))
        return True

    def _add(self, claim: Claim, slots: tuple[int, ...]) -> Granted:
        fence, deadline = _next_fence(claim, self.found), self._now_us + _ms(claim.ttl) * 1000
        grant = SharedGrant(fence, claim.weight, claim.limit, slots, claim.owner.encode(), deadline)
        self._grants[claim.holder.encode()] = grant
        self._mode = mode_of(claim.weight, claim.limit)
        self._writes.append(_describe(claim, fence))
        return grant.granted


def _slots(grants: Mapping[bytes, SharedGrant]) -> set[int]:
    return {slot for grant in grants.values() for slot in grant.slots}


def bitmap(slots: set[int]) -> bytes:
    """As SETBIT writes it: slot 0 is the highest bit of the first byte.

    >>> bitmap({0, 9}), bitmap(set())
    (b'\x80@', b'')
    """
    found = bytearray(max(slots, default=-1) // 8 + 1)
    for slot in slots:
        found[slot // 8] |= 0x80 >> slot % 8
    return bytes(found)


def _ms(seconds: float) -> int:
    return ceil(seconds * 1000)
