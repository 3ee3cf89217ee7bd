"""Acquire a lock from the store: send the claim, wait in the queue, return the grant, clean up if anything fails.

    IDLE ──send──▶ SENT ──granted──▶ HELD
                   │ ▲ ▲
            queued │ │ └─ no answer: send again until the deadline
                   ▼ │
                 QUEUED ──notified, current attempt──▶ HELD
                   └─ timer, stale or missed notification: send again

Rules:

- The ttl of a grant counts from the moment its request was sent; for a notification, from the last request that the
  store answered with "queued".
- A notification is stale, and ignored, if it carries another attempt number than that last request, or if its fence is
  smaller than the greatest fence that the store has granted to this connection. For a shared claim only the fences of
  exclusive grants count: shared grants are valid side by side, and their notifications may be read in any order.
- An answer may arrive after the ttl has passed, for example because the process was stopped. An expired grant is never
  returned: the claim is sent again, and if the grant still exists, that extends it.
- A request without an answer has an unknown outcome. Sending it again is harmless. Before None is returned, the grant
  or ticket that it may have left is removed.
- A waiter refreshes its ticket at least every ttl/3, which also keeps `sent_at` recent.
- The store sends no notification when a lock expires. The first waiter sends its claim when the holder's ttl ends, each
  waiter behind it a little later, so that a crashed holder is noticed at once without a thundering herd.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, final

from lockfast.core.lease_state import LeaseState, useful, valid_until
from lockfast.core.release import BUDGET, CLEAN_UP_PATIENCE, clean_up
from lockfast.core.retry import backoff, retry
from lockfast.errors import Outcome, StoreUnavailable, shown
from lockfast.events import Event, EventKind
from lockfast.ports import Mailbox, Ports, Store
from lockfast.values import Claim, Enqueue, FirstNotification, Granted, Queued, Taken

if TYPE_CHECKING:
    from lockfast.core.local_handoff import PooledGrant

log = logging.getLogger("lockfast")

POLL_AFTER = 1.0
"""Seconds after which the first waiter polls: a notification may be lost, and other lock libraries that use the same
key send none. To keep the load of a long queue low, waiters further back poll later: an exclusive claim with n waiters
ahead of it polls after (n + 1) * POLL_AFTER seconds."""
READERS_TOGETHER = 50
"""How many readers at the head of the queue poll after POLL_AFTER, because one release may grant to all of them. For
permits, that number is the limit of the semaphore."""

EXPIRY_SLACK = 0.002
"""Seconds after the end of the holder's ttl at which the first waiter polls."""
EXPIRY_STAGGER = 0.004
"""Seconds that each further waiter adds to that."""

REQUEST_TIMEOUT = 5.0
"""Seconds after which an unanswered request is sent again, unless a deadline comes sooner."""


class Deadline(NamedTuple):
    """One deadline for a whole operation, passed down so that nested calls share the time that is left.

    `at` is the end of the caller's timeout, None for no limit. `store_timeout` is how many seconds the store may stay
    silent.

    >>> Deadline(at=110.0, store_timeout=10.0).passed(now=109.0)
    False
    """

    at: float | None
    store_timeout: float

    def passed(self, now: float) -> bool:
        return self.at is not None and now >= self.at

    def earliest(self, moment: float) -> float:
        """Return `moment`, or the deadline if that is earlier."""
        return moment if self.at is None else min(moment, self.at)

    def request_until(self, now: float, store: Store) -> float:
        """Return the moment until which a request that is sent now may stay unanswered."""
        # Every request comes here, and a conditional is cheaper than min().
        until = now + (self.store_timeout if self.store_timeout < REQUEST_TIMEOUT else REQUEST_TIMEOUT)  # noqa: FURB136
        return until if self.at is None else min(until, max(self.at, now) + store.grace)

    def gives_up(self, now: float, silent_since: float) -> bool:
        """Whether to raise instead of retrying, if the store has been silent since `silent_since`."""
        return self.passed(now) or now - silent_since >= self.store_timeout


@final
class Grant(NamedTuple):
    """A granted claim. `sent_at` is the earliest moment at which the lock may have been granted.

    `acknowledged` counts the replicas that have it too, None if they were not asked. `queued`: the claim waited in the
    store's queue. `last_fence` is the last fence of the reserved block, 0 if no block was reserved. `pooled_grant` is
    the store grant that this one is a part of, if threads or tasks share one. `slots` are the
    indexes of its permits; empty in the other modes.
    """

    claim: Claim
    fence: int
    sent_at: float
    valid_until: float
    acknowledged: int | None = None
    queued: bool = False
    last_fence: int = 0
    pooled_grant: PooledGrant | None = None
    slots: tuple[int, ...] = ()


class History:
    """What a connection knows of one lock from earlier claims."""

    contended = False
    """Whether the last claim had to wait in the queue of the store."""
    last_fence = 0
    """The greatest fence that the store granted to this connection."""
    last_exclusive = 0
    """The greatest of them that was granted to an exclusive claim."""


class Acquisition:
    """One claim on its way through the store.

    Invariant: `_traces` is True while the store may hold a grant or a ticket of the claim. `spare` is the extra ttl
    that is requested for a pooled grant; it does not count as validity of the lease. `history` is what this connection
    knows of the lock: if it is contended, the first request enqueues; else it only claims, which is cheaper for a free
    lock.
    """

    # Initial values are class attributes, which makes construction cheap.
    _mailbox: Mailbox | None = None
    _ticket: int | None = None
    _late_since: float | None = None
    _attempt = _failures = 0
    _sent_at = _silent_since = _started = 0.0
    _traces = False
    queued = False

    def __init__(
        self,
        ports: Ports,
        claim: Claim,
        deadline: Deadline,
        blocking: bool,
        history: History,
        spare: float = 0.0,
    ) -> None:
        self._ports = ports
        self._store, self._runtime, self._emit = ports
        self._claim = claim
        self._deadline = deadline
        self._blocking = blocking
        self._spare = spare
        self._history = history

    async def run(self) -> Grant | None:
        """Return the grant; None if the lock was still taken at the deadline, or at once if not blocking."""
        store, runtime, claim, deadline = self._store, self._runtime, self._claim, self._deadline
        if self._emit is not None:
            self._started = runtime.now()
            self._event(EventKind.CLAIM_SENT)
        try:
            if self._blocking and self._history.contended:
                await self._open_mailbox()
            while True:
                sent_at = runtime.now()
                self._attempt += 1
                mailbox = self._mailbox
                enqueue = None if mailbox is None else Enqueue(mailbox.address, self._attempt, self._ticket)
                traces, self._traces = self._traces, True
                try:
                    answer = await store.acquire(claim, enqueue, deadline.request_until(sent_at, store))
                except StoreUnavailable as error:
                    self._traces = traces or error.outcome is not Outcome.NOT_DONE
                    await self._pause_after(error, sent_at)
                    continue
                self._sent_at = sent_at
                self._failures = 0
                if type(answer) is Granted:
                    grant = self._grant(answer.fence, answer.slots, answer.acknowledged)
                    if runtime.now() < grant.valid_until - self._spare:
                        return grant if self._mailbox is None else self._finished(grant, self._mailbox)
                    if self._send_once_more():
                        continue
                elif type(answer) is Queued:
                    self._late_since = None
                    if not self.queued:
                        self.queued = True
                        self._event(EventKind.QUEUED)
                    self._ticket = answer.ticket
                    notified = await self._wait_for_notification(answer)
                    if notified is not None:
                        return notified if self._mailbox is None else self._finished(notified, self._mailbox)
                else:
                    self._traces, self._late_since = traces, None
                if self._is_over() or (type(answer) is Taken and not await self._open_mailbox()) or self._is_over():
                    await self._clean_up(inline=True)
                    return None
        except GeneratorExit:
            raise  # the coroutine is being destroyed: it cannot await any more
        except BaseException as error:  # including cancellation and KeyboardInterrupt: nothing may be left behind
            await self._clean_up(inline=not isinstance(error, StoreUnavailable))
            raise
        finally:
            # A KeyboardInterrupt during a call here would lose the grant. So `_finished` closes the mailbox before a
            # grant is returned, and after a success nothing is called here.
            if self._blocking:
                self._history.contended = self.queued
            if self._mailbox is not None:
                self._mailbox.close()

    def _finished(self, grant: Grant, mailbox: Mailbox) -> Grant:
        mailbox.close()
        self._mailbox = None
        return grant

    def _event(self, kind: EventKind) -> None:
        if self._emit is not None:
            self._emit(Event(kind, self._claim.name, self._runtime.now() - self._started))

    def _is_over(self) -> bool:
        return not self._blocking or self._deadline.passed(self._runtime.now())

    def _grant(self, fence: int, slots: tuple[int, ...], acknowledged: int | None = None) -> Grant:
        claim, sent_at, history = self._claim, self._sent_at, self._history
        until = valid_until(sent_at, claim.ttl)
        if fence > history.last_fence:
            history.last_fence = fence
        if not claim.weight and fence > history.last_exclusive:
            history.last_exclusive = fence
        # All fields of a NamedTuple through tuple.__new__: half the cost of its own constructor.
        return tuple.__new__(Grant, (claim, fence, sent_at, until, acknowledged, self.queued, 0, None, slots))

    def _send_once_more(self) -> bool:
        """Whether to send again even past the deadline, because a grant had expired on arrival.

        True only for the first expired grant since the store last answered "queued" or "taken". Raise if every grant
        has arrived expired for `store_timeout` seconds.
        """
        now = self._runtime.now()
        if self._late_since is None:
            self._late_since = now
            return True
        if not self._deadline.passed(now) and now - self._late_since >= self._deadline.store_timeout:
            raise StoreUnavailable(
                f"Every answer of the store took longer than the lock's ttl of {self._claim.ttl:g} s, so each grant "
                "had expired on arrival. The lock was not acquired, and the grant is being removed. Use a longer "
                "ttl, or find out why the store is slow.",
                outcome=Outcome.UNKNOWN,
            )
        return False

    async def _pause_after(self, error: StoreUnavailable, sent_at: float) -> None:
        """After a request without an answer: pause, or raise if the deadline allows no other request."""
        if not self._failures:
            self._silent_since = sent_at
        self._failures += 1
        await self._pause_or_raise(error, self._silent_since, self._failures)

    async def _open_mailbox(self) -> bool:
        """Subscribe before enqueueing: a waiter that is not subscribed is skipped.

        False if the deadline passed first. Then the store's last answer counts: the lock is taken.
        """
        if self._mailbox is None:
            self._mailbox = self._store.mailbox(self._claim.holder)
        silent_since = self._runtime.now()
        failures = 0
        while True:
            try:
                await self._mailbox.open(self._deadline.request_until(self._runtime.now(), self._store))
                return True
            except StoreUnavailable as error:
                if self._attempt and self._deadline.passed(self._runtime.now()):
                    log.warning("Lock %s is taken, and waiting for it failed: %s", shown(self._claim.name), error)
                    return False
                failures += 1
                await self._pause_or_raise(error, silent_since, failures)

    async def _pause_or_raise(self, error: StoreUnavailable, silent_since: float, failures: int) -> None:
        now = self._runtime.now()
        if self._deadline.gives_up(now, silent_since):
            # The first request fails if an idle connection died unnoticed. So a non-blocking call gets a second attempt
            # too, unless the first one took more than half of `grace`, the time that requests may outlast the timeout.
            if self._blocking or failures > 1 or now - silent_since > self._store.grace / 2:
                raise error
            return
        pause = backoff(failures, self._runtime.random())
        await self._runtime.sleep(self._deadline.earliest(now + pause) - now)

    async def _wait_for_notification(self, answer: Queued) -> Grant | None:
        """Wait for the notification that answers the last request; None when it is time to send again."""
        if self._mailbox is None:
            return None
        try:
            notification = await self._mailbox.wait(self._deadline.earliest(self._poll_at(answer)))
            while isinstance(notification, FirstNotification):
                if notification.attempt == self._attempt:
                    answer = Queued(answer.ticket, 0, notification.ttl_left)
                notification = await self._mailbox.wait(self._deadline.earliest(self._poll_at(answer)))
        except StoreUnavailable:
            # The next request shows whether the store is back. The pause protects a store that answers requests and
            # refuses subscriptions.
            now = self._runtime.now()
            await self._runtime.sleep(self._deadline.earliest(now + POLL_AFTER / 4) - now)
            return None
        if notification is None or notification.attempt != self._attempt:
            return None
        conflicting_fence = self._history.last_exclusive if self._claim.weight else self._history.last_fence
        if notification.fence < conflicting_fence:
            return None  # the store has made a conflicting grant since, so this one has ended
        if self._store.capabilities.replica_acks:
            return None  # only the answer to a request shows that replicas have the grant
        left = valid_until(self._sent_at, self._claim.ttl) - self._runtime.now()
        if not useful(left - self._spare, self._claim.ttl - self._spare):
            return None  # too little is left: confirm the grant with a request, which extends it
        return self._grant(notification.fence, notification.slots)

    def _poll_at(self, answer: Queued) -> float:
        """When to send the claim again if no notification arrives."""
        now, claim = self._runtime.now(), self._claim
        together = claim.limit or (READERS_TOGETHER if claim.weight else 1)
        moment = min(self._sent_at + claim.ttl / 3, now + POLL_AFTER * (1 + answer.position // together))
        if answer.ttl_left is not None:
            moment = min(moment, now + answer.ttl_left + EXPIRY_SLACK + EXPIRY_STAGGER * answer.position)
        return moment

    async def _clean_up(self, *, inline: bool) -> None:
        """Remove the grant or ticket that the store may hold; in the background if the store has just failed."""
        if self._traces:
            self._traces = False
            await clean_up(self._ports, self._claim.name, self._claim.holder, self._claim.ttl, inline=inline)


async def acquire_all(ports: Ports, claims: Sequence[Claim], deadline: Deadline) -> list[Grant] | None:
    """Acquire several locks with one request; None if the store cannot grant them all at once.

    One attempt: if its outcome is unknown, what it may have left is removed, and the caller acquires them in order.
    """
    store, runtime, _ = ports
    sent_at = runtime.now()
    try:
        granted = await store.acquire_all(claims, deadline.request_until(sent_at, store))
        if granted is None:
            return None
        grants = [
            Grant(claim, one.fence, sent_at, valid_until(sent_at, claim.ttl), one.acknowledged, slots=one.slots)
            for claim, one in zip(claims, granted, strict=True)
        ]
        if runtime.now() < min(grant.valid_until for grant in grants):
            return grants
    except StoreUnavailable as error:
        await remove(ports, claims if error.outcome is Outcome.UNKNOWN else (), inline=False)
        return None
    except GeneratorExit:
        raise
    except BaseException:
        await remove(ports, claims, inline=True)
        raise
    await remove(ports, claims, inline=True)
    return None


async def remove(ports: Ports, claims: Sequence[Claim], *, inline: bool) -> None:
    """Remove the grants that the store may hold of these claims; if the store is slow, the rest in the background."""
    rest = list(claims)
    slow_at = ports.runtime.now() + CLEAN_UP_PATIENCE / 4
    try:
        while rest:
            inline = inline and ports.runtime.now() < slow_at
            await clean_up(ports, rest[0].name, rest[0].holder, rest[0].ttl, inline=inline)
            del rest[0]
    except GeneratorExit:
        raise
    except BaseException:  # cancelled or interrupted once more
        for claim in rest:
            await clean_up(ports, claim.name, claim.holder, claim.ttl, inline=False)
        raise


async def adopt(ports: Ports, claim: Claim, old_holder: str) -> Grant | None:
    """Become the holder in place of `old_holder`, which exported its lease; None if it lost the lock.

    The rules are those of an acquisition: validity starts when the request is sent, an expired grant is requested
    again, and after a failure the grant that the store may hold is removed.
    """

    async def attempt(until: float) -> Grant | None:
        sent_at = ports.runtime.now()
        granted = await ports.store.adopt(claim, old_holder, until)
        if granted is None:
            return None
        ends = valid_until(sent_at, claim.ttl)
        grant = Grant(claim, granted.fence, sent_at, ends, granted.acknowledged, slots=granted.slots)
        if ports.runtime.now() >= grant.valid_until:
            raise StoreUnavailable(
                f"The store's answer took longer than the ttl of {claim.ttl:g} s, so the adopted lease had expired on "
                "arrival. Use a longer ttl, or find out why the store is slow.",
                outcome=Outcome.UNKNOWN,
            )
        return grant

    try:
        return await retry(ports.runtime, attempt, BUDGET)
    except GeneratorExit:
        raise
    except BaseException:
        await clean_up(ports, claim.name, claim.holder, claim.ttl, inline=True)
        raise


async def downgrade(ports: Ports, lease: LeaseState) -> bool:
    """Turn an exclusive lease into a read lease; False if the store no longer has it. May be repeated after an error.

    The weight changes before the request is sent: a shared renewal finds the grant in either mode, and so no renewal
    can miss it while the outcome is unknown.
    """
    lease.weight, lease.downgrading = 1, True

    async def attempt(until: float) -> bool:
        sent_at = ports.runtime.now()
        claim = Claim(lease.name, lease.holder, lease.ttl, lease.owner, weight=1)
        held = await ports.store.downgrade(claim, until)
        lease.downgrading = False
        if held:
            lease.renewed(sent_at, lease.ttl)
        return held

    return await retry(ports.runtime, attempt, BUDGET)
