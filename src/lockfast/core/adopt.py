"""Adopt: become the holder in place of another, who handed its lease on.

Rules kept here: the grant counts from before the request that was answered; one that ran out on its way is as good as
no answer, so the request is repeated, which tells whether the lock is still ours and makes it last; if we give up, what
may be ours without our knowing is given back.
"""

from __future__ import annotations

from lockfast.core.acquire import Grant
from lockfast.core.release import BUDGET, give_back
from lockfast.core.retry import retry
from lockfast.core.validity import valid_until
from lockfast.errors import Outcome, StoreUnavailable
from lockfast.ports import Runtime, Store
from lockfast.values import Claim


async def adopt(store: Store, runtime: Runtime, claim: Claim, old_holder: str) -> Grant | None:
    """The grant; None when the lock is not the old holder's any more."""
    try:
        return await retry(runtime, lambda until: _adopt_once(store, runtime, claim, old_holder, until), BUDGET)
    except GeneratorExit:
        raise
    except BaseException:
        await give_back(store, runtime, claim.name, claim.holder, claim.ttl, inline=True)
        raise


async def _adopt_once(store: Store, runtime: Runtime, claim: Claim, old_holder: str, until: float) -> Grant | None:
    sent_at = runtime.now()
    granted = await store.adopt(claim, old_holder, until)
    if granted is None:
        return None
    grant = Grant(claim, granted.fence, sent_at, valid_until(sent_at, claim.ttl), granted.acknowledged)
    if runtime.now() >= grant.valid_until:
        raise StoreUnavailable(
            f"The store's answer took longer than the ttl of {claim.ttl:g} s, so the adopted lease had run out when it "
            "came. Give it a longer ttl, or see why the store is slow.",
            outcome=Outcome.UNKNOWN,
        )
    return grant
