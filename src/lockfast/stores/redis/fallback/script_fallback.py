"""With scripts, until the server says that this account may run none; from then on by transactions.

Rules kept here: an account that may do neither is told what it lacks for scripts, the better way; the change is logged
once, as a warning, since waiting is then slower and without an order; what was asked is answered all the same. The two
requests of every cycle go straight to the store in use, which comes back here (`otherwise`) only with a refusal.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from lockfast.errors import StoreError, StoreProtocolError, StoreRefused
from lockfast.facts import Facts
from lockfast.ports import Capabilities, Mailbox, Runtime, WatchedValue
from lockfast.stores.redis.protocol.error_replies import denies_scripts
from lockfast.stores.redis.store import RedisStore
from lockfast.values import Answer, Claim, Enqueue, Granted, LockInfo, Page, Renewal

if TYPE_CHECKING:
    pass

log = logging.getLogger("lockfast")

T = TypeVar("T")

PROBE = "lockfast"
"""A name to ask about where nothing else is known; nothing is changed."""


class ChoosingStore:
    """`ports.Store`. `_store` is the one in use; `_other` the one without scripts, once it was needed. Neither waits
    for replicas: that needs scripts, so then there is no choice (see `building.py`)."""

    def __init__(self, scripted: RedisStore, without: Callable[[], RedisStore], runtime: Runtime) -> None:
        self._scripted = scripted
        self._use(scripted)
        scripted.otherwise = self._instead
        self._without = without
        self._other: RedisStore | None = None
        self._mutex = runtime.mutex()
        self._chosen = False

    def _use(self, store: RedisStore) -> None:
        self._store = store
        self.acquire: Callable[[Claim, Enqueue | None, float], Coroutine[Any, Any, Answer]] = store.acquire
        self.release: Callable[[str, str, float], Coroutine[Any, Any, bool]] = store.release

    @property
    def grace(self) -> float:
        return self._store.grace

    @property
    def capabilities(self) -> Capabilities:
        return self._store.capabilities

    async def reassert(self, claim: Claim, fence: int, until: float) -> bool:
        return await self._store.reassert(claim, fence, until)

    @property
    def inbox_open(self) -> bool:
        return self._store.inbox_open

    @property
    def connected(self) -> bool:
        return self._store.connected

    async def watch(self, key: str, until: float) -> WatchedValue:
        return await self._scripted.watch(key, until)  # needs no scripts

    def mailbox(self, holder: str) -> Mailbox:
        return self._store.mailbox(holder)

    async def cancel_waits(self) -> None:
        await self._store.cancel_waits()

    def on_change(self, callback: Callable[[str | None], None]) -> None:
        self._store.on_change(callback)

    def poll_events(self) -> None:
        self._store.poll_events()

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
            await self.inspect(PROBE, until)  # so that the facts are those of the store that will be used
        except (StoreRefused, StoreProtocolError):
            pass
        return await self._store.facts(until)

    async def _run(self, operation: Callable[[RedisStore], Awaitable[T]]) -> T:
        try:
            return await operation(self._store)
        except (StoreRefused, StoreProtocolError) as refusal:
            return await self._instead(refusal, operation)

    async def _instead(self, refusal: StoreError, operation: Callable[[RedisStore], Awaitable[T]]) -> T:
        """The answer without scripts, if it is for want of them that there was none."""
        if not denies_scripts(refusal):
            raise refusal
        with self._mutex:
            # One for all who are refused: those on one connection must take turns in their transactions.
            other = self._other = self._other or self._without()
        try:
            answer = await operation(other)
        except StoreRefused:
            raise refusal from None
        self._choose(other, refusal)
        return answer

    def _choose(self, other: RedisStore, refusal: StoreError) -> None:
        if self._chosen:
            return
        self._use(other)
        self._chosen = True
        log.warning(
            "This account may not run scripts, so locks are taken by transactions from now on: who waits looks again "
            "and again instead of being told, and may be overtaken. Allow EVAL and EVALSHA, or say "
            "connect(..., scripts=False) if it is meant so. %s",
            refusal,
        )

    def disconnect(self) -> None:
        for store in self._all():
            store.disconnect()

    async def close(self) -> None:
        for store in self._all():
            await store.close()

    def reset(self, *, forked: bool) -> None:
        for store in self._all():
            store.reset(forked=forked)

    def _all(self) -> Sequence[RedisStore]:
        """They share a wire, and have an inbox each."""
        return (self._scripted,) if self._other is None else (self._other, self._scripted)
