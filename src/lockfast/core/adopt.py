"""Adopt: become the holder in place of another, who handed its lease on.

Rules kept here: the grant counts from before the request that was answered; one that ran out on its way is as good as
no answer, so the request is repeated, which tells whether the lock is still ours and makes it last; if we give up, what
may be ours without our knowing is given back.
"""

from __future__ import annotations

from lockfast.core.acquire import Grant
from lockfast.core.retry import insist
from lockfast.core.release import BUDGET, give_back
from lockfast.core.validity import valid_until
from lockfast.errors import Outcome, StoreUnavailable
from lockfast.ports import Runtime, Store
from lockfast.values import Ask


async def adopt(store: Store, runtime: Runtime, ask: Ask, old_holder: str) -> Grant | None:
    """The grant; None when the lock is not the old holder's any more."""
    try:
        return await insist(runtime, lambda until: _adopt_once(store, runtime, ask, old_holder, until), BUDGET)
    except GeneratorExit:
        raise
    except BaseException:
        await give_back(store, runtime, ask.name, ask.holder, ask.ttl, inline=True)
        raise


async def _adopt_once(store: Store, runtime: Runtime, ask: Ask, old_holder: str, until: float) -> Grant | None:
    asked_at = runtime.now()
    granted = await store.adopt(ask, old_holder, until)
    if granted is None:
        return None
    grant = Grant(ask, granted.fence, asked_at, valid_until(asked_at, ask.ttl), granted.acknowledged)
    if runtime.now() >= grant.valid_until:
        raise StoreUnavailable(
            f"The store's answer took longer than the ttl of {ask.ttl:g} s, so the adopted lease had run out when it "
            "came. Give it a longer ttl, or see why the store is slow.",
            outcome=Outcome.UNKNOWN,
        )
    return grant
