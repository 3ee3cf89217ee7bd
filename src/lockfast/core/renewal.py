"""Renewing a batch of leases: what the store's answer about each of them means.

    answer       the lease
    ours         is prolonged
    not ours     is lost; or, where a failover may have forgotten it, is re-asserted first
    none         is asked about again: the others of its batch must not suffer for it

Rules of re-asserting, which keep one holder at a time and fences in order:

- Only a lease that is still valid on the local clock is re-asserted, and only by a store that says it can (`reassert`).
- The server decides in one step: it takes the lease back in only if nobody holds the lock, and if it knows of no grant
  with the same fence or a greater one. So a lock that was deleted or expired on a server that knew it stays lost, and
  so does one that another held meanwhile. The fence stays the largest: the server continues from it.
- Which of the two happened is said in the log, by `Holding.reasserted`, and by the reason of the loss.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

from lockfast.core.lease_state import ALIVE, LeaseState
from lockfast.core.release import give_back
from lockfast.errors import StoreUnavailable
from lockfast.ports import Runtime, Store
from lockfast.values import Claim, Renewal, shown

log = logging.getLogger("lockfast")


Refused = Callable[[LeaseState, str], None]
"""Called with a lease that is not ours any more, and why."""

TAKEN = "the store no longer has it: it expired, or someone took it away"
FORGOTTEN = "the server does not have it: it was taken away, or a failover lost it and another was faster"


async def renew(
    store: Store, runtime: Runtime, due: Sequence[LeaseState], refused: Refused, until: float
) -> list[LeaseState]:
    """Prolong what is still ours, with one request for all; those for which no answer came."""
    sent_at = runtime.now()
    batch: list[tuple[LeaseState, Renewal]] = []
    for lease_state in due:
        if lease_state.state not in ALIVE:
            continue  # given back while others were renewed
        ttl = lease_state.renewal_ttl(sent_at)
        if ttl is None:
            lease_state.next_renewal = math.inf
        else:
            batch.append((lease_state, Renewal(lease_state.name, lease_state.holder, ttl)))
    if not batch:
        return []
    answers = await store.renew([line for _, line in batch], until)
    silent = []
    for (lease_state, line), answer in zip(batch, answers, strict=True):
        if answer:
            lease_state.renewed(sent_at, line.ttl)
        elif answer is None or not await _settled(store, runtime, lease_state, refused, line.ttl, until):
            silent.append(lease_state)
    return silent


async def _settled(
    store: Store, runtime: Runtime, lease_state: LeaseState, refused: Refused, ttl: float, until: float
) -> bool:
    """The store has no such grant: re-assert it, or call it lost. False when that could not be settled now."""
    sent_at = runtime.now()
    if not store.capabilities.reassert:
        refused(lease_state, TAKEN)
        return True
    if lease_state.check(sent_at) not in ALIVE:
        return True
    claim = Claim(lease_state.name, lease_state.holder, ttl, lease_state.owner)
    try:
        again = await store.reassert(claim, lease_state.last_fence, until)
    except StoreUnavailable:
        return False
    if not again:
        refused(lease_state, FORGOTTEN)
    elif lease_state.check(runtime.now()) in ALIVE and lease_state.reassert(sent_at, ttl):
        log.warning(
            "The server had forgotten the lease on %s (fence %d), as after a failover. Nobody had taken the lock, so "
            "the lease was re-asserted and goes on.",
            shown(lease_state.name),
            lease_state.fence,
        )
    else:  # it ended while the request was under way, and what that wrote is nobody's
        await give_back(store, runtime, lease_state.name, lease_state.holder, ttl, inline=False)
    return True
