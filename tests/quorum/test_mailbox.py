"""Notifications of single members, combined for a waiter in the queues of all."""

from types import SimpleNamespace
from typing import Any

from lockfast.core.quorum.members import Votes
from lockfast.core.quorum.store import QuorumMailbox
from lockfast.values import FirstNotification, Queued

MEMBERS = 5
MAJORITY = 3


def waiting(positions: list[int], ttls: list[float]) -> tuple[QuorumMailbox, Votes]:
    members = SimpleNamespace(all=[SimpleNamespace(number=number) for number in range(MEMBERS)], majority=MAJORITY)
    store: Any = SimpleNamespace(members=members)
    votes = Votes(0.0, attempt=5)
    for member, position, ttl in zip(members.all, positions, ttls, strict=True):
        votes.count(member, Queued(7, position, ttl))
    return QuorumMailbox(store, "holder"), votes


def receive(box: QuorumMailbox, votes: Votes, number: int, ttl: float, attempt: int = 5) -> FirstNotification | None:
    box._received.append((number, FirstNotification(attempt, ttl)))
    return box._count_received(votes)


def test_a_waiter_is_first_when_it_is_first_on_a_majority() -> None:
    box, votes = waiting([2] * MEMBERS, [30.0] * MEMBERS)
    assert receive(box, votes, 0, 10.0) is None
    assert receive(box, votes, 3, 9.0) is None
    assert receive(box, votes, 1, 8.0) == FirstNotification(5, 10.0)
    assert receive(box, votes, 2, 8.0) == FirstNotification(5, 9.0)  # later notifications make the ttl more exact


def test_members_where_the_waiter_was_first_from_the_start_count() -> None:
    box, votes = waiting([0, 0, 1, 1, 1], [10.0, 9.0, 30.0, 30.0, 30.0])
    assert receive(box, votes, 4, 8.0) == FirstNotification(5, 10.0)


def test_notifications_of_an_earlier_attempt_are_ignored() -> None:
    box, votes = waiting([0, 0, 1, 1, 1], [10.0, 9.0, 30.0, 30.0, 30.0])
    assert receive(box, votes, 4, 8.0, attempt=4) is None
    assert votes.denied[4] == 30.0
