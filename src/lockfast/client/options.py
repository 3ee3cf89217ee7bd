"""How a lock is to be held: the options of `locks.lock()`, checked when they are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from lockfast.errors import ConfigurationError
from lockfast.values import LEAST_TTL, Owner, Seconds, seconds, shown


class Options(NamedTuple):
    """Checked when built by `options()`."""

    ttl: float
    timeout: float | None
    renew: bool
    max_hold: float | None
    owner: str
    on_risk: Callable[..., Any] | None
    on_lost: Callable[..., Any] | None
    cancel_on_loss: bool
    passing: bool


DEFAULTS: dict[str, Any] = {
    "ttl": 30.0,
    "timeout": None,
    "renew": True,
    "max_hold": None,
    "label": None,
    "on_risk": None,
    "on_lost": None,
    "cancel_on_loss": True,
    "passing": True,
}


def options(owner: Owner, chosen: dict[str, Any]) -> Options:
    """What was chosen, and the defaults for the rest."""
    if not chosen.keys() <= DEFAULTS.keys():
        unknown = next(option for option in chosen if option not in DEFAULTS)
        raise ConfigurationError(f"A lock has no option {shown(unknown)}. It knows {', '.join(DEFAULTS)}.")
    given = {**DEFAULTS, **chosen}
    for what in ("renew", "cancel_on_loss", "passing"):
        if not isinstance(given[what], bool):
            raise ConfigurationError(f"{what} must be True or False, not {shown(given[what])}.")
    for what in ("on_risk", "on_lost"):
        if given[what] is not None and not callable(given[what]):
            raise ConfigurationError(f"{what} must be callable with the lease, not {shown(given[what])}.")
    kept = seconds(given["ttl"], "ttl", least=LEAST_TTL)
    longest = None if given["max_hold"] is None else seconds(given["max_hold"], "max_hold", least=LEAST_TTL)
    label = given["label"]
    who = owner if label is None else Owner(owner.host, owner.pid, label)
    return Options(
        ttl=kept if longest is None else min(kept, longest),
        timeout=limit(given["timeout"]),
        renew=given["renew"],
        max_hold=longest,
        owner=who.encode(),
        on_risk=given["on_risk"],
        on_lost=given["on_lost"],
        cancel_on_loss=given["cancel_on_loss"],
        passing=given["passing"],
    )


def limit(value: Seconds | None) -> float | None:
    """A timeout in seconds; None for as long as it takes."""
    if value is None:
        return None
    try:
        return seconds(value, "timeout")
    except ConfigurationError as error:
        raise ConfigurationError(f"{error} Leave it out to wait as long as it takes.") from None
