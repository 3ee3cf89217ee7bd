"""Every store keeps the contract of `lockfast.testing.contract`.

The checks are tested too: each one finds a store that breaks its rule.
"""

from collections.abc import Sequence

import pytest

from lockfast.errors import ConfigurationError
from lockfast.ports import Mailbox, Store
from lockfast.runtime.base import run
from lockfast.runtime.threads import ThreadRuntime
from lockfast.stores.memory import Hub, MemoryStore
from lockfast.testing import contract
from lockfast.testing import shared_contract as shared
from lockfast.testing.contract import CHECKS, Bench, Check, ContractBroken, check_store, run_check
from lockfast.values import Answer, Claim, Enqueue, FirstNotification, Granted, LockInfo, Page, Renewal, Taken
from tests.contract.driver import Driver, done, scenario
from tests.contract.stores import STORES, capabilities, on

ORDER: set[Check] = {contract.queue_order, contract.tickets}
WAITERS = {contract.inspection, contract.listing, contract.force_release, contract.mailbox_timeout}
HAND_OFF = {contract.hand_off, contract.expiry_hand_off, contract.unreachable_waiter, contract.expired_ticket}
SHARED_QUEUE: set[Check] = {
    shared.readers_in_one_batch,
    shared.waiting_writer_stops_readers,
    shared.weights_in_order,
    shared.downgrade_serves_the_queue,
    shared.departed_head,
    shared.unreachable_head,
    shared.expired_head,
    shared.other_mode_queued,
    shared.several_behind_a_queue,
    shared.shared_inspection,
}
NOT_PROMISED: dict[str, set[Check]] = {
    "quorum": ORDER,
    "transactions": {*ORDER, *WAITERS, *HAND_OFF, *SHARED_QUEUE, contract.first_notification},
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
        monkeypatch.setattr(Bench, "brief", 0.4)
    if not await run_check(check, lambda: d.connect().session.store, d.locks.session.runtime):
        pytest.skip("the store does not grant such claims")


@scenario
async def test_claims_that_the_store_does_not_grant_are_refused(d: Driver) -> None:
    async def acquire_permit() -> None:
        await done(d.locks.semaphore("thing", 2).acquire())

    async def read() -> None:
        await done(d.locks.rwlock("thing").reader.acquire())

    offered = capabilities(d)
    for claim, granted in ((acquire_permit, offered.permits), (read, offered.readers)):
        if not granted:
            with pytest.raises(ConfigurationError):
                await claim()
    assert await done(d.lock().locked()) is False


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


class ReadersExcludeEachOther(Broken):
    async def acquire(self, claim: Claim, enqueue: Enqueue | None, until: float) -> Answer:
        return await super().acquire(claim._replace(weight=0, limit=0), enqueue, until)


class LetsReadersInOneByOne(Broken):
    async def acquire(self, claim: Claim, enqueue: Enqueue | None, until: float) -> Answer:
        return await super().acquire(claim._replace(weight=0) if enqueue else claim, enqueue, until)


class SharedClaimsOvertake(Broken):
    async def acquire(self, claim: Claim, enqueue: Enqueue | None, until: float) -> Answer:
        queue = self._hub.space._queues.pop(claim.name, None) if claim.weight else None
        answer = await super().acquire(claim, None, until)
        if queue:
            self._hub.space._queues[claim.name] = queue
        return answer if isinstance(answer, Granted) else await super().acquire(claim, enqueue, until)


class UsesTheHighestSlot(Broken):
    async def acquire(self, claim: Claim, enqueue: Enqueue | None, until: float) -> Answer:
        answer = await super().acquire(claim, enqueue, until)
        if isinstance(answer, Granted):
            return answer._replace(slots=tuple(claim.limit - 1 - slot for slot in answer.slots))
        return answer


class KeepsTheFirstLimit(Broken):
    limit = 0

    async def acquire(self, claim: Claim, enqueue: Enqueue | None, until: float) -> Answer:
        self.limit = self.limit or claim.limit
        return await super().acquire(claim._replace(limit=self.limit), enqueue, until)


class OneTtlForAllHolders(Broken):
    async def acquire(self, claim: Claim, enqueue: Enqueue | None, until: float) -> Answer:
        answer = await super().acquire(claim, enqueue, until)
        for grant in self._hub.space._grants.get(claim.name, {}).values():
            grant.expires_at = self._runtime.now() + claim.ttl
        return answer


class RenewsEveryHolder(Broken):
    async def renew(self, renewals: Sequence[Renewal], until: float) -> list[bool]:
        for renewal in renewals:
            info = await self.current(renewal.name)
            await super().renew([renewal._replace(holder=one.holder) for one in info.holders], until)
        return await super().renew(renewals, until)


class DowngradesByReleaseAndAcquire(Broken):
    async def downgrade(self, claim: Claim, until: float) -> bool:
        return await self.release(claim.name, claim.holder, until) and bool(await self.acquire(claim, None, until))


class DowngradeWakesNobody(Broken):
    async def downgrade(self, claim: Claim, until: float) -> bool:
        queue = self._hub.space._queues.pop(claim.name, [])
        held = await super().downgrade(claim, until)
        self._hub.space._queues[claim.name] = queue
        return held


class DepartureWakesNobody(Broken):
    async def release(self, name: str, holder: str, until: float) -> bool:
        queue = self._hub.space._queues.get(name, [])
        head = next((one for one in queue if one.claim.holder == holder), None)
        if head is None:
            return await super().release(name, holder, until)
        queue.remove(head)
        return False


class QueuesTheOtherMode(Broken):
    async def acquire(self, claim: Claim, enqueue: Enqueue | None, until: float) -> Answer:
        try:
            return await super().acquire(claim, enqueue, until)
        except ConfigurationError:
            return Taken(None)


class PermitsAreReaders(Broken):
    async def acquire(self, claim: Claim, enqueue: Enqueue | None, until: float) -> Answer:
        return await super().acquire(claim._replace(limit=0), enqueue, until)


class GrantsSomeOfSeveral(Broken):
    async def acquire_all(self, claims: Sequence[Claim], until: float) -> list[Granted] | None:
        answers = [await self.acquire(claim, None, until) for claim in claims]
        granted = [answer for answer in answers if isinstance(answer, Granted)]
        return granted if len(granted) == len(claims) else None


class SeveralOvertake(Broken):
    async def acquire_all(self, claims: Sequence[Claim], until: float) -> list[Granted] | None:
        for claim in claims:
            self._hub.space._queues.pop(claim.name, None)
        return await super().acquire_all(claims, until)


class InspectsOneHolder(Broken):
    async def inspect(self, name: str, until: float) -> LockInfo:
        info = await super().inspect(name, until)
        return info._replace(holders=info.holders[:1])


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
    (shared.readers_together, ReadersExcludeEachOther),
    (shared.readers_in_one_batch, LetsReadersInOneByOne),
    (shared.waiting_writer_stops_readers, SharedClaimsOvertake),
    (shared.permits_and_slots, UsesTheHighestSlot),
    (shared.limit_of_the_claim, KeepsTheFirstLimit),
    (shared.weights_in_order, SharedClaimsOvertake),
    (shared.repeated_shared_claim, NewFenceOnRepeat),
    (shared.shared_expiry, OneTtlForAllHolders),
    (shared.shared_renewal, RenewsEveryHolder),
    (shared.shared_release, ReleasesForAnyHolder),
    (shared.shared_force_release, ForceReleasesAnyHolder),
    (shared.shared_adoption, AdoptsTwice),
    (shared.downgrade, DowngradesByReleaseAndAcquire),
    (shared.downgrade_serves_the_queue, DowngradeWakesNobody),
    (shared.departed_head, DepartureWakesNobody),
    (shared.unreachable_head, GrantsToDeadWaiters),
    (shared.expired_head, NeverExpires),
    (shared.other_mode_refused, QueuesTheOtherMode),
    (shared.other_mode_queued, PermitsAreReaders),
    (shared.several_at_once, GrantsSomeOfSeveral),
    (shared.several_behind_a_queue, SeveralOvertake),
    (shared.shared_inspection, InspectsOneHolder),
]


@pytest.mark.parametrize(("check", "store_class"), BROKEN, ids=lambda value: value.__name__)
def test_each_check_finds_a_store_that_breaks_its_rule(
    check: Check, store_class: type[Broken], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bench, "patience", 0.15)
    hub = Hub()

    def make_store() -> Store:
        return store_class(hub, ThreadRuntime())

    with pytest.raises(ContractBroken, match=f"^{check.__name__}: .* Broken: "):
        run(run_check(check, make_store, ThreadRuntime()))
    assert {check for check, _ in BROKEN} == set(CHECKS)
