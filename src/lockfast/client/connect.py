"""`connect()`: from a URL, a client, a list of servers or nothing to locks on a store.

Every import is inside a function, because `import lockfast` is on the path of every command, however short, and a
program loads only the store that it uses.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
"""As in `typing`, whose import would be a good part of the run time of a short command."""

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, Unpack

    from lockfast.client.lease import Lease
    from lockfast.client.locks import AsyncLocks, Locks
    from lockfast.client.options import StoreOptions
    from lockfast.ports import Observer, Runtime, Store
    from lockfast.stores.sqlite.connection import FastGrant
    from lockfast.values import Owner, Seconds

TCP_SCHEMES = ("redis", "rediss", "valkey", "valkeys")
REDIS_SCHEMES = frozenset(
    {*TCP_SCHEMES, "unix", *(f"{one}+{kind}" for one in TCP_SCHEMES for kind in ("sentinel", "cluster"))}
)
SCHEMES = (
    "redis://, rediss://, valkey://, valkeys://, unix://, redis+sentinel://, redis+cluster://, etcd://, "
    "zookeeper://, sqlite:///path and memory://"
)
REDIS_OPTIONS = ("replicas", "replica_timeout", "aof", "reassert", "service", "scripts")


def connect(
    target: Any = None,
    *,
    label: str = "",
    store_timeout: Seconds = 10.0,
    observer: Observer | None = None,
    **options: Unpack[StoreOptions],
) -> Locks:
    """Return locks on the store that `target` names, for threads. Nothing is sent until a lock is used.

    `target` is a URL (redis://, rediss://, valkey://, valkeys://, unix://, redis+sentinel://host1,host2/service,
    redis+cluster://host1,host2, etcd://, zookeeper://, sqlite:///path, memory://), a client of redis-py or valkey-py, a
    list of either for a quorum of independent servers, or nothing: then LOCKFAST_URL, else the embedded store in the
    user's state folder.

    `label` tells operators who you are. `store_timeout` is how many seconds the store may stay silent before a wait
    without a limit raises `StoreUnavailable`. `observer` receives lifecycle events.

    For Redis and Valkey: `replicas` (0) is how many replicas must acknowledge a grant or a renewal within
    `replica_timeout` (1) seconds, with `aof=True` on disk. `reassert`: whether a grant that the server lost is restored
    if the lock is free; by default with Sentinel or a cluster, where another server may take over. `scripts`: False
    uses transactions, for accounts that may not run scripts; True never does; None finds out. `service` names the
    master for a Sentinel object. For a list: `sits_out` is how many seconds a restarted server is not counted: the
    longest ttl in use, unless the servers keep every grant on disk.

    >>> import lockfast
    >>> lockfast.connect("memory://")
    <Locks on memory://>
    """
    from lockfast.client.locks import Locks
    from lockfast.runtime.threads import ThreadRuntime
    from lockfast.values import seconds

    runtime = ThreadRuntime()
    store, address = _store_of(target, runtime, "threads", options)
    timeout = seconds(store_timeout, "store_timeout", least=0.05)
    return Locks(store, runtime, owner=_owner(label), store_timeout=timeout, address=address, observer=observer)


def connect_asyncio(
    target: Any = None,
    *,
    label: str = "",
    store_timeout: Seconds = 10.0,
    observer: Observer | None = None,
    **options: Unpack[StoreOptions],
) -> AsyncLocks:
    """Return locks on the store that `target` names, for asyncio; `target` and options as for `lockfast.connect`.

    >>> import lockfast.aio
    >>> lockfast.aio.connect("memory://")
    <AsyncLocks on memory://>
    """
    from lockfast.client.locks import AsyncLocks
    from lockfast.runtime.asyncio import AsyncioRuntime
    from lockfast.values import seconds

    runtime = AsyncioRuntime()
    store, address = _store_of(target, runtime, "asyncio", options)
    timeout = seconds(store_timeout, "store_timeout", least=0.05)
    return AsyncLocks(store, runtime, owner=_owner(label), store_timeout=timeout, address=address, observer=observer)


def take_at_once(target: str | None, name: str, ttl: float, label: str) -> FastGrant | None:
    """Acquire a free lock of the embedded store without loading the library; None if `connect()` has to do it.

    For commands that end before the library would be loaded.
    """
    url = target or os.environ.get("LOCKFAST_URL") or "sqlite://"
    if not url.startswith("sqlite:"):
        return None
    from lockfast.stores.sqlite.connection import fast_acquire

    return fast_acquire(url, name, ttl, f"{_host()}:{os.getpid()}:{label}")


def resume(grant: FastGrant, target: str | None, label: str, options: Any) -> Lease:
    """Turn a grant of `take_at_once` into a renewed lease with the same holder id and fence."""
    lease = connect(target, label=label)._resume(grant.name, grant.holder, grant.fence, grant.sent_at, **options)
    grant.close()
    return lease


def _owner(label: str) -> Owner:
    from lockfast.values import Owner

    return Owner(_host(), os.getpid(), label)


def _host() -> str:
    if hasattr(os, "uname"):
        host = os.uname().nodename  # equals socket.gethostname(), without loading socket
    else:
        import socket

        host = socket.gethostname()
    return "".join(char for char in host if char.isprintable() and char != ":")[:64]


def _store_of(target: Any, runtime: Any, flavour: str, options: Mapping[str, Any]) -> tuple[Store, str]:
    """Return the store that `target` names, and its address for people."""
    from lockfast.errors import ConfigurationError, shown

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
    from lockfast.errors import ConfigurationError, shown

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
    if scheme not in ("memory", "sqlite", "etcd", "etcds", "zookeeper"):
        raise ConfigurationError(f"connect() does not know the scheme {shown(scheme + '://')}. Schemes are {SCHEMES}.")
    if options:
        raise ConfigurationError(
            f"The option {shown(next(iter(options)))} belongs to Redis and Valkey; {scheme}:// has no replicas."
        )
    if scheme == "memory":
        from lockfast.stores.memory import MemoryStore, hub

        return MemoryStore(hub(rest), runtime), f"memory://{rest}"
    if scheme == "zookeeper":
        from lockfast.stores.zookeeper.client import Session
        from lockfast.stores.zookeeper.store import ZooKeeperStore

        session = Session(url, runtime, flavour)
        return ZooKeeperStore(session, runtime), session.shown
    if scheme != "sqlite":
        from lockfast.stores.etcd.client import EtcdClient
        from lockfast.stores.etcd.store import EtcdStore

        client = EtcdClient(url, runtime, flavour)
        return EtcdStore(client, runtime), client.shown
    from lockfast.stores.sqlite.location import default_path
    from lockfast.stores.sqlite.store import SqliteStore

    if rest and not rest.startswith("/"):
        raise ConfigurationError(
            "A sqlite URL has three slashes and then the path: sqlite:///locks.db is relative, "
            "sqlite:////var/lib/app/locks.db is absolute, and sqlite:// alone is the default place."
        )
    path = rest[1:] or default_path()
    return SqliteStore(path, runtime, flavour=flavour), f"sqlite:///{path}"


def _quorum(
    targets: Sequence[Any], runtime: Any, flavour: str, *, sits_out: Seconds = 0.0, **unknown: Any
) -> tuple[Store, str]:
    """Return a quorum of the servers in the list."""
    from lockfast.core.quorum.store import QuorumStore
    from lockfast.errors import ConfigurationError, shown
    from lockfast.stores.redis.factory import member_of
    from lockfast.values import seconds

    if unknown:
        raise ConfigurationError(
            f"connect() has no option {shown(next(iter(unknown)))} for a list of servers. Options are label, "
            "store_timeout, observer and sits_out."
        )
    absence = seconds(sits_out, "sits_out")
    for target in targets:
        if isinstance(target, str) and target.partition("://")[0].lower() not in REDIS_SCHEMES:
            raise ConfigurationError("A quorum consists of Redis or Valkey servers: pass their URLs or clients.")
    members = [member_of(target, runtime, flavour) for target in targets]
    addresses = [address for _, address in members]
    _check_servers(addresses)
    return QuorumStore(members, runtime, sits_out=absence), f"a quorum of {', '.join(addresses)}"


def _check_servers(addresses: Sequence[str]) -> None:
    """Refuse a list that is no quorum. Two databases of one server count as one: they fail together."""
    import logging

    from lockfast.errors import ConfigurationError

    count = len(addresses)
    if not count:
        raise ConfigurationError("A quorum needs servers, and this list is empty. Pass three or five.")
    if count < 3:
        raise ConfigurationError(
            f"A quorum of {count} does not survive the failure of a server. Pass three or five that fail "
            "independently; to use a single server, pass it without a list."
        )
    seen: set[str] = set()
    for address in addresses:
        server = address.rpartition("?db=" if address.startswith("unix:") else "/")[0]
        if server in seen:
            raise ConfigurationError(
                f"{address} is in the list twice, so it would vote twice. List each server of a quorum once."
            )
        seen.add(server)
    if count % 2 == 0:
        log = logging.getLogger("lockfast")
        log.warning("A quorum of %d servers survives no more failures than one of %d.", count, count - 1)
