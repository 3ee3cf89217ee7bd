"""The nodes of a quorum: which can be asked now, and what becomes of those that cannot.

Rules kept here:

- A node that is not connected, or has owed an answer for `PATIENCE`, is not asked: nobody waits for it. One probe per
  such node goes on in the background until it answers again.
- Before a node counts (again), it has told who it is: a server that was given twice is refused, and with `sits_out` one
  that restarted and may have forgotten its grants does not count for so long.
- What was to be given back on a node that was away is given back before it counts again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from lockfast.core import backoff
from lockfast.core.quorum.rules import Floor, majority
from lockfast.errors import (
    ConfigurationError,
    LockError,
    Outcome,
    QuorumNotReached,
    StoreError,
    StoreUnavailable,
    closed_error,
)
from lockfast.facts import Facts, Persistence
from lockfast.ports import NodeStore, Runtime, Waker
from lockfast.values import clean

log = logging.getLogger("lockfast")

PATIENCE = 0.25
"""Seconds that a node may take to answer before it is left aside."""
MOST_OWED = 10_000
PROBE = 1.0
"""Seconds that a probe waits for an answer."""
LOOK_AGAIN = 0.01
"""Seconds between two looks at nodes that owe answers, while there is no majority of others."""
STRAGGLERS = 0.25
"""Seconds that the first request waits for the last nodes to be dialled, once a majority is there."""


class Node:
    """One server. `admitted` is true while it may be asked as far as the last probe knows; `tried` after the first."""

    def __init__(self, number: int, store: NodeStore, address: str) -> None:
        self.number = number
        self.store = store
        self.address = address
        self.reset()

    def reset(self) -> None:
        self.admitted = False
        self.tried = False
        self.probing = False
        self.wants_inbox = False
        self.counts_from = 0.0
        self.facts: Facts | None = None
        self.reason = "it has not been dialled yet"
        self.owed: list[tuple[str, str, float]] = []

    def can_be_asked(self, now: float) -> bool:
        store = self.store
        if not self.admitted or not store.connected:
            return False
        silent_since = store.silent_since
        return (silent_since is None or now - silent_since < PATIENCE) and now >= self.counts_from

    def owe(self, name: str, holder: str, gone_at: float) -> None:
        """Remember to give this back, until the ttl has done it anyway."""
        if len(self.owed) < MOST_OWED:
            self.owed.append((name, holder, gone_at))


class Nodes:
    """All nodes of a quorum. `refusal` is set when they can never be one."""

    def __init__(
        self,
        stores: Sequence[tuple[NodeStore, str]],
        runtime: Runtime,
        floor: Floor,
        sits_out: float,
    ) -> None:
        self.all = [Node(number, store, address) for number, (store, address) in enumerate(stores)]
        self.majority = majority(len(self.all))
        self.sits_out = sits_out
        self._floor = floor
        self._runtime = runtime
        self.gather = runtime.gather
        self._mutex = runtime.mutex()
        self._secret = runtime.new_holder_id()
        self._wakers: set[Waker] = set()
        self._probe_wakers: set[Waker] = set()
        self.refusal: ConfigurationError | None = None
        self.closed = False

    def reset(self) -> None:
        self._mutex = self._runtime.mutex()
        self._wakers.clear()
        self._probe_wakers.clear()
        for node in self.all:
            node.reset()

    def close(self) -> None:
        self.closed = True
        self._wake(self._wakers | self._probe_wakers)

    def _wake(self, wakers: set[Waker]) -> None:
        for waker in tuple(wakers):
            waker.wake()

    def ready(self, now: float) -> list[Node]:
        """The nodes that can be asked; the others are probed."""
        found = []
        for node in self.all:
            if node.can_be_asked(now):
                found.append(node)
            elif not node.probing and now >= node.counts_from:
                self.probe(node)
        return found

    async def reach(self, until: float) -> list[Node]:
        """The nodes that can be asked, at least a majority of them; waits a little for those that are being dialled."""
        nodes = self.ready(now := self._runtime.now())
        if len(nodes) < self.majority or (len(nodes) < len(self.all) and not self._all_tried()):
            nodes = await self._gathered(min(until, now + PROBE))
        if self.closed:
            raise closed_error()
        if self.refusal is not None:
            raise self.refusal
        if len(nodes) < self.majority:
            raise self.not_reached({})
        return nodes

    def _all_tried(self) -> bool:
        return all(node.tried for node in self.all)

    async def _gathered(self, until: float) -> list[Node]:
        """Wait for a majority, and a little for nodes that were not tried yet. Nodes may seem silent because it was we
        who were stopped: then what they said is read meanwhile."""
        waker = self._runtime.waker()
        self._wakers.add(waker)
        try:
            while not self.closed and self.refusal is None:
                nodes = self.ready(now := self._runtime.now())
                if now >= until or (len(nodes) >= self.majority and self._all_tried()):
                    break
                if len(nodes) >= self.majority:
                    until = min(until, now + STRAGGLERS)
                await waker.wait(min(until, now + LOOK_AGAIN))
            return self.ready(self._runtime.now())
        finally:
            self._wakers.discard(waker)

    async def listen(self, until: float) -> None:
        """See to it that the nodes' inboxes are dialled; a majority of them at least."""
        waker = self._runtime.waker()
        self._wakers.add(waker)
        asked: set[Node] = set()
        try:
            await self.reach(until)
            while True:
                now = self._runtime.now()
                deaf = [node for node in self.ready(now) if not node.store.inbox_open]
                for node in set(deaf) - asked:  # once: one that refuses us an inbox will go on doing so
                    node.wants_inbox = True
                    self.probe(node)
                asked.update(deaf)
                deaf = [node for node in deaf if node.probing]
                heard = sum(node.store.inbox_open for node in self.all)
                if not deaf or now >= until or self.closed:
                    break
                if heard >= self.majority:
                    until = min(until, now + STRAGGLERS)
                await waker.wait(until)
        finally:
            self._wakers.discard(waker)
        if heard < self.majority:
            raise StoreUnavailable("Too few nodes of the quorum could be listened to, so nothing was sent.")

    def probe(self, node: Node) -> None:
        with self._mutex:
            if node.probing or self.closed:
                return
            node.probing = True
        if not self._runtime.spawn(lambda: self._probe(node), "probe"):
            node.probing = False

    async def _probe(self, node: Node) -> None:
        failures = 0
        waker = self._runtime.waker()
        self._probe_wakers.add(waker)
        try:
            while not self.closed:
                try:
                    await self.one(self._admit(node))
                    node.tried = True
                    return
                except StoreError as error:
                    failures += 1
                    node.tried, node.reason = True, clean(str(error))
                    node.admitted = node.admitted and node.store.connected
                    if node.can_be_asked(self._runtime.now()):
                        return  # it was only the inbox
                except ConfigurationError:
                    return  # closed meanwhile
                self._wake(self._wakers)
                await waker.wait(self._runtime.now() + 4 * backoff.pause(failures, self._runtime.random()))
        finally:
            self._probe_wakers.discard(waker)
            node.probing = False
            self._wake(self._wakers)

    async def _admit(self, node: Node) -> None:
        """Dial the node if need be, hear who it is, give back what is owed, and let it count."""
        now = self._runtime.now
        if await node.store.connect(now() + PROBE):
            node.admitted = False
        who = node.facts = await node.store.identity(now() + PROBE)
        self._floor.see(now(), who.clock)
        if who.identity is None:
            await self._mark(node)
        else:
            self._refuse_twins(node, who.identity)
        while node.owed:
            name, holder, gone_at = node.owed[-1]
            if now() < gone_at:
                await node.store.release(name, holder, now() + PROBE)
            node.owed.pop()
        if not node.admitted:
            node.counts_from = now() + self._absence(await node.store.facts(now() + PROBE) if self.sits_out else who)
            node.admitted = True
        if node.wants_inbox:
            node.wants_inbox = False
            await node.store.connect_inbox(now() + PROBE)

    def _refuse_twins(self, node: Node, identity: str) -> None:
        for other in self.all:
            if other is not node and other.facts is not None and other.facts.identity == identity:
                self._refuse(node, other)

    async def _mark(self, node: Node) -> None:
        """A server that may not tell who it is, is recognised by a mark that we leave for some seconds."""
        found = await node.store.probe(self._secret, node.number, self._runtime.now() + PROBE)
        if found is None:
            log.warning("%s does not say which server it is: see to it that it is in the list once.", node.address)
        elif found != node.number:
            self._refuse(node, self.all[found])

    def _refuse(self, node: Node, other: Node) -> None:
        self.refusal = ConfigurationError(
            f"{other.address} and {node.address} are one and the same server, so it would vote twice. Nothing was "
            "locked. A quorum needs servers that fail independently: name each once."
        )

    def _absence(self, facts: Facts) -> float:
        """Seconds for which a node must not count, because it may have forgotten what it granted."""
        if not self.sits_out or facts.persistence is Persistence.LOG_ALWAYS:
            return 0.0
        # Servers count whole seconds of the clock on the wall: one that has just started may tell of one already.
        up_for = 0.0 if facts.uptime is None else max(0.0, facts.uptime - 1.0)
        absence = max(0.0, self.sits_out - up_for)
        if absence:
            log.warning("A node of the quorum has restarted and does not count for %.0f s.", absence)
        return absence

    async def one(self, work: Coroutine[Any, Any, Any]) -> Any:
        """A single operation on a node."""
        outcomes: list[Any] = []

        def tell(number: int, outcome: Any) -> bool:
            outcomes.append(outcome)
            return True

        await self.gather([work], tell)
        if isinstance(outcomes[0], LockError):
            raise outcomes[0]
        return outcomes[0]

    async def request(
        self, nodes: Sequence[Node], work: Callable[[Node], Coroutine[Any, Any, Any]], tell: Callable[[Node, Any], bool]
    ) -> None:
        """`work` on all `nodes` at the same time, until `tell` says that it is enough."""
        await self.gather([work(node) for node in nodes], lambda number, outcome: tell(nodes[number], outcome))

    def not_reached(self, said: dict[int, str], *, sent: bool = False) -> QuorumNotReached:
        """Why there is no majority, with what each node said."""
        now = self._runtime.now()
        votes = tuple((node.address, said.get(node.number) or self._absent(node, now)) for node in self.all)
        text = "; ".join(f"{address}: {vote}" for address, vote in votes)
        return QuorumNotReached(
            f"No majority of the quorum's {len(self.all)} nodes could be had ({self.majority} are needed), so nothing "
            f"is locked by this. See to the nodes that do not answer, then try again. {text}",
            votes=votes,
            outcome=Outcome.UNKNOWN if sent else Outcome.NOT_DONE,
        )

    def _absent(self, node: Node, now: float) -> str:
        if node.admitted and node.store.connected:
            return "restarted, does not count yet" if now < node.counts_from else "no answer in time"
        return node.reason
