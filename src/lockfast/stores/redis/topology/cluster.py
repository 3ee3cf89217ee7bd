"""The store on a cluster: requests go to the node that owns the slot of the lock.

Every node has its own store, wire and inbox, connected on first use.

Rules:

- Redirections (MOVED, ASK) and lost nodes are handled within the caller's time. Neither changes a lock: the request
  was rejected, or is repeated, which is idempotent.
- The slot map is fetched again when it proved wrong or a node failed, from the first node that answers, by one caller
  at a time and at most every `REFRESH_INTERVAL` seconds.
- A mailbox moves to the lock's node before the request that enqueues: only there do scripts count the receivers of a
  notification, and a grant with no receiver goes to the next waiter. So no claim is enqueued at an importing node.
- Renewals are sent to all nodes before the first answer is awaited, so a dead node does not delay the others.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, ClassVar, TypeVar

from lockfast.errors import LockError, Outcome, StoreError, StoreProtocolError, StoreUnavailable, closed_error, shown
from lockfast.facts import Facts
from lockfast.ports import Capabilities, Mailbox, Runtime, Store
from lockfast.stores.redis.keys import keys_of
from lockfast.stores.redis.lua import scripts
from lockfast.stores.redis.protocol.error_replies import Redirected, UnknownCommand, error_of
from lockfast.stores.redis.protocol.resp import ReplyError, pack
from lockfast.stores.redis.store import RedisStore
from lockfast.stores.redis.topology.replication import AcknowledgedStore
from lockfast.stores.redis.transport.connect import InboxMailbox
from lockfast.stores.redis.transport.tasks import TaskInbox, TaskWire
from lockfast.stores.redis.transport.threads import ThreadInbox, ThreadWire
from lockfast.stores.redis.urls import Address
from lockfast.values import Answer, Claim, Enqueue, Granted, LockInfo, Notification, Page, Renewal

T = TypeVar("T")

CLUSTER_SLOTS = pack(b"CLUSTER", b"SLOTS")
ASKING = pack(b"ASKING")
REFRESH_INTERVAL = 0.1  # seconds
REFRESH_TIMEOUT = 0.5  # seconds for one node to send the slot map
FIRST_MAP_POLL = 0.005  # seconds between two checks whether another caller has fetched the first map
MAX_REDIRECTS = 5


class _Migrating(StoreUnavailable):
    """The slot is moving: the node answered, so it has not failed."""


def slot_owners(reply: Any, asked_host: str) -> dict[int, Address]:
    """The master of each slot, from a reply to CLUSTER SLOTS. A node may omit its own host: then it is `asked_host`.

    >>> slot_owners([[0, 1, [b"10.0.0.1", 6379, b"id"]], [2, 2, [b"", 6380, b"id"], [b"x", 1, b"replica"]]], "seed")
    {0: ('10.0.0.1', 6379), 1: ('10.0.0.1', 6379), 2: ('seed', 6380)}
    """
    owners: dict[int, Address] = {}
    for first, last, (host, port, *_), *_ in reply:
        name = host.decode("utf-8", "replace") if isinstance(host, bytes) else ""
        address = (name if name not in ("", "?") else asked_host, port)
        owners.update(dict.fromkeys(range(first, last + 1), address))
    return owners


@dataclass(eq=False, slots=True)
class ClusterNode:
    """One node. `failed`: its last request got no answer. `importing`: see `asking`."""

    store: RedisStore
    wire: TaskWire | ThreadWire
    inbox: TaskInbox | ThreadInbox
    host: str
    importing: bool = False
    failed: bool = False

    def asking(self) -> ClusterNode:
        """The same node for one request about a slot that it is still importing."""
        return replace(self, store=self.store.with_prefix(ASKING), importing=True)


_failed = attrgetter("failed")


@dataclass(eq=False, slots=True)
class ClusterMailbox:
    """`ports.Mailbox`. `_box` is the mailbox at the node of the last request.

    `ClusterStore.acquire` moves it with `open_at` before each request that enqueues, and sends the address there."""

    address: ClassVar = ""

    _boxes: dict[str, ClusterMailbox]
    _holder: str
    _node: ClusterNode | None = None
    _box: InboxMailbox[Any] | None = None

    async def open(self, until: float) -> None:
        self._boxes[self._holder] = self

    async def open_at(self, node: ClusterNode, slot: int, until: float) -> str:
        box = self._box
        if box is None or self._node is not node or not box.connected:
            if box is not None:
                box.close()
            box = node.inbox.mailbox(self._holder, slot)
            self._node, self._box = node, box
            try:
                await box.open(until)
            except UnknownCommand:
                # Redis before 7.0 has no sharded channels: use an ordinary one, which reaches every node.
                node.inbox.sharded = False
                node.inbox.drop()
                await box.open(until)
        return box.address

    async def wait(self, until: float) -> Notification | None:
        """None also if the connection broke or the slot moved: the next request goes to the new node."""
        return None if self._box is None else await self._box.receive(until)

    def close(self) -> None:
        self._boxes.pop(self._holder, None)
        if self._box is not None:
            self._box.close()


class ClusterStore(Store):
    """`ports.Store` on a cluster.

    Invariants: `_owners` is the last slot map, and `_stale` is set as soon as it may have changed. One caller at a
    time fetches it (`_refreshing`)."""

    inbox_open = False  # the inbox of a waiter depends on the node of its lock

    def __init__(self, seeds: Sequence[Address], new_node: Callable[[str, int], ClusterNode], runtime: Runtime) -> None:
        self._seeds = tuple(seeds)
        self._new_node = new_node
        self._runtime = runtime
        self._nodes: dict[Address, ClusterNode] = {}
        self._on_change: Callable[[str | None], None] | None = None
        self._closed = False
        sample = self._node(self._seeds[0]).store
        self._capabilities = sample.capabilities._replace(fence_blocks=False, values=False)
        self._start()

    def _start(self) -> None:
        self._mutex = self._runtime.mutex()
        self._owners: dict[int, Address] = {}
        self._boxes: dict[str, ClusterMailbox] = {}
        self._stale = True
        self._refreshing = False
        self._refreshed_at = -math.inf

    def _node(self, address: Address) -> ClusterNode:
        node = self._nodes.get(address)
        if node is None:
            new = self._new_node(*address)
            if self._on_change is not None:
                new.store.on_change(self._on_change)
            node = self._nodes.setdefault(address, new)
        return node

    def _all_nodes(self) -> tuple[ClusterNode, ...]:
        return tuple(self._nodes.values())

    # The slot map

    async def _owner(self, slot: int, until: float) -> ClusterNode:
        if self._stale or slot not in self._owners:
            await self._refresh(until)
        address = self._owners.get(slot)
        if address is None:
            raise StoreUnavailable(
                f"No node of the cluster serves slot {slot}, so nothing was sent. Check whether a failover is in "
                "progress, and try again."
            )
        return self._node(address)

    async def _refresh(self, until: float) -> None:
        """Fetch the slot map, unless another caller is fetching it or just has. If there is no map yet, wait."""
        while True:
            with self._mutex:
                mine = not self._refreshing and self._runtime.now() - self._refreshed_at >= REFRESH_INTERVAL
                self._refreshing = self._refreshing or mine
            if mine or self._owners:
                break
            if self._runtime.now() >= until:
                raise StoreUnavailable("The cluster did not send its slot map in time, so nothing was sent. Try again.")
            await self._runtime.sleep(FIRST_MAP_POLL)
        if mine:
            try:
                await self._fetch_slots(until)
            finally:
                self._refreshed_at = self._runtime.now()
                self._refreshing = False

    async def _fetch_slots(self, until: float) -> None:
        """Ask healthy owners first, then failed ones, then the seeds."""
        if self._closed:
            raise closed_error()
        owners = {self._node(address) for address in set(self._owners.values())}
        seeds = [node for node in map(self._node, self._seeds) if node not in owners]
        problem: StoreError = StoreUnavailable("No node of the cluster could be reached, so nothing was sent.")
        for node in [*sorted(owners, key=_failed), *sorted(seeds, key=_failed)]:
            try:
                reply = await node.wire.request(CLUSTER_SLOTS, min(until, self._runtime.now() + REFRESH_TIMEOUT))
            except StoreError as error:
                node.failed = True
                problem = error
                continue
            if isinstance(reply, ReplyError):
                problem = error_of(str(reply), "(while fetching the slot map of the cluster)")
                if "cluster support disabled" in str(reply):
                    problem = StoreProtocolError(
                        "This server is not part of a cluster, so nothing was sent. Connect with redis:// instead of "
                        "redis+cluster://."
                    )
                continue
            try:
                before, self._owners = self._owners, slot_owners(reply, node.host)
            except (TypeError, ValueError, IndexError, AttributeError):
                problem = StoreProtocolError("A node of the cluster sent a slot map that cannot be read. Try again.")
                continue
            self._stale = False
            for address in set(before.values()) - set(self._owners.values()):
                self._node(address).store.disconnect()  # a former master: its waiters move
            return
        if not self._owners or not isinstance(problem, StoreUnavailable):
            raise problem

    async def _routed(self, name: str, until: float, work: Callable[[ClusterNode], Awaitable[T]]) -> T:
        """Run `work(node)` at the lock's node, following redirections."""
        slot = keys_of(name).slot
        node, asking = await self._owner(slot, until), False
        for _ in range(MAX_REDIRECTS):
            try:
                result = await work(node.asking() if asking else node)
            except Redirected as redirection:
                address = redirection.host or node.host, redirection.port
                node, asking = self._node(address), redirection.ask
                if not asking:
                    self._owners[slot] = address
                    self._stale = True
            except _Migrating:
                raise
            except StoreUnavailable:
                node.failed = self._stale = True
                raise
            else:
                node.failed = False
                return result
        raise StoreUnavailable(
            f"The nodes of the cluster keep redirecting requests for the lock {shown(name)}, so nothing was changed. "
            "Its slot is migrating: try again."
        )

    # Operations

    @property
    def grace(self) -> float:
        return max(node.store.grace for node in self._all_nodes())

    def mailbox(self, holder: str) -> Mailbox:
        return ClusterMailbox(self._boxes, holder)

    async def acquire(self, claim: Claim, enqueue: Enqueue | None, until: float) -> Answer:
        async def work(node: ClusterNode) -> Answer:
            if enqueue is None:
                return await node.store.acquire(claim, None, until)
            box = self._boxes.get(claim.holder)
            if box is None:
                raise ValueError("a claim can be enqueued only while its mailbox is open")
            if node.importing:
                name = shown(claim.name)
                raise _Migrating(f"The lock {name} is moving to another node, so nothing was changed. Try again.")
            address = await box.open_at(node, keys_of(claim.name).slot, until)
            return await node.store.acquire(claim, enqueue._replace(address=address), until)

        return await self._routed(claim.name, until, work)

    async def release(self, name: str, holder: str, until: float) -> bool:
        return await self._routed(name, until, lambda node: node.store.release(name, holder, until))

    async def adopt(self, claim: Claim, old_holder: str, until: float) -> Granted | None:
        return await self._routed(claim.name, until, lambda node: node.store.adopt(claim, old_holder, until))

    async def downgrade(self, claim: Claim, until: float) -> bool:
        return await self._routed(claim.name, until, lambda node: node.store.downgrade(claim, until))

    async def acquire_all(self, claims: Sequence[Claim], until: float) -> Sequence[Granted] | None:
        if len({keys_of(claim.name).slot for claim in claims}) > 1:
            return None
        return await self._routed(claims[0].name, until, lambda node: node.store.acquire_all(claims, until))

    async def reassert(self, claim: Claim, fence: int, until: float) -> bool:
        return await self._routed(claim.name, until, lambda node: node.store.reassert(claim, fence, until))

    async def inspect(self, name: str, until: float) -> LockInfo:
        return await self._routed(name, until, lambda node: node.store.inspect(name, until))

    async def force_release(self, name: str, holder: str, until: float) -> bool:
        return await self._routed(name, until, lambda node: node.store.force_release(name, holder, until))

    async def listing(self, pattern: str, cursor: str, until: float) -> Page:
        """Pages of one master after another; the cursor is the number of the master and its own cursor."""
        await self._refresh(until)
        masters = sorted(set(self._owners.values()))
        number, _, inner = cursor.partition(" ")
        at = int(number or 0)
        if at >= len(masters):
            return Page((), "")
        store = self._node(masters[at]).store
        names, after = await store.scan(pattern, inner, until)
        by_slot: dict[int, list[str]] = {}
        for name in names:
            by_slot.setdefault(keys_of(name).slot, []).append(name)
        infos = [info for group in by_slot.values() for info in await store.infos(group, until)]
        return Page(tuple(infos), f"{at} {after}" if after else f"{at + 1} " if at + 1 < len(masters) else "")

    # Renewals: one script per slot, one exchange per node

    async def renew(self, renewals: Sequence[Renewal], until: float) -> Sequence[bool | None]:
        answers: list[bool | None] = [None] * len(renewals)
        error: StoreError | None = None
        for node, groups, posted in await self._post_renewals(renewals, until):
            try:
                replies = await node.wire.collect(posted, until)
                for numbers, place in groups:
                    group = [renewals[number] for number in numbers]
                    answered = await self._answers(node, group, replies[place], until)
                    for number, answer in zip(numbers, answered, strict=True):
                        answers[number] = answer
                node.failed = False
            except StoreError as problem:
                self._stale = node.failed = True
                error = problem
        if all(answer is None for answer in answers):
            raise error or StoreUnavailable(
                "No node of the cluster answered the renewal, so the leases may not have been extended.",
                outcome=Outcome.UNKNOWN,
            )
        return answers

    async def _post_renewals(
        self, renewals: Sequence[Renewal], until: float
    ) -> list[tuple[ClusterNode, list[tuple[list[int], int]], Any]]:
        """Send the renewals, to failed nodes last because they may need a new connection.

        Returns for each node the numbers of its renewals, grouped by slot and script, each group with the place of its
        request, and the posted requests."""
        by_slot: dict[tuple[int, bool], list[int]] = {}
        for number, renewal in enumerate(renewals):
            by_slot.setdefault((keys_of(renewal.name).slot, renewal.shared), []).append(number)
        by_node: dict[ClusterNode, list[list[int]]] = {}
        for (slot, _), numbers in by_slot.items():
            with suppress(StoreUnavailable):  # a slot without an owner must not cost the other leases their renewal
                by_node.setdefault(await self._owner(slot, until), []).append(numbers)
        sent = []
        for node in sorted(by_node, key=_failed):
            requests: list[bytes] = []
            groups = []
            for numbers in by_node[node]:
                group = [renewals[number] for number in numbers]
                requests += *node.store.tracking(group), scripts.renew_request(group)
                groups.append((numbers, len(requests) - 1))
            try:
                sent.append((node, groups, await node.wire.post(requests, until)))
            except StoreUnavailable:
                self._stale = node.failed = True
        return sent

    async def _answers(
        self, node: ClusterNode, renewals: Sequence[Renewal], reply: Any, until: float
    ) -> Sequence[bool | None]:
        """The answers for one slot. If the script was unknown to the node, or the slot moved, renew it again."""
        if isinstance(reply, list) and len(reply) == len(renewals):
            answers = [answer == 1 for answer in reply]
            if isinstance(node.store, AcknowledgedStore):
                return await node.store.acknowledged_renewals(renewals, answers, until)
            return answers
        try:
            return await self._routed(renewals[0].name, until, lambda node: node.store.renew(renewals, until))
        except LockError:
            return [None] * len(renewals)

    # All nodes

    @property
    def capabilities(self) -> Capabilities:
        events = any(node.store.capabilities.change_events for node in self._all_nodes())
        return self._capabilities._replace(change_events=events)

    def on_change(self, callback: Callable[[str | None], None]) -> None:
        self._on_change = callback
        for node in self._all_nodes():
            node.store.on_change(callback)

    def poll_events(self) -> None:
        for node in self._all_nodes():
            node.store.poll_events()

    async def facts(self, until: float) -> Facts:
        """The facts of one master, with the smallest number of replicas of any master."""
        await self._refresh(until)
        masters = [self._node(address) for address in dict.fromkeys(self._owners.values())]
        facts = [await node.store.facts(until) for node in masters]
        replicas = [one.replicas for one in facts if one.replicas is not None]
        return facts[0]._replace(replicas=min(replicas) if len(replicas) == len(facts) else None)

    def disconnect(self) -> None:
        for node in self._all_nodes():
            node.store.disconnect()

    async def cancel_waits(self) -> None:
        for node in self._all_nodes():
            await node.inbox.close()

    async def close(self) -> None:
        self._closed = True
        await self.cancel_waits()
        for node in self._all_nodes():
            await node.wire.close()

    def reset(self, *, forked: bool) -> None:
        for node in self._nodes.values():
            node.store.reset(forked=forked)
        self._start()
