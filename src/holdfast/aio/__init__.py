"""The asyncio colour of the public names: `from holdfast import aio`, then `aio.connect(...)`.

>>> import asyncio
>>> from holdfast import aio
>>> async def main():
...     async with aio.connect("memory://") as locks, locks.lock("file:9527", ttl=10) as lease:
...         return lease.remaining > 9
>>> asyncio.run(main())
True
"""

from __future__ import annotations

from holdfast.connect import connect_asyncio as connect
from holdfast.connection import AsyncLocks as Locks
from holdfast.leases import AsyncLease as Lease
from holdfast.locks import AsyncLock as Lock

__all__ = ["Lease", "Lock", "Locks", "connect"]
