"""One connection per client object, for locks that are made straight on a client: `lockfast.Lock(client, name)`.

Rules kept here: every lock on one client shares one connection, which lives as long as that client does and is closed
after it (for asyncio, also at the end of the event loop, as nobody else would); locks and leases keep the client alive,
so nothing ends under their hands; a client is read, never changed.
"""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping
from typing import Any

from lockfast.client.locks import AsyncLocks, Locks
from lockfast.client.session import BaseLocks
from lockfast.errors import ConfigurationError

_of_client: MutableMapping[Any, BaseLocks[Any]] = weakref.WeakKeyDictionary()


def locks_of(client: Any, *, awaited: bool) -> BaseLocks[Any]:
    """The connection that locks on `client` share; `client` itself if it is a connection already."""
    if isinstance(client, BaseLocks):
        if isinstance(client, AsyncLocks) is not awaited:
            use = "lockfast.aio.Lock" if not awaited else "lockfast.Lock"
            raise ConfigurationError(f"This connection is of the other colour; use {use} with it.")
        return client
    try:
        found = _of_client.get(client)
    except TypeError:
        found = None  # no client of any kind: what follows says so
    return _connected(client, awaited=awaited) if found is None or found._closed else found


def _connected(client: Any, *, awaited: bool) -> BaseLocks[Any]:
    from lockfast.client.connect import connect, connect_asyncio

    if client is None or isinstance(client, str):
        raise ConfigurationError(
            "A lock is made on a client of redis-py or valkey-py. For a URL or the embedded store, call "
            "connect() and then lock(name) on what it returns."
        )
    made: Locks | AsyncLocks
    if awaited:
        made = connect_asyncio(client)
        made._ends_with_loop = True
    else:
        made = connect(client)
    kept = _of_client.setdefault(client, made)  # another thread may have been first; then ours was never used
    if kept._closed:
        kept = _of_client[client] = made
    if kept is made:
        weakref.finalize(client, made._abandon).atexit = False
    return kept
