"""Lifecycle events of locks, for observers. Plain values without secrets: no holder ids, no addresses."""

from __future__ import annotations

import enum
from typing import NamedTuple


class EventKind(enum.Enum):
    """The kind of an event. `Event.seconds` is the wait so far for the first group and the hold time for the second.

    CLAIM_SENT and QUEUED concern the store, and their time starts with the claim: an acquisition that waits for a local
    hand-off sends no claim. An adopted lease is GRANTED too.

    >>> EventKind.GRANTED.value
    'granted'
    """

    CLAIM_SENT = "claim sent"
    QUEUED = "queued"
    GRANTED = "granted"
    TIMED_OUT = "timed out"
    UNAVAILABLE = "unavailable"
    LET_IN = "let in"
    """A semaphore let its caller in without a permit, because the store was unavailable."""

    RENEWED = "renewed"
    AT_RISK = "at risk"
    LOST = "lost"
    RELEASED = "released"
    HANDED_OFF = "handed off locally"
    FORCE_RELEASED = "force released"


class Event(NamedTuple):
    """One event. `fence` is None before the grant; `detail` is the reason of a loss or the error of a store.

    >>> Event(EventKind.GRANTED, "report", seconds=0.25, fence=7).name
    'report'
    """

    kind: EventKind
    name: str
    seconds: float = 0.0
    fence: int | None = None
    detail: str = ""
