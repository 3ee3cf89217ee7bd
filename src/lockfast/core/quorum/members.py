"""The servers of a quorum: which of them can vote now, how the others return, and how their votes are counted.

Rules:
- A member that is not connected, or has not replied for `REPLY_TIMEOUT`, gets no requests, so it delays no caller. One
  background probe per such member reconnects until the member replies again.
- Before a member votes, a probe identifies its server. A server that is listed twice is refused. With `sits_out`, a
  server that restarted does not vote for that long, because it may have forgotten its grants.
- Releases that did not reach a member are sent to it before it votes again.
"""

from __future__ import annotations

import logging
from collections.abc import Coroutine, Sequence
from typing import Any

from lockfast import errors
from lockfast.core.quorum.rules import FenceFloor, majority, time_to_majority
from lockfast.core.retry import backoff
from lockfast.errors import ConfigurationError, LockError, Outcome, QuorumNotReached, StoreError, StoreUnavailable
from lockfast.facts import Facts, Persistence
from lockfast.ports import MemberStore, Runtime, Waker
from lockfast.values import Granted, Queued, Renewal, Taken, clean

log = logging.getLogger("lockfast")

MAX_PENDING_RELEASES = 10_000
# Seconds:
REPLY_TIMEOUT = 0.25  # a member that takes longer to reply gets no more requests
PROBE_TIMEOUT = 1.0  # for each request of a probe
POLL = 0.01  # between two checks for a majority: silent members may have replied while we were suspended
STRAGGLER_TIMEOUT = 0.25  # how long the first request waits for the last connections once a majority is connected


class Member:
    """One server. `admitted`: the last probe succeeded; `probed`: at least one probe has ended."""

    def __init__(self, number: int, store: MemberStore, address: str) -> None:
        self.number = number
        self.store = store
        self.address = address
        self.reset()

    def reset(self) -> None:
        self.admitted = self.probed = self.probing = self.wants_inbox = False
        self.excluded_until = 0.0
        self.facts: Facts | None = None
        self.reason = "not connected yet"
        self.pending_releases: list[tuple[str, str, float]] = []

    def is_available(self, now: float) -> bool:
        if not self.admitted or not self.store.connected:
            return False
        silent_since = self.store.silent_since
        return (silent_since is None or now - silent_since < REPLY_TIMEOUT) and now >= self.excluded_until

    def release_later(self, name: str, holder: str, expires_at: float) -> None:
        """Have the next probe release this, unless its ttl has ended by then."""
        if len(self.pending_releases) < MAX_PENDING_RELEASES:
            self.pending_releases.append((name, holder, expires_at))

    def absence(self, now: float) -> str:
        """Return why this member did not vote."""
        if not self.admitted or not self.store.connected:
            return self.reason
        return "restarted, does not vote yet" if now < self.excluded_until else "no reply in time"


class Members:
    """All servers of a quorum. `refusal` is set when the list turns out to be no quorum."""

    def __init__(
        self, stores: Sequence[tuple[MemberStore, str]], runtime: Runtime, floor: FenceFloor, sits_out: float
    ) -> None:
        self.all = [Member(number, store, address) for number, (store, address) in enumerate(stores)]
        self.majority = majority(len(self.all))
        self.sits_out = sits_out
        self._floor, self._runtime, self._mutex = floor, runtime, runtime.mutex()
        self._secret = runtime.new_holder_id()
        self._wakers: set[Waker] = set()
        self._probe_wakers: set[Waker] = set()
        self.refusal: ConfigurationError | None = None
        self.closed = False

    def reset(self) -> None:
        self._mutex = self._runtime.mutex()
        self._wakers.clear()
        self._probe_wakers.clear()
        for member in self.all:
            member.reset()

    def close(self) -> None:
        self.closed = True
        self._wake(self._wakers | self._probe_wakers)

    def _wake(self, wakers: set[Waker]) -> None:
        for waker in tuple(wakers):
            waker.wake()

    def available(self) -> list[Member]:
        """Return the members that can vote now, and start a probe of each other one."""
        now = self._runtime.now()
        found = []
        for member in self.all:
            if member.is_available(now):
                found.append(member)
            elif not member.probing and now >= member.excluded_until:
                self.probe(member)
        return found

    async def reach(self, until: float) -> list[Member]:
        """Return the available members, at least a majority; wait briefly for those that are being connected."""
        found = self.available()
        if len(found) < self.majority or (len(found) < len(self.all) and not self._all_probed()):
            found = await self._await_majority(min(until, self._runtime.now() + PROBE_TIMEOUT))
        if self.closed:
            raise errors.closed_error()
        if self.refusal is not None:
            raise self.refusal
        if len(found) < self.majority:
            raise self.not_reached({})
        return found

    def _all_probed(self) -> bool:
        return all(member.probed for member in self.all)

    async def _await_majority(self, until: float) -> list[Member]:
        waker = self._runtime.waker()
        self._wakers.add(waker)
        try:
            while not self.closed and self.refusal is None:
                found = self.available()
                now = self._runtime.now()
                if now >= until or (len(found) >= self.majority and self._all_probed()):
                    break
                if len(found) >= self.majority:
                    until = min(until, now + STRAGGLER_TIMEOUT)
                await waker.wait(min(until, now + POLL))
            return self.available()
        finally:
            self._wakers.discard(waker)

    async def connect_inboxes(self, until: float) -> None:
        """Connect the inboxes of the available members, at least of a majority."""
        waker = self._runtime.waker()
        self._wakers.add(waker)
        requested: set[Member] = set()
        try:
            await self.reach(until)
            while True:
                now = self._runtime.now()
                closed = [member for member in self.available() if not member.store.inbox_open]
                for member in set(closed) - requested:  # once: a server that refuses a subscription refuses the next
                    member.wants_inbox = True
                    self.probe(member)
                requested.update(closed)
                open_count = sum(member.store.inbox_open for member in self.all)
                if not any(member.probing for member in closed) or now >= until or self.closed:
                    break
                if open_count >= self.majority:
                    until = min(until, now + STRAGGLER_TIMEOUT)
                await waker.wait(until)
        finally:
            self._wakers.discard(waker)
        self.require_inboxes(open_count)

    def require_inboxes(self, count: int) -> None:
        if count < self.majority:
            raise StoreUnavailable(
                "Too few servers of the quorum accept a subscription, so nothing was sent. They are being reconnected."
            )

    def probe(self, member: Member) -> None:
        """Connect and check a member in the background, unless a probe of it is running."""
        with self._mutex:
            if member.probing or self.closed:
                return
            member.probing = True
        if not self._runtime.spawn(lambda: self._probe(member), "probe"):
            member.probing = False

    async def _probe(self, member: Member) -> None:
        failures = 0
        waker = self._runtime.waker()
        self._probe_wakers.add(waker)
        try:
            while not self.closed:
                try:
                    await self.call(self._admit(member))
                    member.probed = True
                    return
                except StoreError as error:
                    failures += 1
                    member.probed, member.reason = True, clean(str(error))
                    member.admitted = member.admitted and member.store.connected
                    if member.is_available(self._runtime.now()):
                        return  # only the inbox failed
                except ConfigurationError:
                    return  # closed meanwhile
                self._wake(self._wakers)
                await waker.wait(self._runtime.now() + 4 * backoff(failures, self._runtime.random()))
        finally:
            self._probe_wakers.discard(waker)
            member.probing = False
            self._wake(self._wakers)

    async def _admit(self, member: Member) -> None:
        """Connect the member, identify it, send its pending releases, and let it vote."""
        store = member.store

        def limit() -> float:
            return self._runtime.now() + PROBE_TIMEOUT

        if await store.connect(limit()):
            member.admitted = False
        facts = member.facts = await store.identity(limit())
        self._floor.observe_clock(self._runtime.now(), facts.clock)
        if facts.identity is None:
            await self._refuse_marked_twin(member)
        else:
            for other in self.all:
                if other is not member and other.facts is not None and other.facts.identity == facts.identity:
                    self._refuse(member, other)
        while member.pending_releases:
            name, holder, expires_at = member.pending_releases[-1]
            if self._runtime.now() < expires_at:
                await store.release(name, holder, limit())
            member.pending_releases.pop()
        if not member.admitted:
            exclusion = self._exclusion(member, await store.facts(limit())) if self.sits_out else 0.0
            member.excluded_until = self._runtime.now() + exclusion
            member.admitted = True
        if member.wants_inbox:
            member.wants_inbox = False
            await store.connect_inbox(limit())

    async def _refuse_marked_twin(self, member: Member) -> None:
        """Recognise a server that reports no run id by a short-lived key with the number of the first member on it."""
        found = await member.store.mark(self._secret, member.number, self._runtime.now() + PROBE_TIMEOUT)
        if found is None:
            log.warning("%s does not report a run id. Make sure that it is listed only once.", member.address)
        elif found != member.number:
            self._refuse(member, self.all[found])

    def _refuse(self, member: Member, other: Member) -> None:
        self.refusal = ConfigurationError(
            f"{other.address} and {member.address} are one and the same server, so it would vote twice. Nothing was "
            "locked. A quorum needs servers that fail independently: list each once."
        )

    def _exclusion(self, member: Member, facts: Facts) -> float:
        """Return the seconds for which a member must not vote because it may have forgotten its grants."""
        if facts.persistence is Persistence.LOG_ALWAYS:
            return 0.0
        # Servers count whole seconds of wall-clock time: a server that has just started may report one second.
        uptime = 0.0 if facts.uptime is None else max(0.0, facts.uptime - 1.0)
        exclusion = max(0.0, self.sits_out - uptime)
        if exclusion:
            text = "%s restarted and may have forgotten grants; it does not vote for %.0f s"
            log.warning(text, member.address, exclusion)
        return exclusion

    async def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run one member's operation; on threads it can suspend, so it needs `gather` like several would."""
        outcomes: list[Any] = []

        def record(_: int, outcome: Any) -> bool:
            outcomes.append(outcome)
            return True

        await self._runtime.gather([work], record)
        if isinstance(outcomes[0], LockError):
            raise outcomes[0]
        return outcomes[0]

    def failure(self, errors: dict[int, StoreError], replies: dict[int, str]) -> StoreError:
        """Return the error of a request that got no majority. An error that a majority repeats for good is returned as
        is; `replies` says what the other members answered."""
        final = [error for error in errors.values() if not isinstance(error, StoreUnavailable)]
        if len(final) > len(self.all) - self.majority:
            return final[0]
        unavailable = [error for error in errors.values() if isinstance(error, StoreUnavailable)]
        unknown = any(error.outcome is Outcome.UNKNOWN for error in unavailable)
        reasons = {number: clean(str(error)) for number, error in errors.items()}
        return self.not_reached(reasons | replies, sent=bool(replies) or unknown)

    def not_reached(self, replies: dict[int, str], *, sent: bool = False) -> QuorumNotReached:
        """Return the error for a missing majority. `replies` says in words what each member answered."""
        now = self._runtime.now()
        votes = tuple((member.address, replies.get(member.number) or member.absence(now)) for member in self.all)
        text = "; ".join(f"{address}: {vote}" for address, vote in votes)
        return QuorumNotReached(
            f"Fewer than {self.majority} of the quorum's {len(self.all)} servers carried out the request, so it "
            f"neither acquired nor renewed a lock. Check the servers that do not answer, then try again. {text}",
            votes=votes,
            outcome=Outcome.UNKNOWN if sent else Outcome.NOT_DONE,
        )


class Votes:
    """The replies to one claim, by member number.

    `granted` has the fences of the members that granted it, `denied` the ttls of the other holders, and `queued` the
    tickets on those members of `denied` that enqueued it.
    """

    def __init__(self, sent_at: float, attempt: int = 0) -> None:
        self.sent_at = sent_at
        self.attempt = attempt
        self.granted: dict[int, int] = {}
        self.denied: dict[int, float | None] = {}
        self.queued: dict[int, Queued] = {}
        self.errors: dict[int, StoreError] = {}

    def count(self, member: Member, reply: Any) -> None:
        number = member.number
        if isinstance(reply, Granted):
            self.granted[number] = reply.fence
            self.denied.pop(number, None)
            self.queued.pop(number, None)
        elif isinstance(reply, Queued | Taken):
            self.denied[number] = reply.ttl_left
            if isinstance(reply, Queued):
                self.queued[number] = reply
        elif isinstance(reply, StoreError):
            self.errors[number] = reply

    def position(self, majority: int) -> int:
        """Return how many waiters are ahead on as many members as are missing to a majority."""
        positions = sorted(queued.position for queued in self.queued.values())
        missing = max(1, majority - len(self.granted))
        return positions[min(missing, len(positions)) - 1] if positions else 0

    def time_left(self, majority: int) -> float | None:
        """Return the seconds until the other holders' ttls leave a majority to this claim."""
        return time_to_majority(self.denied.values(), majority - len(self.granted))

    def failure(self, members: Members) -> StoreError:
        replies = dict.fromkeys(self.denied, "held by another client") | dict.fromkeys(self.granted, "granted")
        return members.failure(self.errors, replies)


class RenewalVotes:
    """The replies to a batch of renewals. Each renewal has its own vote:

    a majority renewed it                      renewed; restored on the members that do not have it
    too many denied it for a majority to exist lost; removed from the members that still have it
    neither, because replies are missing       unknown (None); the keepalive sends it again
    """

    def __init__(self, renewals: Sequence[Renewal], members: Members) -> None:
        self._renewals = renewals
        self._members = members
        self._renewed = [0] * len(renewals)
        self._denied: list[list[Member]] = [[] for _ in renewals]
        self._errors: dict[int, StoreError] = {}
        self._replies = 0

    def count(self, member: Member, reply: Any) -> bool:
        """Count one member's reply; True when every renewal has a majority."""
        if isinstance(reply, StoreError):
            self._errors[member.number] = reply
            return False
        self._replies += 1
        for index, renewed in enumerate(reply):
            if renewed:
                self._renewed[index] += 1
            elif renewed is False:
                self._denied[index].append(member)
        return min(self._renewed) >= self._members.majority

    def results(self) -> list[bool | None]:
        """Return each renewal's result; raise if fewer members than a majority replied."""
        if self._replies < self._members.majority:
            raise self._members.failure(self._errors, {})
        return [self._result(index) for index in range(len(self._renewals))]

    def _result(self, index: int) -> bool | None:
        if self._renewed[index] >= self._members.majority:
            return True
        possible = len(self._members.all) - len(self._denied[index])
        return False if possible < self._members.majority else None

    def lost(self) -> list[Renewal]:
        return [renewal for index, renewal in enumerate(self._renewals) if self._result(index) is False]

    def forgotten(self) -> list[tuple[Member, Renewal]]:
        """Return the leases that a majority renewed, each with a member that does not have it."""
        return [
            (member, renewal)
            for index, renewal in enumerate(self._renewals)
            if self._result(index) and not renewal.final
            for member in self._denied[index]
        ]
