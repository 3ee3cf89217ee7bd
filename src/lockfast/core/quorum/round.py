"""One round of votes: the same request to all nodes at the same time, and what came of it.

Rules kept here: a round ends as soon as a majority has granted, else when all have answered or their time is up; an
error of a node is a vote that is missing, and is remembered for who has to be told why there was no majority.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from lockfast.core.quorum import rules
from lockfast.core.quorum.nodes import Node, Nodes
from lockfast.errors import Outcome, StoreError, StoreUnavailable
from lockfast.values import Granted, Queued, Taken, clean


class Round:
    """`granted` has the fences of the nodes that are ours, `queued` our places, `lefts` the others' holders' ttls."""

    def __init__(self, sent_at: float, attempt: int = 0) -> None:
        self.sent_at = sent_at
        self.attempt = attempt
        self.granted: dict[int, int] = {}
        self.queued: dict[int, Queued] = {}
        self.lefts: dict[int, float | None] = {}
        self.errors: dict[int, StoreError] = {}

    @property
    def answered(self) -> int:
        return len(self.granted) + len(self.lefts)

    def note(self, node: Node, outcome: Any) -> None:
        number = node.number
        if isinstance(outcome, Granted):
            self.granted[number] = outcome.fence
            self.lefts.pop(number, None)
            self.queued.pop(number, None)
        elif isinstance(outcome, Queued):
            self.queued[number] = outcome
            self.lefts[number] = outcome.ttl_left
        elif isinstance(outcome, Taken):
            self.lefts[number] = outcome.ttl_left
        elif isinstance(outcome, StoreError):
            self.errors[number] = outcome

    def position(self, nodes: Nodes) -> int:
        """How many are before us on as many nodes as we lack."""
        places = sorted(enqueue.position for enqueue in self.queued.values())
        missing = max(1, nodes.majority - len(self.granted))
        return places[min(missing, len(places)) - 1] if places else 0

    def time_left(self, nodes: Nodes) -> float | None:
        return rules.time_to_majority(list(self.lefts.values()), len(self.granted), len(nodes.all))

    def said(self) -> dict[int, str]:
        """Each node's vote in words."""
        words = {number: clean(str(error)) for number, error in self.errors.items()}
        words |= dict.fromkeys(self.lefts, "taken by another")
        return words | dict.fromkeys(self.granted, "granted")

    def failure(self, nodes: Nodes) -> StoreError:
        """Why this round came to nothing: what most nodes refuse for good, no other try can cure."""
        final = [error for error in self.errors.values() if not isinstance(error, StoreUnavailable)]
        if len(final) > len(nodes.all) - nodes.majority:
            return final[0]
        sent = bool(self.granted or self.lefts) or any(
            isinstance(error, StoreUnavailable) and error.outcome is Outcome.UNKNOWN for error in self.errors.values()
        )
        return nodes.not_reached(self.said(), sent=sent)


async def vote(
    nodes: Nodes,
    among: Sequence[Node],
    round_: Round,
    work: Callable[[Node], Coroutine[Any, Any, Any]],
    before: int = 0,
) -> Round:
    """`round_` with the votes of `among`. Where the same request got a fence `before`, a majority that still has it is
    waited for: the others may have given more at the time."""

    def tell(node: Node, outcome: Any) -> bool:
        round_.note(node, outcome)
        if len(round_.granted) < nodes.majority:
            return False
        return not before or sum(fence == before for fence in round_.granted.values()) >= nodes.majority

    await nodes.request(among, work, tell)
    return round_
