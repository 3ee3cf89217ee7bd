"""`connect()`: from a URL, a client or nothing to a connection.

Nothing is imported before it is called, because `import lockfast` is on the path of every command, however short.
`target.py` knows which targets there are.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
"""As in `typing`, whose import would be a good part of the run time of a short command."""

if TYPE_CHECKING:
    from typing import Any, Unpack

    from lockfast.client.lease import Lease
    from lockfast.client.locks import AsyncLocks, Locks
    from lockfast.client.options import StoreOptions
    from lockfast.ports import Observer
    from lockfast.stores.sqlite.connection import FastGrant
    from lockfast.values import Owner, Seconds


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
    from lockfast.client.target import checked_store_timeout, store_of
    from lockfast.runtime.threads import ThreadRuntime

    runtime = ThreadRuntime()
    store, address = store_of(target, runtime, "threads", options)
    timeout = checked_store_timeout(store_timeout)
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
    from lockfast.client.target import checked_store_timeout, store_of
    from lockfast.runtime.asyncio import AsyncioRuntime

    runtime = AsyncioRuntime()
    store, address = store_of(target, runtime, "asyncio", options)
    timeout = checked_store_timeout(store_timeout)
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
