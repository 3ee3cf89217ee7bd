"""Where a waiter hears of its grant: a watch on the holder's node.

A holder's node that was made after our own place was last written is newer than the answer "still queued", so a grant
seen there answers the last turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockfast.ports import Runtime
from lockfast.values import FirstNotification, GrantNotification

if TYPE_CHECKING:
    from lockfast.stores.zookeeper.store import ZooKeeperStore


class ZooKeeperMailbox:
    """`ports.Mailbox`. `turn` and `written_by` are those of the last request that was answered "still queued"."""

    def __init__(self, store: ZooKeeperStore, runtime: Runtime, holder: str) -> None:
        self._store = store
        self._waker = runtime.waker()
        self._holder = holder
        self.name = ""
        self.attempt = 0
        self.written_by = 0

    @property
    def address(self) -> str:
        return "watch"

    async def open(self, until: float) -> None:
        """Nothing to do: `wait` looks before it watches."""

    async def wait(self, until: float) -> GrantNotification | FirstNotification | None:
        while True:
            node = await self._store.holder_of(self.name, until, self._changed)
            if node is None:
                return None  # free: ask, and hand it to whoever is first
            if node.holder == self._holder and node.made_by > self.written_by:
                return GrantNotification(self.attempt, node.made_by)
            if not await self._waker.wait(until):
                return None

    def _changed(self, event: Any) -> None:
        self._waker.wake()

    def close(self) -> None:
        self._store.boxes.pop(self._holder, None)
