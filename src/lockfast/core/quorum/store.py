"""`QuorumStore`: `ports.Store` over the stores of several independent servers.

    claim ──to all at once──▶ majority, same fence ──▶ GRANTED
                              majority, fences differ ──raise the lower ones──▶ GRANTED
                              fewer than a majority replied ──▶ QuorumNotReached
                              no majority, enqueued ──▶ QUEUED: `QuorumMailbox` waits for the missing votes
                              no majority, not enqueued ──split vote: retry; else release──▶ TAKEN

Rules:
- A missing reply means unknown: whatever the claim may have left on a member is released there too.
- A grant is valid from before the first request was sent. It is not used if little of its ttl is left.
- A lease is renewed when a majority renews it, and lost when no majority can. Members that have forgotten a renewed
  lease get it back, so that others may fail later: a reader as if it were new, so never beside a writer.
- A downgrade needs a majority that had the lease. A member that did not confirm it may stay exclusive, which keeps out
  more than necessary; each renewal repeats the downgrade there.
- There are no semaphores. A member counts only the permits that it granted itself: with three members, each pair of
  them could grant one permit, three in all, and no member would have more than two.
- Not promised: order. Each member has its own queue, and the queues can differ.
- A waiter has a ticket on each member. A release makes each member hand its vote to the first waiter in its own queue:
  nearly always the same one, which then has a majority without another request.
- A vote counts only if it answers the current attempt, so old and new votes never add up to a majority.
- A split vote does not wait for a ttl. After a random delay, each contender inspects the members, and those that are
  behind yield; all readers are behind or ahead together. A contender that stays ahead without a majority yields too: it
  may lack members that others can reach.
- A waiter is first in the queue if it is first on as many members as it lacks. Fewer could report a holder that most
  members no longer have.
- A member whose inbox fails is left out and reconnected in the background; the wait continues on the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from lockfast import values
from lockfast.core.quorum import rules
from lockfast.core.quorum.members import REPLY_TIMEOUT, Member, Members, RenewalVotes, Votes
from lockfast.core.quorum.rules import Standing
from lockfast.core.retry import backoff
from lockfast.errors import ConfigurationError, LockError, QuorumNotReached, StoreError, StoreUnavailable, closed_error
from lockfast.facts import Facts, Topology
from lockfast.ports import Capabilities, Mailbox, MemberStore, Runtime, Store
from lockfast.values import Answer, Claim, Enqueue, Granted, LockInfo, Page, Queued, Renewal, Taken, clean

log = logging.getLogger("lockfast")

MAX_ROUNDS = 8  # of a claim that does not wait, while the vote is split
MAX_RECORDS = 100_000
CLEAN_UP_TIMEOUT = 1.0
UNKNOWN_TTL = 60.0  # seconds for which a release is retried if the ttl of its claim is not known
RECHECK = 0.25  # least seconds between two inspections by a contender that has votes beside another's majority
MAX_TIMES_AHEAD = 3  # how often a contender that is ahead in a split vote waits for the others before it yields too


Request = Callable[[Member, float], Coroutine[Any, Any, Any]]  # a member, and the moment when its reply is too late


@dataclass(slots=True)
class ClaimRecord:
    """A claim as it was sent, the numbers of the members that got it, and the fence it was granted (0: none yet).

    `exclusive_on` are the members that have not confirmed the downgrade of the claim.
    """

    claim: Claim
    fence: int = 0
    sent_to: set[int] = field(default_factory=set)
    exclusive_on: set[int] = field(default_factory=set)


class QuorumMailbox:
    """One acquisition's mailbox. `_boxes` are the members' open mailboxes by member number."""

    def __init__(self, store: QuorumStore, holder: str) -> None:
        self._store = store
        self.address = holder  # only the store uses it, to find this mailbox; each member has an address of its own
        self.ticket = 0
        self._boxes: dict[int, Mailbox] = {}
        self._tickets: dict[int, int] = {}
        self._received: list[tuple[int, Any]] = []
        self._record: ClaimRecord | None = None
        self._votes: Votes | None = None
        self._yield_at = 0.0
        self._splits = 0
        self._missed = False

    async def open(self, until: float) -> None:
        self._store.mailboxes[self.address] = self
        await self._store.members.connect_inboxes(until)
        await self.refresh(until)
        self._store.members.require_inboxes(len(self._boxes))

    async def refresh(self, until: float) -> None:
        """Open a mailbox on each member that has (re)connected its inbox."""
        for member in self._store.members.all:
            if member.number not in self._boxes and member.store.inbox_open:
                box = member.store.mailbox(self.address)
                try:
                    await box.open(until)  # does not wait: the inbox is connected
                    self._boxes[member.number] = box
                except StoreUnavailable:
                    box.close()

    def enqueue(self, member: Member, attempt: int) -> Enqueue | None:
        """Return how `member` is to enqueue the claim; None if it cannot notify us, so that it keeps no ticket."""
        box = self._boxes.get(member.number)
        if box is None:
            return None
        return Enqueue(box.address, attempt, self._tickets.get(member.number, self.ticket) or None)

    def start(self, record: ClaimRecord, votes: Votes) -> None:
        """From now on, wait for the votes that are missing."""
        self._record, self._votes = record, votes
        for number, queued in votes.queued.items():
            self._tickets[number] = queued.ticket
        # A member that has lost our ticket gets the one of the others: their clocks agree roughly.
        self.ticket = self.ticket or max(self._tickets.values(), default=0)
        self._schedule_yield()

    def _schedule_yield(self) -> None:
        runtime = self._store.runtime
        self._yield_at = runtime.now() + backoff(self._splits + 1, runtime.random())

    async def wait(self, until: float) -> values.GrantNotification | values.FirstNotification | None:
        runtime, members = self._store.runtime, self._store.members
        while self._votes is not None and self._record is not None and not members.closed:
            votes = self._votes
            if len(votes.granted) >= members.majority:
                granted = await self._store.settle(self._record, votes, until)
                return None if granted is None else values.GrantNotification(votes.attempt, granted.fence)
            now = runtime.now()
            if now >= until:
                return None
            if votes.granted and now >= self._yield_at:
                await self._resolve_split(self._record, votes, until)
                continue
            if not self._received:
                await self._receive(min(until, self._yield_at) if votes.granted else until)
            first = self._count_received(votes)
            if first is not None or self._missed:
                return first
        raise closed_error()

    async def _receive(self, limit: float) -> None:
        """Wait for a notification from any member."""
        self._missed = False
        numbers = list(self._boxes)
        self._store.members.require_inboxes(len(numbers))

        def record(index: int, outcome: Any) -> bool:
            if outcome is None:
                self._missed = self._missed or self._store.runtime.now() < limit
            else:
                self._received.append((numbers[index], outcome))
            return True

        await self._store.runtime.gather([self._boxes[number].wait(limit) for number in numbers], record)

    def _count_received(self, votes: Votes) -> values.FirstNotification | None:
        """Count what the members sent; return a notification if the waiter is now first in the queue."""
        members = self._store.members
        first: values.FirstNotification | None = None
        while self._received:
            number, received = self._received.pop(0)
            member = members.all[number]
            if isinstance(received, StoreError):
                self._boxes.pop(number).close()
                member.wants_inbox = True
                members.probe(member)
            elif received.attempt != votes.attempt:
                continue
            elif isinstance(received, values.GrantNotification):
                if not votes.granted:
                    self._schedule_yield()
                votes.count(member, Granted(received.fence))
            elif number in votes.queued:
                votes.count(member, Queued(votes.queued[number].ticket, 0, received.ttl_left))
                if votes.position(members.majority) == 0:
                    first = values.FirstNotification(votes.attempt, votes.time_left(members.majority))
        return first

    async def _resolve_split(self, record: ClaimRecord, votes: Votes, until: float) -> None:
        """Inspect the members; yield our votes unless another has a majority or we are ahead."""
        store = self._store
        claim = record.claim
        standing = await store.standing(claim, until)
        if standing is Standing.TAKEN:
            self._yield_at = store.runtime.now() + RECHECK * (1 + store.runtime.random())
            return
        self._splits += 1
        self._schedule_yield()
        if standing is Standing.AHEAD and self._splits % (MAX_TIMES_AHEAD + 1):
            return
        among = [store.members.all[number] for number in votes.granted]
        votes.granted.clear()

        async def release_and_enqueue(member: Member, limit: float) -> Any:
            await member.store.release(claim.name, claim.holder, limit)
            if claim.weight:  # with its old ticket, a reader would enter at once beside others that are yielding
                self._tickets[member.number] = 0
            return await member.store.acquire(claim, self.enqueue(member, votes.attempt), limit)

        def count(member: Member, reply: Any) -> bool:
            votes.count(member, reply)
            if isinstance(reply, Queued):
                self._tickets[member.number] = reply.ticket
            return False

        await store.broadcast(among, release_and_enqueue, count, until)

    def close(self) -> None:
        self._store.mailboxes.pop(self.address, None)
        for box in self._boxes.values():
            box.close()


class QuorumStore(Store):
    """`_records` are by holder id, `mailboxes` by address; each acquisition has one of both."""

    def __init__(self, stores: Sequence[tuple[MemberStore, str]], runtime: Runtime, *, sits_out: float = 0.0) -> None:
        self._floor = rules.FenceFloor()
        self.members = Members(stores, runtime, self._floor, sits_out)
        self.runtime = runtime
        self._records: dict[str, ClaimRecord] = {}
        self.mailboxes: dict[str, QuorumMailbox] = {}

    @property
    def capabilities(self) -> Capabilities:
        """Without fence blocks: local hand-off would delay the waiters of other hosts even more."""
        change_events = any(member.store.capabilities.change_events for member in self.members.all)
        return Capabilities(readers=True, change_events=change_events)

    @property
    def grace(self) -> float:
        graces = sorted(member.store.grace for member in self.members.all)
        return graces[self.members.majority - 1]

    def mailbox(self, holder: str) -> Mailbox:
        return QuorumMailbox(self, holder)

    async def broadcast(
        self, among: Sequence[Member], request: Request, count: Callable[[Member, Any], bool], until: float
    ) -> None:
        """Send `request` to all of `among` at once, and pass each reply or `StoreError` to `count` until it returns
        True. Requests that are not answered by then stay sent."""
        limit = min(until, self.runtime.now() + REPLY_TIMEOUT)  # a slow member must not use up the caller's time
        works = [request(member, limit) for member in among]
        await self.runtime.gather(works, lambda index, reply: count(among[index], reply))

    async def _replies(self, among: Sequence[Member], request: Request, until: float) -> dict[int, Any]:
        """Send `request` to all of `among` at once, and return every reply or `StoreError` by member number."""
        found: dict[int, Any] = {}

        def count(member: Member, reply: Any) -> bool:
            found[member.number] = reply
            return False

        await self.broadcast(among, request, count, until)
        return found

    async def acquire(self, claim: Claim, enqueue: Enqueue | None, until: float) -> Answer:
        among = await self.members.reach(until)
        mailbox = None if enqueue is None else self.mailboxes.get(enqueue.address)
        votes = Votes(self.runtime.now(), 0 if enqueue is None else enqueue.attempt)
        record = self._record(claim, votes.sent_at)
        if mailbox is not None and enqueue is not None:
            await mailbox.refresh(until)
            mailbox.ticket = mailbox.ticket or enqueue.ticket or 0
        try:
            granted = await self._claim(record, among, votes, mailbox, until)
        except ConfigurationError:  # one member has the lock as a semaphore; others may have granted the claim
            await self._undo(record, until)
            self._records.pop(claim.holder, None)
            raise
        if granted is not None:
            return granted
        if len(votes.granted) + len(votes.denied) < self.members.majority:
            raise votes.failure(self.members)
        if mailbox is not None and enqueue is not None:
            mailbox.start(record, votes)
            ticket = mailbox.ticket if enqueue.ticket is None else enqueue.ticket
            return Queued(ticket, votes.position(self.members.majority), votes.time_left(self.members.majority))
        return await self._retry_split(record, votes, until)

    def _record(self, claim: Claim, now: float) -> ClaimRecord:
        """Record the claim with the fence to propose. A repeat proposes the same one, so that it changes nothing."""
        record = self._records.get(claim.holder)
        if record is not None:
            record.claim = claim._replace(floor=record.fence or record.claim.floor)
            return record
        if len(self._records) >= MAX_RECORDS:
            for holder in list(self._records)[: MAX_RECORDS // 100]:  # the oldest: probably never released
                self._records.pop(holder, None)
        record = self._records[claim.holder] = ClaimRecord(claim._replace(floor=self._floor.propose(now)))
        return record

    async def _claim(
        self, record: ClaimRecord, among: Sequence[Member], votes: Votes, mailbox: QuorumMailbox | None, until: float
    ) -> Granted | None:
        def request(member: Member, limit: float) -> Coroutine[Any, Any, Answer]:
            enqueue = None if mailbox is None else mailbox.enqueue(member, votes.attempt)
            return member.store.acquire(record.claim, enqueue, limit)

        return await self._vote(record, among, votes, request, until)

    async def _vote(
        self, record: ClaimRecord, among: Sequence[Member], votes: Votes, request: Request, until: float
    ) -> Granted | None:
        """Send `request` until a majority has granted. If the claim already has a fence, until a majority has that one:
        the other members may have granted a higher one."""
        record.sent_to.update(member.number for member in among)

        def count(member: Member, reply: Any) -> bool:
            votes.count(member, reply)
            fences = list(votes.granted.values())
            return (fences.count(record.fence) if record.fence else len(fences)) >= self.members.majority

        await self.broadcast(among, request, count, until)
        return await self.settle(record, votes, until)

    async def settle(self, record: ClaimRecord, votes: Votes, until: float) -> Granted | None:
        """Return the grant if a majority has granted, has one fence, and enough of the ttl is left."""
        members, granted = self.members, votes.granted
        if len(granted) < members.majority:
            return None
        self._floor.observe_fences(votes.sent_at, granted.values())
        fence, lower = rules.choose_fence(granted, len(members.all), record.fence)
        if lower:
            await self._raise_fence(record.claim, fence, lower, votes, until)
            if len(granted) < members.majority or rules.choose_fence(granted, len(members.all), record.fence)[1]:
                return None
        if not rules.has_enough_validity(self.runtime.now(), votes.sent_at, record.claim.ttl):
            log.debug("A majority granted a lock so late that little of its ttl of %g s is left.", record.claim.ttl)
            return None
        record.fence = fence
        return Granted(fence)

    async def _raise_fence(self, claim: Claim, fence: int, lower: Sequence[int], votes: Votes, until: float) -> None:
        """Write the highest fence to the members that granted a lower one, before it is used."""
        higher = claim._replace(floor=fence)
        for number in lower:
            del votes.granted[number]

        def count(member: Member, reply: Any) -> bool:
            votes.count(member, reply)
            return sum(one >= fence for one in votes.granted.values()) >= self.members.majority

        among = [self.members.all[number] for number in lower]
        await self.broadcast(among, lambda member, limit: member.store.acquire(higher, None, limit), count, until)

    async def _retry_split(self, record: ClaimRecord, votes: Votes, until: float) -> Answer:
        """Repeat a claim that does not wait while the vote is split; a contender that is behind yields its votes."""
        claim = record.claim
        for failures in range(1, MAX_ROUNDS):
            if not votes.granted:
                break
            standing = await self.standing(claim, until)
            if standing is Standing.TAKEN:
                break
            if standing is Standing.BEHIND:
                await self._undo(record, until)
            pause = backoff(failures, self.runtime.random()) / 4
            if self.runtime.now() + pause >= until:
                break
            await self.runtime.sleep(pause)
            votes = Votes(self.runtime.now())
            granted = await self._claim(record, await self.members.reach(until), votes, None, until)
            if granted is not None:
                return granted
        time_left = votes.time_left(self.members.majority)
        await self._undo(record, until)
        self._records.pop(claim.holder, None)
        return Taken(time_left)

    async def _undo(self, record: ClaimRecord, until: float) -> None:
        """Release everything the claim may have left; a probe or the ttl removes what a member does not confirm."""
        with suppress(QuorumNotReached):
            await self._release(record.claim.name, record.claim.holder, until, record, wait_for_all=True)

    async def standing(self, claim: Claim, until: float) -> Standing:
        """Rank this claim among the contenders that the members report."""
        among = self.members.available()
        views = await self._replies(among, lambda member, limit: member.store.inspect(claim.name, limit), until)
        found = [view for view in views.values() if isinstance(view, LockInfo)]
        return rules.standing(found, claim, len(self.members.all))

    async def release(self, name: str, holder: str, until: float) -> bool:
        record = self._records.pop(holder, None)  # first: `_restore` then sees that the lease is being released
        try:
            return await self._release(name, holder, until, record, wait_for_all=False)
        except BaseException:
            if record is not None:
                self._records[holder] = record
            raise

    async def _release(
        self, name: str, holder: str, until: float, record: ClaimRecord | None, *, wait_for_all: bool
    ) -> bool:
        """Release on the connected members now, and on the others when they are back."""
        members, now = self.members, self.runtime.now()
        among = [member for member in members.all if member.store.connected]
        expires_at = now + (UNKNOWN_TTL if record is None else record.claim.ttl)
        for member in members.all:
            if not member.store.connected and (record is None or member.number in record.sent_to):
                member.release_later(name, holder, expires_at)
        awaited = {member.number for member in among if member.is_available(now)}
        errors: dict[int, str] = {}
        votes: dict[int, bool] = {}

        def count(member: Member, reply: Any) -> bool:
            awaited.discard(member.number)
            if isinstance(reply, StoreError):
                errors[member.number] = clean(str(reply))
                member.release_later(name, holder, expires_at)
            else:
                votes[member.number] = reply
            return not awaited or (not wait_for_all and sum(votes.values()) >= members.majority)

        await self.broadcast(among, lambda member, limit: member.store.release(name, holder, limit), count, until)
        for member in among:  # the request is sent, but a silent member may never receive it
            if member.number not in votes and member.number not in errors and not member.is_available(now):
                member.release_later(name, holder, expires_at)
        released = sum(votes.values())
        missing = sum(member.number not in votes and member.store.connected for member in among)
        # While missing replies could still make a majority, False ("not held any more") would be a guess.
        if len(votes) < members.majority or released < members.majority <= released + missing:
            raise members.not_reached(errors, sent=bool(among))
        return released >= members.majority

    async def renew(self, renewals: Sequence[Renewal], until: float) -> list[bool | None]:
        among = await self.members.reach(until)
        votes = RenewalVotes(renewals, self.members)
        await self.broadcast(among, lambda member, limit: member.store.renew(renewals, limit), votes.count, until)
        results = votes.results()
        records = [record for one in renewals if (record := self._records.get(one.holder)) is not None]
        unfinished = [record for record in records if record.exclusive_on]
        # A renewal that was built before a downgrade does not find the grant any more; that is no loss.
        downgraded = {record.claim.holder for record in records if record.claim.weight}
        lost = [one for one in votes.lost() if one.shared or one.holder not in downgraded]
        forgotten = votes.forgotten()
        if lost or forgotten or unfinished:
            self.runtime.spawn(lambda: self._repair(lost, forgotten, unfinished), "repair")
        return results

    async def downgrade(self, claim: Claim, until: float) -> bool:
        among = await self.members.reach(until)
        record = self._record(claim, self.runtime.now())  # shared from now on, even if the outcome stays unknown
        record.sent_to.update(member.number for member in self.members.all)
        record.exclusive_on = set(record.sent_to)
        renewal = Renewal(claim.name, claim.holder, claim.ttl, shared=True)
        votes = RenewalVotes([renewal], self.members)

        def count(member: Member, reply: Any) -> bool:
            if isinstance(reply, StoreError):
                return votes.count(member, reply)
            record.exclusive_on.discard(member.number)
            return votes.count(member, [reply])

        await self.broadcast(among, lambda member, limit: member.store.downgrade(record.claim, limit), count, until)
        (downgraded,) = votes.results()
        if downgraded is None:
            raise self.members.not_reached({}, sent=True)
        if not downgraded:
            self.runtime.spawn(lambda: self._repair([renewal], (), ()), "repair")
        return downgraded

    async def _repair(
        self, lost: Sequence[Renewal], forgotten: Sequence[tuple[Member, Renewal]], unfinished: Sequence[ClaimRecord]
    ) -> None:
        """Remove lost leases from all members, restore renewed ones where they are missing, and finish downgrades."""
        try:
            for renewal in lost:
                record = self._records.pop(renewal.holder, None)
                until = self.runtime.now() + CLEAN_UP_TIMEOUT
                await self._release(renewal.name, renewal.holder, until, record, wait_for_all=True)
            for record in unfinished:
                await self._finish_downgrade(record)
            for member, renewal in forgotten:
                await self.members.call(self._restore(member, renewal))
        except LockError as error:
            log.debug("Could not repair a server of the quorum: %s", error)

    async def _finish_downgrade(self, record: ClaimRecord) -> None:
        among = [member for member in self.members.available() if member.number in record.exclusive_on]
        until = self.runtime.now() + CLEAN_UP_TIMEOUT
        replies = await self._replies(among, lambda one, limit: one.store.downgrade(record.claim, limit), until)
        record.exclusive_on -= {number for number, reply in replies.items() if not isinstance(reply, StoreError)}

    async def _restore(self, member: Member, renewal: Renewal) -> None:
        record = self._records.get(renewal.holder)
        if record is None or not record.fence:
            return
        limit = self.runtime.now() + REPLY_TIMEOUT
        claim = record.claim._replace(ttl=renewal.ttl)
        if claim.weight:
            await member.store.acquire(claim, None, limit)
        elif member.store.capabilities.reassert:
            await member.store.reassert(claim, record.fence, limit)
        if renewal.holder not in self._records:  # released meanwhile
            await member.store.release(renewal.name, renewal.holder, limit)

    async def adopt(self, claim: Claim, old_holder: str, until: float) -> Granted | None:
        among = await self.members.reach(until)
        votes = Votes(self.runtime.now())
        record = self._record(claim, votes.sent_at)

        async def request(member: Member, limit: float) -> Granted | Taken:
            return await member.store.adopt(record.claim, old_holder, limit) or Taken(None)

        granted = await self._vote(record, among, votes, request, until)
        if granted is None and len(votes.denied) < self.members.majority:
            raise votes.failure(self.members)  # silent members may have the grant: only a majority can deny it
        if granted is None:
            await self._undo(record, until)
        return granted

    def on_change(self, callback: Callable[[str | None], None]) -> None:
        for member in self.members.all:
            member.store.on_change(callback)

    def poll_events(self) -> None:
        for member in self.members.all:
            member.store.poll_events()

    async def _majority_of_replies(self, request: Request, until: float) -> list[Any]:
        """Return the replies of all available members; raise unless they are a majority."""
        among = await self.members.reach(until)
        found = await self._replies(among, request, until)
        errors = {number: reply for number, reply in found.items() if isinstance(reply, StoreError)}
        if len(found) - len(errors) < self.members.majority:
            raise self.members.failure(errors, dict.fromkeys(found.keys() - errors.keys(), "answered"))
        return [reply for number, reply in found.items() if number not in errors]

    async def inspect(self, name: str, until: float) -> LockInfo:
        views = await self._majority_of_replies(lambda member, limit: member.store.inspect(name, limit), until)
        return rules.merge_views(name, views, self.members.majority)

    async def listing(self, pattern: str, cursor: str, until: float) -> Page:
        """List one member after another, each as it sees its locks, until every majority has a member among them.

        Asking all members about each of thousands of locks would cost too much. One of the listed members has at least
        the fence of the last grant. A member can be ahead of that, if its vote was not needed; `inspect` is exact.
        """
        among = await self.members.reach(until)
        number, _, inner = cursor.partition(":")
        index = int(number or 0)
        member = among[min(index, len(among) - 1)]
        limit = min(until, self.runtime.now() + REPLY_TIMEOUT)
        page: Page = await self.members.call(member.store.listing(pattern, inner, limit))
        if page.cursor:
            return page._replace(cursor=f"{index}:{page.cursor}")
        enough = len(self.members.all) - self.members.majority + 1
        more = index + 1 < min(enough, len(among))
        return page._replace(cursor=f"{index + 1}:" if more else "")

    async def force_release(self, name: str, holder: str, until: float) -> bool:
        done = await self._majority_of_replies(lambda one, limit: one.store.force_release(name, holder, limit), until)
        return sum(map(bool, done)) >= self.members.majority

    async def facts(self, until: float) -> Facts:
        """Return the facts of all members; a member that does not answer is a fact too."""
        try:
            among = await self.members.reach(until)
        except QuorumNotReached:
            among = self.members.available()
        found = await self._replies(among, lambda member, limit: member.store.facts(limit), until)
        nodes = []
        for member in self.members.all:
            facts = found.get(member.number)
            nodes.append(facts if isinstance(facts, Facts) else Facts("server", silent=clean(member.reason)))
        sits_out = self.members.sits_out
        return Facts("quorum", topology=Topology.QUORUM, nodes=tuple(nodes), queue=False, sits_out=sits_out)

    def disconnect(self) -> None:
        for member in self.members.all:
            member.store.disconnect()

    async def close(self) -> None:
        self.members.close()
        first, *others = self.members.all
        await first.store.close()  # ends all waits, and gives the waiters time to leave the other queues
        for mailbox in list(self.mailboxes.values()):
            mailbox.close()
        for member in others:
            await member.store.close()

    def reset(self, *, forked: bool) -> None:
        self._records.clear()
        self.mailboxes.clear()
        for member in self.members.all:
            member.store.reset(forked=forked)
        self.members.reset()
