"""Every store keeps the contract of `lockfast.testing.contract`.

The checks are tested too: each one finds a store that breaks its rule.
"""

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from lockfast.ports import Mailbox, Store
from lockfast.runtime.base import run
from lockfast.runtime.threads import ThreadRuntime
from lockfast.stores.memory import Hub, MemoryStore
from lockfast.testing import contract
from lockfast.testing.contract import CHECKS, Bench, ContractBroken, check_store, run_check
from lockfast.values import Answer, Claim, Enqueue, FirstNotification, Granted, LockInfo, Page, Renewal
from tests.contract.driver import Driver, scenario
from tests.contract.stores import STORES, on

Check = Callable[[Bench], Coroutine[Any, Any, None]]


ORDER: set[Check] = {contract.queue_order, contract.tickets}
WAITERS = {contract.inspection, contract.listing, contract.force_release, contract.mailbox_timeout}
HAND_OFF = {contract.hand_off, contract.expiry_hand_off, contract.unreachable_waiter, contract.expired_ticket}
NOT_PROMISED: dict[str, set[Check]] = {
    "quorum": ORDER,
    "transactions": {*ORDER, *WAITERS, *HAND_OFF, contract.first_notification},
}
"""The fallback to transactions has no queue: its waiters poll, and are neither listed nor counted."""
CASES = [
    pytest.param(*one.values, check, id=f"{one.id}-{check.__name__}")
    for one in on(STORES)
    for check in CHECKS
    if check not in NOT_PROMISED.get(one.values[0][0], ())
]


@pytest.mark.parametrize(("d", "check"), CASES, indirect=["d"])
@scenario
async def test_store_keeps_the_contract(d: Driver, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    if d.store == "quorum":
        # A check sends each request once, where a lock would retry; each client opens ten connections first.
        monkeypatch.setattr("lockfast.core.quorum.store.REPLY_TIMEOUT", 10.0)
        monkeypatch.setattr(contract, "BRIEF", 0.4)
    await run_check(check, lambda: d.connect().session.store, d.locks.session.runtime)


def test_all_checks_in_one_call() -> None:
    hub = Hub()
    run(check_store(lambda: MemoryStore(hub, ThreadRuntime()), ThreadRuntime()))


def test_every_check_states_its_rule() -> None:
    assert all(check.__doc__ for check in CHECKS)
    assert len({check.__name__ for check in CHECKS}) == len(CHECKS)


class Broken(MemoryStore):
    """A memory store that breaks one rule."""

    async def current(self, name: str) -> LockInfo:
        return await super().inspect(name, 0)


class NewFenceOnRepeat(Broken):
    fences = 0

    async def acquire(self, claim: Claim, enqueue: Enqueue | None, until: float) -> Answer:
        answer = await super().acquire(claim, enqueue, until)
        self.fences += 1
        return Granted(answer.fence + self.fences) if isinstance(answer, Granted) else answer


class QueuesEveryClaim(Broken):
    async def acquire(self, claim: Claim, enqueue: Enqueue | None, until: float) -> Answer:
        return await super().acquire(claim, enqueue or Enqueue("nowhere", 0, None), until)


class NotifiesAnOldAttempt(Broken):
    async def acquire(self, claim: Claim, enqueue: Enqueue | None, until: float) -> Answer:
        return await super().acquire(claim, enqueue and enqueue._replace(attempt=1), until)


class ForgetsTickets(Broken):
    async def acquire(self, claim: Claim, enqueue: Enqueue | None, until: float) -> Answer:
        return await super().acquire(claim, enqueue and enqueue._replace(ticket=None), until)


class LastInFirstOut(Broken):
    async def acquire(self, claim: Claim, enqueue: Enqueue | None, until: float) -> Answer:
        answer = await super().acquire(claim, enqueue, until)
        queue = self._hub.space._queues.get(claim.name, [])
        queue.sort(key=lambda one: -one.ticket)
        return answer


class NotifiesNoFirstWaiter(Broken):
    async def release(self, name: str, holder: str, until: float) -> bool:
        self._hub.space._first = lambda *_: FirstNotification(-1, None)  # type: ignore[method-assign]
        return await super().release(name, holder, until)


class ReleasesForAnyHolder(Broken):
    async def release(self, name: str, holder: str, until: float) -> bool:
        info = await self.current(name)
        return await super().release(name, info.holder or holder, until)


class RenewsForAnyHolder(Broken):
    async def renew(self, renewals: Sequence[Renewal], until: float) -> list[bool]:
        answers = []
        for renewal in renewals:
            info = await self.current(renewal.name)
            answers += await super().renew([renewal._replace(holder=info.holder or renewal.holder)], until)
        return answers


class NeverShortens(Broken):
    async def renew(self, renewals: Sequence[Renewal], until: float) -> list[bool]:
        return await super().renew([renewal._replace(final=False) for renewal in renewals], until)


class AdoptsTwice(Broken):
    async def adopt(self, claim: Claim, old_holder: str, until: float) -> Granted | None:
        info = await self.current(claim.name)
        return await super().adopt(claim, info.holder or old_holder, until)


class NeverExpires(Broken):
    async def acquire(self, claim: Claim, enqueue: Enqueue | None, until: float) -> Answer:
        return await super().acquire(claim._replace(ttl=99), enqueue, until)


class DropsTheQueueAtExpiry(Broken):
    async def acquire(self, claim: Claim, enqueue: Enqueue | None, until: float) -> Answer:
        if enqueue is None and not (await self.current(claim.name)).locked:
            self._hub.space._queues.pop(claim.name, None)
        return await super().acquire(claim, enqueue, until)


class GrantsToDeadWaiters(Broken):
    async def close(self) -> None:
        pass

    def mailbox(self, holder: str) -> Mailbox:
        box = super().mailbox(holder)
        box.close = lambda: None  # type: ignore[method-assign]
        return box


class MailboxReturnsAtOnce(Broken):
    def mailbox(self, holder: str) -> Mailbox:
        box = super().mailbox(holder)

        async def nothing(until: float) -> None: ...

        box.wait = nothing  # type: ignore[method-assign]
        return box


class InspectsWithoutWaiters(Broken):
    async def inspect(self, name: str, until: float) -> LockInfo:
        return (await super().inspect(name, until))._replace(waiters=())


class ListsOnlyTheFirst(Broken):
    async def listing(self, pattern: str, cursor: str, until: float) -> Page:
        page = await super().listing(pattern, cursor, until)
        return page._replace(infos=page.infos[:1])


class ForceReleasesAnyHolder(Broken):
    async def force_release(self, name: str, holder: str, until: float) -> bool:
        info = await self.current(name)
        return await super().force_release(name, info.holder or holder, until)


BROKEN = [
    (contract.repeated_acquire, NewFenceOnRepeat),
    (contract.denied_without_queueing, QueuesEveryClaim),
    (contract.hand_off, NotifiesAnOldAttempt),
    (contract.tickets, ForgetsTickets),
    (contract.queue_order, LastInFirstOut),
    (contract.first_notification, NotifiesNoFirstWaiter),
    (contract.release, ReleasesForAnyHolder),
    (contract.renewal, RenewsForAnyHolder),
    (contract.final_renewal, NeverShortens),
    (contract.adoption, AdoptsTwice),
    (contract.expiry, NeverExpires),
    (contract.expiry_hand_off, DropsTheQueueAtExpiry),
    (contract.unreachable_waiter, GrantsToDeadWaiters),
    (contract.expired_ticket, NeverExpires),
    (contract.mailbox_timeout, MailboxReturnsAtOnce),
    (contract.inspection, InspectsWithoutWaiters),
    (contract.listing, ListsOnlyTheFirst),
    (contract.force_release, ForceReleasesAnyHolder),
]


@pytest.mark.parametrize(("check", "store_class"), BROKEN, ids=lambda value: value.__name__)
def test_each_check_finds_a_store_that_breaks_its_rule(
    check: Check, store_class: type[Broken], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contract, "PATIENCE", 0.15)
    hub = Hub()

    def make_store() -> Store:
        return store_class(hub, ThreadRuntime())

    with pytest.raises(ContractBroken, match=f"^{check.__name__}: .* Broken: "):
        run(run_check(check, make_store, ThreadRuntime()))
    assert {check for check, _ in BROKEN} == set(CHECKS)
