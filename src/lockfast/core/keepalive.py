"""The keeper: one actor per client that renews all its leases and notices their loss.

Rules kept here:

- A lease is renewed every third of its ttl, together with all that are due soon: one request, many leases.
- Watching does not wait for renewing (see `renewing`): the actor looks after the deadlines meanwhile.
- However many leases are lost at once, a bounded number of workers tells of them and cleans up.
- The actor does not die while anything is held. If its task is cancelled, what belongs to a task that still runs is
  not given back under it: an ending one is waited for, and for one that goes on another actor is started.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable

from lockfast.core import backoff
from lockfast.core.background import BackgroundTasks
from lockfast.core.lease_state import HELD, LOST, RELEASED, LeaseState
from lockfast.core.release import BUDGET, release
from lockfast.core.renewer import Renewer
from lockfast.errors import LockError, StoreUnavailable
from lockfast.ports import CallerState, Runtime, Store, Waker

log = logging.getLogger("lockfast")

TOGETHER = 1 / 24
"""Share of its ttl by which a renewal may come early, to travel with others."""
ARM_AFTER = 1.0
"""Seconds after which a lease is renewed for the first time where the store tells of changes to what was renewed: from
then on a theft is noticed at once."""
LINGER = 1.0
"""Seconds that an idle keeper stays, so that a busy lock does not start one each time."""
LONGEST_NAP = 1.0
"""A machine that was suspended runs its timers late; the keeper looks at the clock at least this often."""
LISTEN_EVERY = 0.25
"""Seconds after which the keeper takes in what the store told unasked, where nobody else does."""
ENDS_WITHIN = 0.005
"""Seconds between two looks at tasks that are ending."""


class Keepalive:
    """Invariants: at most one `_run` is under way (`_active`); every alive holding of the client is in `_held`; whoever
    adds one that is due before `_wakes_at` wakes the actor."""

    def __init__(self, store: Store, runtime: Runtime) -> None:
        self._store = store
        self._runtime = runtime
        self._mutex = runtime.mutex()
        self._held: dict[LeaseState, None] = {}
        self._alarms: set[str | None] = set()
        self._active = False
        self._closed = False
        self._in_use = False
        self._wakes_at = 0.0
        self._waker: Waker | None = None
        self._renewer = Renewer(store, runtime, ended=self._wake, refused=self.refused, look=self._look)
        self._sweeping = BackgroundTasks(runtime, "sweep", workers=1)
        store.on_change(self._changed)

    def watch(self, lease_state: LeaseState) -> None:
        """Look after `holding` until it is lost or given back."""
        if self._store.capabilities.change_events and lease_state.next_renewal > (
            soon := self._runtime.now() + ARM_AFTER
        ):
            lease_state.next_renewal = soon
        self._held[lease_state] = None  # before the look at `_active`: see `_ends`
        self._in_use = True
        if not self._active and self._start():
            return
        wakes_at = self._wakes_at
        if lease_state.valid_until < wakes_at or (lease_state.renewing and lease_state.next_renewal < wakes_at):
            self._wake()

    def _start(self) -> bool:
        """Start an actor; False when another has done so meanwhile."""
        with self._mutex:
            if self._active:
                return False
            self._active = True
            self._waker = self._waker or self._runtime.waker()
        self._set_going()
        return True

    def _set_going(self) -> None:
        started = False
        try:
            started = self._runtime.spawn(self._run, "keeper")
        finally:
            if not started:
                self._active = False  # the next lease tries again; until then the clock alone tells of a loss

    def unwatch(self, lease_state: LeaseState) -> None:
        self._held.pop(lease_state, None)

    def refused(self, lease_state: LeaseState, reason: str) -> None:
        """The store says that the grant is not ours."""
        self.unwatch(lease_state)
        lease_state.refused(reason)

    def reschedule(self, lease_state: LeaseState) -> None:
        """The times of `holding` changed; it may be due earlier than the actor thinks."""
        if self._due_at(lease_state) < self._wakes_at:
            self._wake()

    def _changed(self, name: str | None) -> None:
        """Somebody else changed a lock of ours: ask about it now rather than at the next renewal."""
        self._alarms.add(name)
        self._wake()

    def _wake(self) -> None:
        if self._waker is not None:
            self._waker.wake()

    def held(self) -> list[LeaseState]:
        return list(self._held)  # in one step: others come and go without the mutex

    def close(self) -> None:
        self._closed = True
        self._wake()

    async def give_back(self, holdings: Iterable[LeaseState]) -> None:
        """Release them, within one budget for all."""
        give_up_at = self._runtime.now() + BUDGET
        for lease_state in holdings:
            left = give_up_at - self._runtime.now()
            if (lease_state.give_back() or not lease_state.settled) and left > 0:
                try:
                    await release(
                        self._store,
                        self._runtime,
                        lease_state.name,
                        lease_state.holder,
                        lease_state.ttl,
                        ours=True,
                        budget=left,
                        goes_on=False,
                    )
                    lease_state.settled = True
                except LockError as error:
                    log.warning("A lock could not be given back at the end, and frees itself later: %s", error)
            self.unwatch(lease_state)

    async def _run(self) -> None:
        try:
            await self._keep()
        except GeneratorExit:
            raise
        except BaseException:
            await self._see_out()
            raise

    async def _see_out(self) -> None:
        """We are cancelled, and perhaps everybody is: the last moment in which a request can be sent."""
        try:
            while any(
                self._runtime.caller_state(lease_state.caller) is CallerState.ENDING for lease_state in self.held()
            ):
                self._sort_out(self._runtime.now())
                await self._runtime.sleep(ENDS_WITHIN)
            await self.give_back(self._callers(CallerState.ENDED))
        finally:
            with self._mutex:
                ends = self._ends()
            if not ends:
                self._set_going()

    def _callers(self, state: CallerState) -> list[LeaseState]:
        """The leases whose thread or task is in that state."""
        return [lease for lease in self.held() if self._runtime.caller_state(lease.caller) is state]

    async def _keep(self) -> None:
        idle_since: float | None = None
        while not self._closed:
            self._wakes_at = math.inf  # until we know better, whoever adds a lease wakes us
            try:
                wakes_at = await self._round()
            except Exception:
                # A keeper that dies silently is how leases are lost without a word.
                log.exception("The keeper failed and goes on; leases that it cannot renew will be reported.")
                wakes_at = self._runtime.now() + LONGEST_NAP / 4
            now = self._runtime.now()
            if not self._held:
                idle_since = now if idle_since is None else idle_since
                if self._retire(now - idle_since):
                    return
                wakes_at = now + LINGER
            else:
                idle_since = None
            self._wakes_at = wakes_at
            await self._nap(wakes_at)

    async def _nap(self, wakes_at: float) -> None:
        """Until then, or until somebody calls."""
        longest = LISTEN_EVERY if self._store.capabilities.change_events else LONGEST_NAP
        while self._waker is not None and not self._closed:
            now = self._runtime.now()
            if now >= wakes_at or await self._waker.wait(min(wakes_at, now + longest)):
                return
            self._store.poll_events()
            if self._alarms:
                return

    def _retire(self, idle_for: float) -> bool:
        with self._mutex:
            if idle_for < LINGER or self._in_use:
                self._in_use = False
                return False
            return self._ends()

    def _ends(self) -> bool:
        """Under the mutex: whether the actor ends, nothing being left to keep. Who comes adds a lease and then looks
        for an actor, and here it is the other way round: so either it finds none, though only for a moment perhaps, and
        goes to start one, or its lease is found here."""
        self._active = False
        if self._held and not self._closed:
            self._active = True
        return not self._active

    async def _round(self) -> float:
        """Tell of what is lost, renew what is due; when to look next."""
        self._store.poll_events()
        due = self._sort_out(self._runtime.now())
        if due and not self._renewer.slow:
            await self._renewer.renew_at_once(due, self.held())
        return min(map(self._due_at, self.held()), default=math.inf)

    def _look(self) -> list[LeaseState]:
        """Tell of what is lost; what is held then."""
        self._sort_out(self._runtime.now())
        return self.held()

    def _sort_out(self, now: float) -> list[LeaseState]:
        """Drop what has ended; whom to renew now: nobody, or all that are due and those that may come along."""
        alarms, self._alarms = self._alarms, set()
        due: list[LeaseState] = []
        ripe = False
        for lease_state in self.held():
            state = lease_state.check(now)
            if state is LOST:
                self.unwatch(lease_state)
                self.sweep(lease_state)
            elif state is RELEASED:
                self.unwatch(lease_state)  # giving it back is its holder's business, and may be tried again
            elif lease_state.renewing:
                if alarms and (None in alarms or lease_state.name in alarms):
                    lease_state.next_renewal = now
                early = lease_state.ttl * TOGETHER if state is HELD else 0.0  # a retry is not hurried
                if lease_state.next_renewal <= now + early:
                    due.append(lease_state)
                    ripe = ripe or lease_state.next_renewal <= now
        return due if ripe else []

    def sweep(self, lease_state: LeaseState) -> None:
        """Remove what the store may still have of a lease that is over, in the background."""
        if lease_state.settled:
            return
        lease_state.settled = True

        async def sweep() -> None:
            # A renewal whose reply was lost may have prolonged the grant beyond what we could rely on.
            gone_at = lease_state.valid_until + lease_state.ttl
            failures = 0
            while self._runtime.now() < gone_at and not self._closed:
                try:
                    await self._store.release(lease_state.name, lease_state.holder, self._runtime.now() + BUDGET)
                    return
                except StoreUnavailable:
                    failures += 1
                    await self._runtime.sleep(backoff.pause(failures, self._runtime.random()))
                except LockError:
                    return  # refused, or the key holds other data by now

        self._sweeping.add(sweep)

    def _due_at(self, lease_state: LeaseState) -> float:
        if not lease_state.renewing or self._renewer.slow:
            return lease_state.valid_until
        return min(lease_state.valid_until, lease_state.next_renewal)
