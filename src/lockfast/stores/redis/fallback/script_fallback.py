"""Use scripts until the server denies them to this account, then transactions.

Rules:

- The request that was denied is answered by a transaction; the caller notices nothing.
- If transactions are denied too, the error is the one about scripts, because they are the better mode.
- The switch is logged once, as a warning: from then on waiters poll and are not served in order.
- `acquire` and `release` are the methods of the store in use, which calls `_fall_back` only after a denial.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from lockfast.errors import StoreError, StoreProtocolError, StoreRefused
from lockfast.facts import Facts
from lockfast.ports import Capabilities, Mailbox, Runtime, WatchedValue
from lockfast.stores.redis.protocol.error_replies import denies_scripts
from lockfast.stores.redis.store import RedisStore
from lockfast.values import Answer, Claim, Enqueue, Granted, LockInfo, Page, Renewal

log = logging.getLogger("lockfast")

T = TypeVar("T")

PROBE = "lockfast"
"""A lock name to inspect before the first acquisition; nothing is changed."""


class FallbackStore:
    """`ports.Store`: `_store` is the one in use, `_transactions` the one without scripts, created on demand."""

    def __init__(self, scripted: RedisStore, new_transaction_store: Callable[[], RedisStore], runtime: Runtime) -> None:
        self._scripted = scripted
        self._new_transaction_store = new_transaction_store
        self._transactions: RedisStore | None = None
        self._mutex = runtime.mutex()
        scripted.fallback = self._fall_back
        self._use(scripted)

    def _use(self, store: RedisStore) -> None:
        self._store = store
        self.acquire: Callable[[Claim, Enqueue | None, float], Coroutine[Any, Any, Answer]] = store.acquire
        self.release: Callable[[str, str, float], Coroutine[Any, Any, bool]] = store.release

    async def _run(self, operation: Callable[[RedisStore], Awaitable[T]]) -> T:
        try:
            return await operation(self._store)
        except (StoreRefused, StoreProtocolError) as denial:
            return await self._fall_back(denial, operation)

    async def _fall_back(self, denial: StoreError, operation: Callable[[RedisStore], Awaitable[T]]) -> T:
        """Repeat the operation as a transaction, if the server denied scripts; else raise `denial`."""
        if not denies_scripts(denial):
            raise denial
        with self._mutex:
            # One store for all callers: transactions on the shared connection must not overlap.
            transactions = self._transactions = self._transactions or self._new_transaction_store()
        try:
            answer = await operation(transactions)
        except StoreRefused:
            raise denial from None
        with self._mutex:
            switched = self._store is not transactions
            self._use(transactions)
        if switched:
            log.warning(
                "This account may not run scripts, so locks use transactions from now on: waiters poll and may be "
                "overtaken. Allow EVAL and EVALSHA, or set connect(..., scripts=False) to accept this. %s",
                denial,
            )
        return answer

    async def renew(self, renewals: Sequence[Renewal], until: float) -> Sequence[bool | None]:
        return await self._run(lambda store: store.renew(renewals, until))

    async def adopt(self, claim: Claim, old_holder: str, until: float) -> Granted | None:
        return await self._run(lambda store: store.adopt(claim, old_holder, until))

    async def inspect(self, name: str, until: float) -> LockInfo:
        return await self._run(lambda store: store.inspect(name, until))

    async def listing(self, pattern: str, cursor: str, until: float) -> Page:
        return await self._run(lambda store: store.listing(pattern, cursor, until))

    async def force_release(self, name: str, holder: str, until: float) -> bool:
        return await self._run(lambda store: store.force_release(name, holder, until))

    async def facts(self, until: float) -> Facts:
        try:
            await self.inspect(PROBE, until)  # a denial switches the store before its facts are read
        except (StoreRefused, StoreProtocolError):
            pass
        return await self._store.facts(until)

    @property
    def capabilities(self) -> Capabilities:
        return self._store.capabilities

    @property
    def grace(self) -> float:
        return self._store.grace

    @property
    def connected(self) -> bool:
        return self._store.connected

    @property
    def inbox_open(self) -> bool:
        return self._store.inbox_open

    def mailbox(self, holder: str) -> Mailbox:
        return self._store.mailbox(holder)

    async def reassert(self, claim: Claim, fence: int, until: float) -> bool:
        return await self._store.reassert(claim, fence, until)

    async def watch(self, key: str, until: float) -> WatchedValue:
        return await self._scripted.watch(key, until)  # needs no scripts

    def on_change(self, callback: Callable[[str | None], None]) -> None:
        self._store.on_change(callback)

    def poll_events(self) -> None:
        self._store.poll_events()

    async def cancel_waits(self) -> None:
        await self._store.cancel_waits()

    def disconnect(self) -> None:
        for store in self._stores():
            store.disconnect()

    async def close(self) -> None:
        for store in self._stores():
            await store.close()

    def reset(self, *, forked: bool) -> None:
        for store in self._stores():
            store.reset(forked=forked)

    def _stores(self) -> Sequence[RedisStore]:
        """Both stores share one wire, but each has its own inbox."""
        return (self._scripted,) if self._transactions is None else (self._transactions, self._scripted)
