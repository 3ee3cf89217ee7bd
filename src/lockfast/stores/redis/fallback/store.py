"""The store without scripts, on WATCH, MULTI and EXEC, for accounts and servers where scripts may not run.

The same keys with the same values as with scripts, so both kinds of client exclude one another, and the fences of both
are one sequence. What it cannot do: nobody queues (who waits looks again, and may be overtaken), nothing is handed on
or pushed, and a theft is noticed at the next renewal. A client with scripts that waits is not told of a release here;
it looks for itself within a second.

Rules kept here:

- One transaction at a time on a connection (`Turns`), and all of it on that very connection: a WATCH that was lost with
  its connection would guard nothing.
- Every transaction begins with UNWATCH, so that one that was given up, at whatever point, leaves nothing watched.
- A race that was lost is run again from the start: each lost race is another's progress.
- What is to be written is decided by pure functions of what was read (`steps.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from lockfast.errors import Outcome, StoreError, StoreUnavailable
from lockfast.facts import Facts, Topology
from lockfast.ports import Capabilities, Runtime
from lockfast.stores.redis.fallback import decisions as steps
from lockfast.stores.redis.fallback.decisions import Step
from lockfast.stores.redis.fallback.exclusive_turn import Turns
from lockfast.stores.redis.fallback.polling import PollingInbox
from lockfast.stores.redis.keys import keys_of
from lockfast.stores.redis.protocol.error_replies import NOT_MASTER, code_of, error_of
from lockfast.stores.redis.protocol.replies import info_of
from lockfast.stores.redis.protocol.resp import ReplyError, pack
from lockfast.stores.redis.store import RedisStore, Wire
from lockfast.values import Answer, Claim, Enqueue, Granted, LockInfo, Queued, Renewal, Taken, shown

T = TypeVar("T")

UNWATCH, MULTI, EXEC = pack(b"UNWATCH"), pack(b"MULTI"), pack(b"EXEC")
TOGETHER = 3
"""Races that a batch of renewals may lose before each is renewed by itself: one busy lock must not hold up the rest."""


MANY = 10**9
OTHER_DATA = "WRONGTYPE"


class _Contended(Exception):
    """So many races were lost."""


class Conversation(Wire, Protocol):
    """A wire on which several requests can be sent together, and what follows on the same connection."""

    async def post(self, requests: Sequence[bytes], until: float, on: Any = None) -> Any:
        """Send them; what `collect` needs, the connection first. With `on`, over that very connection or none:
        `StoreUnavailable` with nothing sent when it is no more."""

    async def collect(self, posted: Any, until: float) -> list[Any]:
        """A reply for each."""


class TransactionStore(RedisStore):
    """`ports.Store` on Redis or Valkey, without scripts."""

    def __init__(self, wire: Conversation, runtime: Runtime, *, topology: Topology = Topology.SINGLE) -> None:
        super().__init__(wire, PollingInbox(runtime), topology=topology)
        self._conversation = wire
        self._runtime = runtime
        self._turns = Turns(runtime)

    async def acquire(
        self, claim: Claim, enqueue: Enqueue | None, until: float, before: Sequence[bytes] = ()
    ) -> Answer:
        keys = keys_of(claim.name)
        if enqueue is not None and enqueue.attempt > 1:  # it was taken a moment ago: look before running a transaction
            _, told = await self._looked(steps.peek(keys), until)
            self._check(told, claim.name)
            if told[0] not in (None, claim.holder.encode()):
                return _taken(told[1], enqueue)
        granted, left_ms = await self._grant(claim.name, lambda told: steps.take(claim, *told), until)
        return _taken(left_ms, enqueue) if granted is None else Granted(granted)

    async def adopt(self, claim: Claim, old_holder: str, until: float, before: Sequence[bytes] = ()) -> Granted | None:
        fence = await self._grant(claim.name, lambda told: steps.adopt(claim, old_holder, *told), until)
        return None if fence is None else Granted(fence)

    async def force_release(self, name: str, holder: str, until: float, before: Sequence[bytes] = ()) -> bool:
        return await self._grant(name, lambda told: steps.force_release(keys_of(name), holder, *told), until)

    async def _grant(self, name: str, decide: Callable[[list[Any]], Step[T]], until: float) -> T:
        """Decide by all that a grant depends on."""
        keys = keys_of(name)
        return await self._transact(name, [keys.lock, keys.meta], steps.look(keys), decide, until)

    async def release(self, name: str, holder: str, until: float, before: Sequence[bytes] = ()) -> bool:
        lock = keys_of(name).lock
        reads = [pack(b"GET", lock)]
        return await self._transact(name, [lock], reads, lambda told: steps.release(lock, holder, *told), until)

    async def renew(self, renewals: Sequence[Renewal], until: float, before: Sequence[bytes] = ()) -> list[bool]:
        all_keys = [keys_of(line.name) for line in renewals]
        reads = [read for keys in all_keys for read in steps.peek(keys)]
        locks, tries = [keys.lock for keys in all_keys], TOGETHER if len(renewals) > 1 else MANY
        try:
            return await self._transact(
                renewals[0].name, locks, reads, lambda told: steps.renew(renewals, told), until, tries, OTHER_DATA
            )
        except _Contended:
            return [(await self.renew([line], until))[0] for line in renewals]

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(values=True)

    async def inspect(self, name: str, until: float, before: Sequence[bytes] = ()) -> LockInfo:
        (info,) = await self._known([name], until)
        if isinstance(info, ReplyError):
            raise self._meaning(info, name)
        return info

    async def known(self, names: list[str], until: float) -> tuple[LockInfo, ...]:
        if not names:
            return ()
        found = await self._known(names, until)
        return tuple(
            LockInfo(name) if isinstance(one, ReplyError) else one for name, one in zip(names, found, strict=True)
        )

    async def _known(self, names: Sequence[str], until: float) -> list[LockInfo | ReplyError]:
        """What is known of each, all read at one moment; an error for a key that holds other data."""
        all_keys = [keys_of(name) for name in names]
        reads = [read for keys in all_keys for read in (*steps.look(keys), pack(b"ZCARD", keys.queue))]
        async with self._turns.turn(until):
            _, replies = await self._looked([UNWATCH, MULTI, *reads, EXEC], until)
        told = self._executed(replies, names[0])
        width = len(reads) // len(names)
        parts = [told[at : at + width] for at in range(0, len(told), width)]
        return [_known_of(name, *part) for name, part in zip(names, parts, strict=True)]

    async def facts(self, until: float) -> Facts:
        return (await super().facts(until))._replace(queue=False)

    def reset(self, *, forked: bool) -> None:
        super().reset(forked=forked)
        self._turns.reset()

    async def _transact(
        self,
        name: str,
        keys: Sequence[bytes],
        reads: Sequence[bytes],
        decide: Callable[[list[Any]], Step[T]],
        until: float,
        tries: int = MANY,
        bearable: str | None = None,
    ) -> T:
        """Read, decide, write; again until nobody came between. Errors of the code `bearable` are left to `decide`."""
        watch = [UNWATCH, pack(b"WATCH", *keys), *reads]
        for _ in range(tries):
            async with self._turns.turn(until):
                link, told = await self._looked(watch, until)
                self._check(told, name, bearable)
                answer, writes = decide(told[2:])
                if not writes:
                    return answer
                _, replies = await self._exchange([MULTI, *writes, EXEC], until, on=link)
            if self._executed(replies, name) is not None:
                return answer
            if self._runtime.now() >= until:
                raise StoreUnavailable(f"Others kept changing the lock {shown(name)}, so nothing was done. Try again.")
        raise _Contended

    async def _exchange(self, requests: Sequence[bytes], until: float, on: Any = None) -> tuple[Any, list[Any]]:
        """The connection that carried the requests, and a reply for each."""
        posted = await self._conversation.post(requests, until, on)
        return posted[0], await self._conversation.collect(posted, until)

    async def _looked(self, requests: Sequence[bytes], until: float) -> tuple[Any, list[Any]]:
        """The replies to requests that change nothing, whether they were carried out or not."""
        try:
            return await self._exchange(requests, until)
        except StoreUnavailable as error:
            if error.outcome is Outcome.NOT_DONE:
                raise
            raise StoreUnavailable("The server did not answer in time; nothing was changed.") from error

    def _executed(self, replies: Sequence[Any], name: str) -> Any:
        """What EXEC gave; None when the race was lost."""
        self._check(replies, name)  # in order: why a command was not even queued comes before what EXEC says of that
        return replies[-1]

    def _check(self, replies: Sequence[Any], name: str, bearable: str | None = None) -> None:
        for reply in replies:
            if type(reply) is ReplyError and code_of(str(reply)) != bearable:
                raise self._meaning(reply, name)

    def _meaning(self, reply: ReplyError, name: str) -> StoreError:
        if code_of(str(reply)) in NOT_MASTER:
            self.wire.drop()
        return error_of(str(reply), shown(name))


def _taken(left_ms: int, enqueue: Enqueue | None) -> Answer:
    left = None if left_ms < 0 else left_ms / 1000
    return Taken(left) if enqueue is None else Queued(enqueue.ticket or 0, 0, left)


def _known_of(name: str, held: Any, meta: Any, left_ms: Any, time: Any, waiting: Any) -> LockInfo | ReplyError:
    if isinstance(held, ReplyError):
        return held
    meta, waiting = (meta if isinstance(meta, bytes) else b""), (waiting if isinstance(waiting, int) else 0)
    exists = 0 if held is None else 1
    return info_of(name, [exists, held or b"", left_ms, meta, steps.microseconds(time), waiting])
