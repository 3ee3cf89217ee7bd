"""The options of a lock: their types for checkers and editors, and their values checked when they are given."""

from __future__ import annotations

import functools
from _thread import TIMEOUT_MAX  # what `threading` exports, without loading it
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, NotRequired, TypedDict, TypeVar

from lockfast.errors import ConfigurationError, shown
from lockfast.ports import Observer
from lockfast.values import LEAST_TTL, Owner, Seconds, seconds

L = TypeVar("L")
"""The class of the lease, for callbacks."""


class CommonOptions(TypedDict, Generic[L], total=False):
    """The options that locks and jobs (`locks.once`) share; `locks.lock` explains them."""

    ttl: Seconds
    timeout: Seconds | None
    label: str | None
    on_risk: Callable[[L], object] | None
    on_lost: Callable[[L], object] | None
    cancel_on_loss: bool
    local_handoff: bool


class LockOptions(CommonOptions[L], Generic[L], total=False):
    """The options of `locks.lock()`, which explains them."""

    renew: bool
    max_hold: Seconds | None


class OnceOptions(CommonOptions[L], Generic[L], total=False):
    """The options of `locks.once()`, which explains them."""

    every: Seconds | None
    at_least: Seconds
    at_most: Seconds | None


class StoreOptions(TypedDict, total=False):
    """The options of `connect()` that depend on the store; `connect` explains them."""

    replicas: int
    replica_timeout: Seconds
    aof: bool
    reassert: bool | None
    service: str | None
    scripts: bool | None
    sits_out: Seconds


class SessionOptions(TypedDict):
    """The options of a session that every store has."""

    owner: Owner
    store_timeout: float
    address: str
    observer: NotRequired[Observer | None]


class Options(NamedTuple):
    """Checked options; built by `checked()`."""

    ttl: float
    timeout: float | None
    renew: bool
    max_hold: float | None
    owner: str
    on_risk: Callable[[Any], object] | None
    on_lost: Callable[[Any], object] | None
    cancel_on_loss: bool
    local_handoff: bool


NAMES = (*CommonOptions.__annotations__, "renew", "max_hold")


def checked(owner: Owner, options: LockOptions[Any]) -> Options:
    """Check `options` and fill in the defaults."""
    if "on_lost" not in options and "on_risk" not in options:  # the cache must not keep callbacks alive
        try:
            return _cached(owner, **options)
        except TypeError:
            pass  # an option that does not exist, or a value that cannot be hashed: reported below
    try:
        return _checked(owner, **options)
    except TypeError:
        unknown = next((option for option in options if option not in NAMES), None)
        if unknown is None:
            raise
        raise ConfigurationError(f"A lock has no option {shown(unknown)}. Options are {', '.join(NAMES)}.") from None


def _checked(
    owner: Owner,
    *,
    ttl: Seconds = 30.0,
    timeout: Seconds | None = None,
    renew: bool = True,
    max_hold: Seconds | None = None,
    label: str | None = None,
    on_risk: Callable[[Any], object] | None = None,
    on_lost: Callable[[Any], object] | None = None,
    cancel_on_loss: bool = True,
    local_handoff: bool = True,
) -> Options:
    for what, flag in (("renew", renew), ("cancel_on_loss", cancel_on_loss), ("local_handoff", local_handoff)):
        if flag is not True and flag is not False:
            raise ConfigurationError(f"{what} must be True or False, not {shown(flag)}.")
    for what, callback in (("on_risk", on_risk), ("on_lost", on_lost)):
        if callback is not None and not callable(callback):
            raise ConfigurationError(f"{what} must be callable with the lease, not {shown(callback)}.")
    kept = seconds(ttl, "ttl", least=LEAST_TTL)
    longest = None if max_hold is None else seconds(max_hold, "max_hold", least=LEAST_TTL)
    if label is not None:
        owner = Owner(owner.host, owner.pid, label)
    return Options(
        kept if longest is None else min(kept, longest),
        checked_timeout(timeout),
        renew,
        longest,
        owner.encode(),
        on_risk,
        on_lost,
        cancel_on_loss,
        local_handoff,
    )


_cached = functools.lru_cache(maxsize=256, typed=True)(_checked)
"""Programs make locks with the same few options again and again."""


def checked_timeout(value: Seconds | None) -> float | None:
    """Return a timeout in seconds; None for no limit, which `threading.TIMEOUT_MAX` means too."""
    if value is None or (type(value) is float and value == TIMEOUT_MAX):
        return None
    try:
        return seconds(value, "timeout")
    except ConfigurationError as error:
        raise ConfigurationError(f"{error} Leave it out to wait without a limit.") from None


def chosen_wait(blocking: bool, timeout: Seconds | None, default: float | None) -> float | None:
    """Check the arguments of `acquire()`. Return how long to wait; None for no limit."""
    if blocking is not True and blocking is not False:
        raise ConfigurationError(f"blocking must be True or False, not {shown(blocking)}.")
    if not blocking and timeout is not None:
        raise ConfigurationError("A timeout makes no sense with blocking=False: use one of them.")
    wait = default if timeout is None else checked_timeout(timeout)
    return wait if blocking else 0.0
