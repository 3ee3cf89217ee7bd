"""Take a lock away from its holder: an operator's last resort.

Rules kept here: it hits only the holder that was looked at before, never whoever came next; a repeat after a lost reply
can therefore hit nobody else, and what the first request did counts as done.
"""

from __future__ import annotations

from lockfast.core.retry import retry
from lockfast.errors import Outcome, StoreUnavailable
from lockfast.ports import Runtime, Store
from lockfast.values import LockInfo

MOST_TRIES = 100
"""How often a lock may change hands under an operator who wants it from anybody."""


async def force_release_lock(
    store: Store, runtime: Runtime, name: str, holder: str | None, patience: float
) -> LockInfo | None:
    """Whom it hit, as seen just before; None when nobody holds the lock, or somebody else than `holder` does."""
    for _ in range(MOST_TRIES):
        seen = await retry(runtime, lambda until: store.inspect(name, until), patience)
        if seen.holder is None or (holder is not None and seen.holder != holder):
            return None
        if await _take_away(store, runtime, name, seen.holder, patience):
            return seen
        if holder is not None:
            return None
    return None


async def _take_away(store: Store, runtime: Runtime, name: str, holder: str, patience: float) -> bool:
    maybe_done = False

    async def once(until: float) -> bool:
        nonlocal maybe_done
        try:
            return await store.force_release(name, holder, until)
        except StoreUnavailable as error:
            maybe_done = maybe_done or error.outcome is Outcome.UNKNOWN
            raise

    return await retry(runtime, once, patience) or maybe_done
