"""The moment in which a lease is lost, as something to wait for: the rules once, the two colours below them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockfast.core.lease_state import State
from lockfast.ports import Runtime
from lockfast.runtime.runner import run
from lockfast.values import Seconds, seconds

if TYPE_CHECKING:
    from lockfast.client.lease import BaseLease


class BaseLost:
    """The moment of loss as something to wait for; true once it has come."""

    def __init__(self, lease: BaseLease) -> None:
        self._lease = lease

    def is_set(self) -> bool:
        """Whether the lease is lost, by the local clock."""
        return self._lease.state is State.LOST

    def __bool__(self) -> bool:
        return self.is_set()

    async def _wait(self, runtime: Runtime, timeout: Seconds | None) -> bool:
        until = None if timeout is None else runtime.now() + seconds(timeout, "timeout")
        waker = runtime.waker()
        self._lease._wakers.append(waker)
        try:
            while not self.is_set():
                if not await waker.wait(until):
                    return self.is_set()
            return True
        finally:
            self._lease._wakers.remove(waker)


class Lost(BaseLost):
    """For threads: `wait()` blocks.

    >>> import lockfast
    >>> lease = lockfast.connect("memory://").lock("doc:lost").acquire()
    >>> lease.lost.wait(timeout=0)
    False
    >>> lease.release()
    True
    """

    def wait(self, timeout: Seconds | None = None) -> bool:
        """Block until the lease is lost; False when `timeout` seconds passed first."""
        return run(self._wait(self._lease._client.runtime, timeout))


class AsyncLost(BaseLost):
    """For asyncio: `await wait()`."""

    async def wait(self, timeout: Seconds | None = None) -> bool:
        """Wait until the lease is lost; False when `timeout` seconds passed first."""
        return await self._wait(self._lease._client.runtime, timeout)
