"""What operators see of a quorum: the views of its nodes, made one.

Rules kept here: a lock is held by whoever holds a majority, and by nobody else; what only a minority says is a
contender's vote or a leftover.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from lockfast.core.quorum.nodes import Node, Nodes
from lockfast.errors import QuorumNotReached, StoreError
from lockfast.facts import Facts, Topology
from lockfast.values import LockInfo, Page, clean


async def _views(
    nodes: Nodes, work: Callable[[Node], Coroutine[Any, Any, Any]], until: float
) -> tuple[dict[int, Any], dict[int, StoreError]]:
    """What each node says; a majority of them at least."""
    among = await nodes.reach(until)
    views: dict[int, Any] = {}
    errors: dict[int, StoreError] = {}

    def tell(node: Node, outcome: Any) -> bool:
        if isinstance(outcome, StoreError):
            errors[node.number] = outcome
        else:
            views[node.number] = outcome
        return False

    await nodes.request(among, work, tell)
    if len(views) < nodes.majority:
        raise nodes.not_reached({number: clean(str(error)) for number, error in errors.items()}, sent=True)
    return views, errors


async def inspect(nodes: Nodes, name: str, limit: float, until: float) -> LockInfo:
    views, _ = await _views(nodes, lambda node: node.store.inspect(name, limit), until)
    return merged(name, list(views.values()), nodes.majority)


def merged(name: str, views: list[LockInfo], needed: int) -> LockInfo:
    """One view of several.

    >>> merged("x", [LockInfo("x", "a", ttl_left=2.0), LockInfo("x", "a", ttl_left=1.0), LockInfo("x", "b")], 2).holder
    'a'
    """
    longest = max(views, key=lambda view: view.waiting)
    fences = sorted((view.fence for view in views if view.fence is not None), reverse=True)
    fence = fences[min(needed, len(fences)) - 1] if fences else None  # what a majority has reached
    holders = Counter(view.holder for view in views if view.holder is not None)
    holder = next((holder for holder, count in holders.items() if count >= needed), None)
    free = LockInfo(name, fence=fence, waiters=longest.waiters, waiting=longest.waiting)
    if holder is None:
        return free
    theirs = sorted((view for view in views if view.holder == holder), key=lambda view: -(view.ttl_left or 1e18))
    kept = theirs[needed - 1]  # for so long a majority has it
    since = max((view.held_for for view in theirs if view.held_for is not None), default=None)
    return free._replace(holder=holder, owner=kept.owner, held_for=since, ttl_left=kept.ttl_left)


async def listing(nodes: Nodes, pattern: str, cursor: str, limit: float, until: float) -> Page:
    """From one node after another, as each sees it, until so many that no majority is without them: a look at
    thousands of locks is no place to ask every node about each. So one of these nodes has the fence of the last grant
    at least; a node may be ahead of it, as what it gave was not needed for the majority. `inspect` tells exactly."""
    among = await nodes.reach(until)
    number, _, inner = cursor.partition(":")
    at = int(number or 0)
    node = among[min(at, len(among) - 1)]
    page: Page = await nodes.one(node.store.listing(pattern, inner, limit))
    if page.cursor:
        return page._replace(cursor=f"{at}:{page.cursor}")
    more = at + 1 < len(among) - nodes.majority + 1 + (len(nodes.all) - len(among))
    return page._replace(cursor=f"{at + 1}:" if more and at + 1 < len(among) else "")


async def force_release(nodes: Nodes, name: str, holder: str, limit: float, until: float) -> bool:
    views, _ = await _views(nodes, lambda node: node.store.force_release(name, holder, limit), until)
    return sum(map(bool, views.values())) >= nodes.majority


async def facts(nodes: Nodes, now: float, limit: float, until: float) -> Facts:
    """The facts of all; a node that does not answer is a fact too."""
    found: dict[int, Facts] = {}

    def tell(node: Node, outcome: Any) -> bool:
        if isinstance(outcome, Facts):
            found[node.number] = outcome
        return False

    try:
        among = await nodes.reach(until)
    except QuorumNotReached:
        among = nodes.ready(now)
    await nodes.request(among, lambda node: node.store.facts(limit), tell)
    views = tuple(found.get(node.number) or Facts("server", silent=clean(node.reason)) for node in nodes.all)
    return Facts("quorum", topology=Topology.QUORUM, nodes=views, queue=False, sits_out=nodes.sits_out)
