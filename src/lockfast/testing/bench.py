"""What the checks of the store contract share: `Bench`, the fixtures of one check, and comparisons."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from lockfast.ports import Mailbox, Runtime, Store
from lockfast.values import (
    Claim,
    Enqueue,
    FirstNotification,
    Granted,
    GrantNotification,
    LockInfo,
    Owner,
    Queued,
)

MakeStore = Callable[[], Store]
T = TypeVar("T")

LONG = 30.0  # a ttl that outlasts every check, in seconds
JOINS = "a claim with an inbox joins the queue of a held lock"


class ContractBroken(AssertionError):
    """The store broke a rule of the contract."""


class Bench:
    """Fixtures of one check: stores of one engine, and a lock name and holder ids that are unused."""

    patience = 10.0
    """Seconds that a check waits for an event that is due at once."""
    brief = 0.05
    """A ttl that expires during a check, in seconds."""

    def __init__(self, make_store: MakeStore, runtime: Runtime) -> None:
        self._make_store = make_store
        self._stores: list[Store] = []
        self._boxes: list[Mailbox] = []
        self.runtime = runtime
        self.rename()

    def store(self) -> Store:
        store = self._make_store()
        self._stores.append(store)
        return store

    def until(self) -> float:
        return self.runtime.now() + self.patience

    def rename(self) -> None:
        """Choose another unused lock name."""
        self.name = f"contract:{self.runtime.new_holder_id()}"

    def claim(self, label: str, ttl: float = LONG, *, weight: int = 0, limit: int = 0) -> Claim:
        owner = Owner("host", 1, label).encode()
        return Claim(self.name, self.runtime.new_holder_id(), ttl, owner, weight=weight, limit=limit)

    async def answer(self, kind: type[T], rule: str, store: Store, claim: Claim, enqueue: Enqueue | None = None) -> T:
        """Send a claim, whose answer must be of this kind."""
        return as_a(kind, await store.acquire(claim, enqueue, self.until()), rule)

    async def acquire(self, store: Store, claim: Claim) -> int:
        """Acquire a free lock; return its fence."""
        return (await self.answer(Granted, "a free lock is granted", store, claim)).fence

    async def acquire_expired(self, store: Store, claim: Claim, rule: str) -> Granted:
        """Retry until `claim` is granted, because an earlier grant or ticket has ended."""

        async def granted() -> Granted | None:
            answer = await store.acquire(claim, None, self.until())
            return answer if isinstance(answer, Granted) else None

        return await self.poll(granted, rule)

    async def mailbox(self, store: Store, holder: str) -> Mailbox:
        box = store.mailbox(holder)
        self._boxes.append(box)
        await box.open(self.until())
        return box

    async def enqueue(
        self, store: Store, claim: Claim, attempt: int = 1, ticket: int | None = None
    ) -> tuple[Mailbox, Queued]:
        """Join the queue of a held lock."""
        box = await self.mailbox(store, claim.holder)
        return box, await self.answer(Queued, JOINS, store, claim, Enqueue(box.address, attempt, ticket))

    async def next_grant(self, box: Mailbox) -> GrantNotification:
        """Wait for a grant notification; skip "you are first" notifications."""
        while True:
            notification = await box.wait(self.until())
            if isinstance(notification, GrantNotification):
                return notification
            as_a(FirstNotification, notification, "the store notifies a waiter of its grant")

    async def inspect(self, store: Store) -> LockInfo:
        return await store.inspect(self.name, self.until())

    async def listing(self, store: Store, pattern: str) -> dict[str, LockInfo]:
        """All locks that match, page by page."""
        found: dict[str, LockInfo] = {}
        cursor, pages = "", 0
        while cursor or not pages:
            page = await store.listing(pattern, cursor, self.until())
            for info in page.infos:  # two pages may list one lock: the entry with the greater fence counts
                found[info.name] = max(info, found.get(info.name, info), key=lambda info: info.fence or 0)
            cursor, pages = page.cursor, pages + 1
        return found

    async def poll(self, look: Callable[[], Coroutine[Any, Any, T | None]], rule: str) -> T:
        """Call `look` until it returns a value other than None."""
        give_up_at = self.until()
        while (found := await look()) is None:
            if self.runtime.now() >= give_up_at:
                raise ContractBroken(f"{rule}; that did not happen within {self.patience:g} s")
            await self.runtime.sleep(0.002)
        return found

    async def close(self) -> None:
        for box in self._boxes:
            box.close()  # a store waits for open mailboxes when it closes
        for store in self._stores:
            await store.close()


def as_a(kind: type[T], answer: object, rule: str) -> T:
    if not isinstance(answer, kind):
        raise ContractBroken(f"{rule}: expected {kind.__name__}, got {answer!r}")
    return answer


def equal(actual: object, expected: object, rule: str) -> None:
    if actual != expected:
        raise ContractBroken(f"{rule}: expected {expected!r}, got {actual!r}")


def more(actual: float, than: float, rule: str) -> None:
    if not actual > than:
        raise ContractBroken(f"{rule}: expected more than {than!r}, got {actual!r}")


Check = Callable[[Bench], Coroutine[Any, Any, None]]
