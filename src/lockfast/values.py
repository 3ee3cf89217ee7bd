"""The values that cross the ports: small, frozen, and checked when they are built.

Rules: seconds are floats. A value that cannot work (a ttl of 0, NaN, an empty name) cannot be built, and the error says
what fits. Text from strangers is cleaned before it is shown.

Values that every acquisition makes are built by `tuple.__new__` with all their fields: half the cost of the constructor
of a named tuple.
"""

from __future__ import annotations

import enum
import math
import sys
from typing import TYPE_CHECKING, NamedTuple, Self, Union

from lockfast.errors import ConfigurationError, shown

if TYPE_CHECKING:
    from datetime import timedelta
    from decimal import Decimal

Seconds = Union[float, int, "Decimal", "timedelta"]
"""The types that callers may pass as a time."""

LEAST_TTL = 0.01
MOST_SECONDS = 366 * 86_400.0
MOST_NAME_BYTES = 1024
MOST_LABEL_CHARS = 128
AUX_PREFIX = "lockfast:"
"""Keys with this prefix belong to the store, so no lock name may begin with it."""


def seconds(value: object, what: str, *, least: float = 0.0, most: float = MOST_SECONDS) -> float:
    """Return `value` as float seconds; the error says what fits.

    >>> from datetime import timedelta
    >>> seconds(timedelta(minutes=1), "ttl")
    60.0
    >>> seconds("10", "ttl")
    Traceback (most recent call last):
    lockfast.errors.ConfigurationError: ttl must be seconds (a number or a timedelta), not '10'.
    """
    if type(value) is float:
        number = value
    elif isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value) if abs(value) < 1e15 else math.inf
    elif _is_a(value, "datetime", "timedelta"):
        number = value.total_seconds()  # type: ignore[attr-defined]
    elif _is_a(value, "decimal", "Decimal"):
        number = math.nan if value.is_nan() else float(value)  # type: ignore[attr-defined, arg-type]
    else:
        raise ConfigurationError(f"{what} must be seconds (a number or a timedelta), not {shown(value)}.")
    if not least <= number <= most:  # false for NaN too
        raise ConfigurationError(f"{what} must be from {least:g} to {most:g} seconds, not {shown(value)}.")
    return number


def _is_a(value: object, module: str, name: str) -> bool:
    """isinstance without importing the module: if nobody imported it, no such value can exist."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, name))


def lock_name(value: object) -> str:
    """Return `value` if it can name a lock; the error says why not.

    >>> lock_name("file:9527")
    'file:9527'
    """
    if not isinstance(value, str):
        raise ConfigurationError(f"A lock's name must be text, not {shown(value)}.")
    if not value:
        raise ConfigurationError("A lock's name must not be empty.")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise ConfigurationError(f"A lock's name must be valid Unicode; {shown(value)} has a lone surrogate.") from None
    if size > MOST_NAME_BYTES:
        raise ConfigurationError(f"A lock's name may have {MOST_NAME_BYTES} bytes in UTF-8, not {size}.")
    if not value.isprintable() and any(char < " " or "\x7f" <= char <= "\x9f" for char in value):
        raise ConfigurationError(f"A lock's name must not have control characters, as {shown(value)} has.")
    if value.startswith(AUX_PREFIX):
        raise ConfigurationError(f"A lock's name must not begin with {AUX_PREFIX!r}: lockfast uses such keys itself.")
    return value


def holder_id(value: object) -> str:
    """Return `value` if it can be a holder id: 1 to 128 visible ASCII characters.

    >>> holder_id("moto")
    'moto'
    """
    if not isinstance(value, str) or not 1 <= len(value) <= 128 or not value.isascii():
        raise ConfigurationError(f"A holder id must be 1 to 128 visible ASCII characters, not {shown(value)}.")
    if not value.isprintable() or " " in value or value.startswith(AUX_PREFIX):
        raise ConfigurationError(
            f"A holder id must not have spaces or control characters, nor begin with {AUX_PREFIX!r}: {shown(value)}."
        )
    return value


def name_pattern(value: object) -> str:
    """Return `value` if it can be a pattern: `*` is any text, `?` any character, `[ab]` one of them.

    >>> name_pattern("report:*")
    'report:*'
    """
    if not isinstance(value, str) or not value:
        raise ConfigurationError(f"A pattern for names must be text such as 'report:*', not {shown(value)}.")
    return value


def fits(name: str, pattern: str) -> bool:
    """Whether a lock's name matches `pattern`; upper and lower case differ.

    >>> fits("report:nightly", "report:*"), fits("Report:nightly", "report:*")
    (True, False)
    """
    if pattern == "*":
        return True
    from fnmatch import fnmatchcase  # here, because few programs list locks

    return fnmatchcase(name, pattern)


def is_plain(pattern: str) -> bool:
    """Whether `pattern` matches only itself.

    >>> is_plain("report:nightly"), is_plain("report:[ab]")
    (True, False)
    """
    return not any(char in "*?[" for char in pattern)


def clean(text: str, most: int = 200) -> str:
    """Return a stranger's text without control or direction characters, safe for a terminal or a page.

    >>> clean("evil\\x1b[2J name")
    'evil\\ufffd[2J name'
    """
    cut = text if len(text) <= most else text[: most - 1] + "…"
    return "".join(char if char.isprintable() else "\ufffd" for char in cut)


class _OwnerFields(NamedTuple):
    host: str
    pid: int
    label: str


class Owner(_OwnerFields):
    """The client behind a claim, for people: host, process and a label of its choice.

    >>> Owner("web1", 4711, "checkout").encode()
    'web1:4711:checkout'
    >>> Owner.decode("web1:4711:checkout")
    Owner(host='web1', pid=4711, label='checkout')
    """

    __slots__ = ()

    def __new__(cls, host: str, pid: int, label: str = "") -> Self:
        if not isinstance(label, str):
            raise ConfigurationError(f"A label must be text, not {shown(label)}.")
        if len(label) > MOST_LABEL_CHARS:
            raise ConfigurationError(f"A label may have {MOST_LABEL_CHARS} characters, not {len(label)}.")
        if not label.isprintable():
            raise ConfigurationError(f"A label must be printable, as {shown(label)} is not.")
        return super().__new__(cls, host, pid, label)

    def encode(self) -> str:
        return f"{self.host}:{self.pid}:{self.label}"

    @classmethod
    def decode(cls, text: str) -> Owner | None:
        """Return the owner in `text`, cleaned; None if there is none."""
        host, _, rest = text.partition(":")
        pid, separator, label = rest.partition(":")
        if not separator or not (pid.isascii() and pid.isdecimal()) or len(pid) > 12:
            return None
        return cls(clean(host, 64), int(pid), clean(label, MOST_LABEL_CHARS))

    def __str__(self) -> str:
        return f"{self.label} ({self.host}, pid {self.pid})" if self.label else f"{self.host}, pid {self.pid}"


class Mode(enum.Enum):
    """How a claim shares its lock with others: not at all, with other readers, or within a number of permits.

    >>> Mode.READ.value
    'read'
    """

    EXCLUSIVE = "exclusive"
    READ = "read"
    PERMITS = "permits"


class Claim(NamedTuple):
    """One request for a lock. All requests of an acquisition carry the same claim, so a retry changes nothing.

    `fences` is how many fences the grant reserves; the store returns the last of them. `floor` is the least fence that
    a quorum wants from its servers, so that they agree. `weight` is 0 for an exclusive claim, and for a shared one how
    many permits it takes; `limit` is how many all grants together may take, 0 for no limit. A reader has weight 1 and
    no limit.

    >>> Claim("report", "moto", 30.0, "").mode.value, Claim("gpu", "moto", 30.0, "", weight=2, limit=4).mode.value
    ('exclusive', 'permits')
    """

    name: str
    holder: str
    ttl: float
    owner: str
    fences: int = 1
    floor: int = 0
    weight: int = 0
    limit: int = 0

    @property
    def mode(self) -> Mode:
        return mode_of(self.weight, self.limit)


def mode_of(weight: int, limit: int) -> Mode:
    """The mode of a claim with that weight and limit."""
    if not weight:
        return Mode.EXCLUSIVE
    return Mode.PERMITS if limit else Mode.READ


class Enqueue(NamedTuple):
    """How to queue a claim that cannot be granted: the inbox, the attempt number, and the ticket if there is one.

    `attempt` numbers the requests of one acquisition. A notification carries the attempt that it answers, so that one
    that was delayed while a later request was answered "queued" is recognised as stale.
    """

    address: str
    attempt: int
    ticket: int | None


class Granted(NamedTuple):
    """The claim was granted; `acknowledged` counts the replicas that have it too, None if they were not asked.

    `slots` are the indexes of the permits, one per permit; empty in the other modes.
    """

    fence: int
    acknowledged: int | None = None
    slots: tuple[int, ...] = ()


class Queued(NamedTuple):
    """The claim is in the queue.

    `ttl_left`: in so many seconds expired grants may let the claim in, unless they are renewed; None if the holder has
    no ttl.
    """

    ticket: int
    position: int
    ttl_left: float | None


class Taken(NamedTuple):
    """The claim cannot be granted now, and is not in the queue."""

    ttl_left: float | None


Answer = Granted | Queued | Taken


class GrantNotification(NamedTuple):
    """The store granted a queued claim; answers the request with number `attempt`."""

    attempt: int
    fence: int
    slots: tuple[int, ...] = ()


class FirstNotification(NamedTuple):
    """A queued claim is now first; `ttl_left` is as in `Queued`.

    It sets the waiter's timer: the new holder may have a shorter ttl than the last one, and a lost grant notification
    delays only until the first waiter polls."""

    attempt: int
    ttl_left: float | None


Notification = GrantNotification | FirstNotification


class Renewal(NamedTuple):
    """One entry of a batch: extend the grant of `holder` on `name` by `ttl`.

    `final`: the grant ends after exactly `ttl`, sooner or later than before, and is not renewed again. `shared`: it is
    a grant of a reader or of permits.
    """

    name: str
    holder: str
    ttl: float
    final: bool = False
    shared: bool = False


class HolderInfo(NamedTuple):
    """One grant, as `inspect()` shows it; all times in seconds.

    `owner`, `fence` and `held_for` are None for a lock that another program took. `ttl_left` is None if the grant has
    no ttl. `slots` are the indexes of its permits.

    >>> HolderInfo("moto", mode=Mode.PERMITS, slots=(0, 1)).permits
    2
    """

    holder: str
    owner: Owner | None = None
    fence: int | None = None
    held_for: float | None = None
    ttl_left: float | None = None
    mode: Mode = Mode.EXCLUSIVE
    slots: tuple[int, ...] = ()

    @property
    def permits(self) -> int:
        """How many permits the grant has; 0 in the other modes."""
        return len(self.slots)


class WaiterInfo(NamedTuple):
    """One waiter, as `inspect()` shows it; `permits` is how many it waits for, 0 in the other modes."""

    holder: str
    owner: Owner | None
    waiting_for: float
    mode: Mode = Mode.EXCLUSIVE
    permits: int = 0


def waiter_info(claim: Claim, owner: Owner | None, waiting_for: float) -> WaiterInfo:
    """Describe the waiter behind a queued claim."""
    mode = claim.mode
    return WaiterInfo(claim.holder, owner, waiting_for, mode, claim.weight if mode is Mode.PERMITS else 0)


class LockInfo(NamedTuple):
    """The state of one lock in the store.

    `holders` are the live grants in the order of their fences: none if the lock is free, several for readers and
    permits. `fence` is the last one granted; None if there was none or the store lost it. `waiting` is the number of
    waiters; `waiters` are the first of them, in order, and `locks.list()` leaves them out.

    `holder`, `owner`, `held_for` and `ttl_left` describe the first holder; None if the lock is free.

    >>> LockInfo("report").locked
    False
    >>> LockInfo("gpu", (HolderInfo("a", slots=(0, 1)), HolderInfo("b", slots=(2,)))).permits
    3
    """

    name: str
    holders: tuple[HolderInfo, ...] = ()
    fence: int | None = None
    waiters: tuple[WaiterInfo, ...] = ()
    waiting: int = 0

    @property
    def locked(self) -> bool:
        """Whether anybody holds the lock, in any mode."""
        return bool(self.holders)

    @property
    def mode(self) -> Mode | None:
        """The mode in which the lock is held; None if it is free."""
        return self.holders[0].mode if self.holders else None

    @property
    def permits(self) -> int:
        """How many permits of a semaphore are in use."""
        return sum(one.permits for one in self.holders)

    @property
    def holder(self) -> str | None:
        return self.holders[0].holder if self.holders else None

    @property
    def owner(self) -> Owner | None:
        return self.holders[0].owner if self.holders else None

    @property
    def held_for(self) -> float | None:
        return self.holders[0].held_for if self.holders else None

    @property
    def ttl_left(self) -> float | None:
        return self.holders[0].ttl_left if self.holders else None


class Page(NamedTuple):
    """A part of all locks, and the cursor of the next part; empty after the last."""

    infos: tuple[LockInfo, ...]
    cursor: str
