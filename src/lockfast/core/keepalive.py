"""The keepalive: one background thread or task per connection that renews all its leases and detects their loss.

Rules:

- A lease is renewed every third of its ttl, together with all leases that are due soon: one request, many leases.
- A slow renewal continues elsewhere (`renewal.py`), so that this loop still detects losses.
- However many leases are lost at once, a single worker cleans up.
- The actor, as that thread or task is called here, lives while anything is held. If its task is cancelled, it waits
  for tasks that are ending, releases the leases of tasks that have ended, and starts another actor for the rest.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable

from lockfast.core.background import BackgroundTasks
from lockfast.core.lease_state import HELD, LOST, RELEASED, LeaseState
from lockfast.core.release import BUDGET, release
from lockfast.core.renewal import Renewer
from lockfast.core.retry import backoff
from lockfast.errors import LockError, StoreUnavailable
from lockfast.ports import CallerState, Ports, Waker
from lockfast.values import shown

log = logging.getLogger("lockfast")

EARLY = 1 / 24
"""Share of its ttl by which a renewal may be sent early to join a batch."""
FIRST_RENEWAL = 1.0
"""Seconds to the first renewal with a store that reports external changes: it does so only after a renewal."""
LINGER = 1.0
"""Seconds that an idle actor stays, so that frequent acquisitions do not start one each time."""
LONGEST_SLEEP = 1.0
"""After the machine was suspended, timers fire late, so the actor looks at the clock at least this often."""
POLL_EVENTS_EVERY = 0.25
"""Seconds after which the actor processes unsolicited messages of the store, if no request does."""
ENDING_POLL = 0.005
"""Seconds between two checks of tasks that are ending."""


class Keepalive:
    """Watches the leases of one connection.

    Invariants: at most one `_run` is active (`_active`); every live lease of the connection is in `_held`; a new
    lease that is due before `_wakes_at` wakes the actor.
    """

    def __init__(self, ports: Ports) -> None:
        self._ports = ports
        self._store, self._runtime, _ = ports
        self._mutex = self._runtime.mutex()
        self._held: dict[LeaseState, None] = {}
        self._changed: deque[str | None] = deque()
        self._active = False
        self._closed = False
        self._in_use = False
        self._wakes_at = 0.0
        self._first_renewal = math.inf
        self._waker: Waker | None = None
        self._renewer = Renewer(ports, on_idle=self._wake, on_lost=self.lose, check_deadlines=self._check_deadlines)
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

        async def clean_up() -> None:
            # A renewal whose reply was lost may have extended the grant beyond its known end.
            gone_at = lease.valid_until + lease.ttl
            failures = 0
            while self._runtime.now() < gone_at and not self._closed:
                try:
                    await self._store.release(lease.name, lease.holder, self._runtime.now() + BUDGET)
                    return
                except StoreUnavailable:
                    failures += 1
                    await self._runtime.sleep(backoff(failures, self._runtime.random()))
                except LockError:
                    return  # denied, or the key holds other data

        self._clean_ups.add(clean_up)

    def _on_change(self, name: str | None) -> None:
        """An external change of a lock: renew it now instead of at the next renewal."""
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
        if due and not self._renewer.slow:
            await self._renewer.renew_now(due, self.held())
        return min(map(self._due_at, self.held()), default=math.inf)

    def _update_first_renewal(self, now: float) -> None:
        """Renew new leases early if the store reports changes, which is known once it is connected."""
        before = self._first_renewal
        self._first_renewal = FIRST_RENEWAL if self._store.capabilities.change_events else math.inf
        if self._first_renewal < before:
            for lease in self.held():
                lease.next_renewal = min(lease.next_renewal, now + FIRST_RENEWAL)

    def _check_deadlines(self) -> list[LeaseState]:
        """Report losses, and return what is held then."""
        self._select_due(self._runtime.now())
        return self.held()

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
                if changed and (None in changed or lease.name in changed):
                    lease.next_renewal = now
                early = lease.ttl * EARLY if state is HELD else 0.0  # after a failure, keep the pause
                if lease.next_renewal <= now + early:
                    due.append(lease)
                    any_due = any_due or lease.next_renewal <= now
        return due if any_due else []

    def _due_at(self, lease: LeaseState) -> float:
        if not lease.renews or self._renewer.slow:
            return lease.valid_until
        return min(lease.valid_until, lease.next_renewal)
