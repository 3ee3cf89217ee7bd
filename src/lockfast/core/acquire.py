"""Acquire: ask, queue, wait, take the grant; leave nothing behind when it does not come to that.

    FREE ──ask──▶ ASKING ──granted──▶ HELD
                  │  ▲ ▲
         queued   │  │ └─ no answer: the same request again, until the deadline
                  ▼  │
                 QUEUED ──push, young enough──▶ HELD
                  └─ timer, stale push, missed pushes: ask again

Rules kept here:

- A grant counts from when the request was sent that led to it. For a pushed grant that is the last request
  answered "still queued", and the push must name that request's turn: an older push is stale.
- A reply may be on its way for longer than the ttl, or meet a process that was stopped. Nobody is handed a grant that
  has run out: the same request again tells whether it is still ours, and makes it last.
- Unknown is a third answer. A request that got no reply is sent again, which changes nothing if it had been
  executed; and "not acquired" is said only after trying to remove what it may have left.
- Who waits asks again at least every third of its ttl: that keeps its place alive and its `asked_at` young.
- Expiry is not an event. The waiter in front asks when the holder's ttl is over, those behind a little later
  each, so that a crashed holder is noticed at once and a long queue does not come running together.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple, final

from lockfast.core import backoff
from lockfast.core.deadline import Deadline
from lockfast.core.release import give_back
from lockfast.core.validity import valid_until, worth
from lockfast.errors import Outcome, StoreUnavailable
from lockfast.ports import Mailbox, Runtime, Store
from lockfast.values import Claim, Enqueue, FirstNotification, Granted, Queued, Taken, shown

if TYPE_CHECKING:
    from lockfast.core.local_queue import SharedGrant

log = logging.getLogger("lockfast")

LOOK_AGAIN = 1.0
"""Seconds after which the waiter in front looks for itself: a push may be lost, and a lock that something
else than lockfast took is freed without one. The waiter at place n looks every n+1 times that, which adds up
to few requests however long the queue; it is told when it becomes the first."""

EXPIRY_SLACK = 0.002
EXPIRY_STAGGER = 0.004


@final
class Grant(NamedTuple):
    """The lock is ours, as `ask` has it, up to `valid_until`; `asked_at` is the earliest moment it may have become so.
    `last` is the last fence that the store reserved for it, if that is not `fence` itself; `tenancy` is what it is a
    part of, if anything."""

    claim: Claim
    fence: int
    sent_at: float
    valid_until: float
    acknowledged: int | None = None
    queued: bool = False
    last: int = 0
    shared_grant: SharedGrant | None = None


class Attempt:
    """One acquisition. `_traces` is true while the store may hold a grant or a place of ours; `_askers` is where it is
    noted that we ask, for as long as we do; `_spare` is how much of the ttl the holder has no use of; `_first` is what
    came of a request without a place that was made before, until we have looked at it."""

    __slots__ = (
        "_ask",
        "_asked_at",
        "_askers",
        "_attempt",
        "_blocking",
        "_box",
        "_deadline",
        "_failures",
        "_late_since",
        "_runtime",
        "_silent_since",
        "_spare",
        "_store",
        "_ticket",
        "_traces",
    )

    def __init__(
        self,
        store: Store,
        runtime: Runtime,
        claim: Claim,
        deadline: Deadline,
        blocking: bool,
        askers: dict[str, None] | None = None,
        spare: float = 0.0,
    ) -> None:
        self._store = store
        self._runtime = runtime
        self._ask = claim
        self._deadline = deadline
        self._blocking = blocking
        self._askers = askers
        self._spare = spare
        self._box: Mailbox | None = None
        self._ticket: int | None = None
        self._attempt = 0
        self._asked_at = 0.0
        self._traces = False
        self._late_since: float | None = None
        self._failures = 0
        self._silent_since = 0.0

    async def run(self) -> Grant | None:
        """The grant; None when the lock stayed taken until the deadline (or at all, when not blocking)."""
        store, runtime, claim, deadline = self._store, self._runtime, self._ask, self._deadline
        if self._askers is not None:
            self._askers[claim.holder] = None
        try:
            while True:
                if self._box is None and self._blocking and store.inbox_open:
                    await self._open_mailbox()
                sent_at = runtime.now()
                self._attempt += 1
                enqueue = None if self._box is None else Enqueue(self._box.address, self._attempt, self._ticket)
                traces, self._traces = self._traces, True
                try:
                    answer = await store.acquire(claim, enqueue, deadline.attempt(sent_at, store))
                except StoreUnavailable as error:
                    self._traces = traces or error.outcome is not Outcome.NOT_DONE
                    await self._ask_again_after(error, sent_at)
                    continue
                self._asked_at = sent_at
                self._failures = 0
                if type(answer) is Granted:
                    grant = self._grant(answer.fence, answer.acknowledged)
                    if runtime.now() < grant.valid_until - self._spare:
                        return grant
                    if self._ask_once_more():
                        continue
                elif type(answer) is Queued:
                    self._ticket = answer.ticket
                    pushed = await self._wait_turn(answer)
                    if pushed is not None:
                        return pushed
                else:
                    self._traces = traces
                listening = self._is_over() or type(answer) is not Taken or await self._open_mailbox()
                if not listening or self._is_over():
                    await self._abandon(inline=True)
                    return None
        except GeneratorExit:
            raise  # the coroutine is being destroyed: no await is possible any more
        except BaseException as error:  # cancelled and interrupted included: nothing may be left behind
            await self._abandon(inline=not isinstance(error, StoreUnavailable))
            raise
        finally:
            if self._askers is not None:
                del self._askers[claim.holder]
            if self._box is not None:
                self._box.close()

    def _is_over(self) -> bool:
        return not self._blocking or self._deadline.passed(self._runtime.now())

    def _grant(self, fence: int, acknowledged: int | None = None) -> Grant:
        claim, sent_at = self._ask, self._asked_at
        until = valid_until(sent_at, claim.ttl)
        return tuple.__new__(Grant, (claim, fence, sent_at, until, acknowledged, self._ticket is not None, 0, None))

    def _ask_once_more(self) -> bool:
        """Whether to ask at once, time or no time, since a grant ran out on its way; or report it when all do."""
        now = self._runtime.now()
        if self._late_since is None:
            self._late_since = now
            return True
        if not self._deadline.passed(now) and self._deadline.out_of_patience(now, self._late_since):
            raise StoreUnavailable(
                f"Each answer of the store took longer than the lock's ttl of {self._ask.ttl:g} s, so every grant had "
                "run out when it came. Nothing is left behind. Give the lock a longer ttl, or see why the store is "
                "slow.",
                outcome=Outcome.UNKNOWN,
            )
        return False

    async def _ask_again_after(self, error: StoreUnavailable, sent_at: float) -> None:
        """Pause, when a request of that moment got no answer; or report it when the deadline allows no other."""
        if not self._failures:
            self._silent_since = sent_at
        self._failures += 1
        await self._endure(error, self._silent_since, self._failures)

    async def _open_mailbox(self) -> bool:
        """Listen before asking for a place: a grant pushed to nobody would go to the next one. False when the caller's
        time is up first; if the store has answered before, its last word stands: the lock is taken."""
        if self._box is None:
            self._box = self._store.mailbox(self._ask.holder)
        silent_since = self._runtime.now()
        failures = 0
        while True:
            try:
                await self._box.open(self._deadline.attempt(self._runtime.now(), self._store))
                return True
            except StoreUnavailable as error:
                if self._attempt and self._deadline.passed(self._runtime.now()):
                    log.warning("The lock %s is taken, and could not be waited for: %s", shown(self._ask.name), error)
                    return False
                failures += 1
                await self._endure(error, silent_since, failures)

    async def _endure(self, error: StoreUnavailable, silent_since: float, failures: int) -> None:
        """Leave a failing store alone for a moment, or report it when the caller's time is up."""
        now = self._runtime.now()
        if self._deadline.out_of_patience(now, silent_since):
            # Who does not wait gets a second try all the same: a connection may have died while it lay idle.
            if self._blocking or failures > 1 or now - silent_since > self._store.grace / 2:
                raise error
            return
        pause = backoff.pause(failures, self._runtime.random())
        await self._runtime.sleep(self._deadline.earliest(now + pause) - now)

    async def _wait_turn(self, answer: Queued) -> Grant | None:
        """Wait for the push that answers our last request; None when it is time to ask again."""
        if self._box is None:
            return None
        try:
            push = await self._box.wait(self._deadline.earliest(self._next_look(answer)))
            while isinstance(push, FirstNotification):
                if push.attempt == self._attempt:
                    answer = Queued(answer.ticket, 0, push.ttl_left)
                push = await self._box.wait(self._deadline.earliest(self._next_look(answer)))
        except StoreUnavailable:
            # The next request tells whether the store is back, and bears the limits; but a store that
            # answers requests and refuses mailboxes must not be asked without a pause.
            now = self._runtime.now()
            await self._runtime.sleep(self._deadline.earliest(now + LOOK_AGAIN / 4) - now)
            return None
        if push is None or push.attempt != self._attempt:
            return None
        if self._store.capabilities.replica_acks:
            return None  # no replica is known to have it: the answer to a request implies that
        grant = self._grant(push.fence)
        if not worth(grant.valid_until - self._runtime.now(), self._ask.ttl):
            return None  # the push lay about too long: confirm it with a request
        return grant

    def _next_look(self, answer: Queued) -> float:
        """When to ask again if nothing is pushed."""
        now = self._runtime.now()
        moment = min(self._asked_at + self._ask.ttl / 3, now + LOOK_AGAIN * (1 + answer.position))
        if answer.ttl_left is not None:
            moment = min(moment, now + answer.ttl_left + EXPIRY_SLACK + EXPIRY_STAGGER * answer.position)
        return moment

    async def _abandon(self, *, inline: bool) -> None:
        """Remove what the store may hold of us. A store that just failed us is left to the background."""
        if not self._traces:
            return
        self._traces = False
        await give_back(self._store, self._runtime, self._ask.name, self._ask.holder, self._ask.ttl, inline)
