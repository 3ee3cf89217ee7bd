"""Release a lock, remove what a failed operation left behind, and end another's lease by force.

Rules:

- A release is idempotent and is retried within its budget. The caller waits at most `BUDGET` seconds.
- After that it continues in the background until the store answers or the grant has expired. So does the clean-up
  after a cancelled or timed-out acquisition.
- With `keep_until`, a release does not delete the grant: it lets it expire at that moment, for jobs that must not run
  again at once.
- A force release ends only the lease that was inspected, never that of the next holder. After a lost reply, a retry
  that finds nothing means that the first request worked.
"""

from __future__ import annotations

import logging

from lockfast.core.lease_state import LeaseState, State
from lockfast.core.retry import backoff, retry
from lockfast.errors import LockError, Outcome, StoreRefused, StoreUnavailable, shown
from lockfast.events import Event, EventKind
from lockfast.ports import Ports
from lockfast.values import LockInfo, Renewal

log = logging.getLogger("lockfast")

BUDGET = 2.0

CLEAN_UP_PATIENCE = 0.08
"""Seconds that a caller whose deadline passed, or which was cancelled, still waits for the clean-up."""

FORCE_RELEASE_ATTEMPTS = 100
"""How often a lock may change hands while an operator tries to free it from any holder."""


async def release(
    ports: Ports, lease: LeaseState, keep_until: float = 0.0, *, budget: float = BUDGET, background: bool = True
) -> bool:
    """Release a lease; True if the store still had it. May be called again after an error.

    Without `background`, nothing continues after the budget, because the store is about to be closed.
    """
    store, runtime, emit = ports
    started = runtime.now()
    lease.check(started)
    valid = lease.release()
    # If the lease was RELEASED already and is not cleared, an earlier release failed. Its clean-up may have freed the
    # lock, so finding nothing counts as done.
    maybe_done = not valid and lease.state is State.RELEASED
    if lease.cleared:
        return False  # released, handed off or lost before
    ours = valid or maybe_done
    keep_until = keep_until if ours else 0.0
    failures = 0
    try:
        while True:
            try:
                until = started + (budget if failures else budget / 2)
                if keep_until:
                    released = await _end(ports, lease.name, lease.holder, keep_until, until)
                else:
                    released = await store.release(lease.name, lease.holder, until)
                break
            except StoreUnavailable as error:
                failures += 1
                maybe_done = maybe_done or error.outcome is Outcome.UNKNOWN
                left = started + budget - runtime.now()
                if left <= 0:
                    raise
                await runtime.sleep(min(left, backoff(failures, runtime.random())))
    except GeneratorExit:
        raise
    except BaseException as error:  # the holder wants it free, also if it is cancelled now
        if background and (isinstance(error, StoreUnavailable) or not isinstance(error, LockError)):
            await clean_up(ports, lease.name, lease.holder, lease.ttl, inline=False, keep_until=keep_until)
        raise
    lease.cleared = True
    # If a reply was lost and the retry finds nothing, the first request freed the lock. A lost lease stays lost, even
    # if its key still existed.
    released = ours and (released or maybe_done)
    if released and emit is not None:
        emit(Event(EventKind.RELEASED, lease.name, runtime.now() - lease.held_since, lease.fence))
    return released


async def _end(ports: Ports, name: str, holder: str, keep_until: float, until: float) -> bool:
    """Remove the grant, or let it expire at `keep_until`: a retry computes the ttl again."""
    keep = keep_until - ports.runtime.now()
    if keep <= 0:
        return await ports.store.release(name, holder, until)
    (ours,) = await ports.store.renew([Renewal(name, holder, keep, final=True)], until)
    if ours is None:
        raise StoreUnavailable("The store did not say whether the lock was released.", outcome=Outcome.UNKNOWN)
    return ours


async def clean_up(ports: Ports, name: str, holder: str, ttl: float, *, inline: bool, keep_until: float = 0.0) -> None:
    """Remove a grant or ticket that may exist: at once if the store answers, else in the background."""
    runtime = ports.runtime

    async def persist() -> None:
        await remove(ports, name, holder, runtime.now() + ttl, keep_until)

    async def first_attempt() -> None:
        try:
            await _end(ports, name, holder, keep_until, runtime.now() + CLEAN_UP_PATIENCE)
        except StoreUnavailable:
            runtime.spawn(persist, "clean-up")
        except LockError as error:
            _log_refusal(name, error)

    if inline:
        await runtime.finish(first_attempt, "clean-up", CLEAN_UP_PATIENCE)
    else:
        runtime.spawn(persist, "clean-up")


async def remove(ports: Ports, name: str, holder: str, gone_at: float, keep_until: float = 0.0) -> None:
    """Remove a grant or ticket that may exist. Retry until the store answers, or until it has expired at `gone_at`."""
    runtime = ports.runtime
    failures = 0
    while runtime.now() < gone_at:
        try:
            await _end(ports, name, holder, keep_until, runtime.now() + BUDGET)
            return
        except StoreUnavailable:
            failures += 1
            await runtime.sleep(backoff(failures, runtime.random()))
        except LockError as error:
            _log_refusal(name, error)
            return


def _log_refusal(name: str, error: LockError) -> None:
    """Denied, or closed meanwhile: only the ttl can remove the grant now."""
    if isinstance(error, StoreRefused):
        log.warning("Clean-up of lock %s was denied; it expires by its ttl: %s", shown(name), error)


async def force_release(ports: Ports, name: str, holder: str | None, patience: float) -> LockInfo | None:
    """End the lease of `holder`, or of every holder. Return the lock as it was just before.

    None if nobody holds the lock, or `holder` does not.
    """
    store, runtime, emit = ports
    for _ in range(FORCE_RELEASE_ATTEMPTS):
        seen = await retry(runtime, lambda until: store.inspect(name, until), patience)
        chosen = [one for one in seen.holders if holder in (None, one.holder)]
        ended = [one for one in chosen if await _force_release(ports, name, one.holder, patience)]
        for one in ended:
            log.warning("Lock %s was force-released from %s", shown(name), one.owner or "an unknown holder")
            if emit is not None:
                emit(Event(EventKind.FORCE_RELEASED, name, one.held_for or 0.0, one.fence))
        if ended:
            return seen
        if holder is not None or not chosen:
            return None
    return None


async def _force_release(ports: Ports, name: str, holder: str, patience: float) -> bool:
    maybe_done = False

    async def attempt(until: float) -> bool:
        nonlocal maybe_done
        try:
            return await ports.store.force_release(name, holder, until)
        except StoreUnavailable as error:
            maybe_done = maybe_done or error.outcome is Outcome.UNKNOWN
            raise

    return await retry(ports.runtime, attempt, patience) or maybe_done
