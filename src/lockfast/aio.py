"""The public names for asyncio: `from lockfast import aio`, then `aio.connect(...)`.

`aio.simple` has the plain functions of `lockfast.simple`, awaited.

>>> import asyncio
>>> from lockfast import aio
>>> async def main():
...     async with aio.connect("memory://") as locks, locks.lock("file:9527", ttl=10) as lease:
...         return lease.remaining > 9
>>> asyncio.run(main())
True
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockfast.client.all_of import AsyncAllOf as AllOf
from lockfast.client.all_of import AsyncLeaseSet as LeaseSet
from lockfast.client.connect import connect_asyncio as connect
from lockfast.client.lease import AsyncLease as Lease
from lockfast.client.lock import AsyncLock as Lock
from lockfast.client.locks import AsyncLocks as Locks
from lockfast.client.rlock import AsyncRLock as RLock
from lockfast.client.rwlock import AsyncRWLock as RWLock
from lockfast.client.semaphore import AsyncPermit as Permit
from lockfast.client.semaphore import AsyncSemaphore as Semaphore

__all__ = ["AllOf", "Lease", "LeaseSet", "Lock", "Locks", "Permit", "RLock", "RWLock", "Semaphore", "connect"]

if TYPE_CHECKING:
    from lockfast.simple import aio as simple  # noqa: F401
else:

    def __getattr__(name: str) -> Any:
        """Load `simple` when it is first used: it needs the Redis store."""
        if name == "simple":
            from lockfast.simple import aio

            return aio
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
