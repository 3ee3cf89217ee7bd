"""What a connection is in both colours: a store, its keeper, and the leases that it looks after.

A process that was forked from one that had connections starts clean: it drops what it inherited without
touching it, and holds none of its parent's leases (`generation` tells them apart).
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, Generic

from lockfast.client.base_lock import BaseLock, LeaseT
from lockfast.client.export import Exported
from lockfast.core.acquire import Grant
from lockfast.core.adopt import adopt
from lockfast.core.background import BackgroundTasks
from lockfast.core.deadline import ATTEMPT, Deadline
from lockfast.core.keepalive import Keepalive
from lockfast.core.lease_state import LeaseState
from lockfast.core.listing import Listing
from lockfast.core.local_queue import Passing
from lockfast.core.release import BUDGET, give_back
from lockfast.core.retry import retry
from lockfast.core.single_flight import Once
from lockfast.core.validity import valid_until
from lockfast.errors import LeaseLost, closed_error
from lockfast.ports import Runtime, Store
from lockfast.values import Claim, Owner, shown

if TYPE_CHECKING:
    from lockfast.client.guarantees import Guarantees

log = logging.getLogger("lockfast")

MOST_CALLBACKS = 16
"""Callbacks of one connection that may run at the same time."""

CLOSES_WITHIN = BUDGET + 1.0
"""Seconds that `close()` takes at most: the budget for giving back, and a moment to hang up."""

exiting: list[bool] = []
"""Not empty once the program ends."""
everyone: weakref.WeakSet[BaseLocks[Any]] = weakref.WeakSet()


class BaseLocks(Generic[LeaseT]):
    """What a connection is in both colours."""

    _lock_class: type[BaseLock[LeaseT]]

    def __init__(self, store: Store, runtime: Runtime, *, owner: Owner, store_timeout: float, address: str) -> None:
        self.store = store
        self.runtime = runtime
        self.keepalive = Keepalive(store, runtime)
        self.passing = Passing(runtime)
        self.callbacks = BackgroundTasks(runtime, "callback", MOST_CALLBACKS)
        self.store_timeout = store_timeout
        self.no_deadline = Deadline(None, store_timeout)
        self.patience = min(store_timeout, ATTEMPT)
        self.generation = 0
        self._owner = owner
        self._address = address
        self._closed = False
        self._warned: set[str] = set()
        self._ending = Once(runtime, "close")
        self._stranded: list[LeaseState] = []
        everyone.add(self)

    def ensure_open(self) -> None:
        if self._closed:
            raise closed_error()

    def _start_clean(self, *, forked: bool) -> None:
        """In a forked child, or a new event loop: nothing of what was before is ours."""
        self.generation += 1
        self.store.reset(forked=forked)
        self.keepalive = Keepalive(self.store, self.runtime)
        self.passing = Passing(self.runtime)
        self.callbacks = BackgroundTasks(self.runtime, "callback", MOST_CALLBACKS)
        self._ending = Once(self.runtime, "close")
        self._owner = Owner(self._owner.host, os.getpid(), self._owner.label)

    def _abandon(self) -> None:
        """Hang up, when nobody can use this any more, and so nothing is held. Called by the garbage collector, in
        whatever thread and in the midst of anything: so it takes no mutex and starts no thread."""
        self.keepalive.close()
        self.store.disconnect()

    def _closed_under_us(self) -> None:
        """A thread that waited is told that the connection was closed. When that is because the program ends, nobody
        is there to be told: a daemon thread waits for the end, which comes at once, rather than complain."""
        if self._closed and exiting and threading.current_thread().daemon:
            threading.Event().wait()

    async def _close(self) -> None:
        self._closed = True
        self.keepalive.close()
        await self._ending.request(self._end, CLOSES_WITHIN)

    async def _end(self) -> None:
        try:
            await self.store.cancel_waits()  # first: what is given back must not go to who waits here
            for claim in self.passing.close():
                await give_back(self.store, self.runtime, claim.name, claim.holder, claim.ttl, inline=True)
            await self.keepalive.give_back([*self._stranded, *self.keepalive.held()])
        finally:
            await self.store.close()

    async def _adopt(self, text: str, chosen: dict[str, Any]) -> LeaseT:
        self.ensure_open()
        exported = Exported.decode(text)
        lock = self._lock_class(self, exported.name, **{"ttl": exported.ttl, **chosen})
        claim = Claim(lock.name, self.runtime.new_holder_id(), lock._options.ttl, lock._options.owner)
        grant = await adopt(self.store, self.runtime, claim, exported.holder)
        if grant is None:
            raise LeaseLost(
                f"The exported lease on {shown(exported.name)} is no longer there: it expired, was given back, or "
                "someone adopted it before. Acquire the lock anew.",
                name=exported.name,
            )
        return lock._lease(grant)

    def _resume(self, name: str, holder: str, fence: int, sent_at: float, chosen: dict[str, Any]) -> LeaseT:
        """A lease on what was granted to `holder` by a request sent at `asked_at`, before this connection was."""
        self.ensure_open()
        lock = self._lock_class(self, name, **chosen)
        claim = Claim(lock.name, holder, lock._options.ttl, lock._options.owner)
        return lock._lease(Grant(claim, fence, sent_at, valid_until(sent_at, claim.ttl)))

    async def _guarantees(self) -> Guarantees:
        self.ensure_open()
        from lockfast.client.guarantees import guarantees_of

        found = guarantees_of(await retry(self.runtime, self.store.facts, self.store_timeout))
        for line in found.dangers:
            if line.topic not in self._warned:
                self._warned.add(line.topic)
                log.warning("%s: %s: %s", self._address, line.topic, line.text)
        return found

    def _survey(self, pattern: str, free: bool) -> Listing:
        self.ensure_open()
        return Listing(self.store, self.runtime, pattern, free=free, patience=self.store_timeout)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} on {self._address}{', closed' if self._closed else ''}>"
