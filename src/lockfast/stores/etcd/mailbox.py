"""How a waiter learns of its grant: it watches all grants of the lock.

- Its grant is a key with its holder id.
- If grants end so that its claim would be admitted, it sends its claim again. That is the case after an expiry, and
  after releases at the same moment that did not see each other. A release that serves the queue wakes nobody else.
"""

from __future__ import annotations

from lockfast.admission import LiveGrant, admit
from lockfast.errors import StoreUnavailable
from lockfast.ports import Runtime
from lockfast.stores.etcd.client import EtcdClient
from lockfast.stores.etcd.records import Record, Snapshot, all_grants, fence_at, packed
from lockfast.values import Claim, GrantNotification, Mode, Notification


class EtcdMailbox:
    """`ports.Mailbox`: a watch on the lock's grants from the revision of the last request answered "queued".

    Any change after `revision` is newer than that answer, so a grant in it answers the request `attempt`. `_live` has
    the grants at `revision`.
    """

    address = "watch"

    def __init__(self, client: EtcdClient, runtime: Runtime, holder: str, boxes: dict[str, EtcdMailbox]) -> None:
        self._client = client
        self._runtime = runtime
        self._holder = holder
        self._boxes = boxes
        self._claim = Claim("", holder, 0.0, "")
        self._live: dict[bytes, LiveGrant] = {}
        self._revision = self._attempt = 0

    async def open(self, until: float) -> None:
        """Nothing to do: a watch can start at a past revision."""

    def queued(self, claim: Claim, seen: Snapshot, attempt: int) -> None:
        """The request `attempt` was answered "queued", with the lock as in `seen`."""
        self._claim, self._revision, self._attempt = claim, seen.revision, attempt
        self._live = {one.key: one.live for one in seen.grants}

    async def wait(self, until: float) -> Notification | None:
        start, end = all_grants(self._claim.name)
        watched = {"key": packed(start), "range_end": packed(end), "start_revision": self._revision + 1}
        watch = self._client.stream("/v3/watch", {"create_request": watched}, until)
        try:
            async for part in watch:
                was_admitted = self._is_admitted()
                for event in part.get("result", {}).get("events", ()):
                    granted = self._apply(Record.of(event["kv"]), event.get("type") == "DELETE")
                    if granted is not None:
                        return granted
                if self._is_admitted() and not was_admitted:
                    return None  # the next request serves the queue
                if self._runtime.now() >= until:
                    return None
        finally:
            await watch.aclose()
        if self._runtime.now() < until:
            raise StoreUnavailable("etcd ended the watch for a grant. The ticket is kept; the next request retries.")
        return None

    def _is_admitted(self) -> bool:
        """Whether the claim would be admitted if it were first."""
        return admit(self._live.values(), self._claim) is not None

    def _apply(self, record: Record, is_deletion: bool) -> GrantNotification | None:
        self._revision = max(self._revision, record.changed)
        if is_deletion:
            self._live.pop(record.key, None)
            return None
        live = self._live[record.key] = record.live
        if record.holder != self._holder:
            return None
        fence = fence_at(record.changed) if live.mode is Mode.EXCLUSIVE else record.shared_fence
        return GrantNotification(self._attempt, fence, live.slots)

    def close(self) -> None:
        self._boxes.pop(self._holder, None)
