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
- Seats are served first come, first served. Who waits in one for its patience without a turn goes to the store for a
  place of its own. Of those that waited in the store, one within two spans is passed on: however many places a room has
  there, who waits behind them waits for no more than twice as long as for their holds alone, and one span.
- What is lost is not passed on, and neither is what is at risk: who waits then asks the store.
- Without others of its own room, an acquisition asks the store just as it would without passing.
"""

from __future__ import annotations

from holdfast.core.acquire import Grant
from holdfast.core.acquire import acquire as ask_store
from holdfast.core.deadline import Deadline
from holdfast.core.release import give_back
from holdfast.core.rooms import SPAN, Room, Seat, Tenancy, Turn
from holdfast.core.validity import DRIFT, worth_taking
from holdfast.ports import Runtime, Store
from holdfast.values import Ask

EXTRA = SPAN / (1 - DRIFT) + 0.0005
"""Seconds of ttl asked for on top, so that the last lease of the span is worth as much as the first."""


async def acquire(
    room: Room | None, store: Store, runtime: Runtime, ask: Ask, deadline: Deadline, *, blocking: bool
) -> Turn | None:
    """A turn, passed on or granted by the store; None when there was none until the deadline. Without a room, nothing
    is passed on."""
    if room is None:
        alone = await ask_store(store, runtime, ask, deadline, blocking=blocking)
        return None if alone is None else Turn(ask, alone, None)
    fences = room.enter(runtime, ask) if blocking else 1
    if isinstance(fences, Seat):
        outcome = await _sit(room, store, runtime, fences, deadline)
        if not isinstance(outcome, int):
            return outcome
        fences = outcome
    if fences != 1:
        return await _ask_for_tenancy(room, store, runtime, ask, deadline, fences)
    room.askers.add(ask.holder)
    try:
        grant = await ask_store(store, runtime, ask, deadline, blocking=blocking)
    finally:
        room.askers.discard(ask.holder)
    return None if grant is None else tuple.__new__(Turn, (ask, grant, None))


async def _ask_for_tenancy(
    room: Room, store: Store, runtime: Runtime, ask: Ask, deadline: Deadline, fences: int
) -> Turn | None:
    wide = ask._replace(ttl=ask.ttl + EXTRA, fences=fences)
    grant: Grant | None = None
    try:
        grant = await ask_store(store, runtime, wide, deadline, blocking=True)
    finally:
        if grant is None:
            room.gave_up(ask.holder)
    if grant is None:
        return None
    now = runtime.now()
    tenancy = Tenancy(room, ask, grant, fences, now)
    room.granted(tenancy, grant.queued, now)
    return tenancy.first(grant)


async def _sit(room: Room, store: Store, runtime: Runtime, seat: Seat, deadline: Deadline) -> Turn | int | None:
    """Wait in a seat: a turn; how many fences to ask the store for; or None when the deadline has passed."""
    try:
        while True:
            await seat.waker.wait(deadline.earliest(seat.patient_until))
            now = runtime.now()
            outcome = room.leave(seat) if deadline.passed(now) else room.look(seat, now)
            if isinstance(outcome, Turn) and not worth_taking(now, outcome.grant.asked_at, outcome.ask.ttl):
                await _send_on(room, store, runtime, outcome)  # we slept too long: let the store decide anew
                outcome = 1
            if outcome is not None or deadline.passed(now):
                return outcome
    except GeneratorExit:
        room.leave(seat)
        raise  # the coroutine is being destroyed: no await is possible any more
    except BaseException:  # cancelled or interrupted: what was passed to us meanwhile goes on to the next
        turn = room.leave(seat)
        if turn is not None:
            await _send_on(room, store, runtime, turn)
        raise


async def _send_on(room: Room, store: Store, runtime: Runtime, turn: Turn) -> None:
    """Get rid of a turn that its taker can't use."""
    tenancy, now = turn.tenancy, runtime.now()
    if tenancy is None or (worth_taking(now, turn.grant.asked_at, turn.ask.ttl) and room.pass_on(tenancy, None, now)):
        return
    try:
        await give_back(store, runtime, turn.ask.name, turn.ask.holder, turn.ask.ttl + EXTRA, inline=True)
    finally:
        tenancy.end()
