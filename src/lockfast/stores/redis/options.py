"""The options of `connect()` for Redis and Valkey, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from lockfast.errors import ConfigurationError
from lockfast.values import seconds, shown

MAX_REPLICAS = 100


class ReplicaAcks(NamedTuple):
    """How many replicas must acknowledge a grant, within how many seconds, and whether on disk (the master too)."""

    replicas: int
    within: float
    on_disk: bool


class RedisOptions(NamedTuple):
    """Checked options.

    `acks` is None if no acknowledgement is needed. `reassert` None: on with sentinels or a cluster only. `service` is
    the sentinels' name for the master. `scripts` None: use scripts unless the server denies them."""

    acks: ReplicaAcks | None = None
    reassert: bool | None = None
    service: str | None = None
    scripts: bool | None = None


def checked_options(given: Mapping[str, Any]) -> RedisOptions:
    """Check the options, and add the defaults.

    >>> checked_options({"replicas": 1}).acks
    ReplicaAcks(replicas=1, within=1.0, on_disk=False)
    >>> checked_options({"replicas": -1})
    Traceback (most recent call last):
    lockfast.errors.ConfigurationError: replicas must be a whole number from 0 to 100, not -1.
    """
    replicas, on_disk = given.get("replicas", 0), given.get("aof", False)
    reassert, service, scripts = given.get("reassert"), given.get("service"), given.get("scripts")
    if type(replicas) is not int or not 0 <= replicas <= MAX_REPLICAS:
        raise ConfigurationError(f"replicas must be a whole number from 0 to {MAX_REPLICAS}, not {shown(replicas)}.")
    if not isinstance(on_disk, bool):
        raise ConfigurationError(f"aof must be True or False, not {shown(on_disk)}.")
    if reassert is not None and not isinstance(reassert, bool):
        raise ConfigurationError(f"reassert must be True, False or None, not {shown(reassert)}.")
    if service is not None and (not isinstance(service, str) or not service):
        raise ConfigurationError(f"service must be the sentinels' name for a master, not {shown(service)}.")
    if scripts is not None and not isinstance(scripts, bool):
        raise ConfigurationError(f"scripts must be True, False, or None to find out, not {shown(scripts)}.")
    if scripts is False and (replicas or on_disk or reassert):
        raise ConfigurationError("Acknowledgement by replicas and reassert need scripts: remove scripts=False.")
    within = seconds(given.get("replica_timeout", 1.0), "replica_timeout", least=0.001, most=60.0)
    if replicas or on_disk:
        return RedisOptions(ReplicaAcks(replicas, within, on_disk), reassert, service, scripts)
    if "replica_timeout" in given:
        raise ConfigurationError("replica_timeout has no effect without replicas=1 (or more) or aof=True.")
    return RedisOptions(None, reassert, service, scripts)
