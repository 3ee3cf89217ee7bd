"""From the target of `connect()` to a store. Imports only what the target needs."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from lockfast.errors import ConfigurationError, shown
from lockfast.ports import Runtime, Store
from lockfast.values import Seconds, seconds

log = logging.getLogger("lockfast")

TCP_SCHEMES = ("redis", "rediss", "valkey", "valkeys")
REDIS_SCHEMES = frozenset(
    {*TCP_SCHEMES, "unix", *(f"{one}+{kind}" for one in TCP_SCHEMES for kind in ("sentinel", "cluster"))}
)
SCHEMES = (
    "redis://, rediss://, valkey://, valkeys://, unix://, redis+sentinel://, redis+cluster://, etcd://, "
    "zookeeper://, sqlite:///path and memory://"
)
REDIS_OPTIONS = ("replicas", "replica_timeout", "aof", "reassert", "service", "scripts")


def checked_store_timeout(value: Seconds) -> float:
    return seconds(value, "store_timeout", least=0.05)


def store_of(target: Any, runtime: Runtime, flavour: str, options: Mapping[str, Any]) -> tuple[Store, str]:
    if isinstance(target, list | tuple):
        return _quorum(target, runtime, flavour, **options)
    for option in options:
        if option not in REDIS_OPTIONS:
            raise ConfigurationError(
                f"connect() has no option {shown(option)}. Options are label, store_timeout and observer, and for "
                f"Redis and Valkey {', '.join(REDIS_OPTIONS)}."
            )
    if target is None:
        target = os.environ.get("LOCKFAST_URL") or "sqlite://"
    if isinstance(target, str):
        return _store_of_url(target, runtime, flavour, options)
    from lockfast.stores.redis.factory import store_of_client

    return store_of_client(target, runtime, flavour, options)


def _store_of_url(url: str, runtime: Runtime, flavour: str, options: Mapping[str, Any]) -> tuple[Store, str]:
    scheme, separator, rest = url.partition("://")
    scheme = scheme.lower()
    if not separator or not scheme.replace("+", "").isalnum():
        # The beginning of a broken URL may be a password, so it is not shown.
        raise ConfigurationError(
            f"The target of connect() is not a URL: it does not begin with a scheme and '://'. Use one of {SCHEMES}."
        )
    if scheme in REDIS_SCHEMES:
        from lockfast.stores.redis.factory import store_of_url

        return store_of_url(url, runtime, flavour, options)
    if scheme in ("memory", "sqlite", "etcd", "etcds", "zookeeper") and options:
        raise ConfigurationError(
            f"The option {shown(next(iter(options)))} belongs to Redis and Valkey; {scheme}:// has no replicas."
        )
    if scheme == "memory":
        from lockfast.stores.memory import MemoryStore, hub

        return MemoryStore(hub(rest), runtime), f"memory://{rest}"
    if scheme == "sqlite":
        return _sqlite_store(rest, runtime, flavour)
    if scheme in ("etcd", "etcds"):
        return _etcd_store(url, runtime, flavour)
    if scheme == "zookeeper":
        return _zookeeper_store(url, runtime, flavour)
    raise ConfigurationError(f"connect() does not know the scheme {shown(scheme + '://')}. Schemes are {SCHEMES}.")


def _quorum(
    targets: Sequence[Any], runtime: Any, flavour: str, *, sits_out: Seconds = 0.0, **unknown: Any
) -> tuple[Store, str]:
    """Return a quorum of the servers in the list."""
    from lockfast.core.quorum.store import QuorumStore
    from lockfast.stores.redis.factory import member_of

    if unknown:
        raise ConfigurationError(
            f"connect() has no option {shown(next(iter(unknown)))} for a list of servers. Options are label, "
            "store_timeout, observer and sits_out."
        )
    absence = seconds(sits_out, "sits_out")
    _check_size(targets)
    nodes = []
    for target in targets:
        if isinstance(target, str) and target.partition("://")[0].lower() not in REDIS_SCHEMES:
            raise ConfigurationError("A quorum consists of Redis or Valkey servers: pass their URLs or clients.")
        nodes.append(member_of(target, runtime, flavour))
    _check_addresses([address for _, address in nodes])
    shown_as = f"a quorum of {', '.join(address for _, address in nodes)}"
    return QuorumStore(nodes, runtime, sits_out=absence), shown_as


def _check_size(targets: Sequence[Any]) -> None:
    if not targets:
        raise ConfigurationError("A quorum needs servers, and this list is empty. Pass three or five.")
    if len(targets) < 3:
        raise ConfigurationError(
            f"A quorum of {len(targets)} does not survive the failure of a server. Pass three or five that fail "
            "independently; to use a single server, pass it without a list."
        )
    if len(targets) % 2 == 0:
        log.warning("A quorum of %d servers survives no more failures than one of %d.", len(targets), len(targets) - 1)


def _check_addresses(addresses: Sequence[str]) -> None:
    """Refuse a server that is listed twice, whatever the database: it is the server that fails."""
    seen: set[str] = set()
    for address in addresses:
        server = address.rpartition("?db=" if address.startswith("unix:") else "/")[0]
        if server in seen:
            raise ConfigurationError(
                f"{address} is in the list twice, so it would vote twice. List each server of a quorum once."
            )
        seen.add(server)


def _etcd_store(url: str, runtime: Runtime, flavour: str) -> tuple[Store, str]:
    from lockfast.stores.etcd.client import EtcdClient
    from lockfast.stores.etcd.store import EtcdStore

    client = EtcdClient(url, runtime, flavour)
    return EtcdStore(client, runtime), client.shown


def _zookeeper_store(url: str, runtime: Runtime, flavour: str) -> tuple[Store, str]:
    from lockfast.stores.zookeeper.session import Session
    from lockfast.stores.zookeeper.store import ZooKeeperStore

    session = Session(url, runtime, flavour)
    return ZooKeeperStore(session, runtime), session.shown


def _sqlite_store(rest: str, runtime: Runtime, flavour: str) -> tuple[Store, str]:
    from lockfast.stores.sqlite.location import default_path
    from lockfast.stores.sqlite.store import SqliteStore

    if rest and not rest.startswith("/"):
        raise ConfigurationError(
            "A sqlite URL has three slashes and then the path: sqlite:///locks.db is relative, "
            "sqlite:////var/lib/app/locks.db is absolute, and sqlite:// alone is the default place."
        )
    path = rest[1:] or default_path()
    return SqliteStore(path, runtime, flavour=flavour), f"sqlite:///{path}"
