"""Locks without scripts, by WATCH, MULTI and EXEC: for accounts and servers that do not allow scripts.

Keys and values are those of the script mode, so both kinds of client exclude each other and share one fence sequence.
There is no queue: waiters poll and may overtake each other, and the next renewal notices an external change. A client
with scripts that waits for such a lock polls it every second.

Readers and permits join others only while no client with scripts waits. Among clients without scripts, a writer or a
claim for many permits may wait for as long as others keep sharing the lock. Unlike a script, a transaction needs memory
to renew a shared grant, or to release permits.

Rules:

- Transactions on one connection never overlap. Each starts with UNWATCH, so an abandoned one leaves nothing watched,
  and ends on the connection it started on: a lost connection loses its WATCH.
- A lost race starts again from the first read; each lost race is the progress of another client.
- Pure functions choose the answer and the writes, see `decisions.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from lockfast.errors import Outcome, StoreError, StoreProtocolError, StoreRefused, StoreUnavailable, shown
from lockfast.facts import Facts, Topology
from lockfast.ports import Capabilities, Mailbox, Runtime, Waker
from lockfast.stores.redis.fallback.decisions import (
    Decision,
    Found,
    SharedLock,
    decide_acquire,
    decide_adopt,
    decide_force_release,
    decide_renew,
    grant_reads,
    holder_reads,
    shared_reads,
)
from lockfast.stores.redis.keys import keys_of
from lockfast.stores.redis.protocol.error_replies import code_of, denies_scripts
from lockfast.stores.redis.protocol.replies import MODES, info_of
from lockfast.stores.redis.protocol.resp import ReplyError, pack
from lockfast.stores.redis.store import (
    MAX_HOLDERS_LISTED,
    MAX_SHOWN,
    FairMutex,
    Inbox,
    RedisStore,
    TransportWire,
)
from lockfast.values import Answer, Claim, Enqueue, Granted, LockInfo, Queued, Renewal, Taken

log = logging.getLogger("lockfast")

T = TypeVar("T")
P = ParamSpec("P")

UNWATCH, MULTI, EXEC = pack(b"UNWATCH"), pack(b"MULTI"), pack(b"EXEC")
# Races that a batch of renewals may lose before each is renewed alone, so that one busy lock cannot delay the rest.
BATCH_ATTEMPTS = 3
UNLIMITED = 10**9
# Seconds between two polls: doubled each time, then shortened by up to a half at random.
FIRST_PAUSE, MAX_PAUSE = 0.004, 0.1


class _TooManyRaces(Exception):
    """A transaction lost as many races as it may."""


class TransactionStore(RedisStore):
    """`ports.Store` on Redis or Valkey, without scripts."""

    wire: TransportWire

    def __init__(self, wire: TransportWire, runtime: Runtime, *, topology: Topology = Topology.SINGLE) -> None:
        super().__init__(wire, PollingInbox(runtime), topology=topology)
        self._runtime = runtime
        self._mutex = FairMutex(runtime)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(values=True, readers=True, permits=True)

    async def acquire_all(self, claims: Sequence[Claim], until: float) -> list[Granted] | None:
        return None

    async def acquire(self, claim: Claim, enqueue: Enqueue | None, until: float) -> Answer:
        keys = keys_of(claim.name)
        if enqueue is not None and enqueue.attempt > 1:  # the lock was taken a moment ago: read before a transaction
            _, replies = await self._read(holder_reads(keys), until)
            self._check(replies, claim.name)
            if replies[0] not in (None, claim.holder.encode()) and not (claim.weight and replies[0] in MODES):
                return _taken(None if replies[1] < 0 else replies[1] / 1000, enqueue)

        def decide(found: Found) -> Decision[Answer]:
            fence, writes = decide_acquire(claim, found)
            left = None if found.left_ms < 0 else found.left_ms / 1000
            return Decision(_taken(left, enqueue) if fence is None else Granted(fence), writes)

        def decide_shared(lock: SharedLock) -> Decision[Answer]:
            granted = lock.acquire(claim, waits=enqueue is not None and enqueue.ticket is not None)
            return Decision(_taken(lock.free_in(claim), enqueue)) if granted is None else lock.decision(granted)

        if claim.weight:
            return await self._share(claim.name, decide_shared, until)
        return await self._grant(claim.name, decide, until)

    async def downgrade(self, claim: Claim, until: float) -> bool:
        return await self._share(claim.name, lambda lock: lock.decision(lock.downgrade(claim)), until)

    async def adopt(self, claim: Claim, old_holder: str, until: float) -> Granted | None:
        if claim.weight:
            return await self._share(claim.name, lambda lock: lock.decision(lock.adopt(claim, old_holder)), until)
        fence = await self._grant(claim.name, lambda found: decide_adopt(claim, old_holder, found), until)
        return None if fence is None else Granted(fence)

    async def force_release(self, name: str, holder: str, until: float) -> bool:
        keys = keys_of(name)
        ended = await self._grant(name, lambda found: decide_force_release(keys, holder, found), until)
        if ended is None:
            return await self._share(name, lambda lock: lock.decision(lock.force_release(holder)), until)
        return ended

    async def _grant(self, name: str, decide: Callable[[Found], Decision[T]], until: float) -> T:
        keys = keys_of(name)
        reads = grant_reads(keys)
        return await self._transact(name, [keys.lock, keys.meta], reads, lambda replies: decide(Found(*replies)), until)

    async def _share(self, name: str, decide: Callable[[SharedLock], Decision[T]], until: float) -> T:
        keys = keys_of(name)
        watched, reads = [keys.lock, keys.meta, keys.grants], shared_reads(keys)
        return await self._transact(name, watched, reads, lambda replies: decide(SharedLock(name, replies)), until)

    async def release(self, name: str, holder: str, until: float) -> bool:
        lock = keys_of(name).lock

        def decide(replies: list[Any]) -> Decision[bool | None]:
            if replies[0] in MODES:
                return Decision(None)
            held = replies == [holder.encode()]
            return Decision(held, (pack(b"DEL", lock),) if held else ())

        released = await self._transact(name, [lock], [pack(b"GET", lock)], decide, until)
        if released is None:
            return await self._share(name, lambda lock: lock.decision(lock.release(holder)), until)
        return released

    async def renew(self, renewals: Sequence[Renewal], until: float) -> Sequence[bool | None]:
        if any(one.shared is not renewals[0].shared for one in renewals):
            return await self._renew_in_two(renewals, until)
        try:
            if renewals[0].shared:
                return await self._renew_shared(renewals, until)
            return await self._renew_exclusive(renewals, until)
        except _TooManyRaces:
            return [(await self.renew([renewal], until))[0] for renewal in renewals]

    async def _renew_exclusive(self, renewals: Sequence[Renewal], until: float) -> list[bool]:
        all_keys = [keys_of(renewal.name) for renewal in renewals]
        return await self._transact(
            renewals[0].name,
            [keys.lock for keys in all_keys],
            [read for keys in all_keys for read in holder_reads(keys)],
            lambda replies: decide_renew(renewals, replies),
            until,
            attempts=BATCH_ATTEMPTS if len(renewals) > 1 else UNLIMITED,
            accepted="WRONGTYPE",
        )

    async def _renew_shared(self, renewals: Sequence[Renewal], until: float) -> list[bool]:
        names = list(dict.fromkeys(renewal.name for renewal in renewals))
        all_keys = [keys_of(name) for name in names]
        reads = [read for keys in all_keys for read in shared_reads(keys)]
        width = len(reads) // len(names)

        def decide(replies: list[Any]) -> Decision[list[bool]]:
            parts = [replies[at : at + width] for at in range(0, len(replies), width)]
            locks = {name: SharedLock(name, part) for name, part in zip(names, parts, strict=True)}
            answers = [locks[renewal.name].renew(renewal) for renewal in renewals]
            return Decision(answers, tuple(write for lock in locks.values() for write in lock.decision(None).writes))

        return await self._transact(
            names[0],
            [key for keys in all_keys for key in (keys.lock, keys.grants)],
            reads,
            decide,
            until,
            attempts=BATCH_ATTEMPTS if len(renewals) > 1 else UNLIMITED,
            accepted="WRONGTYPE",
        )

    async def inspect(self, name: str, until: float) -> LockInfo:
        (info,) = await self._infos([name], MAX_SHOWN, until)
        if isinstance(info, ReplyError):
            raise self._error(info, name)
        return info

    async def infos(self, names: list[str], until: float) -> tuple[LockInfo, ...]:
        if not names:
            return ()
        infos = await self._infos(names, MAX_HOLDERS_LISTED, until)
        return tuple(
            LockInfo(name) if isinstance(info, ReplyError) else info for name, info in zip(names, infos, strict=True)
        )

    async def _infos(self, names: Sequence[str], most: int, until: float) -> list[LockInfo | ReplyError]:
        """The state of each lock, all read in one transaction; an error for a key that holds other data.

        Only locks that are shared need a second one.
        """
        all_keys = [keys_of(name) for name in names]
        reads = [read for keys in all_keys for read in (*grant_reads(keys), pack(b"ZCARD", keys.queue))]
        async with self._mutex.held(until):
            _, replies = await self._read([UNWATCH, MULTI, *reads, EXEC], until)
        self._check(replies, names[0])
        width = len(reads) // len(names)
        parts = {name: replies[-1][at * width : (at + 1) * width] for at, name in enumerate(names)}
        shared = await self._shared_grants([name for name, part in parts.items() if part[0] in MODES], until)
        return [_info(name, shared.get(name, [])[: 3 * most], *part) for name, part in parts.items()]

    async def _shared_grants(self, names: Sequence[str], until: float) -> dict[str, list[Any]]:
        """The shared grants of each lock, as `info_of` reads them."""
        if not names:
            return {}
        reads = [read for name in names for read in shared_reads(keys_of(name))]
        async with self._mutex.held(until):
            _, replies = await self._read([UNWATCH, MULTI, *reads, EXEC], until)
        self._check(replies, names[0])
        width = len(reads) // len(names)
        locks = [SharedLock(name, replies[-1][at * width : (at + 1) * width]) for at, name in enumerate(names)]
        return {name: lock.rows() for name, lock in zip(names, locks, strict=True)}

    async def facts(self, until: float) -> Facts:
        return (await super().facts(until))._replace(queue=False)

    def reset(self, *, forked: bool) -> None:
        super().reset(forked=forked)
        self._mutex.reset()

    async def _transact(
        self,
        name: str,
        keys: Sequence[bytes],
        reads: Sequence[bytes],
        decide: Callable[[list[Any]], Decision[T]],
        until: float,
        attempts: int = UNLIMITED,
        accepted: str | None = None,
    ) -> T:
        """Read, decide, write; repeat after a lost race. `decide` also gets error replies with the code `accepted`."""
        watch = [UNWATCH, pack(b"WATCH", *keys), *reads]
        for _ in range(attempts):
            async with self._mutex.held(until):
                connection, replies = await self._read(watch, until)
                self._check(replies, name, accepted)
                answer, writes = decide(replies[2:])
                if not writes:
                    return answer
                _, replies = await self._exchange([MULTI, *writes, EXEC], until, on=connection)
            self._check(replies, name)  # in order: the reason why a command was not queued comes before EXEC's error
            if replies[-1] is not None:
                return answer
            if self._runtime.now() >= until:
                raise StoreUnavailable(f"Others kept changing the lock {shown(name)}; nothing was written. Try again.")
        raise _TooManyRaces

    async def _exchange(self, requests: Sequence[bytes], until: float, on: Any = None) -> tuple[Any, list[Any]]:
        posted = await self.wire.post(requests, until, on)
        return posted[0], await self.wire.collect(posted, until)

    async def _read(self, requests: Sequence[bytes], until: float) -> tuple[Any, list[Any]]:
        """`_exchange` for requests that change nothing, so its outcome is never unknown."""
        try:
            return await self._exchange(requests, until)
        except StoreUnavailable as error:
            if error.outcome is Outcome.NOT_DONE:
                raise
            raise StoreUnavailable("The server did not answer in time; nothing was changed. Try again.") from error

    def _check(self, replies: Sequence[Any], name: str, accepted: str | None = None) -> None:
        for reply in replies:
            if type(reply) is ReplyError and code_of(str(reply)) != accepted:
                raise self._error(reply, name)


class FallbackStore(RedisStore):
    """Uses scripts until the server denies them to this account, then transactions.

    A transaction also answers the request that was denied. If transactions are denied too, the error is the one about
    scripts, because they are the better mode. `acquire`, `release` and `renew` call `_fall_back` themselves."""

    def __init__(self, wire: TransportWire, inbox: Inbox, runtime: Runtime, *, topology: Topology, reasserts: bool):
        self._transactions = TransactionStore(wire, runtime, topology=topology)
        super().__init__(wire, inbox, topology=topology, reasserts=reasserts)  # receives the wire's push messages
        self._script_inbox = inbox
        self._mutex = runtime.mutex()

    async def _fall_back(self, denial: StoreError, operation: Callable[[RedisStore], Awaitable[T]]) -> T:
        """Repeat the operation as a transaction, if the server denied scripts; else raise `denial`."""
        if not denies_scripts(denial):
            raise denial
        try:
            answer = await operation(self._transactions)
        except StoreRefused:
            raise denial from None
        with self._mutex:
            switched = self.substitute is None
            self.substitute, self.inbox = self._transactions, self._transactions.inbox
        if switched:
            log.warning(
                "This account may not run scripts, so locks use transactions from now on: waiters poll and may be "
                "overtaken. Allow EVAL and EVALSHA, or set connect(..., scripts=False) to accept this. %s",
                denial,
            )
        return answer

    async def _either(
        self,
        script: Callable[P, Awaitable[T]],
        transaction: Callable[P, Awaitable[T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        if self.substitute is not None:
            return await transaction(*args, **kwargs)
        try:
            return await script(*args, **kwargs)
        except (StoreRefused, StoreProtocolError) as denial:
            return await self._fall_back(denial, lambda _: transaction(*args, **kwargs))

    async def adopt(self, claim: Claim, old_holder: str, until: float) -> Granted | None:
        return await self._either(super().adopt, self._transactions.adopt, claim, old_holder, until)

    async def inspect(self, name: str, until: float) -> LockInfo:
        return await self._either(super().inspect, self._transactions.inspect, name, until)

    async def infos(self, names: list[str], until: float) -> tuple[LockInfo, ...]:
        return await self._either(super().infos, self._transactions.infos, names, until)

    async def force_release(self, name: str, holder: str, until: float) -> bool:
        return await self._either(super().force_release, self._transactions.force_release, name, holder, until)

    async def facts(self, until: float) -> Facts:
        with suppress(StoreRefused, StoreProtocolError):
            await self.inspect("lockfast", until)  # changes nothing; a denial switches before the facts are read
        return await self._either(super().facts, self._transactions.facts, until)

    def disconnect(self) -> None:
        self._script_inbox.drop()
        super().disconnect()

    async def close(self) -> None:
        if self.substitute is not None:
            await self._script_inbox.close()
        await super().close()

    def reset(self, *, forked: bool) -> None:
        self._script_inbox.reset(forked=forked)
        self._transactions.reset(forked=forked)
        super().reset(forked=forked)


def _taken(left: float | None, enqueue: Enqueue | None) -> Answer:
    return Taken(left) if enqueue is None else Queued(enqueue.ticket or 0, 0, left)


def _info(
    name: str, shared: list[Any], holder: Any, meta: Any, left_ms: Any, time: Any, waiting: Any
) -> LockInfo | ReplyError:
    if isinstance(holder, ReplyError):
        return holder
    meta, waiting = (meta if isinstance(meta, bytes) else b""), (waiting if isinstance(waiting, int) else 0)
    now_us = Found(holder, meta, left_ms, time).now_us
    return info_of(name, [0 if holder is None else 1, holder or b"", left_ms, meta, now_us, waiting, shared])


class PollingInbox:
    """`store.Inbox` without notifications: its mailboxes only pace the polling."""

    connected = True

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.open: set[PollingMailbox] = set()

    def mailbox(self, holder: str) -> Mailbox:
        return PollingMailbox(self)

    def drop(self) -> None:
        for box in tuple(self.open):
            box.wake()

    async def close(self) -> None:
        self.drop()  # the waiters' next request finds the connection closed

    def reset(self, *, forked: bool) -> None:
        self.open = set()


class PollingMailbox:
    """`ports.Mailbox`: `wait` returns None when it is time to poll."""

    address = "nowhere"

    def __init__(self, inbox: PollingInbox) -> None:
        self._inbox = inbox
        self._pause = FIRST_PAUSE
        self._waker: Waker | None = None

    async def open(self, until: float) -> None:
        self._inbox.open.add(self)

    async def wait(self, until: float) -> None:
        runtime = self._inbox.runtime
        if self._waker is None:
            self._waker = runtime.waker()
        pause = self._pause * (0.5 + 0.5 * runtime.random())
        self._pause = min(MAX_PAUSE, 2 * self._pause)
        await self._waker.wait(min(until, runtime.now() + pause))

    def wake(self) -> None:
        if self._waker is not None:
            self._waker.wake()

    def close(self) -> None:
        self._inbox.open.discard(self)
