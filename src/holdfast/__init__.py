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

from holdfast._version import __version__
from holdfast.connect import connect

TYPE_CHECKING = False
"""As in `typing`, which is not loaded: see `connect.py`."""

if TYPE_CHECKING:
    from holdfast import errors
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

_HOMES = {
    "Lease": "leases",
    "Lock": "locks",
    "LockInfo": "values",
    "Locks": "connection",
    "Owner": "values",
    "State": "core.holding",
    "WaiterInfo": "values",
}
"""Where a public name is defined, if not among the errors. It is loaded when first asked for."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    from importlib import import_module

    home = import_module("holdfast." + _HOMES.get(name, "errors"))
    value = home if name == "errors" else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
