"""The store on a cluster: each lock lives on the node that owns its slot, and is reached there.

Every node has its own store, wire and inbox, dialled when first needed. A waiter's mailbox is at the node that runs the
scripts of its lock, for there PUBLISH and SPUBLISH count who received a push.

Rules kept here:

- MOVED, ASK and the loss of a node are followed within the caller's time. None of them changes anything in a lock: the
  request was refused, or is repeated, which changes nothing more.
- The map of slots is asked for anew when it proved wrong or a node failed, from whichever node answers; at most one
  asks at a time, and not more often than every `LOOK_EVERY` seconds.
- A mailbox goes where its lock goes, before the request that asks for a place: a grant pushed to nobody would go to the
  next one. So a place is asked for only at a node that owns the slot for good, not at one that it is being moved to.
- Renewals go out to all nodes before the first answer is waited for, so a node that is down costs the others nothing.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from lockfast.errors import LockError, Outcome, StoreError, StoreUnavailable, closed_error
from lockfast.facts import Facts
from lockfast.ports import Capabilities, Mailbox, Runtime, Store
from lockfast.stores.redis.keys import keys_of
from lockfast.stores.redis.protocol.error_replies import Redirected, error_of
from lockfast.stores.redis.protocol.resp import ReplyError
from lockfast.stores.redis.topology.cluster_mailbox import ClusterMailbox
from lockfast.stores.redis.topology.cluster_node import Node, Renewals
from lockfast.stores.redis.topology.slot_map import ASKING, SLOTS_REQUEST, Address, owners_in
from lockfast.values import Answer, Claim, Enqueue, Granted, LockInfo, Page, Renewal, shown

T = TypeVar("T")

LOOK_EVERY = 0.1
LOOK_WITHIN = 0.5
"""Seconds that one node gets to tell the map of slots."""
MOST_REDIRECTS = 5
FIRST_LOOK = 0.005
"""Seconds between two looks at whether somebody else has got the first map."""


class ClusterStore(Store):
    """`ports.Store` on a cluster. Invariants: `_owners` is what the cluster said last, and `_wrong` is set as soon as
    it may have changed; one caller at a time asks for it (`_looking`)."""

    inbox_open = False  # the inbox of a waiter depends on the node of its lock

    def __init__(self, seeds: Sequence[Address], make: Callable[[str, int], Node], runtime: Runtime) -> None:
        self._seeds = tuple(seeds)
        self._make = make
        self._runtime = runtime
        self._nodes: dict[Address, Node] = {}
        self._tell: Callable[[str | None], None] | None = None
        self._closed = False
        sample = self._node(self._seeds[0]).store
        self._capabilities = sample.capabilities._replace(fence_blocks=False, values=False)
        self._start()

    def _start(self) -> None:
        self._mutex = self._runtime.mutex()
        self._owners: dict[int, Address] = {}
        self._boxes: dict[str, ClusterMailbox] = {}
        self._wrong = True
        self._looking = False
        self._looked_at = -math.inf

    # Which node.

    def _node(self, address: Address) -> Node:
        node = self._nodes.get(address)
        if node is None:
            made = self._make(*address)
            if self._tell is not None:
                made.store.on_change(self._tell)
            node = self._nodes.setdefault(address, made)
        return node

    async def _owner(self, slot: int, until: float) -> Node:
        if self._wrong or slot not in self._owners:
            await self._look(until)
        address = self._owners.get(slot)
        if address is None:
            raise StoreUnavailable(
                f"No node of the cluster serves the slot {slot}, so nothing was sent. Is a failover under way?"
            )
        return self._node(address)

    async def _look(self, until: float) -> None:
        """Ask for the map, unless somebody else does or just did; who has none at all waits for it."""
        while True:
            with self._mutex:
                mine = not self._looking and self._runtime.now() - self._looked_at >= LOOK_EVERY
                self._looking = self._looking or mine
            if mine or self._owners:
                break
            if self._runtime.now() >= until:
                raise StoreUnavailable("The cluster did not tell its slots in time, so nothing was sent.")
            await self._runtime.sleep(FIRST_LOOK)
        if mine:
            try:
                await self._ask_for_slots(until)
            finally:
                self._looked_at = self._runtime.now()
                self._looking = False

    async def _ask_for_slots(self, until: float) -> None:
        """The map from the first node that tells it: those that work, then those that failed, then the seeds."""
        if self._closed:
            raise closed_error()
        owners = {self._node(address) for address in set(self._owners.values())}
        asked = sorted(owners, key=lambda node: node.failed)
        seeds = [node for node in map(self._node, self._seeds) if node not in owners]
        asked += sorted(seeds, key=lambda node: node.failed)
        problem: StoreError = StoreUnavailable("No node of the cluster could be asked.")
        for node in asked:
            try:
                reply = await node.wire.request(SLOTS_REQUEST, min(until, self._runtime.now() + LOOK_WITHIN))
            except StoreError as error:
                node.failed = True
                problem = error
                continue
            if isinstance(reply, ReplyError):
                problem = _no_cluster(str(reply))
                continue
            self._wrong = False
            self._learn(owners_in(reply, node.host))
            return
        if not self._owners or not isinstance(problem, StoreUnavailable):
            raise problem

    def _learn(self, owners: dict[int, Address]) -> None:
        """Use the new map; who is a master no more is left at once, and whoever waits there is told."""
        before, self._owners = self._owners, owners
        for address in set(before.values()) - set(owners.values()):
            self._node(address).leave()

    async def _routed(self, name: str, until: float, work: Callable[[Node, Sequence[bytes]], Awaitable[T]]) -> T:
        """What `work` gives at the node that has the lock."""
        slot = keys_of(name).slot
        node = await self._owner(slot, until)
        before: tuple[bytes, ...] = ()
        for _ in range(MOST_REDIRECTS):
            try:
                result = await work(node, before)
            except Redirected as there:
                node, before = self._follow(slot, node, there)
            except StoreUnavailable:
                node.failed = self._wrong = True
                raise
            else:
                node.failed = False
                return result
        raise StoreUnavailable(
            f"The nodes of the cluster send each other the requests for the lock {shown(name)}; nothing was changed. "
            "It is being moved: try again."
        )

    def _follow(self, slot: int, node: Node, there: Redirected) -> tuple[Node, tuple[bytes, ...]]:
        address = there.host or node.host, there.port
        if there.ask:
            return self._node(address), (ASKING,)
        self._owners[slot] = address
        self._wrong = True
        return self._node(address), ()

    # The operations.

    @property
    def grace(self) -> float:
        return max(node.store.grace for node in tuple(self._nodes.values()))

    def mailbox(self, holder: str) -> Mailbox:
        return ClusterMailbox(self._boxes, holder)

    async def acquire(self, claim: Claim, enqueue: Enqueue | None, until: float) -> Answer:
        async def work(node: Node, before: Sequence[bytes]) -> Answer:
            if enqueue is None:
                return await node.store.acquire(claim, None, until, before)
            box = self._boxes.get(claim.holder)
            if box is None:
                raise ValueError("a place was asked for without an open mailbox")
            if before:
                raise StoreUnavailable(f"The lock {shown(claim.name)} is being moved to another node. Try again.")
            here = enqueue._replace(address=await box.at(node, keys_of(claim.name).slot, until))
            return await node.store.acquire(claim, here, until)

        return await self._routed(claim.name, until, work)

    async def release(self, name: str, holder: str, until: float) -> bool:
        return await self._routed(name, until, lambda node, before: node.store.release(name, holder, until, before))

    async def adopt(self, claim: Claim, old_holder: str, until: float) -> Granted | None:
        return await self._routed(
            claim.name, until, lambda node, before: node.store.adopt(claim, old_holder, until, before)
        )

    async def inspect(self, name: str, until: float) -> LockInfo:
        return await self._routed(name, until, lambda node, before: node.store.inspect(name, until, before))

    async def force_release(self, name: str, holder: str, until: float) -> bool:
        return await self._routed(
            name, until, lambda node, before: node.store.force_release(name, holder, until, before)
        )

    async def listing(self, pattern: str, cursor: str, until: float) -> Page:
        """Part by part of one master after another; the cursor names both."""
        await self._look(until)
        masters = sorted(set(self._owners.values()))
        number, _, inner = cursor.partition(" ")
        at = int(number or 0)
        if at >= len(masters):
            return Page((), "")
        store = self._node(masters[at]).store
        names, after = await store.scan(pattern, inner, until)
        groups: dict[int, list[str]] = {}
        for name in names:
            groups.setdefault(keys_of(name).slot, []).append(name)
        infos = [one for group in groups.values() for one in await store.known(group, until)]
        return Page(tuple(infos), f"{at} {after}" if after else f"{at + 1} " if at + 1 < len(masters) else "")

    async def reassert(self, claim: Claim, fence: int, until: float) -> bool:
        return await self._routed(
            claim.name, until, lambda node, before: node.store.reassert(claim, fence, until, before)
        )

    # Renewals: one script per slot, one exchange per node.

    async def renew(self, renewals: Sequence[Renewal], until: float) -> Sequence[bool | None]:
        groups: dict[int, list[int]] = {}
        for at, line in enumerate(renewals):
            groups.setdefault(keys_of(line.name).slot, []).append(at)
        answers: list[bool | None] = [None] * len(renewals)
        error: StoreError | None = None
        for part in await self._posted(renewals, groups, until):
            try:
                answered = await part.answers(until, self._renew_again)
            except StoreError as problem:
                self._wrong = part.node.failed = True
                error = problem
                continue
            part.node.failed = False
            for at, answer in answered:
                answers[at] = answer
        if all(answer is None for answer in answers):
            raise error or StoreUnavailable("No node of the cluster answered the renewal.", outcome=Outcome.UNKNOWN)
        return answers

    async def _posted(self, renewals: Sequence[Renewal], groups: dict[int, list[int]], until: float) -> list[Renewals]:
        """The renewals on their way, by node; those that failed before come last, since they may have to be dialled."""
        parts: dict[Node, Renewals] = {}
        for slot, places in groups.items():
            node = await self._owner(slot, until)
            part = parts.setdefault(node, Renewals(node))
            part.add([(at, renewals[at]) for at in places])
        sent = []
        for part in sorted(parts.values(), key=lambda part: part.node.failed):
            try:
                await part.post(until)
                sent.append(part)
            except StoreUnavailable:
                self._wrong = part.node.failed = True
        return sent

    async def _renew_again(self, lines: Sequence[Renewal], until: float) -> Sequence[bool | None]:
        """One group whose script was refused: the script was unknown, or the slot is elsewhere."""
        try:
            return await self._routed(lines[0].name, until, lambda node, before: node.store.renew(lines, until, before))
        except LockError:
            return [None] * len(lines)

    # The rest.

    @property
    def capabilities(self) -> Capabilities:
        events = any(node.store.capabilities.change_events for node in tuple(self._nodes.values()))
        return self._capabilities._replace(change_events=events)

    def on_change(self, callback: Callable[[str | None], None]) -> None:
        self._tell = callback
        for node in tuple(self._nodes.values()):
            node.store.on_change(callback)

    def poll_events(self) -> None:
        for node in tuple(self._nodes.values()):
            node.store.poll_events()

    async def facts(self, until: float) -> Facts:
        """Those of one master, with the fewest replicas that any has."""
        await self._look(until)
        masters = [self._node(address) for address in dict.fromkeys(self._owners.values())]
        found: list[Facts] = [await node.store.facts(until) for node in masters]
        known = [facts.replicas for facts in found if facts.replicas is not None]
        return found[0]._replace(replicas=min(known) if len(known) == len(found) else None)

    def disconnect(self) -> None:
        """Close the connections; the next request dials anew."""
        for node in tuple(self._nodes.values()):
            node.store.disconnect()

    async def cancel_waits(self) -> None:
        """Who waits is told that this is being closed, and gives back its place over the wire."""
        for node in tuple(self._nodes.values()):
            await node.inbox.close()

    async def close(self) -> None:
        self._closed = True
        await self.cancel_waits()
        for node in tuple(self._nodes.values()):
            await node.wire.close()

    def reset(self, *, forked: bool) -> None:
        for node in self._nodes.values():
            node.store.reset(forked=forked)
        self._start()


def _no_cluster(text: str) -> StoreError:
    if "cluster support disabled" in text:
        from lockfast.errors import StoreProtocolError

        return StoreProtocolError(
            "This server is no part of a cluster, so nothing was sent. Connect with redis:// instead of redis+cluster://."
        )
    return error_of(text, "(while asking for the slots of the cluster)")
