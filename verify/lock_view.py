"""One lock as its keys in the server describe it: the grants, the queue, and the marker of shared grants.

`_layout.lua` describes the keys. The checks use this view only, so none of them depends on the scripts that it checks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from lockfast.admission import LiveGrant, admit
from lockfast.stores.redis.keys import Keys
from lockfast.values import Claim, Mode, mode_of
from verify.server_commands import Entry

MARKERS = (b"lockfast:read", b"lockfast:permits")
"""Values of the lock key while shared grants are live."""
MARKER_MS = 2
"""Milliseconds by which the marker may outlive the longest grant, or end before it (rule MK)."""


class StoredGrant(NamedTuple):
    """A grant in the store, up to `ends_us` of the server's clock (None: without an end)."""

    holder: str
    fence: int
    ends_us: int | None
    weight: int = 0
    limit: int = 0
    slots: tuple[int, ...] = ()

    @property
    def mode(self) -> Mode:
        return mode_of(self.weight, self.limit)

    def live(self, now_us: int) -> bool:
        return self.ends_us is None or now_us < self.ends_us

    def claim(self) -> Claim:
        """The claim that was granted, as admission sees it."""
        return Claim("", self.holder, 1.0, "", weight=self.weight, limit=self.limit)


class StoredWaiter(NamedTuple):
    """A waiter in the store's queue."""

    ticket: float
    claim: Claim
    inbox: bytes
    dead_at_us: int

    def reachable(self, channels: Collection[bytes], now_us: int) -> bool:
        """Whether its inbox has a subscriber and its last request is younger than its ttl."""
        return self.inbox in channels and self.dead_at_us > now_us


class LockView(NamedTuple):
    """`lock` is the entry of the lock key. `grants` includes expired ones that no request has removed yet."""

    lock: Entry | None = None
    grants: tuple[StoredGrant, ...] = ()
    queue: tuple[StoredWaiter, ...] = ()
    endless: tuple[bytes, ...] = ()
    """Auxiliary keys of shared grants that have no ttl."""

    def live(self, now_us: int) -> dict[str, StoredGrant]:
        """The live grants by holder, in the order of their fences."""
        return {one.holder: one for one in self.grants if one.live(now_us)}

    def owned(self, now_us: int) -> str:
        """Describe the holders."""
        holders = self.live(now_us)
        return f"held by {' and '.join(holders)}" if holders else "free"

    def marker_error_ms(self) -> float:
        """By how much the marker lasts longer (or shorter, if negative) than the longest shared grant; 0 if none."""
        if self.lock is None or self.lock.value not in MARKERS or self.lock.expires_ms is None:
            return 0.0
        longest = max((one.ends_us or 0 for one in self.grants), default=0)
        return self.lock.expires_ms - longest / 1000


def view_of(data: Mapping[bytes, Entry], keys: Keys, fence_key: bytes = b"") -> LockView:
    """The view of one lock in the data of a server. `fence_key` is where a hand-written lock keeps its fence."""
    lock = data.get(keys.lock)
    queue = _queue(data, keys) if keys.queue in data else ()
    if lock is None:
        return LockView(None, (), queue)
    if lock.value in MARKERS:
        endless = tuple(key for key in keys[4:7] if key in data and data[key].expires_ms is None)
        return LockView(lock, _shared_grants(data, keys), queue, endless)
    meta = data.get(fence_key or keys.meta)
    fence = 0 if meta is None else int(meta.value.split(b" ")[0])
    ends_us = None if lock.expires_ms is None else (lock.expires_ms + 1) * 1000
    return LockView(lock, (StoredGrant(lock.value.decode("utf-8", "replace"), fence, ends_us),), queue)


def _shared_grants(data: Mapping[bytes, Entry], keys: Keys) -> tuple[StoredGrant, ...]:
    ends = data.get(keys.grants)
    entries = dict(data[keys.details].value) if keys.details in data else {}
    found = []
    for score, member in () if ends is None else ends.value:
        fence, weight, limit, slots, *_ = entries.get(member, b"0 1 0 -").decode().split(" ")
        taken = () if slots == "-" else tuple(map(int, slots.split(",")))
        found.append(StoredGrant(member.decode(), int(fence), int(score), int(weight), int(limit), taken))
    return tuple(sorted(found, key=lambda grant: grant.fence))


def _queue(data: Mapping[bytes, Entry], keys: Keys) -> tuple[StoredWaiter, ...]:
    entries = dict(data[keys.waiters].value) if keys.waiters in data else {}
    found = []
    for ticket, member in data[keys.queue].value:
        words = entries.get(member, b"0 1 0 - 1 0 0 ").split(b" ")
        claim = Claim("", member.decode(), int(words[1]) / 1000, "", weight=int(words[5]), limit=int(words[6]))
        found.append(StoredWaiter(ticket, claim, words[3], int(words[2]) * 1000))
    return tuple(found)


def admissible(grants: Collection[StoredGrant], claim: Claim) -> tuple[int, ...] | None:
    """The slots that `claim` gets if it is first; None if it must wait. `admission.py` decides."""
    return admit([LiveGrant(one.mode, one.slots, None) for one in grants], claim)
