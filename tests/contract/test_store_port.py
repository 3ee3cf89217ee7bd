"""The stores below the public names: each keeps the contract that `lockfast.testing.contract` checks.

The checks are checked too: each of them finds the store that breaks its rule.
"""

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from lockfast.ports import Mailbox, Store
from lockfast.runtime.runner import run
from lockfast.runtime.threads import ThreadRuntime
from lockfast.stores.memory import Hub, MemoryStore
from lockfast.testing import contract
from lockfast.testing.contract import CHECKS, Bench, ContractBroken, check_store, run_check
from lockfast.values import Answer, Claim, Enqueue, Granted, LockInfo, Page, Renewal
from tests.contract.driver import Driver, scenario

Check = Callable[[Bench], Coroutine[Any, Any, None]]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@scenario
async def test_store_keeps_the_contract(d: Driver, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    if d.store == "quorum":
        monkeypatch.setattr(
            "lockfast.core.quorum.store.REPLY_TIMEOUT", 10.0
        )  # a check asks once, a lock would ask again
        monkeypatch.setattr(contract, "BRIEF", 0.4)  # each client dials ten connections before its first request
    await run_check(check, lambda: d.connect().store, d.locks.runtime)


def test_all_checks_in_one_call() -> None:
    hub = Hub()
    run(check_store(lambda: MemoryStore(hub, ThreadRuntime()), ThreadRuntime()))


def test_every_check_has_its_rule() -> None:
    assert all(check.__doc__ for check in CHECKS)
    assert len({check.__name__ for check in CHECKS}) == len(CHECKS)


class Broken(MemoryStore):
    """A store that breaks one rule; the memory store does the rest."""

    async def others(self, name: str) -> LockInfo:
        return await super().inspect(name, 0)


class NewFenceOnRepeat(Broken):
    fences = 0

    async def acquire(self, claim: Claim, enqueue: Enqueue | None, until: float) -> Answer:
        answer = await super().acquire(claim, enqueue, until)
        self.fences += 1
        return Granted(answer.fence + self.fences) if isinstance(answer, Granted) else answer


class QueuesEverybody(Broken):
    async def acquire(self, claim: Claim, enqueue: Enqueue | None, until: float) -> Answer:
        return await super().acquire(claim, enqueue or Enqueue("nowhere", 0, None), until)


class PushesAnOldTurn(Broken):
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


class TellsNobody(Broken):
    async def release(self, name: str, holder: str, until: float) -> bool:
        self._hub.space._tell_next = lambda name, now: None  # type: ignore[method-assign]
        return await super().release(name, holder, until)


class AnyoneReleases(Broken):
    async def release(self, name: str, holder: str, until: float) -> bool:
        info = await self.others(name)
        return await super().release(name, info.holder or holder, until)


class RenewsUnasked(Broken):
    async def renew(self, renewals: Sequence[Renewal], until: float) -> list[bool]:
        answers = []
        for line in renewals:
            info = await self.others(line.name)
            answers += await super().renew([line._replace(holder=info.holder or line.holder)], until)
        return answers


class NeverShortens(Broken):
    async def renew(self, renewals: Sequence[Renewal], until: float) -> list[bool]:
        return await super().renew([line._replace(final=False) for line in renewals], until)


class AdoptsTwice(Broken):
    async def adopt(self, claim: Claim, old_holder: str, until: float) -> Granted | None:
        info = await self.others(claim.name)
        return await super().adopt(claim, info.holder or old_holder, until)


class NeverExpires(Broken):
    async def acquire(self, claim: Claim, enqueue: Enqueue | None, until: float) -> Answer:
        return await super().acquire(claim._replace(ttl=99), enqueue, until)


class TakesFromTheQueue(Broken):
    async def acquire(self, claim: Claim, enqueue: Enqueue | None, until: float) -> Answer:
        if enqueue is None and not (await self.others(claim.name)).locked:
            self._hub.space._queues.pop(claim.name, None)
        return await super().acquire(claim, enqueue, until)


class WaitsForTheDead(Broken):
    async def close(self) -> None:
        pass

    def mailbox(self, holder: str) -> Mailbox:
        box = super().mailbox(holder)
        box.close = lambda: None  # type: ignore[method-assign]
        return box


class ReturnsAtOnce(Broken):
    def mailbox(self, holder: str) -> Mailbox:
        box = super().mailbox(holder)

        async def nothing(until: float) -> None: ...

        box.wait = nothing  # type: ignore[method-assign]
        return box


class ShowsNobody(Broken):
    async def inspect(self, name: str, until: float) -> LockInfo:
        return (await super().inspect(name, until))._replace(waiters=())


class ListsOnlyTheFirst(Broken):
    async def listing(self, pattern: str, cursor: str, until: float) -> Page:
        page = await super().listing(pattern, cursor, until)
        return page._replace(infos=page.infos[:1])


class BreaksForAnybody(Broken):
    async def force_release(self, name: str, holder: str, until: float) -> bool:
        info = await self.others(name)
        return await super().force_release(name, info.holder or holder, until)


BROKEN = [
    (contract.repeated_acquire, NewFenceOnRepeat),
    (contract.denied_without_queueing, QueuesEverybody),
    (contract.hand_off, PushesAnOldTurn),
    (contract.tickets, ForgetsTickets),
    (contract.queue_order, LastInFirstOut),
    (contract.first_notification, TellsNobody),
    (contract.release, AnyoneReleases),
    (contract.renewal, RenewsUnasked),
    (contract.final_renewal, NeverShortens),
    (contract.adoption, AdoptsTwice),
    (contract.expiry, NeverExpires),
    (contract.expiry_hand_off, TakesFromTheQueue),
    (contract.unreachable_waiter, WaitsForTheDead),
    (contract.expired_ticket, NeverExpires),
    (contract.mailbox_timeout, ReturnsAtOnce),
    (contract.inspection, ShowsNobody),
    (contract.listing, ListsOnlyTheFirst),
    (contract.force_release, BreaksForAnybody),
]


@pytest.mark.parametrize(("check", "store_class"), BROKEN, ids=lambda value: value.__name__)
def test_each_check_finds_the_store_that_breaks_its_rule(
    check: Check, store_class: type[Broken], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contract, "PATIENCE", 0.15)
    hub = Hub()

    def make_store() -> Store:
        return store_class(hub, ThreadRuntime())

    with pytest.raises(ContractBroken, match=f"^{check.__name__}: .* Broken: "):
        run(run_check(check, make_store, ThreadRuntime()))
    assert {check for check, _ in BROKEN} == set(CHECKS)
