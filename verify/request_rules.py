"""Rules for one request: how it may change one lock. The explorer and the simulator check them for every request.

Each function returns the description of a violation, None if there is none.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

from lockfast.stores.redis.lua.scripts import ACQUIRE, ADOPT, Script
from lockfast.values import Claim
from verify.lock_view import LockView, StoredGrant, admissible

KEY, HOLDER, TICKET, WEIGHT, LIMIT = 3, 10, 15, 17, 18
"""Positions in a request of acquire.lua."""


class Change(NamedTuple):
    """One lock before and after a request; `channels` have a subscriber after it."""

    words: Sequence[bytes]
    now_us: int
    before: LockView
    after: LockView
    channels: Collection[bytes]

    def new_grants(self) -> list[StoredGrant]:
        """The grants that the request made, in the order of their fences."""
        old = self.before.live(self.now_us)
        return [one for holder, one in self.after.live(self.now_us).items() if holder not in old]

    def names(self, holder: str) -> bool:
        """Whether the request names this holder."""
        return holder.encode() in self.words


def runs(words: Sequence[bytes], script: Script) -> bool:
    """Whether a request runs this script."""
    return len(words) > KEY and words[1] in (script.digest.encode(), script.text)


def overwritten(change: Change, protected: Collection[str]) -> str | None:
    """OW: the grant of a `protected` holder that the request changes although it does not name the holder."""
    after = change.after.live(change.now_us)
    for holder, grant in change.before.live(change.now_us).items():
        left = after.get(holder)
        if left == grant or holder not in protected or change.names(holder):
            continue
        verb = "changed the ttl of" if left is not None else "overwrote" if after else "deleted"
        return f"{verb} the lease of {holder}, and its request does not name {holder}"
    return None


def refenced(change: Change) -> str | None:
    """FT: a grant whose fence changes."""
    after = change.after.live(change.now_us)
    for holder, grant in change.before.live(change.now_us).items():
        left = after.get(holder)
        if left is not None and left.fence != grant.fence:
            return f"the fence of {holder} changes from {grant.fence} to {left.fence}"
    return None


def not_admitted(change: Change) -> str | None:
    """AD: a grant that `admission.py` would not make, or would make with other slots."""
    if runs(change.words, ADOPT):
        return None  # takes over the slots of the old holder
    new = change.new_grants()
    live = [one for one in change.after.live(change.now_us).values() if one not in new]
    for grant in new:
        slots = admissible(live, grant.claim())
        if slots is None:
            others = " and ".join(one.holder for one in live)
            return f"{grant.holder} is granted the lock ({grant.mode.value}), which {others} keeps it out of"
        if slots != grant.slots:
            return f"{grant.holder} is granted slots {grant.slots} instead of {slots}"
        live.append(grant)
    return None


def overtaken(change: Change) -> str | None:
    """FQ: a grant to a claim that came later than a reachable waiter, unless both are granted together."""
    if runs(change.words, ADOPT):
        return None  # takes over a grant
    new = change.new_grants()
    together = {one.holder for one in new}
    queue = [one for one in change.before.queue if runs(change.words, ACQUIRE) or not change.names(one.claim.holder)]
    tickets = {one.claim.holder: one.ticket for one in queue}  # without a waiter that leaves by this request
    last = -math.inf
    for grant in new:
        ticket = min(tickets.get(grant.holder, math.inf), _own_ticket(change.words, grant.holder))
        if ticket < last:
            return f"{grant.holder} is granted a greater fence than a later waiter"
        last = ticket
        for waiter in queue:
            if waiter.ticket >= ticket:
                break
            if waiter.claim.holder not in together and waiter.reachable(change.channels, change.now_us):
                return (
                    f"{grant.holder} is granted the lock, although {waiter.claim.holder} is reachable and has "
                    "waited longer"
                )
    return None


def _own_ticket(words: Sequence[bytes], holder: str) -> float:
    """The ticket that the holder's own request presents, from an earlier position in the queue."""
    own = runs(words, ACQUIRE) and words[HOLDER] == holder.encode()
    return float(words[TICKET]) if own and words[TICKET] else math.inf


def granted_to_unreachable(change: Change) -> str | None:
    """FQ: a hand-off to a waiter that does not receive it."""
    waiters = {one.claim.holder: one for one in change.before.queue}
    for grant in change.new_grants():
        if change.names(grant.holder) or not change.before.queue:
            continue
        waiter = waiters.get(grant.holder)
        if waiter is None or not waiter.reachable(change.channels, change.now_us):
            return f"the lock is handed off to {grant.holder}, which is unreachable or whose ticket expired"
    return None


def denied_to_holder(change: Change, reply: object) -> str | None:
    """NL: a claim that is answered "taken" or "queued" although its sender is a holder."""
    if not _is_denied(change, reply):
        return None
    holder = change.words[HOLDER].decode()
    return f"{holder} is denied the lock, and it is the holder" if holder in change.after.live(change.now_us) else None


def denied_for_nothing(change: Change, reply: object) -> str | None:
    """LW: a claim that is answered "taken" or "queued" although neither a grant nor a reachable waiter keeps it out."""
    if not _is_denied(change, reply):
        return None
    words = change.words
    holder = words[HOLDER].decode()
    claim = Claim("", holder, 1.0, "", weight=int(words[WEIGHT]), limit=int(words[LIMIT]))
    if admissible(change.after.live(change.now_us).values(), claim) is None:
        return None
    for waiter in change.after.queue:
        if waiter.claim.holder == holder:
            break
        if waiter.reachable(change.channels, change.now_us):
            return None
    return f"{holder} has to wait, although neither a grant nor a reachable waiter keeps it out"


def _is_denied(change: Change, reply: object) -> bool:
    return isinstance(reply, list) and runs(change.words, ACQUIRE)
