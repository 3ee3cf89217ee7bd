"""Where a waiter hears of its grant: a watch on the lock's key, from the revision of its last request on.

A change after that revision is newer than the answer "still queued", so a grant seen there answers the last turn.
"""

from __future__ import annotations

from lockfast.errors import StoreUnavailable
from lockfast.ports import Runtime
from lockfast.stores.etcd.calls import Calls
from lockfast.stores.etcd.records import Record, lock_key, packed
from lockfast.values import FirstNotification, GrantNotification


class EtcdMailbox:
    """`ports.Mailbox`. `revision` and `turn` are those of the last request that was answered "still queued"."""

    def __init__(self, calls: Calls, runtime: Runtime, holder: str, boxes: dict[str, EtcdMailbox]) -> None:
        self._calls = calls
        self._runtime = runtime
        self._holder = holder
        self._boxes = boxes
        self.name = ""
        self.revision = 0
        self.attempt = 0

    @property
    def address(self) -> str:
        return "watch"

    async def open(self, until: float) -> None:
        """Nothing to do: a watch begins at a revision of the past."""

    async def wait(self, until: float) -> GrantNotification | FirstNotification | None:
        request = {"create_request": {"key": packed(lock_key(self.name)), "start_revision": self.revision + 1}}
        watch = self._calls.lines("/v3/watch", request, until)
        try:
            async for part in watch:
                freed = False
                for event in part.get("result", {}).get("events", ()):
                    record = Record.of(event["kv"])
                    self.revision = max(self.revision, record.changed)
                    freed = event.get("type") == "DELETE"
                    if record.value == self._holder.encode():
                        return GrantNotification(self.attempt, record.changed)
                if freed or self._runtime.now() >= until:
                    return None  # free: ask, and hand it to whoever is first
        finally:
            await watch.aclose()  # type: ignore[attr-defined]
        if self._runtime.now() < until:
            raise StoreUnavailable("etcd ended the watch for a grant. The next request tells whether it is back.")
        return None

    def close(self) -> None:
        """A watch lasts as long as its wait, so there is only the entry to remove."""
        self._boxes.pop(self._holder, None)
