"""The keepalive: one background thread or task per connection that renews all its leases and detects their loss.

    answer to a renewal   the lease
    held                  is extended
    not held              is lost, unless a failover may have lost the grant and it can be re-asserted
    none                  is renewed again later; the others of its batch are not affected

Rules of the actor, as that thread or task is called here:

- A lease is renewed every third of its ttl, together with all leases that are due soon: one request, many leases.
- A slow renewal does not delay the detection of losses: the actor checks deadlines between two requests, and a request
  without an immediate answer continues in the background, one at a time.
- A failed renewal puts its leases at risk and is retried until their deadlines.
- A renewal cannot revive a lease: the store checks the holder id, and a `LeaseState` never leaves LOST or RELEASED.
- However many leases are lost at once, a single worker cleans up.
- The actor lives while anything is held. If it is cancelled, it looks at the tasks that hold leases: it waits for those
  that are ending, releases the leases of those that have ended, and starts another actor for the rest.

Rules of re-asserting, which keep one holder at a time and fences in order:

- Only a lease that is still valid by the local clock is re-asserted, and only if the store is capable of it.
- The server decides in one step. It restores the grant only if nobody holds the lock and if it knows of no equal or
  greater fence. So a lease stays lost if the server knew its grant, which then expired or was deleted, or if another
  client held the lock meanwhile.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable, Sequence

from lockfast.core.background import BackgroundTasks
from lockfast.core.lease_state import ALIVE, HELD, LOST, RELEASED, LeaseState
from lockfast.core.release import BUDGET, clean_up, release, remove
from lockfast.errors import LockError, Outcome, StoreError, StoreUnavailable, shown
from lockfast.events import Event, EventKind
from lockfast.ports import CallerState, Ports, Waker
from lockfast.values import Claim, Renewal

log = logging.getLogger("lockfast")

EARLY = 1 / 24
"""Share of its ttl by which a renewal may be sent early to join a batch."""
FIRST_RENEWAL = 1.0
"""Seconds to the first renewal if the store reports external changes: it does not report them before a renewal."""
LINGER = 1.0
"""Seconds that an idle actor stays, so that frequent acquisitions do not start one each time."""
LONGEST_SLEEP = 1.0
"""After the machine was suspended, timers fire late, so the actor looks at the clock at least this often."""
POLL_EVENTS_EVERY = 0.25
"""Seconds after which the actor processes unsolicited messages of the store, if no request does."""
ENDING_POLL = 0.005
"""Seconds between two checks of tasks that are ending."""

BATCH = 500
IMMEDIATE = 0.03
"""Seconds that the actor itself waits for an answer. It reports a loss at most this late."""
LONGEST_WAIT = 2.0
"""Seconds after which a renewal in the background is retried: a connection can be dead without notice."""

TAKEN = "the store no longer has it: it expired, or another client took or deleted it"
FORGOTTEN = "the server does not have it: it was taken, or a failover lost it and another client was faster"


class Keepalive:
    """Watches the leases of one connection.

    Invariants: at most one `_run` is active (`_active`); every live lease of the connection is in `_held`; a new
    lease that is due before `_wakes_at` wakes the actor.
    """

    def __init__(self, ports: Ports) -> None:
        self._ports = ports
        self._store, self._runtime, self._emit = ports
        self._mutex = self._runtime.mutex()
        self._held: dict[LeaseState, None] = {}
        self._changed: deque[str | None] = deque()
        self._active = False
        self._closed = False
        self._in_use = False
        self._wakes_at = 0.0
        self._first_renewal = math.inf
        self._waker: Waker | None = None
        self._slow = False
        self._clean_ups = BackgroundTasks(self._runtime, "clean-up", workers=1)
        self._store.on_change(self._on_change)

    def watch(self, lease: LeaseState) -> None:
        """Renew `lease` and detect its loss until it ends."""
        if lease.next_renewal > lease.sent_at + self._first_renewal:
            lease.next_renewal = lease.sent_at + self._first_renewal
        self._held[lease] = None  # before reading `_active`: see `_retire`
        self._in_use = True
        if not self._active and self._start():
            return
        wakes_at = self._wakes_at
        if lease.valid_until < wakes_at or (lease.renews and lease.next_renewal < wakes_at):
            self._wake()

    def unwatch(self, lease: LeaseState) -> None:
        self._held.pop(lease, None)

    def held(self) -> list[LeaseState]:
        return list(self._held)  # in one step: other threads change it without the mutex

    def lose(self, lease: LeaseState, reason: str) -> None:
        """The store no longer has the grant."""
        self.unwatch(lease)
        lease.lose(reason)

    def reschedule(self, lease: LeaseState) -> None:
        """The times of `lease` changed; it may be due earlier than the actor plans."""
        if self._due_at(lease) < self._wakes_at:
            self._wake()

    def close(self) -> None:
        self._closed = True
        self._wake()

    async def release(self, leases: Iterable[LeaseState]) -> None:
        """Release `leases`; all together may take `BUDGET` seconds."""
        give_up_at = self._runtime.now() + BUDGET
        skipped = 0
        for lease in leases:
            left = give_up_at - self._runtime.now()
            if left <= 0:
                skipped += 1
            else:
                try:
                    await release(self._ports, lease, budget=left, background=False)
                except LockError as error:
                    log.warning(
                        "Could not release lock %s on close; it expires by its ttl: %s", shown(lease.name), error
                    )
            self.unwatch(lease)
        if skipped:
            log.warning("Could not release %d locks within %g s; they expire by their ttl.", skipped, BUDGET)

    def clean_up(self, lease: LeaseState) -> None:
        """Remove what the store may still have of an ended lease, in the background."""
        if lease.cleared:
            return
        lease.cleared = True
        # A renewal whose reply was lost may have extended the grant beyond its known end.
        gone_at = lease.valid_until + lease.ttl
        self._clean_ups.add(lambda: remove(self._ports, lease.name, lease.holder, gone_at))

    def _on_change(self, name: str | None) -> None:
        """A lock was changed externally, or any lock if `name` is None: renew it now to find out whether it is lost."""
        self._changed.append(name)
        self._wake()

    def _wake(self) -> None:
        if self._waker is not None:
            self._waker.wake()

    def _start(self) -> bool:
        """Start an actor; False if another thread did."""
        ours = started = False
        try:  # an interrupt at any point must not leave `_active` set without an actor
            with self._mutex:
                if self._active:
                    return False
                self._active = ours = True
                self._waker = self._waker or self._runtime.waker()
            started = self._runtime.spawn(self._run, "keepalive")
            return True
        finally:
            if ours and not started:
                self._active = False  # the next lease tries again; until then leases are not renewed and expire

    async def _run(self) -> None:
        try:
            await self._keep()
        except GeneratorExit:
            raise
        except BaseException:
            await self._shut_down()
            raise

    async def _shut_down(self) -> None:
        """After a cancellation: release the leases of ended tasks, and leave the rest to another actor.

        If the event loop is shutting down, this is the last chance to send requests.
        """
        try:
            while self._of_callers(CallerState.ENDING):
                self._select_due(self._runtime.now())
                await self._runtime.sleep(ENDING_POLL)
            await self.release(self._of_callers(CallerState.ENDED))
        finally:
            self._active = False  # before `_held` is read, as in `_retire()`
            if self._held and not self._closed:
                self._start()

    def _of_callers(self, state: CallerState) -> list[LeaseState]:
        """The leases whose thread or task is in that state."""
        return [lease for lease in self.held() if self._runtime.caller_state(lease.caller) is state]

    async def _keep(self) -> None:
        idle_since: float | None = None
        while not self._closed:
            self._wakes_at = math.inf  # until the round ends, a new lease wakes the actor
            try:
                wakes_at = await self._round()
            except Exception:
                # An actor that dies silently would lose leases without a report.
                log.exception("A round of the keepalive failed; retrying. Leases that it cannot renew are lost.")
                wakes_at = self._runtime.now() + LONGEST_SLEEP / 4
            now = self._runtime.now()
            if not self._held:
                idle_since = now if idle_since is None else idle_since
                if self._retire_after(now - idle_since):
                    return
                wakes_at = now + LINGER
            else:
                idle_since = None
            self._wakes_at = wakes_at
            await self._sleep(wakes_at)

    async def _sleep(self, wakes_at: float) -> None:
        longest = POLL_EVENTS_EVERY if self._store.capabilities.change_events else LONGEST_SLEEP
        while self._waker is not None and not self._closed:
            now = self._runtime.now()
            if now >= wakes_at or await self._waker.wait(min(wakes_at, now + longest)):
                return
            self._poll_events()
            if self._changed:
                return

    def _poll_events(self) -> None:
        try:
            self._store.poll_events()
        except Exception as error:  # the next request meets the same error, and handles it
            log.debug("Could not read the events of the store: %s", error)

    def _retire_after(self, idle_for: float) -> bool:
        with self._mutex:
            if idle_for < LINGER or self._in_use:
                self._in_use = False
                return False
            return self._retire()

    def _retire(self) -> bool:
        """Under the mutex: end the actor unless something is held.

        `watch()` adds its lease before it reads `_active`; this clears `_active` before it reads `_held`. So one side
        always sees the other.
        """
        self._active = False
        if self._held and not self._closed:
            self._active = True
        return not self._active

    async def _round(self) -> float:
        """Report losses, renew what is due, and return when to run again."""
        self._poll_events()
        now = self._runtime.now()
        self._update_first_renewal(now)
        due = self._select_due(now)
        if due and not self._slow:
            await self._renew(due)
        return min(map(self._due_at, self.held()), default=math.inf)

    def _update_first_renewal(self, now: float) -> None:
        """Renew new leases early if the store reports changes, which is known once it is connected."""
        before = self._first_renewal
        self._first_renewal = FIRST_RENEWAL if self._store.capabilities.change_events else math.inf
        if self._first_renewal < before:
            for lease in self.held():
                lease.next_renewal = min(lease.next_renewal, now + FIRST_RENEWAL)

    def _select_due(self, now: float) -> list[LeaseState]:
        """Drop ended leases. Return the leases to renew now: none, or all that are due or nearly due."""
        changed: set[str | None] = set()
        while self._changed:  # never replaced: another thread may be adding to it
            changed.add(self._changed.popleft())
        due: list[LeaseState] = []
        any_due = False
        for lease in self.held():
            state = lease.check(now)
            if state is LOST:
                self.unwatch(lease)
                self.clean_up(lease)
            elif state is RELEASED:
                self.unwatch(lease)  # releasing is the holder's task, which may retry
            elif lease.renews:
                if changed and not lease.weight and (None in changed or lease.name in changed):
                    lease.next_renewal = now
                early = lease.ttl * EARLY if state is HELD else 0.0  # after a failure, keep the pause
                if lease.next_renewal <= now + early:
                    due.append(lease)
                    any_due = any_due or lease.next_renewal <= now
        return due if any_due else []

    def _due_at(self, lease: LeaseState) -> float:
        if not lease.renews or self._slow:
            return lease.valid_until
        return min(lease.valid_until, lease.next_renewal)

    async def _renew(self, due: Sequence[LeaseState]) -> None:
        """Renew each batch within about one round trip; a slower one continues in the background."""
        held = self.held()
        checked_at = now = self._runtime.now()
        unanswered: list[LeaseState] = []
        error: StoreError | None = None
        for start in range(0, len(due), BATCH):
            now = self._runtime.now()
            if now - checked_at > IMMEDIATE / 2:
                self._select_due(now)  # reports losses
                held, checked_at = self.held(), now
            nearest = min((lease.valid_until for lease in held), default=math.inf)
            try:
                until = min(now + IMMEDIATE, max(now + IMMEDIATE / 10, nearest))
                unanswered += await self._renew_if_connected(due[start : start + BATCH], until)
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
        """Renew, but do not connect for it: connecting may take longer than `until`."""
        if not self._store.connected:
            raise StoreUnavailable("There is no connection yet.", outcome=Outcome.UNKNOWN)
        try:
            return await self.renew(batch, until)
        except StoreUnavailable as error:
            if self._runtime.now() < until:
                raise
            # Out of time, perhaps before it was sent. With this outcome, `_continue` retries it.
            raise StoreUnavailable(str(error), outcome=Outcome.UNKNOWN) from error

    def _continue(self, rest: Sequence[LeaseState], error: StoreError, until: float) -> None:
        """Retry in the background if an answer is still possible; else put the leases at risk."""
        if isinstance(error, StoreUnavailable) and error.outcome is Outcome.UNKNOWN:
            self._slow = True
            if self._runtime.spawn(lambda: self._renew_in_background(rest, until), "renewal"):
                return
            self._slow = False
        self._failed(rest, error)

    async def _renew_in_background(self, rest: Sequence[LeaseState], until: float) -> None:
        unanswered: list[LeaseState] = []
        error: StoreError | None = None
        try:
            for start in range(0, len(rest), BATCH):
                try:
                    unanswered += await self.renew(rest[start : start + BATCH], until)
                except StoreError as failure:
                    unanswered += rest[start:]
                    error = failure
                    break
            if unanswered:
                self._failed(unanswered, error or _no_answer())
        finally:
            self._slow = False
            self._wake()

    def _failed(self, leases: Sequence[LeaseState], error: StoreError) -> None:
        log.warning("Could not renew %d leases; retrying until they expire: %s", len(leases), error)
        now = self._runtime.now()
        for lease in leases:
            lease.renewal_failed(now + min(1.0, max(0.02, lease.ttl / 20)))

    async def renew(self, due: Sequence[LeaseState], until: float) -> list[LeaseState]:
        """Extend the leases with one request. Return those without an answer."""
        sent_at = self._runtime.now()
        batch: list[tuple[LeaseState, Renewal]] = []
        for lease in due:
            if lease.state not in ALIVE:
                continue  # released while others were renewed
            ttl = lease.renewal_ttl(sent_at)
            if ttl is None:
                lease.next_renewal = math.inf
            else:
                batch.append((lease, Renewal(lease.name, lease.holder, ttl, shared=lease.weight > 0)))
        if not batch:
            return []
        answers = await self._store.renew([renewal for _, renewal in batch], until)
        unanswered = []
        for (lease, renewal), held in zip(batch, answers, strict=True):
            if held:
                lease.renewed(sent_at, renewal.ttl)
                if self._emit is not None:
                    self._emit(Event(EventKind.RENEWED, lease.name, sent_at - lease.held_since, lease.fence))
            elif held is None or (lease.weight and not renewal.shared):
                unanswered.append(lease)  # no answer, or the lease was downgraded meanwhile
            elif not await self._reassert_or_lose(lease, renewal.ttl, until):
                unanswered.append(lease)
        return unanswered

    async def _reassert_or_lose(self, lease: LeaseState, ttl: float, until: float) -> bool:
        """Handle a lease that the store does not have; False if that could not be settled now."""
        sent_at = self._runtime.now()
        if not self._store.capabilities.reassert or lease.weight:
            self.lose(lease, TAKEN)
            return True
        if lease.check(sent_at) not in ALIVE:
            return True
        claim = Claim(lease.name, lease.holder, ttl, lease.owner)
        try:
            restored = await self._store.reassert(claim, lease.last_fence, until)
        except StoreUnavailable:
            return False
        if not restored:
            self.lose(lease, FORGOTTEN)
        elif lease.check(self._runtime.now()) in ALIVE and lease.reassert(sent_at, ttl):
            log.warning(
                "The server had lost the lease on %s (fence %d), as after a failover. Nobody had taken the lock, so "
                "the lease was re-asserted and stays valid.",
                shown(lease.name),
                lease.fence,
            )
        else:  # the lease ended during the request, so nobody owns the restored grant
            await clean_up(self._ports, lease.name, lease.holder, ttl, inline=False)
        return True


def _no_answer() -> StoreUnavailable:
    return StoreUnavailable(
        "Some servers did not answer; the leases there may or may not have been renewed.", outcome=Outcome.UNKNOWN
    )
