"""The keeper: one actor per client that renews all its leases and notices their loss.

Rules kept here:

- A lease is renewed every third of its ttl, together with all that are due soon: one request, many leases.
- A renewal that fails is tried again until the deadline; the holder is told that the lease is at risk.
- Nothing here can revive a lease: the store checks the holder id, and `Holding` never leaves LOST or RELEASED,
  so a renewal that crosses a release on its way changes nothing.
- Watching does not wait for renewing: a request that is not answered at once goes on in the background, and the
  actor looks after the deadlines meanwhile.
- However many leases are lost at once, a bounded number of workers tells of them and cleans up.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from holdfast.core import backoff
from holdfast.core.errands import Errands
from holdfast.core.holding import ALIVE, Holding, State
from holdfast.core.release import BUDGET, release
from holdfast.errors import LockError, Outcome, StoreError, StoreUnavailable
from holdfast.ports import Runtime, Store, Waker
from holdfast.values import Renewal

log = logging.getLogger("holdfast")

BATCH = 500
AT_ONCE = 0.03
"""Seconds that the actor itself waits for an answer; and so the most by which it tells of a loss late."""
MOST_PATIENCE = 2.0
"""Seconds after which a renewal in the background is repeated; a connection may be dead without knowing."""
TOGETHER = 1 / 24
"""Share of its ttl by which a renewal may come early, to travel with others."""
ARM_AFTER = 1.0
"""Seconds after which a lease is renewed for the first time where the store tells of changes to what was renewed: from
then on a theft is noticed at once."""
LINGER = 1.0
"""Seconds that an idle keeper stays, so that a busy lock does not start one each time."""
LONGEST_NAP = 1.0
"""A machine that was suspended runs its timers late; the keeper looks at the clock at least this often."""


class Keeper:
    """Invariants: at most one `_run` is under way (`_active`), and at most one slow renewal (`_slow`); every alive
    holding of the client is in `_held`; whoever adds one that is due before `_wakes_at` wakes the actor."""

    def __init__(self, store: Store, runtime: Runtime) -> None:
        self._store = store
        self._runtime = runtime
        self._mutex = runtime.mutex()
        self._held: dict[str, Holding] = {}
        self._alarms: set[str | None] = set()
        self._active = False
        self._slow = False
        self._closed = False
        self._in_use = False
        self._wakes_at = 0.0
        self._waker: Waker | None = None
        self._sweeping = Errands(runtime, "sweep", workers=1)
        store.on_change(self._changed)

    def watch(self, holding: Holding) -> None:
        """Look after `holding` until it is lost or given back."""
        if self._store.notices:
            holding.next_renewal = min(holding.next_renewal, self._runtime.now() + ARM_AFTER)
        with self._mutex:
            self._held[holding.holder] = holding
            self._in_use = True
            if self._waker is None:
                self._waker = self._runtime.waker()
            start, self._active = not self._active, True
            early = self._due_at(holding) < self._wakes_at
        if start:
            if not self._runtime.spawn(self._run, "keeper"):
                self._active = False  # the next lease tries again; until then the clock alone tells of a loss
        elif early:
            self._waker.wake()

    def unwatch(self, holding: Holding) -> None:
        self._held.pop(holding.holder, None)

    def reschedule(self, holding: Holding) -> None:
        """The times of `holding` changed; it may be due earlier than the actor thinks."""
        if self._due_at(holding) < self._wakes_at:
            self._wake()

    def _changed(self, name: str | None) -> None:
        """Somebody else changed a lock of ours: ask about it now rather than at the next renewal."""
        self._alarms.add(name)
        self._wake()

    def _wake(self) -> None:
        if self._waker is not None:
            self._waker.wake()

    def held(self) -> list[Holding]:
        with self._mutex:
            return list(self._held.values())

    def close(self) -> None:
        self._closed = True
        self._wake()

    async def give_all_back(self) -> None:
        """Release whatever is held, within one budget for all."""
        give_up_at = self._runtime.now() + BUDGET
        for holding in self.held():
            left = give_up_at - self._runtime.now()
            if (holding.give_back() or not holding.settled) and left > 0:
                try:
                    await release(
                        self._store,
                        self._runtime,
                        holding.name,
                        holding.holder,
                        holding.ttl,
                        ours=True,
                        budget=left,
                    )
                    holding.settled = True
                except LockError as error:
                    log.warning("A lock could not be given back at the end, and frees itself later: %s", error)
            self.unwatch(holding)

    async def _run(self) -> None:
        try:
            await self._keep()
        except GeneratorExit:
            raise
        except BaseException:
            # The event loop is shutting down around us: the last moment in which a request can be sent.
            await self.give_all_back()
            raise

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
            self._wakes_at = wakes_at = min(wakes_at, now + LONGEST_NAP)
            if self._waker is not None:
                await self._waker.wait(wakes_at)

    def _retire(self, idle_for: float) -> bool:
        with self._mutex:
            if self._held or idle_for < LINGER or self._in_use:
                self._in_use = False
                return False
            self._active = False
            return True

    async def _round(self) -> float:
        """Tell of what is lost, renew what is due; when to look next."""
        self._store.listen()
        now = self._runtime.now()
        due = self._sort_out(now)
        if due and not self._slow:
            await self._renew_at_once(due)
        return min(map(self._due_at, self.held()), default=math.inf)

    def _sort_out(self, now: float) -> list[Holding]:
        """Drop what has ended; whom to renew now: nobody, or all that are due and those that may come along."""
        alarms, self._alarms = self._alarms, set()
        due: list[Holding] = []
        ripe = False
        for holding in self.held():
            state = holding.check(now)
            if state is State.LOST:
                self._drop(holding)
            elif state is State.RELEASED:
                self.unwatch(holding)  # giving it back is its holder's business, and may be tried again
            elif holding.renewing:
                if alarms and (None in alarms or holding.name in alarms):
                    holding.next_renewal = now
                early = holding.ttl * TOGETHER if state is State.HELD else 0.0  # a retry is not hurried
                if holding.next_renewal <= now + early:
                    due.append(holding)
                    ripe = ripe or holding.next_renewal <= now
        return due if ripe else []

    def _drop(self, holding: Holding) -> None:
        self.unwatch(holding)
        if holding.settled:
            return
        holding.settled = True

        async def sweep() -> None:
            # A renewal whose reply was lost may have prolonged the grant beyond what we could rely on.
            gone_at = holding.valid_until + holding.ttl
            failures = 0
            while self._runtime.now() < gone_at and not self._closed:
                try:
                    await self._store.release(holding.name, holding.holder, self._runtime.now() + BUDGET)
                    return
                except StoreUnavailable:
                    failures += 1
                    await self._runtime.sleep(backoff.pause(failures, self._runtime.random()))
                except LockError:
                    return  # refused, or the key holds other data by now

        self._sweeping.add(sweep)

    async def _renew_at_once(self, due: Sequence[Holding]) -> None:
        """Renew within a round trip or so; what takes longer goes on in the background."""
        now = self._runtime.now()
        held = self.held() or due
        nearest = min(holding.valid_until for holding in held)
        rest, error = await self._renew_all(due, min(now + AT_ONCE, max(now + AT_ONCE / 10, nearest)))
        if error is None:
            return
        if not (isinstance(error, StoreUnavailable) and error.outcome is Outcome.UNKNOWN):
            self._failing(rest, error)
            return
        self._slow = True
        # What waits here holds up the renewal of all others, so it is the shortest ttl that counts. Giving up early
        # costs nothing: the request may be repeated.
        patience = min(MOST_PATIENCE, max(0.05, min(holding.ttl for holding in held) / 6))

        async def go_on() -> None:
            try:
                failed, error = await self._renew_all(rest, now + patience)
                self._failing(failed, error)
            finally:
                self._slow = False
                self._wake()

        if not self._runtime.spawn(go_on, "renewal"):
            self._slow = False
            self._failing(rest, error)

    def _failing(self, failed: Sequence[Holding], error: StoreError | None) -> None:
        if error is not None:
            log.warning("Renewing %d leases failed and will be tried again: %s", len(failed), error)
        now = self._runtime.now()
        for holding in failed:
            holding.failing(now + min(1.0, max(0.02, holding.ttl / 20)))

    async def _renew_all(self, due: Sequence[Holding], until: float) -> tuple[Sequence[Holding], StoreError | None]:
        """Renew in batches; those for which no answer came, and why."""
        for start in range(0, len(due), BATCH):
            try:
                await self._renew(due[start : start + BATCH], until)
            except StoreError as error:
                return due[start:], error
        return (), None

    async def _renew(self, due: Sequence[Holding], until: float) -> None:
        """One request for many leases."""
        asked_at = self._runtime.now()
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
            return
        answers = await self._store.renew([line for _, line in batch], until)
        for (holding, line), still_ours in zip(batch, answers, strict=True):
            if still_ours:
                holding.renewed(asked_at, line.ttl)
            else:
                self.unwatch(holding)
                holding.refused()

    def _due_at(self, holding: Holding) -> float:
        if not holding.renewing or self._slow:
            return holding.valid_until
        return min(holding.valid_until, holding.next_renewal)
