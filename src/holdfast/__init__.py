"""holdfast: a lock that several processes on several machines can trust.

How to read this tree. `connect.py` turns a target into a store and returns `connection.Locks`; that makes `locks.Lock`,
which hands out `leases.Lease`. These are thin. What happens is decided in `core/`, which is pure and knows only
`ports.py`; `runtime/` (threads, asyncio) and `stores/` (memory, sqlite, redis) stand behind those ports. `values.py`
and `errors.py` are what everybody speaks in.

>>> import holdfast
>>> locks = holdfast.connect("memory://")
>>> with locks.lock("file:9527", ttl=10) as lease:
...     lease.fence > 0
True
"""

from __future__ import annotations

from holdfast import errors
from holdfast._version import __version__
from holdfast.connect import connect
from holdfast.connection import Locks
from holdfast.core.holding import State
from holdfast.errors import (
    AcquireTimeout,
    ConfigurationError,
    LeaseLost,
    LockError,
    NotHeld,
    Outcome,
    QuorumNotReached,
    StaleFence,
    StoreError,
    StoreProtocolError,
    StoreRefused,
    StoreUnavailable,
    UpdateConflict,
)
from holdfast.leases import Lease
from holdfast.locks import Lock
from holdfast.values import LockInfo, Owner, WaiterInfo

__all__ = [
    "AcquireTimeout",
    "ConfigurationError",
    "Lease",
    "LeaseLost",
    "Lock",
    "LockError",
    "LockInfo",
    "Locks",
    "NotHeld",
    "Outcome",
    "Owner",
    "QuorumNotReached",
    "StaleFence",
    "State",
    "StoreError",
    "StoreProtocolError",
    "StoreRefused",
    "StoreUnavailable",
    "UpdateConflict",
    "WaiterInfo",
    "__version__",
    "connect",
    "errors",
]
