"""Grants that replicas acknowledged: WAIT or WAITAOF after each grant and each renewal.

What that is worth: so many replicas had the grant at that moment. Should one of them take over, it knows the lock; if
another does, it does not. It narrows what a failover can lose, and no more.

Rules kept here:

- A grant that is not acknowledged in time is given back, and the caller is told how many of how many had it. A renewal
  that is not acknowledged does not count: the lease is at risk, and is lost at its deadline if that goes on.
- WAIT holds up whatever follows on its connection, and speaks for all that went before. So there is one at a time,
  which answers for everybody who wrote before it was sent; who writes meanwhile shares the next one. However many
  callers there are and however dead the replicas, nobody stands behind more than two of them.
- WAIT is never sent without a limit (0 would mean for ever), nor with one longer than a connection may be silent.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from math import ceil
from typing import Any

from lockfast.errors import Outcome, StoreError, StoreRefused, StoreUnavailable
from lockfast.facts import Facts
from lockfast.ports import Runtime, Waker
from lockfast.stores.redis.options import Wanted
from lockfast.stores.redis.protocol.error_replies import error_of
from lockfast.stores.redis.protocol.resp import ReplyError, pack
from lockfast.stores.redis.store import Inbox, RedisStore, Wire
from lockfast.values import Answer, Claim, Enqueue, Granted, Renewal, clean, shown

SLICE = 1.0
"""Seconds for which one WAIT may hold up the connection."""
REPLY_WITHIN = 0.5
"""Seconds by which the answer to a WAIT may outlast its limit."""
UNDO_WITHIN = 1.0


def wait_request(wanted: Wanted, left: float) -> bytes:
    """
    >>> wait_request(Wanted(2, 1.0, False), 0.5)
    b'*3\\r\\n$4\\r\\nWAIT\\r\\n$1\\r\\n2\\r\\n$3\\r\\n500\\r\\n'
    """
    limit = b"%d" % max(1, ceil(min(left, SLICE) * 1000))
    count = b"%d" % wanted.replicas
    return pack(b"WAITAOF", b"1", count, limit) if wanted.on_disk else pack(b"WAIT", count, limit)


def count_in(wanted: Wanted, reply: Any) -> int:
    """How many acknowledged; -1 if the master itself has not got it on disk where that was asked for."""
    if isinstance(reply, ReplyError):
        raise _refused(wanted, str(reply))
    if not wanted.on_disk:
        return int(reply)
    local, replicas = reply
    return int(replicas) if local >= 1 else -1


def _refused(wanted: Wanted, text: str) -> StoreError:
    if wanted.on_disk and ("unknown command" in text or "appendonly is disabled" in text):
        return StoreRefused(
            "The server can't confirm that a grant is on disk, so none was kept: aof=True needs Redis 7.2 or Valkey, "
            f"with appendonly yes. [{clean(text, 160)}]"
        )
    return error_of(text, "(while asking its replicas)")


class Acknowledgements:
    """One WAIT at a time, for all who wrote before it.

    Invariants: `_begun` counts those sent and `_answered` is the last one answered, which `_count` replicas confirmed;
    whoever sleeps is in `_sleepers`, and is woken when the one under way is over."""

    def __init__(self, claim: Callable[[float], Awaitable[int]], runtime: Runtime) -> None:
        self._ask = claim
        self._runtime = runtime
        self._mutex = runtime.mutex()
        self._begun = 0
        self._answered = 0
        self._count = 0
        self._busy = False
        self._sleepers: list[Waker] = []

    async def count(self, enough: int, until: float) -> int:
        """How many replicas have what this caller wrote before; fewer than `enough` only when the time was up."""
        mine, best = self._begun + 1, -1
        while True:
            waker: Waker | None = None
            with self._mutex:
                if self._answered >= mine:
                    best, mine = max(best, self._count), self._begun + 1
                if best >= enough or self._runtime.now() >= until:
                    return best
                if self._busy:
                    waker = self._runtime.waker()
                    self._sleepers.append(waker)
                else:
                    self._busy = True
                    self._begun += 1
                    mine = self._begun
            if waker is not None:
                await waker.wait(until)
            else:
                await self._lead(mine, until)

    async def _lead(self, number: int, until: float) -> None:
        try:
            count = await self._ask(until)
            with self._mutex:
                self._answered, self._count = number, count
        finally:
            with self._mutex:
                self._busy = False
                sleepers, self._sleepers = self._sleepers, []
            for sleeper in sleepers:
                sleeper.wake()


class ConfirmingStore(RedisStore):
    """A store whose grants and renewals count once replicas acknowledged them."""

    def __init__(self, wire: Wire, inbox: Inbox, runtime: Runtime, wanted: Wanted, **setup: Any) -> None:
        super().__init__(wire, inbox, **setup)
        self._capabilities = self._all_capabilities(replica_acks=True)
        self._runtime = runtime
        self._wanted = wanted
        self._acknowledgements = Acknowledgements(self._wait, runtime)

    @property
    def grace(self) -> float:
        return self.wire.grace + self._wanted.within

    async def _wait(self, until: float) -> int:
        left = min(SLICE, until - self._runtime.now())
        request = wait_request(self._wanted, left)
        return count_in(self._wanted, await self.wire.request(request, self._runtime.now() + left + REPLY_WITHIN))

    async def _acknowledged(self, ttl: float, until: float) -> int:
        """How many replicas have all that we wrote so far; half of a ttl is the longest that it may take."""
        in_time = self._runtime.now() + min(self._wanted.within, ttl / 2)
        return await self._acknowledgements.count(self._wanted.replicas, min(in_time, until))

    async def acquire(
        self, claim: Claim, enqueue: Enqueue | None, until: float, before: Sequence[bytes] = ()
    ) -> Answer:
        answer = await super().acquire(claim, enqueue, until, before)
        if not isinstance(answer, Granted):
            return answer
        count = await self._acknowledged(claim.ttl, until)
        if count >= self._wanted.replicas:
            return Granted(answer.fence, count)
        raise await self._undo(claim, count, before)

    async def _undo(self, claim: Claim, count: int, before: Sequence[bytes]) -> StoreUnavailable:
        outcome, and_so = Outcome.NOT_DONE, "was given back"
        try:
            await super().release(claim.name, claim.holder, self._runtime.now() + UNDO_WITHIN, before)
        except StoreError:
            outcome, and_so = Outcome.UNKNOWN, "is being given back"
        return StoreUnavailable(f"The lock {shown(claim.name)} {and_so}: {self._verdict(count)}", outcome=outcome)

    def _verdict(self, count: int) -> str:
        wanted = self._wanted
        what = "have it on disk" if wanted.on_disk else "acknowledged it"
        if wanted.on_disk and count < 0:
            return f"the server did not have it on disk within {wanted.within:g} s. Is its disk slow?"
        return (
            f"{max(count, 0)} of the {wanted.replicas} replicas asked for {what} within {wanted.within:g} s. "
            "Are they connected, and do they keep up?"
        )

    async def adopt(self, claim: Claim, old_holder: str, until: float, before: Sequence[bytes] = ()) -> Granted | None:
        granted = await super().adopt(claim, old_holder, until, before)
        if granted is None:
            return None
        count = await self._confirmed(claim.name, claim.ttl, until)
        return Granted(granted.fence, count)

    async def reassert(self, claim: Claim, fence: int, until: float, before: Sequence[bytes] = ()) -> bool:
        again = await super().reassert(claim, fence, until, before)
        if again:
            await self._confirmed(claim.name, claim.ttl, until)
        return again

    async def _confirmed(self, name: str, ttl: float, until: float) -> int:
        """The count; what is not acknowledged stays, and may be asked about again."""
        count = await self._acknowledged(ttl, until)
        if count < self._wanted.replicas:
            raise StoreUnavailable(
                f"The lease on {shown(name)} was prolonged, which does not count: {self._verdict(count)}",
                outcome=Outcome.UNKNOWN,
            )
        return count

    async def renew(
        self, renewals: Sequence[Renewal], until: float, before: Sequence[bytes] = ()
    ) -> Sequence[bool | None]:
        answers = await super().renew(renewals, until, before)
        return await self.confirmed_renewals(renewals, answers, until)

    async def confirmed_renewals(
        self, renewals: Sequence[Renewal], answers: Sequence[bool | None], until: float
    ) -> Sequence[bool | None]:
        """The answers, of which a yes counts only when the replicas have it too."""
        if not any(answers):
            return answers
        try:
            await self._confirmed(renewals[0].name, min(line.ttl for line in renewals), until)
        except StoreUnavailable:
            if False in answers:  # those who lost theirs must hear of it all the same
                return [None if answer else answer for answer in answers]
            raise
        return answers

    def reset(self, *, forked: bool) -> None:
        super().reset(forked=forked)
        self._acknowledgements = Acknowledgements(self._wait, self._runtime)

    async def facts(self, until: float) -> Facts:
        return (await super().facts(until))._replace(acknowledged=self._wanted.replicas)
