"""What one who waits for a majority is told of the queues of single nodes."""

from types import SimpleNamespace
from typing import Any

from lockfast.core.quorum.mailbox import QuorumMailbox
from lockfast.core.quorum.votes import Votes
from lockfast.values import FirstNotification, Queued

NODES = 5
MAJORITY = 3


def waiting(positions: list[int], lefts: list[float]) -> tuple[QuorumMailbox, Votes]:
    members = SimpleNamespace(all=[SimpleNamespace(number=number) for number in range(NODES)], majority=MAJORITY)
    store: Any = SimpleNamespace(members=members)
    votes = Votes(0.0, attempt=5)
    for node, position, left in zip(members.all, positions, lefts, strict=True):
        votes.count(node, Queued(7, position, left))
    return QuorumMailbox(store, "holder"), votes


def hear(box: QuorumMailbox, votes: Votes, number: int, left: float, attempt: int = 5) -> FirstNotification | None:
    box._received.append((number, FirstNotification(attempt, left)))
    return box._count_received(votes)


def test_first_is_who_is_first_on_a_majority_and_it_is_told_the_ttl_that_counts_there() -> None:
    box, votes = waiting([2] * NODES, [30.0] * NODES)
    assert hear(box, votes, 0, 10.0) is None
    assert hear(box, votes, 3, 9.0) is None
    assert hear(box, votes, 1, 8.0) == FirstNotification(5, 10.0)
    assert hear(box, votes, 2, 8.0) == FirstNotification(5, 9.0)  # what comes later makes it more exact


def test_nodes_where_it_was_the_first_all_along_count() -> None:
    box, votes = waiting([0, 0, 1, 1, 1], [10.0, 9.0, 30.0, 30.0, 30.0])
    assert hear(box, votes, 4, 8.0) == FirstNotification(5, 10.0)


def test_received_of_an_earlier_turn_say_nothing() -> None:
    box, votes = waiting([0, 0, 1, 1, 1], [10.0, 9.0, 30.0, 30.0, 30.0])
    assert hear(box, votes, 4, 8.0, attempt=4) is None
    assert votes.denied[4] == 30.0
