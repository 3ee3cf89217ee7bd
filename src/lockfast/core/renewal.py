"""Renew leases: one request for many, and the meaning of each answer.

    answer       the lease
    held         is extended
    not held     is lost; or, if a failover may have lost it, is re-asserted first
    none         is renewed again later; the others of its batch are not affected

Rules of re-asserting, which keep one holder at a time and fences in order:

- Only a lease that is still valid by the local clock is re-asserted, and only if the store is capable of it.
- The server decides in one step. It restores the grant only if nobody holds the lock and if it knows of no equal or
  greater fence. So a lock that was deleted or expired on a server that knew it stays lost, and so does a lock that
  another client held meanwhile.

Rules of renewing:

- A slow renewal does not delay the detection of losses: the keepalive checks deadlines between two requests, and a
  request without an immediate answer continues in the background, one at a time.
- A failed renewal puts its leases at risk and is retried until their deadlines.
- A renewal cannot revive a lease: the store checks the holder id, and a `LeaseState` never leaves LOST or RELEASED.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

from lockfast.core.lease_state import ALIVE, LeaseState
from lockfast.core.release import clean_up
from lockfast.errors import Outcome, StoreError, StoreUnavailable
from lockfast.events import Event, EventKind
from lockfast.ports import Ports
from lockfast.values import Claim, Renewal, shown

log = logging.getLogger("lockfast")

BATCH = 500
IMMEDIATE = 0.03
"""Seconds that the keepalive itself waits for an answer, and so the most by which it reports a loss late."""
LONGEST_WAIT = 2.0
"""Seconds after which a renewal in the background is retried: a connection can be dead without notice."""

TAKEN = "the store no longer has it: it expired, or another client took or deleted it"
FORGOTTEN = "the server does not have it: it was taken, or a failover lost it and another client was faster"

OnLost = Callable[[LeaseState, str], None]
"""Called with a lease that the store no longer has, and the reason."""


async def renew(ports: Ports, due: Sequence[LeaseState], on_lost: OnLost, until: float) -> list[LeaseState]:
    """Extend the leases with one request. Return those without an answer."""
    sent_at = ports.runtime.now()
    batch: list[tuple[LeaseState, Renewal]] = []
    for lease in due:
        if lease.state not in ALIVE:
            continue  # released while others were renewed
        ttl = lease.renewal_ttl(sent_at)
        if ttl is None:
            lease.next_renewal = math.inf
        else:
            batch.append((lease, Renewal(lease.name, lease.holder, ttl)))
    if not batch:
        return []
    answers = await ports.store.renew([renewal for _, renewal in batch], until)
    unanswered = []
    for (lease, renewal), held in zip(batch, answers, strict=True):
        if held:
            lease.renewed(sent_at, renewal.ttl)
            if ports.emit is not None:
                ports.emit(Event(EventKind.RENEWED, lease.name, sent_at - lease.held_since, lease.fence))
        elif held is None or not await _reassert_or_lose(ports, lease, on_lost, renewal.ttl, until):
            unanswered.append(lease)
    return unanswered


async def _reassert_or_lose(ports: Ports, lease: LeaseState, on_lost: OnLost, ttl: float, until: float) -> bool:
    """Handle a lease that the store does not have; False if that could not be settled now."""
    store, runtime, _ = ports
    sent_at = runtime.now()
    if not store.capabilities.reassert:
        on_lost(lease, TAKEN)
        return True
    if lease.check(sent_at) not in ALIVE:
        return True
    claim = Claim(lease.name, lease.holder, ttl, lease.owner)
    try:
        restored = await store.reassert(claim, lease.last_fence, until)
    except StoreUnavailable:
        return False
    if not restored:
        on_lost(lease, FORGOTTEN)
    elif lease.check(runtime.now()) in ALIVE and lease.reassert(sent_at, ttl):
        log.warning(
            "The server had lost the lease on %s (fence %d), as after a failover. Nobody had taken the lock, so the "
            "lease was re-asserted and stays valid.",
            shown(lease.name),
            lease.fence,
        )
    else:  # the lease ended during the request, so nobody owns the restored grant
        await clean_up(ports, lease.name, lease.holder, ttl, inline=False)
    return True


class Renewer:
    """Renews in batches. `slow` is True while a renewal continues in the background.

    `on_idle` is called when that ends; `check_deadlines` between two batches, and returns the leases held then.
    """

    def __init__(
        self,
        ports: Ports,
        *,
        on_idle: Callable[[], None],
        on_lost: OnLost,
        check_deadlines: Callable[[], list[LeaseState]],
    ) -> None:
        self._ports = ports
        self._store, self._runtime, _ = ports
        self._on_idle = on_idle
        self._on_lost = on_lost
        self._check_deadlines = check_deadlines
        self.slow = False

    async def renew_now(self, due: Sequence[LeaseState], held: Sequence[LeaseState]) -> None:
        """Renew each batch within about one round trip; a slower one continues in the background."""
        checked_at = now = self._runtime.now()
        unanswered: list[LeaseState] = []
        error: StoreError | None = None
        for start in range(0, len(due), BATCH):
            now = self._runtime.now()
            if now - checked_at > IMMEDIATE / 2:
                held, checked_at = self._check_deadlines(), now
            nearest = min((lease.valid_until for lease in held), default=math.inf)
            try:
                batch = due[start : start + BATCH]
                unanswered += await self._renew_if_connected(
                    batch, min(now + IMMEDIATE, max(now + IMMEDIATE / 10, nearest))
                )
            except StoreError as failure:
                unanswered += due[start:]
                error = failure
                break
        if unanswered:
            # A pending request delays the renewal of all others, so the shortest ttl decides how long it may take.
            # Giving up early is harmless: the request can be repeated.
            patience = min(LONGEST_WAIT, max(0.05, min(lease.ttl for lease in held or due) / 6))
            self._continue(unanswered, error or _no_answer(), now + patience)

    async def _renew_if_connected(self, batch: Sequence[LeaseState], until: float) -> Sequence[LeaseState]:
        """Renew without connecting, which may take longer than `until`."""
        if not self._store.connected:
            raise StoreUnavailable("There is no connection yet.", outcome=Outcome.UNKNOWN)
        try:
            return await renew(self._ports, batch, self._on_lost, until)
        except StoreUnavailable as error:
            if self._runtime.now() < until:
                raise
            raise StoreUnavailable(str(error), outcome=Outcome.UNKNOWN) from error  # perhaps not even sent

    def _continue(self, rest: Sequence[LeaseState], error: StoreError, until: float) -> None:
        """Retry in the background if an answer is still possible; else put the leases at risk."""
        if isinstance(error, StoreUnavailable) and error.outcome is Outcome.UNKNOWN:
            self.slow = True
            if self._runtime.spawn(lambda: self._renew_in_background(rest, until), "renewal"):
                return
            self.slow = False
        self._failed(rest, error)

    async def _renew_in_background(self, rest: Sequence[LeaseState], until: float) -> None:
        try:
            self._failed(*await self._renew_all(rest, until))
        finally:
            self.slow = False
            self._on_idle()

    def _failed(self, leases: Sequence[LeaseState], error: StoreError | None) -> None:
        if error is not None:
            log.warning("Could not renew %d leases; retrying until they expire: %s", len(leases), error)
        now = self._runtime.now()
        for lease in leases:
            lease.renewal_failed(now + min(1.0, max(0.02, lease.ttl / 20)))

    async def _renew_all(
        self, due: Sequence[LeaseState], until: float
    ) -> tuple[Sequence[LeaseState], StoreError | None]:
        """Renew in batches. Return the leases without an answer, and why."""
        unanswered: list[LeaseState] = []
        for start in range(0, len(due), BATCH):
            try:
                unanswered += await renew(self._ports, due[start : start + BATCH], self._on_lost, until)
            except StoreError as error:
                return (*unanswered, *due[start:]), error
        return unanswered, _no_answer() if unanswered else None


def _no_answer() -> StoreUnavailable:
    return StoreUnavailable(
        "Some servers did not answer; the leases there may or may not have been renewed.", outcome=Outcome.UNKNOWN
    )
