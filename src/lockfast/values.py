"""The values that cross the ports: small, frozen, and checked when they are built.

Rules kept here: seconds are floats; a value that could not work (a ttl of 0, a NaN, an empty name) cannot be
built, and the error says what fits; text that strangers chose is cleaned before anyone is shown it.

Values that every acquisition makes are built there by `tuple.__new__`, with all their fields: half the price of a named
tuple's own constructor, which is a function in Python.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, NamedTuple, Self, Union

from lockfast.errors import ConfigurationError

if TYPE_CHECKING:
    from datetime import timedelta
    from decimal import Decimal

Seconds = Union[float, int, "Decimal", "timedelta"]
"""What callers may give where a time is asked for."""

LEAST_TTL = 0.01
MOST_SECONDS = 366 * 86_400.0
MOST_NAME_BYTES = 1024
MOST_LABEL_CHARS = 128
AUX_PREFIX = "lockfast:"
"""Keys under this prefix are the store's own, so no lock may be named so."""


def seconds(value: object, what: str, *, least: float = 0.0, most: float = MOST_SECONDS) -> float:
    """`value` as float seconds, or an error that says what fits.

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
    """isinstance without importing: where the module was never imported, no such value can exist."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, name))


def lock_name(value: object) -> str:
    """`value` if it can name a lock, or an error that says why not.

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
        raise ConfigurationError(f"A lock's name must not begin with {AUX_PREFIX!r}: such keys are lockfast's own.")
    return value


def holder_id(value: object) -> str:
    """`value` if it can be a holder id: 1 to 128 visible ASCII characters.

    >>> holder_id("moto")
    'moto'
    """
    if not isinstance(value, str) or not 1 <= len(value) <= 128 or not value.isascii():
        raise ConfigurationError(f"A holder id must be 1 to 128 visible ASCII characters, not {shown(value)}.")
    if not value.isprintable() or " " in value:
        raise ConfigurationError(f"A holder id must not have spaces or control characters: {shown(value)}.")
    return value


def name_pattern(value: object) -> str:
    """`value` if it can be a pattern for names: `*` any text, `?` any character, `[ab]` either of them.

    >>> name_pattern("report:*")
    'report:*'
    """
    if not isinstance(value, str) or not value:
        raise ConfigurationError(f"A pattern for names must be text such as 'report:*', not {shown(value)}.")
    return value


def fits(name: str, pattern: str) -> bool:
    """Whether a lock's name is one of those that `pattern` asks for; upper and lower case differ.

    >>> fits("report:nightly", "report:*"), fits("Report:nightly", "report:*")
    (True, False)
    """
    if pattern == "*":
        return True
    from fnmatch import fnmatchcase  # here, because few programs ever list

    return fnmatchcase(name, pattern)


def is_plain(pattern: str) -> bool:
    """Whether only one name can fit: the pattern itself.

    >>> is_plain("report:nightly"), is_plain("report:[ab]")
    (True, False)
    """
    return not any(char in "*?[" for char in pattern)


def shown(value: object) -> str:
    """A short repr that cannot flood or steer a terminal.

    >>> shown("x" * 1000)
    "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx..."
    """
    try:
        text = ascii(value[:80] if isinstance(value, str | bytes) else value)
    except Exception:  # its repr fails, or it is a number too long to be written out
        text = f"a value of type {ascii(type(value).__name__)[1:-1]}"
    return text if len(text) <= 63 else text[:60] + "..."


def clean(text: str, most: int = 200) -> str:
    """Text that a stranger chose, fit for a terminal or a page: no control or direction characters.

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
    """Who holds or waits, for an operator's eyes: host, process and a label of the caller's choice.

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
        """The owner that `text` tells of, cleaned; None when it tells of none."""
        host, _, rest = text.partition(":")
        pid, separator, label = rest.partition(":")
        if not separator or not (pid.isascii() and pid.isdecimal()) or len(pid) > 12:
            return None
        return cls(clean(host, 64), int(pid), clean(label, MOST_LABEL_CHARS))

    def __str__(self) -> str:
        return f"{self.label} ({self.host}, pid {self.pid})" if self.label else f"{self.host}, pid {self.pid}"


class Claim(NamedTuple):
    """What one acquisition wants; the same through all its requests, so that a repeat changes nothing.

    `fences` is how many fences the grant reserves; the one that a grant tells is the last of them. `floor` is what a
    quorum gives to its nodes: a fence that the grant should not be less than, so that they agree.
    """

    name: str
    holder: str
    ttl: float
    owner: str
    fences: int = 1
    floor: int = 0


class Enqueue(NamedTuple):
    """How to keep a place in the queue: where to push the grant, and which request this is.

    `turn` numbers the requests of one acquisition. A push names the turn it answers to, so a push that lay in a
    buffer while a later request was answered "still queued" is recognised as stale.
    """

    address: str
    attempt: int
    ticket: int | None


class Granted(NamedTuple):
    """The lock is ours since some moment after the request was sent; `acknowledged` counts the replicas that said that
    they have it too (None: nobody asked them)."""

    fence: int
    acknowledged: int | None = None


class Queued(NamedTuple):
    """Taken by another; we have a place. `ttl_left` is None when the holder has no ttl at all."""

    ticket: int
    position: int
    ttl_left: float | None


class Taken(NamedTuple):
    """Taken by another; we have no place."""

    ttl_left: float | None


Answer = Granted | Queued | Taken


class GrantNotification(NamedTuple):
    """A grant that the store sent by itself, in answer to the request numbered `turn`."""

    attempt: int
    fence: int


class FirstNotification(NamedTuple):
    """News that the store sent by itself: we are first in the queue now, behind a holder with that ttl.

    It makes the timer of whoever is next right: the holder may have a shorter ttl than the one before, and a push
    that is lost is missed no longer than the first in the queue waits before it looks."""

    attempt: int
    ttl_left: float | None


Notification = GrantNotification | FirstNotification


class Renewal(NamedTuple):
    """One line of a batch: keep `name` for `holder` for another `ttl`.

    `final` is the holder's last word: it is done, the grant is to end when exactly `ttl` has passed, be that sooner
    or later than before, and nobody will renew it again.
    """

    name: str
    holder: str
    ttl: float
    final: bool = False


class WaiterInfo(NamedTuple):
    """One place in the queue, as `inspect()` shows it."""

    holder: str
    owner: Owner | None
    waiting_for: float


class LockInfo(NamedTuple):
    """What the store knows of one lock; all times in seconds.

    `holder` is None when the lock is free. `fence` is the last one granted (None: never, or forgotten).
    `owner` and `held_for` are None for a lock that something else than lockfast took. `waiting` counts those who
    wait; `waiters` are the first of them, in order, and are left out by `locks.list()`.

    >>> LockInfo("report").locked
    False
    """

    name: str
    holder: str | None = None
    owner: Owner | None = None
    fence: int | None = None
    held_for: float | None = None
    ttl_left: float | None = None
    waiters: tuple[WaiterInfo, ...] = ()
    waiting: int = 0

    @property
    def locked(self) -> bool:
        return self.holder is not None


class Page(NamedTuple):
    """A part of all locks, and where to go on; an empty `cursor` means that there is no more."""

    infos: tuple[LockInfo, ...]
    cursor: str
