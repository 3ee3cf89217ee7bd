"""What one who waits for a majority is told of the queues of single nodes."""

from types import SimpleNamespace
from typing import Any

from lockfast.core.quorum.mailbox import QuorumMailbox
from lockfast.core.quorum.round import Round
from lockfast.values import FirstNotification, Queued

NODES = 5
MAJORITY = 3


def waiting(positions: list[int], lefts: list[float]) -> tuple[QuorumMailbox, Round]:
    nodes = SimpleNamespace(all=[SimpleNamespace(number=number) for number in range(NODES)], majority=MAJORITY)
    store: Any = SimpleNamespace(nodes=nodes)
    round_ = Round(0.0, attempt=5)
    for node, position, left in zip(nodes.all, positions, lefts, strict=True):
        round_.note(node, Queued(7, position, left))
    return QuorumMailbox(store, "holder"), round_


def hear(box: QuorumMailbox, round_: Round, number: int, left: float, attempt: int = 5) -> FirstNotification | None:
    box._news.append((number, FirstNotification(attempt, left)))
    return box._take_news(round_)


def test_first_is_who_is_first_on_a_majority_and_it_is_told_the_ttl_that_counts_there() -> None:
    box, round_ = waiting([2] * NODES, [30.0] * NODES)
    assert hear(box, round_, 0, 10.0) is None
    assert hear(box, round_, 3, 9.0) is None
    assert hear(box, round_, 1, 8.0) == FirstNotification(5, 10.0)
    assert hear(box, round_, 2, 8.0) == FirstNotification(5, 9.0)  # what comes later makes it more exact


def test_nodes_where_it_was_the_first_all_along_count() -> None:
    box, round_ = waiting([0, 0, 1, 1, 1], [10.0, 9.0, 30.0, 30.0, 30.0])
    assert hear(box, round_, 4, 8.0) == FirstNotification(5, 10.0)


def test_news_of_an_earlier_turn_say_nothing() -> None:
    box, round_ = waiting([0, 0, 1, 1, 1], [10.0, 9.0, 30.0, 30.0, 30.0])
    assert hear(box, round_, 4, 8.0, attempt=4) is None
    assert round_.lefts[4] == 30.0
