"""Release: give back a grant or a place, and know what to say when the store does not answer.

Rules kept here: releasing is idempotent, so it is repeated within its budget; a caller waits for it for
`BUDGET` seconds at most; what the store did not answer by then, and the clean-up after a cancelled or timed-out
acquisition, goes on in the background until the store has answered or the ttl has removed the trace anyway. Who
wants the name to stay taken for a while (`keep_until`) leaves the grant in the store with that much time and no
renewals, instead of removing it.
"""

from __future__ import annotations

import logging

from lockfast.core import backoff
from lockfast.errors import LockError, Outcome, StoreRefused, StoreUnavailable
from lockfast.ports import Runtime, Store
from lockfast.values import Renewal

log = logging.getLogger("lockfast")

BUDGET = 2.0

CLEAN_UP_PATIENCE = 0.08
"""Seconds for which a caller whose time is up, or who was cancelled, still waits for the clean-up."""


async def _end(store: Store, runtime: Runtime, name: str, holder: str, keep_until: float, until: float) -> bool:
    """Remove the grant, or let it end at `keep_until`; a repeat asks for what is left by then, never for less."""
    keep = keep_until - runtime.now()
    if keep <= 0:
        return await store.release(name, holder, until)
    (ours,) = await store.renew([Renewal(name, holder, keep, final=True)], until)
    if ours is None:
        raise StoreUnavailable("The lock may or may not have been given back.", outcome=Outcome.UNKNOWN)
    return ours


async def release(
    store: Store,
    runtime: Runtime,
    name: str,
    holder: str,
    ttl: float,
    ours: bool,
    maybe_done: bool = False,
    keep_until: float = 0.0,
    *,
    budget: float = BUDGET,
    goes_on: bool = True,
) -> bool:
    """Whether the lock was still the holder's.

    `ours` says that the lease was valid when this began, `maybe_done` that an earlier call failed. If a reply is lost
    and the repeat finds nothing, it was the first request that freed the lock. Not `goes_on`: nothing is left to the
    background, because the store is about to be closed.
    """
    give_up_at = runtime.now() + budget
    failures = 0
    try:
        while True:
            try:
                until = give_up_at - budget / 2 if failures == 0 else give_up_at
                if keep_until:  # else straight to the store
                    released = await _end(store, runtime, name, holder, keep_until, until)
                else:
                    released = await store.release(name, holder, until)
                return released or (maybe_done and ours)
            except StoreUnavailable as error:
                failures += 1
                maybe_done = maybe_done or error.outcome is Outcome.UNKNOWN
                left = give_up_at - runtime.now()
                if left <= 0:
                    raise
                await runtime.sleep(min(left, backoff.pause(failures, runtime.random())))
    except GeneratorExit:
        raise
    except BaseException as error:  # the caller meant it to be free, so see to it
        if goes_on and (isinstance(error, StoreUnavailable) or not isinstance(error, LockError)):
            await give_back(store, runtime, name, holder, ttl, inline=False, keep_until=keep_until)
        raise


async def give_back(
    store: Store, runtime: Runtime, name: str, holder: str, ttl: float, inline: bool, *, keep_until: float = 0.0
) -> None:
    """Remove a grant or place that may be there, at once if the store answers, else in the background."""

    async def persist() -> None:
        gone_at = runtime.now() + ttl
        failures = 0
        while runtime.now() < gone_at:
            try:
                await _end(store, runtime, name, holder, keep_until, runtime.now() + BUDGET)
                return
            except StoreUnavailable:
                failures += 1
                await runtime.sleep(backoff.pause(failures, runtime.random()))
            except LockError as error:
                _give_up(error)
                return

    async def first_try() -> None:
        try:
            await _end(store, runtime, name, holder, keep_until, runtime.now() + CLEAN_UP_PATIENCE)
        except StoreUnavailable:
            runtime.spawn(persist, "clean-up")
        except LockError as error:
            _give_up(error)

    if inline:
        await runtime.finish(first_try, "clean-up", CLEAN_UP_PATIENCE)
    else:
        runtime.spawn(persist, "clean-up")


def _give_up(error: LockError) -> None:
    """Refused, or closed meanwhile: only the ttl can remove it, and nobody but the log can be told."""
    if isinstance(error, StoreRefused):
        log.warning("A clean-up failed, and what it left frees itself later: %s", error)
