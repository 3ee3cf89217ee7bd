"""Passing on: threads or tasks of one connection hand a lock to one another without asking the store.

What the store grants is then a *tenancy*: one holder id, a block of fences, and a little more ttl than a lease has. Its
leases follow one another: whoever gives one back hands the tenancy to the first who waits in the same *room*, which is
one name on one connection.

    in the room                                        who comes now
    nobody asks or holds                               asks the store for a lease
    one asks or holds, with a lease of its own         asks the store for a tenancy
    one asks for a tenancy, or has one to pass on      takes a seat

Rules kept here:

- A tenancy is passed on for `SPAN` seconds from when it was granted. Then it is given back to the store, which hands
  the lock to whoever waits there: nobody who waits elsewhere is kept out for longer than that and the last hold.
- A passed lease is worth what a fresh one is: `EXTRA` is asked for on top of the ttl. Only leases of equal ttl follow
  one another, so that a crash never blocks the others for longer than the crashed one's own ttl and that.
- Each lease has a fence of its own, greater than the one before and less than that of any later grant.
- Seats are served first come, first served. Who waits in one for its patience and is not passed the lock goes to the
  store for a place of its own. Of those that waited in the store, one within two spans is passed on: however many
  places a room has there, who waits behind them waits for no more than twice as long as for their holds alone, and one
  span.
- What is lost is not passed on, and neither is what is at risk: who waits then asks the store.
- Without others of its own room, an acquisition asks the store just as it would without passing.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from lockfast.core.acquire import Attempt, Grant
from lockfast.core.deadline import Deadline
from lockfast.core.local_queue import SPAN, ClaimTerms, Lead, LocalQueue, LocalWaiter, SharedGrant
from lockfast.core.release import give_back
from lockfast.core.validity import DRIFT, worth
from lockfast.ports import Runtime, Store
from lockfast.values import Claim

EXTRA = SPAN / (1 - DRIFT) + 0.0005
"""Seconds of ttl asked for on top, so that the last lease of the span is worth as much as the first."""


def acquire(
    local_queue: LocalQueue | None,
    store: Store,
    runtime: Runtime,
    terms: ClaimTerms,
    deadline: Deadline,
    blocking: bool,
) -> Coroutine[Any, Any, Grant | None]:
    """A grant, passed on or of the store; None when there was none until the deadline. Without a room, nothing is
    passed on. With what `begun` gave, it goes on from there. To be awaited at once: it may have a seat already."""
    askers = None
    if local_queue is not None:
        askers = local_queue.askers
        begun = local_queue.enter(runtime, terms) if blocking else None
        if type(begun) is LocalWaiter:
            return _sit(local_queue, store, runtime, begun, deadline)
        if type(begun) is Lead:
            return _ask_for_tenancy(local_queue, store, runtime, terms, deadline, begun)
    name, ttl, owner = terms
    claim = tuple.__new__(Claim, (name, runtime.new_holder_id(), ttl, owner, 1, 0))
    return Attempt(store, runtime, claim, deadline, blocking, askers).run()


async def _ask_for_tenancy(
    local_queue: LocalQueue, store: Store, runtime: Runtime, terms: ClaimTerms, deadline: Deadline, lead: Lead
) -> Grant | None:
    claim = Claim(terms.name, lead.holder, terms.ttl, terms.owner)
    wide = claim._replace(ttl=claim.ttl + EXTRA, fences=lead.fences)
    grant: Grant | None = None
    try:
        grant = await Attempt(store, runtime, wide, deadline, blocking=True, spare=EXTRA).run()
    finally:
        if grant is None:
            local_queue.gave_up(lead.holder)
    if grant is None:
        return None
    now = runtime.now()
    shared_grant = SharedGrant(local_queue, claim, grant, lead.fences, now)
    local_queue.granted(shared_grant, grant.queued, now)
    return shared_grant.first(grant)


async def _sit(
    local_queue: LocalQueue, store: Store, runtime: Runtime, local_waiter: LocalWaiter, deadline: Deadline
) -> Grant | None:
    """Wait in a seat to be passed the lock, or until it is time to ask the store."""
    ends = deadline.at
    try:
        while True:
            await local_waiter.waker.wait(
                local_waiter.patient_until if ends is None else deadline.earliest(local_waiter.patient_until)
            )
            now = runtime.now()
            over = ends is not None and deadline.passed(now)
            outcome = local_queue.leave(local_waiter) if over else local_queue.look(runtime, local_waiter, now)
            if outcome is None:
                if over:
                    return None
            elif type(outcome) is Lead:
                break
            elif worth(outcome.valid_until - now, outcome.claim.ttl):
                return outcome
            else:
                await _send_on(store, runtime, outcome)  # we slept too long: let the store decide anew
                claim = Claim(
                    local_waiter.terms.name, runtime.new_holder_id(), local_waiter.terms.ttl, local_waiter.terms.owner
                )
                return await Attempt(store, runtime, claim, deadline, True, local_queue.askers).run()
    except GeneratorExit:
        local_queue.leave(local_waiter)
        raise  # the coroutine is being destroyed: no await is possible any more
    except BaseException:  # cancelled or interrupted: what was passed to us meanwhile goes on to the next
        await withdraw(local_queue, store, runtime, local_waiter)
        raise
    return await _ask_for_tenancy(local_queue, store, runtime, local_waiter.terms, deadline, outcome)


async def withdraw(
    local_queue: LocalQueue | None, store: Store, runtime: Runtime, reached: Grant | LocalWaiter | Lead
) -> None:
    """Undo what an acquisition has reached that was interrupted before anybody had the lease. What it has undone itself
    by then is undone once more, which changes nothing."""
    if type(reached) is Grant:
        await _send_on(store, runtime, reached)
    elif local_queue is not None and type(reached) is LocalWaiter:
        grant = local_queue.leave(reached)
        if grant is not None:
            await _send_on(store, runtime, grant)
    elif local_queue is not None and type(reached) is Lead:
        local_queue.gave_up(reached.holder)


async def _send_on(store: Store, runtime: Runtime, grant: Grant) -> None:
    """Get rid of a grant that its taker can't use."""
    claim, shared_grant, now = grant.claim, grant.shared_grant, runtime.now()
    if (
        shared_grant is not None
        and worth(grant.valid_until - now, claim.ttl)
        and shared_grant.local_queue.pass_on(shared_grant, None, now)
    ):
        return
    try:
        await give_back(store, runtime, claim.name, claim.holder, claim.ttl + EXTRA, inline=True)
    finally:
        if shared_grant is not None:
            shared_grant.end()
