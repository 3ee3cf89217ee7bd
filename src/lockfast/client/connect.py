"""`connect()`: from a URL, a client or nothing to a connection.

Nothing is loaded before it is called: `import lockfast` is on the way of every command, however short. What a target
may be is known to `targets.py`.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
"""As in `typing`, whose import would be a good part of the time that a short command takes."""

if TYPE_CHECKING:
    from typing import Any

    from lockfast.client.lease import Lease
    from lockfast.client.locks import AsyncLocks, Locks
    from lockfast.stores.sqlite.fast_client import FastGrant
    from lockfast.values import Owner, Seconds


def connect(target: Any = None, *, label: str = "", store_timeout: Seconds = 10.0, **choices: Any) -> Locks:
    """Locks on the store that `target` names, for threads.

    `target` is a URL (redis://, rediss://, valkey://, valkeys://, unix://, sqlite:///path, memory://), a client of
    redis-py or valkey-py, a list of either for a quorum of independent servers, or nothing: then LOCKFAST_URL, else
    the embedded store in the user's state folder. With a list, `sits_out` is for how many seconds a server that
    restarted is not counted: the longest ttl in use, if the servers do not keep every grant on disk.
    `label` tells operators who we are. `store_timeout` is how many seconds a store may go on not answering
    before a wait without limit gives up with `StoreUnavailable`. Nothing is sent until a lock is used.

    For Redis and Valkey: `replicas` (0) is how many replicas must acknowledge a grant or a renewal before it counts,
    within `replica_timeout` (1) seconds, with `aof=True` on disk. `reassert`: whether a grant that the server forgot is
    taken back in if the lock is free; by default where another server may take over, with Sentinel or a cluster.
    `scripts`: False does without (transactions instead, for accounts that may not run scripts), True never does, and
    None finds out. `service` names the master for a Sentinel object. URLs of several servers: redis+sentinel://host1,host2/service,
    redis+cluster://host1,host2.

    >>> import lockfast
    >>> lockfast.connect("memory://")
    <Locks on memory://>
    """
    from lockfast.client.locks import Locks
    from lockfast.client.target import checked_timeout, store_of
    from lockfast.runtime.threads import ThreadRuntime

    runtime = ThreadRuntime()
    store, address = store_of(target, runtime, "threads", choices)
    return Locks(store, runtime, owner=_owner(label), store_timeout=checked_timeout(store_timeout), address=address)


def connect_asyncio(
    target: Any = None, *, label: str = "", store_timeout: Seconds = 10.0, **choices: Any
) -> AsyncLocks:
    """Locks on the store that `target` names, for asyncio; `target` and options as for `lockfast.connect`.

    >>> import lockfast.aio
    >>> lockfast.aio.connect("memory://")
    <AsyncLocks on memory://>
    """
    from lockfast.client.locks import AsyncLocks
    from lockfast.client.target import checked_timeout, store_of
    from lockfast.runtime.asyncio import AsyncioRuntime

    runtime = AsyncioRuntime()
    store, address = store_of(target, runtime, "asyncio", choices)
    return AsyncLocks(
        store, runtime, owner=_owner(label), store_timeout=checked_timeout(store_timeout), address=address
    )


def take_at_once(target: str | None, name: str, ttl: float, label: str) -> FastGrant | None:
    """A lease on a free lock of the embedded store, without loading the library; None when that is not so simple, and
    `connect()` has to do it. For commands that are over before the library would be loaded."""
    url = target or os.environ.get("LOCKFAST_URL") or "sqlite://"
    if not url.startswith("sqlite:"):
        return None
    from lockfast.stores.sqlite import fast_client

    path = fast_client.path_of(url)
    return None if path is None else fast_client.acquire(path, name, ttl, f"{_host()}:{os.getpid()}:{label}")


def resume(grant: FastGrant, target: str | None, label: str, options: dict[str, Any]) -> Lease:
    """Turn a grant of `take_at_once` into a renewed lease with the same holder id and fence."""
    lease = connect(target, label=label)._resume(grant.name, grant.holder, grant.fence, grant.sent_at, options)
    grant.close()
    return lease


def _owner(label: str) -> Owner:
    from lockfast.values import Owner

    return Owner(_host(), os.getpid(), label)


def _host() -> str:
    if hasattr(os, "uname"):
        host = os.uname().nodename  # what socket.gethostname() gives, without loading it
    else:
        import socket

        host = socket.gethostname()
    return "".join(char for char in host if char.isprintable() and char != ":")[:64]
