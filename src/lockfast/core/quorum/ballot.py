"""Renewing many leases at once: each is voted on by itself.

majority says ours                    prolonged; put back on the nodes that have forgotten it
so many say not ours that none can    lost; what is left of it is removed
neither, as nodes are missing         asked about again
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockfast.core.quorum.nodes import Node, Nodes
from lockfast.core.quorum.round import Round
from lockfast.core.quorum.rules import majority
from lockfast.errors import StoreError
from lockfast.values import Renewal


class Ballot:
    """The votes on each line of a batch."""

    def __init__(self, renewals: Sequence[Renewal], count: int) -> None:
        self._renewals = renewals
        self._count = count
        self._yes = [0] * len(renewals)
        self._no: list[list[int]] = [[] for _ in renewals]
        self._round = Round(0.0)
        self.answered = 0

    def tell(self, node: Node, outcome: Any) -> bool:
        """Count what a node said; True when every line has its majority."""
        if isinstance(outcome, StoreError):
            self._round.note(node, outcome)
            return False
        self.answered += 1
        for number, renewed in enumerate(outcome):
            if renewed:
                self._yes[number] += 1
            elif renewed is False:
                self._no[number].append(node.number)
        return min(self._yes) >= majority(self._count)

    def answers(self) -> list[bool | None]:
        return [self._answer(number) for number in range(len(self._renewals))]

    def _answer(self, number: int) -> bool | None:
        if self._yes[number] >= majority(self._count):
            return True
        return False if self._count - len(self._no[number]) < majority(self._count) else None

    def lost(self) -> list[Renewal]:
        return [line for number, line in enumerate(self._renewals) if self._answer(number) is False]

    def forgotten(self) -> list[tuple[int, Renewal]]:
        """The nodes that lack a lease which is kept, and which lease that is."""
        kept = [number for number, line in enumerate(self._renewals) if self._answer(number) and not line.final]
        return [(node, self._renewals[number]) for number in kept for node in self._no[number]]

    def failure(self, nodes: Nodes) -> StoreError:
        return self._round.failure(nodes)
