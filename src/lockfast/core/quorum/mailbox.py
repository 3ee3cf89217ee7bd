"""Wait for a majority: one mailbox over the mailboxes of all members, with a ticket in each member's queue.

A release reaches all members, and each hands its vote to the first waiter in its own queue. That is nearly always the
same waiter, which then has a majority without another request. If the queues differ, the vote can be split. Then each
contender inspects the members, and all but the one with the most votes pass their votes to the next waiter.

Rules:
- A vote counts only if it answers the current attempt, so old and new votes never add up to a majority.
- A split vote does not wait for a ttl. After a random delay, contenders that are behind yield. A contender that stays
  ahead without a majority yields too: it may lack members that others can reach.
- A waiter is first in the queue if it is first on as many members as it lacks. Fewer could report a holder that most
  members no longer have.
- A member whose inbox fails is left out and reconnected in the background; the wait continues on the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockfast.core.quorum.members import TOO_FEW_INBOXES
from lockfast.core.quorum.rules import Standing
from lockfast.core.retry import backoff
from lockfast.errors import StoreError, StoreUnavailable, closed_error
from lockfast.ports import Mailbox
from lockfast.values import Enqueue, FirstNotification, Granted, GrantNotification, Queued

if TYPE_CHECKING:
    from lockfast.core.quorum.members import Member
    from lockfast.core.quorum.store import ClaimRecord, QuorumStore
    from lockfast.core.quorum.votes import Votes

RECHECK = 0.25
"""Least seconds between two inspections by a contender that has votes beside another's majority."""
MAX_TIMES_AHEAD = 3
"""How often a contender that is ahead in a split vote waits for the others before it yields too."""


class QuorumMailbox:
    """One acquisition's mailbox. `_boxes` are the members' open mailboxes by member number."""

    def __init__(self, store: QuorumStore, holder: str) -> None:
        self._store = store
        self.holder = holder
        self.ticket = 0
        self._boxes: dict[int, Mailbox] = {}
        self._tickets: dict[int, int] = {}
        self._received: list[tuple[int, Any]] = []
        self._record: ClaimRecord | None = None
        self._votes: Votes | None = None
        self._yield_at = 0.0
        self._splits = 0
        self._missed = False

    @property
    def address(self) -> str:
        return self.holder  # only the store uses it, to find this mailbox; each member has an address of its own

    async def open(self, until: float) -> None:
        self._store.add_mailbox(self)
        await self._store.members.connect_inboxes(until)
        await self.refresh(until)
        if len(self._boxes) < self._store.members.majority:
            raise StoreUnavailable(TOO_FEW_INBOXES)

    async def refresh(self, until: float) -> None:
        """Open a mailbox on each member that has (re)connected its inbox."""
        for member in self._store.members.all:
            if member.number not in self._boxes and member.store.inbox_open:
                box = member.store.mailbox(self.holder)
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

    async def wait(self, until: float) -> GrantNotification | FirstNotification | None:
        runtime, members = self._store.runtime, self._store.members
        while self._votes is not None and self._record is not None and not members.closed:
            votes = self._votes
            if len(votes.granted) >= members.majority:
                granted = await self._store.settle(self._record, votes, until)
                return None if granted is None else GrantNotification(votes.attempt, granted.fence)
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
        if len(numbers) < self._store.members.majority:
            raise StoreUnavailable(TOO_FEW_INBOXES)

        def record(index: int, outcome: Any) -> bool:
            if outcome is None:
                self._missed = self._missed or self._store.runtime.now() < limit
            else:
                self._received.append((numbers[index], outcome))
            return True

        await self._store.runtime.gather([self._boxes[number].wait(limit) for number in numbers], record)

    def _count_received(self, votes: Votes) -> FirstNotification | None:
        """Count what the members sent; return a notification if the waiter is now first in the queue."""
        members = self._store.members
        first: FirstNotification | None = None
        while self._received:
            number, received = self._received.pop(0)
            member = members.all[number]
            if isinstance(received, StoreError):
                self._boxes.pop(number).close()
                member.wants_inbox = True
                members.probe(member)
            elif received.attempt != votes.attempt:
                continue
            elif isinstance(received, GrantNotification):
                if not votes.granted:
                    self._schedule_yield()
                votes.count(member, Granted(received.fence))
            elif number in votes.queued:
                votes.count(member, Queued(votes.queued[number].ticket, 0, received.ttl_left))
                if votes.position(members.majority) == 0:
                    first = FirstNotification(votes.attempt, votes.time_left(members.majority))
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
        limit = store.reply_limit(until)

        async def release_and_enqueue(member: Member) -> Any:
            await member.store.release(claim.name, claim.holder, limit)
            return await member.store.acquire(claim, self.enqueue(member, votes.attempt), limit)

        def count(member: Member, reply: Any) -> bool:
            votes.count(member, reply)
            if isinstance(reply, Queued):
                self._tickets[member.number] = reply.ticket
            return False

        await store.members.broadcast(among, release_and_enqueue, count)

    def close(self) -> None:
        self._store.remove_mailbox(self)
        for box in self._boxes.values():
            box.close()
