"""`QuorumStore`: `ports.Store` made of the stores of several independent servers.

    ask all at once ──majority granted, one fence──▶ GRANTED
          │          ──majority granted, fences differ──▶ raise the lower ones ──▶ GRANTED
          │          ──too few answers──▶ QuorumNotReached
          └─ no majority ──with a place──▶ QUEUED: `mailbox.py` waits for the other votes
                         └─without──▶ split vote? give way or insist, and ask again; else give back, TAKEN

Rules kept here:

- What may have been left on a node is given back there too, whatever it answered: what it did not answer is unknown.
- A grant counts from before the first request of its round, and is not given when little is left of its ttl.
- A lease is renewed when a majority renews it, and lost when that is impossible.
- Not promised: order. Each node has its queue, and they can differ.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lockfast.core import backoff
from lockfast.core.quorum import keeping, looking, rules
from lockfast.core.quorum.mailbox import QuorumMailbox
from lockfast.core.quorum.nodes import PATIENCE, Node, Nodes
from lockfast.core.quorum.round import Round, vote
from lockfast.core.quorum.rules import Standing
from lockfast.errors import QuorumNotReached, StoreError
from lockfast.facts import Facts
from lockfast.ports import Capabilities, Mailbox, NodeStore, Runtime, Store
from lockfast.values import Answer, Claim, Enqueue, Granted, LockInfo, Page, Queued, Renewal, Taken, clean

log = logging.getLogger("lockfast")

MOST_ROUNDS = 8
"""Rounds of a try that others split; each time those who are behind give way."""
MOST_TRACES = 100_000


class Trace(NamedTuple):
    """What an acquisition may have left on the nodes: what it asked for, which nodes, and what fence it was given."""

    claim: Claim
    asked: set[int]
    fence: int = 0


class QuorumStore(Store):
    """`traces` are by holder id and `_boxes` by address: one of an acquisition each."""

    def __init__(
        self,
        stores: Sequence[tuple[NodeStore, str]],
        runtime: Runtime,
        *,
        sits_out: float = 0.0,
    ) -> None:
        self._floor = rules.Floor()
        self.nodes = Nodes(stores, runtime, self._floor, sits_out)
        self.runtime = runtime
        self.traces: dict[str, Trace] = {}
        self._boxes: dict[str, QuorumMailbox] = {}

    @property
    def capabilities(self) -> Capabilities:
        """Without fence blocks: local hand-off would delay the waiters of other hosts even more."""
        return Capabilities(change_events=any(node.store.capabilities.change_events for node in self.nodes.all))

    @property
    def grace(self) -> float:
        graces = sorted(node.store.grace for node in self.nodes.all)
        return graces[self.nodes.majority - 1]

    @property
    def inbox_open(self) -> bool:
        return all(node.store.inbox_open for node in self.nodes.all if node.admitted) and any(
            node.admitted for node in self.nodes.all
        )

    def mailbox(self, holder: str) -> Mailbox:
        return QuorumMailbox(self, holder)

    def add_box(self, box: QuorumMailbox) -> None:
        self._boxes[box.holder] = box

    def remove_box(self, box: QuorumMailbox) -> None:
        self._boxes.pop(box.holder, None)

    def limit(self, until: float) -> float:
        """Until when one node may take: others may have answered long ago."""
        return min(until, self.runtime.now() + PATIENCE)

    async def acquire(self, claim: Claim, enqueue: Enqueue | None, until: float) -> Answer:
        among = await self.nodes.reach(until)
        box = None if enqueue is None else self._boxes.get(enqueue.address)
        round_ = Round(self.runtime.now(), 0 if enqueue is None else enqueue.attempt)
        claim = self._traced(claim, round_.sent_at)
        if box is not None and enqueue is not None:
            await box.refresh(until)
            box.ticket = box.ticket or enqueue.ticket or 0
        await self.ask_for_votes(claim, among, round_, box, until)
        granted = await self.settle(claim, round_, until)
        if granted is not None:
            return granted
        if round_.answered < self.nodes.majority:
            raise round_.failure(self.nodes)
        if box is not None and enqueue is not None:
            box.start(claim, round_)
            ticket = box.ticket if enqueue.ticket is None else enqueue.ticket
            return Queued(ticket, round_.position(self.nodes), round_.time_left(self.nodes))
        return await self._try_again(claim, round_, until)

    def _traced(self, claim: Claim, now: float) -> Claim:
        """`ask` with the fence to propose; the same for each request of an acquisition, so that a repeat is one."""
        trace = self.traces.get(claim.holder)
        floor = self._floor.propose(now) if trace is None else trace.fence or trace.claim.floor
        claim = claim._replace(floor=floor)
        if len(self.traces) >= MOST_TRACES:
            for holder in list(self.traces)[: MOST_TRACES // 100]:  # of leases that were never given back
                self.traces.pop(holder, None)
        self.traces[claim.holder] = Trace(claim, set()) if trace is None else trace._replace(claim=claim)
        return claim

    async def ask_for_votes(
        self, claim: Claim, among: Sequence[Node], round_: Round, box: QuorumMailbox | None, until: float
    ) -> None:
        limit = self.limit(until)
        attempt = round_.attempt
        before = self._note_asked(claim, among)

        def work(node: Node) -> Any:
            enqueue = None if box is None else box.enqueue(node, attempt)
            return node.store.acquire(claim, enqueue, limit)

        await vote(self.nodes, among, round_, work, before)

    def _note_asked(self, claim: Claim, among: Sequence[Node]) -> int:
        """Remember where traces may be left; the fence that the same acquisition got before, if it did."""
        trace = self.traces.get(claim.holder)
        if trace is None:
            return 0
        if len(trace.asked) < len(self.nodes.all):
            trace.asked.update([node.number for node in among])
        return trace.fence

    async def settle(self, claim: Claim, round_: Round, until: float) -> Granted | None:
        """The grant, if a majority gave it, all of these have one fence, and enough of its ttl is left."""
        nodes = self.nodes
        if len(round_.granted) < nodes.majority:
            return None
        self._floor.learn(round_.sent_at, round_.granted.values())
        trace = self.traces.get(claim.holder)
        before = 0 if trace is None else trace.fence
        fence, behind = rules.highest(round_.granted, len(nodes.all), before)
        if behind:
            await self._raise(claim, fence, behind, round_, until)
            if len(round_.granted) < nodes.majority or rules.highest(round_.granted, len(nodes.all), before)[1]:
                return None
        if not rules.is_worth_it(self.runtime.now(), round_.sent_at, claim.ttl):
            log.debug("A majority granted a lock, but so slowly that little is left of its ttl of %g s.", claim.ttl)
            return None
        if trace is not None:
            self.traces[claim.holder] = trace._replace(fence=fence)
        return Granted(fence)

    async def _raise(self, claim: Claim, fence: int, behind: Sequence[int], round_: Round, until: float) -> None:
        """Write the largest fence to the nodes that gave less, before anyone uses it."""
        higher = claim._replace(floor=fence)
        among = [self.nodes.all[number] for number in behind]
        limit = self.limit(until)
        for number in behind:
            del round_.granted[number]

        def tell(node: Node, outcome: Any) -> bool:
            round_.note(node, outcome)
            return sum(one >= fence for one in round_.granted.values()) >= self.nodes.majority

        await self.nodes.request(among, lambda node: node.store.acquire(higher, None, limit), tell)

    async def _try_again(self, claim: Claim, round_: Round, until: float) -> Answer:
        """A try without a majority: while the vote is split and time is left, those who are behind give way."""
        for attempt in range(1, MOST_ROUNDS):
            if not round_.granted:
                break
            where = await self.standing(claim, until)
            if where is Standing.TAKEN:
                break
            if where is Standing.BEHIND:
                await self._undo(claim, until)
            pause = backoff.pause(attempt, self.runtime.random()) / 4
            if self.runtime.now() + pause >= until:
                break
            await self.runtime.sleep(pause)
            round_ = Round(self.runtime.now())
            await self.ask_for_votes(claim, await self.nodes.reach(until), round_, None, until)
            granted = await self.settle(claim, round_, until)
            if granted is not None:
                return granted
        left = round_.time_left(self.nodes)
        await self._undo(claim, until)
        self.traces.pop(claim.holder, None)
        return Taken(left)

    async def _undo(self, claim: Claim, until: float) -> None:
        """Remove all traces of a try; what a node does not confirm is left to the background or the ttl."""
        try:
            await self.give_back(claim.name, claim.holder, until, self.traces.get(claim.holder), thorough=True)
        except QuorumNotReached:
            pass

    async def standing(self, claim: Claim, until: float) -> Standing:
        """Who holds the nodes that we do not."""
        holders: list[str | None] = []

        def tell(node: Node, outcome: Any) -> bool:
            if isinstance(outcome, LockInfo):
                holders.append(outcome.holder)
            return False

        limit = self.limit(until)
        among = self.nodes.ready(self.runtime.now())
        await self.nodes.request(among, lambda node: node.store.inspect(claim.name, limit), tell)
        return rules.standing(holders, claim.holder, len(self.nodes.all))

    async def release(self, name: str, holder: str, until: float) -> bool:
        trace = self.traces.pop(holder, None)  # first: what mends a lease meanwhile sees that it is given back
        try:
            return await self.give_back(name, holder, until, trace, thorough=False)
        except BaseException:
            if trace is not None:
                self.traces[holder] = trace
            raise

    async def give_back(self, name: str, holder: str, until: float, trace: Trace | None, *, thorough: bool) -> bool:
        """Give back on all nodes: on those that are connected now, on the others when they come back."""
        nodes, now = self.nodes, self.runtime.now()
        among = [node for node in nodes.all if node.store.connected]
        gone_at = now + (trace.claim.ttl if trace is not None else 60.0)
        for node in nodes.all:
            if not node.store.connected and (trace is None or node.number in trace.asked):
                node.owe(name, holder, gone_at)
        awake = {node.number for node in among if node.can_be_asked(now)}
        said: dict[int, str] = {}
        votes: dict[int, bool] = {}

        def tell(node: Node, outcome: Any) -> bool:
            awake.discard(node.number)
            if isinstance(outcome, StoreError):
                said[node.number] = clean(str(outcome))
                node.owe(name, holder, gone_at)
            else:
                votes[node.number] = outcome
            return not awake or (not thorough and sum(votes.values()) >= nodes.majority)

        limit = self.limit(until)
        await nodes.request(among, lambda node: node.store.release(name, holder, limit), tell)
        for node in among:  # it is sent, and comes after what we asked before; but a silent node may lose it
            if node.number not in votes and node.number not in said and not node.can_be_asked(now):
                node.owe(name, holder, gone_at)
        freed = sum(votes.values())
        unheard = sum(node.number not in votes and node.store.connected for node in among)
        # With nodes that may still say yes, "it had gone" would be a guess: a repeat tells.
        if len(votes) < nodes.majority or freed < nodes.majority <= freed + unheard:
            raise nodes.not_reached(said, sent=bool(among))
        return freed >= nodes.majority

    async def renew(self, renewals: Sequence[Renewal], until: float) -> list[bool | None]:
        return await keeping.renew(self, renewals, until)

    async def adopt(self, claim: Claim, old_holder: str, until: float) -> Granted | None:
        among = await self.nodes.reach(until)
        round_ = Round(self.runtime.now())
        claim = self._traced(claim, round_.sent_at)
        limit = self.limit(until)

        async def work(node: Node) -> Granted | Taken:
            return await node.store.adopt(claim, old_holder, limit) or Taken(None)

        await vote(self.nodes, among, round_, work, self._note_asked(claim, among))
        granted = await self.settle(claim, round_, until)
        if granted is None and len(round_.lefts) < self.nodes.majority:
            raise round_.failure(self.nodes)  # it is gone only if a majority says so: the silent may have it
        if granted is None:
            await self._undo(claim, until)
        return granted

    def on_change(self, callback: Callable[[str | None], None]) -> None:
        for node in self.nodes.all:
            node.store.on_change(callback)

    def poll_events(self) -> None:
        for node in self.nodes.all:
            node.store.poll_events()

    async def inspect(self, name: str, until: float) -> LockInfo:
        return await looking.inspect(self.nodes, name, self.limit(until), until)

    async def listing(self, pattern: str, cursor: str, until: float) -> Page:
        return await looking.listing(self.nodes, pattern, cursor, self.limit(until), until)

    async def force_release(self, name: str, holder: str, until: float) -> bool:
        return await looking.force_release(self.nodes, name, holder, self.limit(until), until)

    async def facts(self, until: float) -> Facts:
        return await looking.facts(self.nodes, self.runtime.now(), self.limit(until), until)

    def disconnect(self) -> None:
        for node in self.nodes.all:
            node.store.disconnect()

    async def cancel_waits(self) -> None:
        """Who waits is sent away by `close`, and what it is given until then goes back as all else does."""

    async def close(self) -> None:
        self.nodes.close()
        first, *others = self.nodes.all
        await first.store.close()  # this tells all who wait, and gives them time to leave all queues
        for box in list(self._boxes.values()):
            box.close()
        for node in others:
            await node.store.close()

    def reset(self, *, forked: bool) -> None:
        self.traces.clear()
        self._boxes.clear()
        for node in self.nodes.all:
            node.store.reset(forked=forked)
        self.nodes.reset()
