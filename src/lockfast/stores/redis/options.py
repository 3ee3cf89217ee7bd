"""What `connect()` may be told about servers of the Redis kind, checked when it is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from lockfast.errors import ConfigurationError
from lockfast.values import seconds, shown

MOST_REPLICAS = 100
DEFAULTS: dict[str, Any] = {
    "replicas": 0,
    "replica_timeout": 1.0,
    "aof": False,
    "reassert": None,
    "service": None,
    "scripts": None,
}


class Wanted(NamedTuple):
    """How many replicas must acknowledge, within how many seconds, and whether on disk (the master too)."""

    replicas: int
    within: float
    on_disk: bool


class Choices(NamedTuple):
    """`wanted` is None where no acknowledgement is asked for; `reassert` None where the set-up decides; `service` is
    the name by which sentinels know the master; `scripts` None where it is to be found out whether they may run."""

    wanted: Wanted | None = None
    reassert: bool | None = None
    service: str | None = None
    scripts: bool | None = None


def choices_of(given: Mapping[str, Any]) -> Choices:
    """What was chosen, and the defaults for the rest.

    >>> choices_of({"replicas": 1}).wanted
    Wanted(replicas=1, within=1.0, on_disk=False)
    >>> choices_of({"replicas": -1})
    Traceback (most recent call last):
    lockfast.errors.ConfigurationError: replicas must be a whole number from 0 to 100, not -1.
    """
    chosen = {**DEFAULTS, **given}
    replicas, on_disk, reassert, service = (chosen[key] for key in ("replicas", "aof", "reassert", "service"))
    if type(replicas) is not int or not 0 <= replicas <= MOST_REPLICAS:
        raise ConfigurationError(f"replicas must be a whole number from 0 to {MOST_REPLICAS}, not {shown(replicas)}.")
    if not isinstance(on_disk, bool):
        raise ConfigurationError(f"aof must be True or False, not {shown(on_disk)}.")
    if reassert is not None and not isinstance(reassert, bool):
        raise ConfigurationError(f"reassert must be True, False or None, not {shown(reassert)}.")
    if service is not None and (not isinstance(service, str) or not service):
        raise ConfigurationError(f"service must be the name by which sentinels know a master, not {shown(service)}.")
    scripts = chosen["scripts"]
    if scripts is not None and not isinstance(scripts, bool):
        raise ConfigurationError(f"scripts must be True, False, or None to find out, not {shown(scripts)}.")
    if scripts is False and (replicas or on_disk or reassert):
        raise ConfigurationError("Acknowledgement by replicas and reassert need scripts: leave scripts=False out.")
    within = seconds(chosen["replica_timeout"], "replica_timeout", least=0.001, most=60.0)
    if not replicas and not on_disk:
        if "replica_timeout" in given:
            raise ConfigurationError("replica_timeout makes no sense without replicas=1 (or more) or aof=True.")
        return Choices(None, reassert, service, scripts)
    return Choices(Wanted(replicas, within, on_disk), reassert, service, scripts)
