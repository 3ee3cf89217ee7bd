"""Local hand-off: threads or tasks of one connection pass a lock to each other without a round trip.

For that the store grants a *pooled grant*: one holder id, a block of fences, and a little more ttl than a lease has.
Its leases follow one another: a release hands the pooled grant to the first waiter of the same *local queue*, which is
one name on one connection.

A new acquisition does the first of these that applies:

    waits in the local queue     if another one waits there, claims a pooled grant, or holds one that can be handed off
    claims a pooled grant        if another one claims or holds the lock, or the last pooled grant was handed off
    claims an individual lease   otherwise

Rules:

- A pooled grant is handed off for `SPAN` seconds after it was granted. Then it is released to the store, so a remote
  waiter waits at most for that span plus the last hold.
- A handed-off lease is valid for as long as a fresh one, because `EXTRA` is requested on top of the ttl. A waiter
  with another ttl is not handed the grant, so a crash blocks others for at most ttl + `EXTRA`.
- Each lease has its own fence, greater than the one before and less than that of any later grant.
- Local waiters are served first come, first served. A waiter that is not served within its patience leaves the local
  queue and claims the lock from the store.
- A process may have several tickets in the store's queue. A pooled grant that had to wait there is handed off only if
  the last span began at least 2 * `SPAN` seconds ago. Otherwise it serves one lease and is released. So local hand-offs
  cause at most half of the delay of a remote waiter by this process, plus one span.
- A lost lease, or one whose last renewal failed, is not handed off: the next waiter claims the lock from the store.

Threads run concurrently, so waiters, pooled claims and the pooled grant change under the mutex of the queue, and wakers
are called outside of it. `claiming`, `last_lease` and `contended` (of `History`) change without it. Reads without the
mutex only choose a path: a stale value can lead to a slower one, never to a wrong one.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple, final

from lockfast.core.acquire import Acquisition, Deadline, Grant, History
from lockfast.core.lease_state import ALIVE, DRIFT, HELD, LeaseState, useful, valid_until
from lockfast.core.release import clean_up
from lockfast.errors import closed_error
from lockfast.ports import Ports, Runtime
from lockfast.values import Claim

SPAN = 0.05
"""Seconds for which a pooled grant is handed off."""
EXTRA = SPAN / (1 - DRIFT) + 0.0005
"""Seconds of ttl requested on top, so that the last lease of the span is valid for as long as the first."""
PATIENCE = 0.1
LONG_PATIENCE = 1.0
"""Seconds that a local waiter waits before it claims the lock itself; `LONG_PATIENCE` if waiters were served
recently."""
FEWEST_FENCES = 16
MOST_FENCES = 8_192
"""The bounds of a block, which has about twice the fences that the last pooled grant used. A fence is a time of
the store's clock in microseconds, and the last fences of a block may lie in the future. A store that restarts without
its data starts again at the time of its clock. So a block must cover less time than a restart takes, or fences would
repeat."""


MOST_IDLE = 1000
"""A connection with this many local queues, or more if many are in use, drops the idle ones. It keeps them until then,
because they remember how many fences were useful."""


class ClaimTerms(NamedTuple):
    """A claim without a holder id: a local waiter that is handed the lock never needs one."""

    name: str
    ttl: float
    owner: str
    weight: int = 0
    limit: int = 0


@final
class PooledClaim(NamedTuple):
    """Permission to claim a pooled grant from the store, under this holder id and with that many fences."""

    holder: str
    fences: int


@final
class LocalWaiter:
    """One waiter of a local queue; `grant` is set between the hand-off and the moment it is taken up."""

    __slots__ = ("grant", "patient_until", "started", "terms", "waker")

    def __init__(self, runtime: Runtime, terms: ClaimTerms, now: float, patience: float) -> None:
        self.terms = terms
        self.started = now
        self.patient_until = now + patience
        self.grant: Grant | None = None
        self.waker = runtime.waker()


class PooledGrant:
    """One grant of the store, for several leases in a row.

    Invariants: the fences above `_used` up to `_last` are unused; at most one lease is alive; `receiver` is the waiter
    that was handed the lock and has not taken it up yet.
    """

    def __init__(self, queue: LocalQueue, claim: Claim, grant: Grant, fences: int, now: float) -> None:
        self.queue = queue
        self.claim = claim
        self.receiver: LocalWaiter | None = None
        self.span_ends = now + SPAN
        self.handoffs = 0
        self._granted_at = now
        self._acknowledged = grant.acknowledged
        self._age = now - grant.sent_at
        self._lasts = valid_until(0.0, claim.ttl)
        self._until = grant.valid_until
        self._last = grant.fence
        self._used = grant.fence - fences + 1

    def first(self, grant: Grant) -> Grant:
        """The grant for the acquisition that claimed it."""
        until = grant.sent_at + self._lasts
        return grant._replace(
            claim=self.claim, fence=self._used, valid_until=until, last_fence=self._last, pooled_grant=self
        )

    @property
    def had_span(self) -> bool:
        """Whether it was ever allowed to be handed off."""
        return self.span_ends > self._granted_at

    @property
    def used_up(self) -> bool:
        """Whether more fences might have been useful."""
        return self._used == self._last

    def can_hand_off(self, now: float) -> bool:
        return now < self.span_ends and self._used < self._last

    def next(self, waiter: LocalWaiter, now: float) -> Grant:
        """The grant for `waiter`. It is valid for as long as the first one was on arrival."""
        used = self._used = self._used + 1
        self.handoffs += 1
        claim, owner, sent_at = self.claim, waiter.terms.owner, now - self._age
        until = min(sent_at + self._lasts, self._until)
        if owner != claim.owner:
            claim = claim._replace(owner=owner)
        return tuple.__new__(Grant, (claim, used, sent_at, until, self._acknowledged, False, self._last, self, ()))

    def end(self) -> None:
        """It is about to be released, or is lost or exported: it cannot be handed off any more."""
        self.queue.end_pooled(self)


class LocalQueue(History):
    """The local waiters of one name on one connection.

    Invariants: a waiter in `_waiters` has no grant; a closed queue has no waiters; while somebody waits and nobody
    claims a pooled grant, the first waiter has been woken, or wakes when its patience runs out.

    `_pooled_claims` maps the holder id of each pooled claim under way to a flag. If the flag is True and the claim has
    to wait in the store's queue, the grant serves one lease only. `claiming` has the holder ids of individual claims
    under way, and `last_lease` is the lease that was granted last: an acquisition that meets any of them is not alone.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._mutex = runtime.mutex()
        self._waiters: deque[LocalWaiter] = deque()
        self._pooled_claims: dict[str, bool] = {}
        self._pooled: PooledGrant | None = None
        self._span_began = -math.inf
        self._no_handoff_until = -math.inf
        self._fences = FEWEST_FENCES
        self._productive = False  # whether the last pooled grant was handed off at all
        self.claiming: dict[str, None] = {}
        self.closed = False
        self._retired = False
        self.last_lease: LeaseState | None = None

    def enter(self, ports: Ports, terms: ClaimTerms) -> LocalWaiter | PooledClaim | None:
        """Join the queue or get permission for a pooled claim; None if the acquisition is alone.

        None also if the store grants no fence blocks: then nothing can be handed off.
        """
        if not (self.claiming or self._pooled_claims or self._pooled or self._productive):
            last = self.last_lease
            if last is None or last.state not in ALIVE:
                return None  # as nearly always
        runtime = ports.runtime
        now = runtime.now()
        with self._mutex:
            if self.closed:
                raise closed_error()
            if self._retired:
                return None  # it is not in the table any more, so `LocalQueues.close()` could not wake its waiters
            if not self._waiters and not self._may_hand_off(now):
                return self._pooled_claim(runtime, now) if ports.store.capabilities.fence_blocks else None
            waiter = LocalWaiter(runtime, terms, now, LONG_PATIENCE if self._serves else PATIENCE)
            self._waiters.append(waiter)
            return waiter

    @property
    def _serves(self) -> bool:
        """Whether local waiters were served recently."""
        return self._productive or (self._pooled is not None and self._pooled.handoffs > 0)

    def _may_hand_off(self, now: float) -> bool:
        return bool(self._pooled_claims) or (self._pooled is not None and self._pooled.can_hand_off(now))

    def _pooled_claim(self, runtime: Runtime, now: float) -> PooledClaim:
        no_handoff = now < self._no_handoff_until
        few = bool(self._pooled_claims) or no_handoff
        claim = PooledClaim(runtime.new_holder_id(), FEWEST_FENCES if few else self._fences)
        self._pooled_claims[claim.holder] = no_handoff
        return claim

    def poll(self, runtime: Runtime, waiter: LocalWaiter, now: float) -> Grant | PooledClaim | None:
        """After a wake-up or a timer: a grant, permission for a pooled claim, or None to keep waiting."""
        with self._mutex:
            if self.closed:
                raise closed_error()
            if waiter.grant is not None:
                return self._take_up(waiter)
            if self._serves:
                waiter.patient_until = waiter.started + LONG_PATIENCE
            if now < waiter.patient_until and self._may_hand_off(now):
                return None
            self._waiters.remove(waiter)
            return self._pooled_claim(runtime, now)

    def _take_up(self, waiter: LocalWaiter) -> Grant | None:
        grant, waiter.grant = waiter.grant, None
        if grant is not None and grant.pooled_grant is not None:
            grant.pooled_grant.receiver = None
        return grant

    def leave(self, waiter: LocalWaiter) -> Grant | None:
        """Leave the queue; return the grant that arrived meanwhile, if any."""
        with self._mutex:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            grant = self._take_up(waiter)
            head = self._next_to_claim()  # the wake-up may have been meant for the leaving waiter
        if head is not None:
            head.waker.wake()
        return grant

    def _next_to_claim(self) -> LocalWaiter | None:
        """The waiter to wake if nobody is left that could hand off the lock."""
        return self._waiters[0] if self._waiters and not self._pooled_claims and self._pooled is None else None

    def pooled_granted(self, pooled: PooledGrant, queued: bool, now: float) -> None:
        """A pooled claim was granted. If it waited in the store, remote clients may wait behind it."""
        with self._mutex:
            no_handoff = self._pooled_claims.pop(pooled.claim.holder, False)
            self._pooled = pooled
            if queued and (no_handoff or now - self._span_began < 2 * SPAN):
                pooled.span_ends = now
                self._no_handoff_until = self._span_began + 2 * SPAN
            else:
                self._no_handoff_until = -math.inf
                self._span_began = self._span_began if no_handoff else now

    def pooled_claim_failed(self, holder: str) -> None:
        with self._mutex:
            self._pooled_claims.pop(holder, None)
            head = self._next_to_claim()
        if head is not None:
            head.waker.wake()

    def end_pooled(self, pooled: PooledGrant) -> None:
        """`pooled` has ended: if nobody claims another one, the first waiter must."""
        with self._mutex:
            if self._pooled is not pooled:
                return
            self._pooled = None
            if pooled.had_span:
                self._productive = pooled.handoffs > 0
                at_least = self._fences if pooled.used_up else FEWEST_FENCES
                self._fences = min(MOST_FENCES, max(at_least, 2 * pooled.handoffs))
            head = self._next_to_claim()
        if head is not None:
            head.waker.wake()

    def hand_off(self, pooled: PooledGrant, lease: LeaseState | None, now: float) -> bool:
        """Hand `pooled` to the first waiter, if `lease`, its current lease, is still valid.

        False if it must be released to the store instead.
        """
        waiters = self._waiters
        if not waiters:
            return False
        ttl = pooled.claim.ttl
        with self._mutex:
            if not waiters or self.closed or not pooled.can_hand_off(now) or waiters[0].terms.ttl != ttl:
                return False
            if lease is not None:
                if lease.ttl != ttl or lease.state is not HELD or now >= lease.valid_until:
                    return False
                if not lease.release(handed_off=True):
                    return False
            waiter = waiters.popleft()
            waiter.grant = pooled.next(waiter, now)
            pooled.receiver = waiter
        waiter.waker.wake()
        return True

    def retire(self) -> bool:
        """Refuse waiters from now on, if the queue is idle."""
        last = self.last_lease
        with self._mutex:
            busy = self._waiters or self._pooled_claims or self._pooled or self.claiming
            self._retired = not busy and (last is None or last.state not in ALIVE)
            return self._retired

    def close(self) -> Claim | None:
        """Wake all waiters. Return the claim of a pooled grant that was on its way to one of them."""
        with self._mutex:
            self.closed = True
            waiting = list(self._waiters)
            self._waiters.clear()
            pooled, revoked = self._pooled, None
            if pooled is not None and pooled.receiver is not None:
                waiting.append(pooled.receiver)
                self._take_up(pooled.receiver)
                revoked = pooled.claim._replace(ttl=pooled.claim.ttl + EXTRA)
        for waiter in waiting:
            waiter.waker.wake()
        return revoked


class LocalQueues:
    """The local queues of one connection. Idle ones are dropped when there are many."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._mutex = runtime.mutex()
        self._queues: dict[str, LocalQueue] = {}
        self._sweep_at = MOST_IDLE
        self._closed = False

    def queue(self, name: str) -> LocalQueue:
        queue = self._queues.get(name)
        return self._add(name) if queue is None else queue

    def _add(self, name: str) -> LocalQueue:
        with self._mutex:
            queue = self._queues.get(name)
            if queue is None:
                if len(self._queues) >= self._sweep_at:
                    self._queues = {name: queue for name, queue in self._queues.items() if not queue.retire()}
                    self._sweep_at = 2 * len(self._queues) + MOST_IDLE
                queue = self._queues[name] = LocalQueue(self._runtime)
                queue.closed = self._closed
            return queue

    def close(self) -> list[Claim]:
        """Close all queues. Return the claims that must be released to the store."""
        with self._mutex:
            self._closed = True
            queues = list(self._queues.values())
        return [claim for claim in [queue.close() for queue in queues] if claim is not None]


async def acquire(
    ports: Ports, queue: LocalQueue, terms: ClaimTerms, deadline: Deadline, *, blocking: bool, local: bool = True
) -> Grant | None:
    """Return a grant, handed off locally or from the store; None if there was none until the deadline.

    Not `local`: without hand-off. Shared claims are never handed off: they need not wait for one another.
    """
    entered = queue.enter(ports, terms) if blocking and local and not terms.weight else None
    if entered is None:
        return await _claim(ports, queue, terms, deadline, blocking)
    if isinstance(entered, LocalWaiter):
        return await _wait(ports, queue, entered, deadline)
    try:
        return await _claim_pooled(ports, queue, terms, deadline, entered)
    except BaseException:
        # An interrupt can skip this call in `_claim_pooled`; a second call is harmless.
        queue.pooled_claim_failed(entered.holder)
        raise


async def _claim(
    ports: Ports, queue: LocalQueue, terms: ClaimTerms, deadline: Deadline, blocking: bool
) -> Grant | None:
    """Claim a lease from the store, for this acquisition alone."""
    name, ttl, owner, weight, limit = terms
    holder = ports.runtime.new_holder_id()
    claim = tuple.__new__(Claim, (name, holder, ttl, owner, 1, 0, weight, limit))
    acquisition = Acquisition(ports, claim, deadline, blocking, queue)
    queue.claiming[holder] = None  # no call between this and `try`: an interrupt could come there
    try:
        return await acquisition.run()
    finally:
        del queue.claiming[holder]


async def _claim_pooled(
    ports: Ports, queue: LocalQueue, terms: ClaimTerms, deadline: Deadline, pooled_claim: PooledClaim
) -> Grant | None:
    claim = Claim(terms.name, pooled_claim.holder, terms.ttl, terms.owner)
    wide = claim._replace(ttl=claim.ttl + EXTRA, fences=pooled_claim.fences)
    grant: Grant | None = None
    try:
        grant = await Acquisition(ports, wide, deadline, True, queue, EXTRA).run()
    finally:
        if grant is None:
            queue.pooled_claim_failed(pooled_claim.holder)
    if grant is None:
        return None
    now = ports.runtime.now()
    pooled = PooledGrant(queue, claim, grant, pooled_claim.fences, now)
    queue.pooled_granted(pooled, grant.queued, now)
    return pooled.first(grant)


async def _wait(ports: Ports, queue: LocalQueue, waiter: LocalWaiter, deadline: Deadline) -> Grant | None:
    """Wait to be handed the lock, or until it is time to claim it from the store."""
    runtime, ends = ports.runtime, deadline.at
    outcome: Grant | PooledClaim | None = None
    try:
        while True:
            await waiter.waker.wait(waiter.patient_until if ends is None else deadline.earliest(waiter.patient_until))
            now = runtime.now()
            over = ends is not None and deadline.passed(now)
            outcome = queue.leave(waiter) if over else queue.poll(runtime, waiter, now)
            if outcome is None:
                if over:
                    return None
            elif type(outcome) is PooledClaim:
                return await _claim_pooled(ports, queue, waiter.terms, deadline, outcome)
            elif useful(outcome.valid_until - now, outcome.claim.ttl):
                return outcome
            else:
                grant, outcome = outcome, None
                await return_grant(ports, grant)  # woken too late: let the store decide
                return await _claim(ports, queue, waiter.terms, deadline, blocking=True)
    except BaseException as error:  # cancelled or interrupted: the next waiter gets a grant that arrived meanwhile
        if type(outcome) is PooledClaim:
            queue.pooled_claim_failed(outcome.holder)
        late = queue.leave(waiter) or (outcome if type(outcome) is Grant else None)
        if late is not None and isinstance(error, GeneratorExit):  # being destroyed: it cannot await any more
            _return_locally(late, runtime.now())
        elif late is not None:
            await return_grant(ports, late)
        raise


async def return_grant(ports: Ports, grant: Grant) -> None:
    """Hand off or release a grant that its receiver could not use in time, or did not receive."""
    claim = grant.claim
    if not _return_locally(grant, ports.runtime.now()):
        await clean_up(ports, claim.name, claim.holder, claim.ttl + EXTRA, inline=True)


def _return_locally(grant: Grant, now: float) -> bool:
    """Hand off the grant; False if it must be released to the store."""
    pooled = grant.pooled_grant
    if pooled is None:
        return False
    if useful(grant.valid_until - now, grant.claim.ttl) and pooled.queue.hand_off(pooled, None, now):
        return True
    pooled.end()
    return False
