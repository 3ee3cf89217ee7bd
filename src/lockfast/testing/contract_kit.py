"""What the checks of `contract.py` stand on: stores of one engine, fresh names, and how a broken rule is told."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from lockfast.ports import Mailbox, Runtime, Store
from lockfast.values import Claim, Enqueue, FirstNotification, Granted, GrantNotification, LockInfo, Owner, Queued

MakeStore = Callable[[], Store]
T = TypeVar("T")

PATIENCE = 10.0
"""Seconds for which a check waits for what should come at once."""
LONG = 30.0
BRIEF = 0.05
"""Ttls that outlast a check, and that end within one."""


class ContractBroken(AssertionError):
    """A store did not do what every store must."""


class Bench:
    """What a check works with: stores of one engine, names and holder ids that nobody used before."""

    def __init__(self, make_store: MakeStore, runtime: Runtime) -> None:
        self._make_store = make_store
        self._stores: list[Store] = []
        self._boxes: list[Mailbox] = []
        self.runtime = runtime
        self.name = f"contract:{runtime.new_holder_id()}"

    def store(self) -> Store:
        store = self._make_store()
        self._stores.append(store)
        return store

    def until(self) -> float:
        return self.runtime.now() + PATIENCE

    def claim(self, label: str, ttl: float = LONG) -> Claim:
        return Claim(self.name, self.runtime.new_holder_id(), ttl, Owner("host", 1, label).encode())

    async def take(self, store: Store, claim: Claim) -> int:
        """Get a free lock; its fence."""
        return as_a(Granted, await store.acquire(claim, None, self.until()), "a free lock is granted").fence

    async def mailbox(self, store: Store, holder: str) -> Mailbox:
        """A mailbox of `store` that is open."""
        box = store.mailbox(holder)
        self._boxes.append(box)
        await box.open(self.until())
        return box

    async def queue(
        self, store: Store, claim: Claim, attempt: int = 1, ticket: int | None = None
    ) -> tuple[Mailbox, Queued]:
        """Wait for a taken lock."""
        box = await self.mailbox(store, claim.holder)
        answer = await store.acquire(claim, Enqueue(box.address, attempt, ticket), self.until())
        return box, as_a(Queued, answer, "who asks for a place in the queue of a taken lock gets one")

    async def next_push(self, box: Mailbox) -> GrantNotification:
        """The grant that is pushed next; news on the way to it are passed by."""
        while True:
            push = await box.wait(self.until())
            if isinstance(push, GrantNotification):
                return push
            as_a(FirstNotification, push, "a grant that is handed over is pushed to its holder")

    async def inspect(self, store: Store) -> LockInfo:
        return await store.inspect(self.name, self.until())

    async def poll(self, look: Callable[[], Coroutine[Any, Any, T | None]], what: str) -> T:
        """The first answer that is not None."""
        give_up_at = self.until()
        while (found := await look()) is None:
            if self.runtime.now() >= give_up_at:
                raise ContractBroken(f"{what}, within {PATIENCE:g} s")
            await self.runtime.sleep(0.002)
        return found

    async def close(self) -> None:
        for box in self._boxes:
            box.close()  # a store gives those who wait at one time to leave
        for store in self._stores:
            await store.close()


def as_a(kind: type[T], answer: object, rule: str) -> T:
    if not isinstance(answer, kind):
        raise ContractBroken(f"{rule}, but the answer was {answer!r}")
    return answer


def equal(seen: object, wanted: object, rule: str) -> None:
    if seen != wanted:
        raise ContractBroken(f"{rule}: {wanted!r} was due, and {seen!r} came")


def more(seen: float, least: float, rule: str) -> None:
    if not seen > least:
        raise ContractBroken(f"{rule}: more than {least!r} was due, and {seen!r} came")
