"""Keeping leases: renewed by a majority, mended where a minority has lost them.

Rules kept here: a lease that a majority no longer has is removed from the rest too; one that a majority has is put
back on nodes that have forgotten it, so that others may fail later; and a release that crosses this on its way wins.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lockfast.core.quorum.ballot import Ballot
from lockfast.core.quorum.nodes import PATIENCE, Node
from lockfast.errors import StoreError
from lockfast.values import Renewal

if TYPE_CHECKING:
    from lockfast.core.quorum.store import QuorumStore

log = logging.getLogger("lockfast")

REMOVE_WITHIN = 1.0


async def renew(store: QuorumStore, renewals: Sequence[Renewal], until: float) -> list[bool | None]:
    """For each line what a majority says; None where too few have said anything."""
    nodes = store.nodes
    among = await nodes.reach(until)
    ballot = Ballot(renewals, len(nodes.all))
    limit = store.limit(until)
    await nodes.request(among, lambda node: node.store.renew(renewals, limit), ballot.tell)
    if ballot.answered < nodes.majority:
        raise ballot.failure(nodes)
    lost, forgotten = ballot.lost(), ballot.forgotten()
    if lost or forgotten:
        store.runtime.spawn(lambda: _mend(store, lost, forgotten), "mend")
    return ballot.answers()


async def _mend(store: QuorumStore, lost: Sequence[Renewal], forgotten: Sequence[tuple[int, Renewal]]) -> None:
    try:
        for line in lost:
            trace = store.traces.pop(line.holder, None)
            within = store.runtime.now() + REMOVE_WITHIN
            await store.give_back(line.name, line.holder, within, trace, thorough=True)
        for number, line in forgotten:
            await _put_back(store, store.nodes.all[number], line)
    except StoreError as error:
        log.debug("A node of the quorum could not be mended: %s", error)


async def _put_back(store: QuorumStore, node: Node, line: Renewal) -> None:
    trace = store.traces.get(line.holder)
    if trace is None or not trace.fence or not node.store.capabilities.reassert:
        return
    limit = store.runtime.now() + PATIENCE
    await store.nodes.one(node.store.reassert(trace.claim._replace(ttl=line.ttl), trace.fence, limit))
    if line.holder not in store.traces:
        await store.nodes.one(node.store.release(line.name, line.holder, limit))
