"""Renewing: one request for many leases, and what their holders are told of its answer.

Rules kept here:

- Renewing holds up nobody: the keeper looks after the deadlines between two requests, and what is not answered at once
  goes on in the background, one request at a time.
- A renewal that fails puts its leases at risk and is tried again, now and then, until their deadlines.
- Nothing here can revive a lease: the store checks the holder id, and `Holding` never leaves LOST or RELEASED, so a
  renewal that crosses a release on its way changes nothing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

from lockfast.core.lease_state import LeaseState
from lockfast.core.renewal import Refused, renew
from lockfast.errors import Outcome, StoreError, StoreUnavailable
from lockfast.ports import Runtime, Store

log = logging.getLogger("lockfast")

BATCH = 500
AT_ONCE = 0.03
"""Seconds that the keeper itself waits for an answer, and so the most by which it tells of a loss late."""
MOST_PATIENCE = 2.0
"""Seconds after which a renewal in the background is repeated; a connection may be dead without knowing."""


class Renewer:
    """`slow` is true while a renewal goes on in the background. `ended` is called when it has ended, `refused` with
    each lease that the store says is not ours, `look` when there is time to look after the deadlines."""

    def __init__(
        self,
        store: Store,
        runtime: Runtime,
        *,
        ended: Callable[[], None],
        refused: Refused,
        look: Callable[[], list[LeaseState]],
    ) -> None:
        self._store = store
        self._runtime = runtime
        self._ended = ended
        self._refused = refused
        self._look = look
        self.slow = False

    async def renew_at_once(self, due: Sequence[LeaseState], held: Sequence[LeaseState]) -> None:
        """Renew each batch within a round trip or so; what takes longer goes on in the background."""
        looked_at = now = self._runtime.now()
        silent: list[LeaseState] = []
        error: StoreError | None = None
        for start in range(0, len(due), BATCH):
            now = self._runtime.now()
            if now - looked_at > AT_ONCE / 2:
                held, looked_at = self._look(), now
            nearest = min((lease_state.valid_until for lease_state in held), default=math.inf)
            try:
                batch = due[start : start + BATCH]
                silent += await self._renew_connected(batch, min(now + AT_ONCE, max(now + AT_ONCE / 10, nearest)))
            except StoreError as failure:
                silent += due[start:]
                error = failure
                break
        if silent:
            # What waits holds up the renewal of all others, so it is the shortest ttl that counts. Giving up early
            # costs nothing: the request may be repeated.
            patience = min(MOST_PATIENCE, max(0.05, min(lease_state.ttl for lease_state in held or due) / 6))
            self._try_on(silent, error or _unanswered(), now + patience)

    async def _renew_connected(self, batch: Sequence[LeaseState], until: float) -> Sequence[LeaseState]:
        """As `renew`, but does not dial: that may take longer than `until`."""
        if not self._store.connected:
            raise StoreUnavailable("There is no connection yet.", outcome=Outcome.UNKNOWN)
        try:
            return await renew(self._store, self._runtime, batch, self._refused, until)
        except StoreUnavailable as error:
            if self._runtime.now() < until:
                raise
            raise StoreUnavailable(str(error), outcome=Outcome.UNKNOWN) from error  # not sent yet, perhaps

    def _try_on(self, rest: Sequence[LeaseState], error: StoreError, until: float) -> None:
        """In the background, if the answer may still come."""
        if isinstance(error, StoreUnavailable) and error.outcome is Outcome.UNKNOWN:
            self.slow = True
            if self._runtime.spawn(lambda: self._go_on(rest, until), "renewal"):
                return
            self.slow = False
        self._failing(rest, error)

    async def _go_on(self, rest: Sequence[LeaseState], until: float) -> None:
        try:
            failed, error = await self._renew_all(rest, until)
            self._failing(failed, error)
        finally:
            self.slow = False
            self._ended()

    def _failing(self, failed: Sequence[LeaseState], error: StoreError | None) -> None:
        if error is not None:
            log.warning("Renewing %d leases failed and will be tried again: %s", len(failed), error)
        now = self._runtime.now()
        for lease_state in failed:
            lease_state.failing(now + min(1.0, max(0.02, lease_state.ttl / 20)))

    async def _renew_all(
        self, due: Sequence[LeaseState], until: float
    ) -> tuple[Sequence[LeaseState], StoreError | None]:
        """Renew in batches; those for which no answer came, and why."""
        silent: list[LeaseState] = []
        for start in range(0, len(due), BATCH):
            try:
                silent += await renew(self._store, self._runtime, due[start : start + BATCH], self._refused, until)
            except StoreError as error:
                return (*silent, *due[start:]), error
        return silent, _unanswered() if silent else None


def _unanswered() -> StoreUnavailable:
    return StoreUnavailable(
        "A part of the servers did not answer; the leases there may or may not have been renewed.",
        outcome=Outcome.UNKNOWN,
    )
