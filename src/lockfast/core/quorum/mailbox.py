"""Waiting for a majority: one mailbox made of the nodes' mailboxes, in all of their queues at the same time.

A release reaches all nodes, and each hands its vote to the first in its own queue: nearly always the same waiter, who
then has a majority without asking. Where the queues differ, or votes were taken while nodes were away, the vote is
split. Then each contender looks who holds the nodes, and all but the one with the most votes give theirs to the next
in the queue.

Rules kept here:

- A vote counts only if it answers the last turn, as every push; so a majority is never made of old and new votes.
- A split vote is never waited out: after a moment, chosen at random, those who are behind give way; and so does one
  that is ahead and gets nowhere, for it may lack nodes that others can reach.
- First in the queue is who is first on as many nodes as it lacks: told by fewer, it would count on a holder that most
  nodes no longer have.
- A node that cannot be heard any more is left out and dialled in the background; the wait goes on with the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockfast.core import backoff
from lockfast.core.quorum.rules import Standing
from lockfast.errors import StoreError, StoreUnavailable, closed_error
from lockfast.ports import Mailbox
from lockfast.values import Claim, Enqueue, FirstNotification, Granted, GrantNotification, Queued

if TYPE_CHECKING:
    from lockfast.core.quorum.nodes import Node
    from lockfast.core.quorum.round import Round
    from lockfast.core.quorum.store import QuorumStore

LOOK_AGAIN = 0.25
"""Seconds after which who holds some votes beside another's majority looks again, at the least."""
MOST_PATIENCE = 3
"""How often one who is ahead in a split vote waits for the others to give way, before it does so itself."""


class QuorumMailbox:
    """One acquisition's. `_boxes` are by node number, and open; `_news` has come and was not looked at yet."""

    def __init__(self, store: QuorumStore, holder: str) -> None:
        self._store = store
        self.holder = holder
        self.ticket = 0
        self._boxes: dict[int, Mailbox] = {}
        self._tickets: dict[int, int] = {}
        self._news: list[tuple[int, Any]] = []
        self._ask: Claim | None = None
        self._round: Round | None = None
        self._give_way_at = 0.0
        self._splits = 0
        self._missed = False

    @property
    def address(self) -> str:
        return self.holder  # the nodes have addresses of their own: this is how the store finds them

    async def open(self, until: float) -> None:
        self._store.add_box(self)
        await self._store.nodes.listen(until)
        await self.refresh(until)
        if len(self._boxes) < self._store.nodes.majority:
            raise StoreUnavailable("Too few nodes of the quorum could be listened to, so nothing was sent.")

    async def refresh(self, until: float) -> None:
        """Listen also to nodes that have come back."""
        for node in self._store.nodes.all:
            if node.number not in self._boxes and node.store.inbox_open:
                box = node.store.mailbox(self.holder)
                try:
                    await box.open(until)  # no wait: it is connected already
                    self._boxes[node.number] = box
                except StoreUnavailable:
                    box.close()

    def enqueue(self, node: Node, attempt: int) -> Enqueue | None:
        """Where that node is to push to; None for one that we cannot hear, which then keeps no place for us."""
        box = self._boxes.get(node.number)
        if box is None:
            return None
        return Enqueue(box.address, attempt, self._tickets.get(node.number, self.ticket) or None)

    def start(self, claim: Claim, round_: Round) -> None:
        """From now on wait for the votes that `round_` lacks."""
        self._ask, self._round = claim, round_
        for number, enqueue in round_.queued.items():
            self._tickets[number] = enqueue.ticket
        # On a node where we lose our place, we come back with the ticket of the others: their clocks agree roughly.
        self.ticket = self.ticket or max(self._tickets.values(), default=0)
        self._schedule()

    def _schedule(self) -> None:
        randomness = self._store.runtime.random()
        self._give_way_at = self._store.runtime.now() + backoff.pause(self._splits + 1, randomness)

    async def wait(self, until: float) -> GrantNotification | FirstNotification | None:
        runtime, nodes = self._store.runtime, self._store.nodes
        while self._round is not None and self._ask is not None and not nodes.closed:
            round_ = self._round
            if len(round_.granted) >= nodes.majority:
                granted = await self._store.settle(self._ask, round_, until)
                return None if granted is None else GrantNotification(round_.attempt, granted.fence)
            now = runtime.now()
            if now >= until:
                return None
            if round_.granted and now >= self._give_way_at:
                await self._give_way(self._ask, round_, until)
                continue
            limit = min(until, self._give_way_at) if round_.granted else until
            if not self._news:
                await self._hear(limit)
            news = self._take_news(round_)
            if news is not None or (not self._news and self._missed):
                return news
        raise closed_error()

    async def _hear(self, limit: float) -> None:
        """Wait for news of any node."""
        self._missed = False
        heard = list(self._boxes)
        if len(heard) < self._store.nodes.majority:
            raise StoreUnavailable("Too few nodes of the quorum can be heard; they are being dialled.")

        def tell(which: int, outcome: Any) -> bool:
            if outcome is None:
                self._missed = self._missed or self._store.runtime.now() < limit
            else:
                self._news.append((heard[which], outcome))
            return True

        works = [self._boxes[number].wait(limit) for number in heard]
        await self._store.nodes.gather(works, tell)

    def _take_news(self, round_: Round) -> FirstNotification | None:
        """Count what came; what the core should know, if anything."""
        told: FirstNotification | None = None
        while self._news:
            number, news = self._news.pop(0)
            node = self._store.nodes.all[number]
            if isinstance(news, StoreError):
                self._boxes.pop(number).close()
                node.wants_inbox = True
                self._store.nodes.probe(node)
            elif news.attempt == round_.attempt and isinstance(news, GrantNotification):
                if not round_.granted:
                    self._schedule()
                round_.note(node, Granted(news.fence))
            elif news.attempt == round_.attempt and number in round_.queued:
                round_.note(node, Queued(round_.queued[number].ticket, 0, news.ttl_left))
                if round_.position(self._store.nodes) == 0:
                    told = FirstNotification(round_.attempt, round_.time_left(self._store.nodes))
        return told

    async def _give_way(self, claim: Claim, round_: Round, until: float) -> None:
        """The vote seems split: see who stands where, and hand our votes on unless we are the one to get the rest."""
        where = await self._store.standing(claim, until)
        if where is Standing.TAKEN:
            self._give_way_at = self._store.runtime.now() + LOOK_AGAIN * (1 + self._store.runtime.random())
            return
        self._splits += 1
        self._schedule()
        if where is Standing.AHEAD and self._splits % (MOST_PATIENCE + 1):
            return
        among = [self._store.nodes.all[number] for number in round_.granted]
        round_.granted.clear()
        limit = self._store.limit(until)

        async def hand_on(node: Node) -> Any:
            await node.store.release(claim.name, claim.holder, limit)
            return await node.store.acquire(claim, self.enqueue(node, round_.attempt), limit)

        def tell(node: Node, outcome: Any) -> bool:
            round_.note(node, outcome)
            if isinstance(outcome, Queued):
                self._tickets[node.number] = outcome.ticket
            return False

        await self._store.nodes.request(among, hand_on, tell)

    def close(self) -> None:
        self._store.remove_box(self)
        for box in self._boxes.values():
            box.close()
