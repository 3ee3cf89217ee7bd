"""The short way: one request and its answer, for who finds nobody about.

Most locks are free when somebody comes, and nobody else has come by when they are given back. For these the ordinary
way is long: a coroutine for each layer, and provision for mailboxes, places and repeats that are not needed. Here a
request is a plain function that blocks, where the store has such (`ports.Direct`).

Rules kept here:

- What is asked is what the ordinary way asks first while nobody listens for pushes. Whatever comes of it but a plain
  yes, in time, goes to that way as the outcome of its first request (`First`): so nothing is asked twice, no limit
  begins anew, and one code alone says "not acquired" and removes what a lost reply or an interrupt has left behind.
- It is for who is alone: when others of this connection ask, wait or hold, the lock is passed on (see `passing.py`).
  Nor is it for who had to wait the last time: such a one asks for a place at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from lockfast.core.acquire import Grant
from lockfast.core.first import First
from lockfast.core.lease_state import HELD, LeaseState
from lockfast.core.local_handoff import Asked, Begun
from lockfast.core.local_queue import ClaimTerms, LocalQueue
from lockfast.core.release import BUDGET
from lockfast.core.validity import valid_until
from lockfast.ports import Direct, Runtime
from lockfast.values import Claim, Granted

T = TypeVar("T")


def acquire(
    local_queue: LocalQueue,
    direct: Direct[Any],
    runtime: Runtime,
    terms: ClaimTerms,
    patience: float,
    meanwhile: Callable[[], T],
) -> tuple[Grant | Begun, T | None]:
    """A grant, or what to go on from in the ordinary way; and what `meanwhile` gave, which is called while the store is
    at work, if that was asked."""
    enqueue = local_queue.enter(runtime, terms)
    if enqueue is not None:
        return enqueue, None
    name, ttl, owner = terms
    holder, made = runtime.new_holder_id(), None
    claim = tuple.__new__(Claim, (name, holder, ttl, owner, 1, 0))
    sent_at = runtime.now()
    local_queue.askers[holder] = None  # and no call before `try`, nor in `finally`: that is where an interrupt may come
    try:
        sent = direct.request(claim, sent_at, sent_at + patience)
        made = meanwhile()
        answer = direct.answer(sent, claim, sent_at + patience)
        if type(answer) is int:
            until = valid_until(sent_at, ttl)
            if runtime.now() < until:
                return tuple.__new__(Grant, (claim, answer, sent_at, until, None, False, 0, None)), made
        return Asked(claim, First(sent_at, Granted(answer) if isinstance(answer, int) else answer)), made
    except BaseException as error:  # an interrupt too: whoever goes on cleans up, and raises it
        return Asked(claim, First(sent_at, error)), made
    finally:
        del local_queue.askers[holder]


def release(lease_state: LeaseState, direct: Direct[Any], now: float) -> bool | First[bool]:
    """True when it was given back; False when this is not the way for it, and nothing was done; or what to go on
    from."""
    if lease_state.state is not HELD or now >= lease_state.valid_until or not lease_state.give_back():
        return False
    try:
        released = direct.release(lease_state.name, lease_state.holder, now, now + BUDGET / 2)
    except BaseException as error:  # as above
        return First(now, error)
    if released is not True:
        return First(now, released)
    lease_state.settled = True
    return True
