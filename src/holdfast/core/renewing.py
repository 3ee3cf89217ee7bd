"""Renewing: one request for many leases, and what their holders are told of its answer.

Rules kept here:

- Renewing holds up nobody: what is not answered at once goes on in the background, and at most one request does.
- A renewal that fails puts its leases at risk and is tried again, now and then, until their deadlines.
- Nothing here can revive a lease: the store checks the holder id, and `Holding` never leaves LOST or RELEASED, so a
  renewal that crosses a release on its way changes nothing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

from holdfast.core.holding import ALIVE, Holding
from holdfast.errors import Outcome, StoreError, StoreUnavailable
from holdfast.ports import Runtime, Store
from holdfast.values import Renewal

log = logging.getLogger("holdfast")

BATCH = 500
AT_ONCE = 0.03
"""Seconds that the keeper itself waits for an answer; and so the most by which it tells of a loss late."""
MOST_PATIENCE = 2.0
"""Seconds after which a renewal in the background is repeated; a connection may be dead without knowing."""


class Renewer:
    """`slow` is true while a renewal goes on in the background; `ended` is called when it has ended, and `refused` with
    each lease that the store says is not ours."""

    def __init__(
        self, store: Store, runtime: Runtime, *, ended: Callable[[], None], refused: Callable[[Holding], None]
    ) -> None:
        self._store = store
        self._runtime = runtime
        self._ended = ended
        self._refused = refused
        self.slow = False

    async def renew_at_once(self, due: Sequence[Holding], held: Sequence[Holding]) -> None:
        """Renew within a round trip or so; what takes longer goes on in the background. `held` is what else is held."""
        now = self._runtime.now()
        nearest = min(holding.valid_until for holding in held or due)
        rest, error = await self._renew_all(due, min(now + AT_ONCE, max(now + AT_ONCE / 10, nearest)))
        if error is None:
            return
        if not (isinstance(error, StoreUnavailable) and error.outcome is Outcome.UNKNOWN):
            self._failing(rest, error)
            return
        # What waits here holds up the renewal of all others, so it is the shortest ttl that counts. Giving up early
        # costs nothing: the request may be repeated.
        patience = min(MOST_PATIENCE, max(0.05, min(holding.ttl for holding in held or due) / 6))
        self.slow = True
        if not self._runtime.spawn(lambda: self._go_on(rest, now + patience), "renewal"):
            self.slow = False
            self._failing(rest, error)

    async def _go_on(self, rest: Sequence[Holding], until: float) -> None:
        try:
            failed, error = await self._renew_all(rest, until)
            self._failing(failed, error)
        finally:
            self.slow = False
            self._ended()

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
                self._refused(holding)
