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

from lockfast.core.lease_state import ALIVE, Holding
from lockfast.core.release import give_back
from lockfast.errors import StoreUnavailable
from lockfast.ports import Runtime, Store
from lockfast.values import Ask, Renewal, shown

log = logging.getLogger("lockfast")


Refused = Callable[[Holding, str], None]
"""Called with a lease that is not ours any more, and why."""

TAKEN = "the store no longer has it: it expired, or someone took it away"
FORGOTTEN = "the server does not have it: it was taken away, or a failover lost it and another was faster"


async def renew(
    store: Store, runtime: Runtime, due: Sequence[Holding], refused: Refused, until: float
) -> list[Holding]:
    """Prolong what is still ours, with one request for all; those for which no answer came."""
    asked_at = runtime.now()
    batch: list[tuple[Holding, Renewal]] = []
    for holding in due:
        if holding.state not in ALIVE:
            continue  # given back while others were renewed
        ttl = holding.renewal_ttl(asked_at)
        if ttl is None:
            holding.next_renewal = math.inf
        else:
            batch.append((holding, Renewal(holding.name, holding.holder, ttl)))
    if not batch:
        return []
    answers = await store.renew([line for _, line in batch], until)
    silent = []
    for (holding, line), answer in zip(batch, answers, strict=True):
        if answer:
            holding.renewed(asked_at, line.ttl)
        elif answer is None or not await _settled(store, runtime, holding, refused, line.ttl, until):
            silent.append(holding)
    return silent


async def _settled(
    store: Store, runtime: Runtime, holding: Holding, refused: Refused, ttl: float, until: float
) -> bool:
    """The store has no such grant: re-assert it, or call it lost. False when that could not be settled now."""
    asked_at = runtime.now()
    if store.reassert is None:
        refused(holding, TAKEN)
        return True
    if holding.check(asked_at) not in ALIVE:
        return True
    ask = Ask(holding.name, holding.holder, ttl, holding.owner)
    try:
        again = await store.reassert(ask, holding.last_fence, until)
    except StoreUnavailable:
        return False
    if not again:
        refused(holding, FORGOTTEN)
    elif holding.check(runtime.now()) in ALIVE and holding.reassert(asked_at, ttl):
        log.warning(
            "The server had forgotten the lease on %s (fence %d), as after a failover. Nobody had taken the lock, so "
            "the lease was re-asserted and goes on.",
            shown(holding.name),
            holding.fence,
        )
    else:  # it ended while the request was under way, and what that wrote is nobody's
        await give_back(store, runtime, holding.name, holding.holder, ttl, inline=False)
    return True
