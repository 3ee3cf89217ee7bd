"""lockfast: a lock that several processes on several machines can trust.

How to read this tree: `client/connect.py` turns a target into a store and returns `Locks`, which makes `Lock` objects,
which return `Lease` objects. These are thin. `core/` decides; it is pure and knows only `ports.py`. `runtime/`
(threads, asyncio) and `stores/` implement the ports. `values.py` and `errors.py` are used by all.

>>> import lockfast
>>> locks = lockfast.connect("memory://")
>>> with locks.lock("file:9527", ttl=10) as lease:
...     lease.fence > 0
True
"""

from __future__ import annotations

from lockfast._version import __version__
from lockfast.client.connect import connect

TYPE_CHECKING = False
"""As in `typing`, which is not loaded: see `connect.py`."""

if TYPE_CHECKING:
    from lockfast import errors
    from lockfast.client.all_of import AllOf, LeaseSet
    from lockfast.client.lease import Lease
    from lockfast.client.lock import Lock
    from lockfast.client.locks import Locks
    from lockfast.client.rlock import RLock
    from lockfast.client.rwlock import RWLock
    from lockfast.client.semaphore import Permit, Semaphore
    from lockfast.core.lease_state import State
    from lockfast.errors import (
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
        WouldDeadlock,
    )
    from lockfast.values import HolderInfo, LockInfo, Mode, Owner, WaiterInfo

__all__ = [
    "AcquireTimeout",
    "AllOf",
    "ConfigurationError",
    "HolderInfo",
    "Lease",
    "LeaseLost",
    "LeaseSet",
    "Lock",
    "LockError",
    "LockInfo",
    "Locks",
    "Mode",
    "NotHeld",
    "Outcome",
    "Owner",
    "Permit",
    "QuorumNotReached",
    "RLock",
    "RWLock",
    "Semaphore",
    "StaleFence",
    "State",
    "StoreError",
    "StoreProtocolError",
    "StoreRefused",
    "StoreUnavailable",
    "UpdateConflict",
    "WaiterInfo",
    "WouldDeadlock",
    "__version__",
    "connect",
    "errors",
]

_HOMES = {
    "AllOf": "client.all_of",
    "HolderInfo": "values",
    "Lease": "client.lease",
    "LeaseSet": "client.all_of",
    "Lock": "client.lock",
    "LockInfo": "values",
    "Locks": "client.locks",
    "Mode": "values",
    "Owner": "values",
    "Permit": "client.semaphore",
    "RLock": "client.rlock",
    "RWLock": "client.rwlock",
    "Semaphore": "client.semaphore",
    "State": "core.lease_state",
    "WaiterInfo": "values",
}
"""Where a public name is defined, if not among the errors. It is loaded when first asked for."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'lockfast' has no attribute {name!r}")
    from importlib import import_module

    home = import_module("lockfast." + _HOMES.get(name, "errors"))
    value = home if name == "errors" else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
