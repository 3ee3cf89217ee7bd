"""Count the members' replies: `Votes` for one claim, `RenewalVotes` for a batch of renewals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockfast.core.quorum import rules
from lockfast.core.quorum.members import Member, Members
from lockfast.errors import Outcome, StoreError, StoreUnavailable
from lockfast.values import Granted, Queued, Renewal, Taken, clean


def failure(members: Members, errors: dict[int, StoreError], replies: dict[int, str]) -> StoreError:
    """Return the error of a request that got no majority. An error that a majority repeats for good is returned as is;
    `replies` says what the other members answered."""
    final = [error for error in errors.values() if not isinstance(error, StoreUnavailable)]
    if len(final) > len(members.all) - members.majority:
        return final[0]
    unknown = any(isinstance(error, StoreUnavailable) and error.outcome is Outcome.UNKNOWN for error in errors.values())
    reasons = {number: clean(str(error)) for number, error in errors.items()}
    return members.not_reached(reasons | replies, sent=bool(replies) or unknown)


class Votes:
    """The replies to one claim, by member number.

    `granted` has the fences of the members that granted it, `denied` the ttls of the other holders, and `queued` the
    tickets on those members of `denied` that enqueued it.
    """

    def __init__(self, sent_at: float, attempt: int = 0) -> None:
        self.sent_at = sent_at
        self.attempt = attempt
        self.granted: dict[int, int] = {}
        self.denied: dict[int, float | None] = {}
        self.queued: dict[int, Queued] = {}
        self.errors: dict[int, StoreError] = {}

    def count(self, member: Member, reply: Any) -> None:
        number = member.number
        if isinstance(reply, Granted):
            self.granted[number] = reply.fence
            self.denied.pop(number, None)
            self.queued.pop(number, None)
        elif isinstance(reply, Queued | Taken):
            self.denied[number] = reply.ttl_left
            if isinstance(reply, Queued):
                self.queued[number] = reply
        elif isinstance(reply, StoreError):
            self.errors[number] = reply

    def position(self, majority: int) -> int:
        """Return how many waiters are ahead on as many members as are missing to a majority."""
        positions = sorted(queued.position for queued in self.queued.values())
        missing = max(1, majority - len(self.granted))
        return positions[min(missing, len(positions)) - 1] if positions else 0

    def time_left(self, majority: int) -> float | None:
        """Return the seconds until the other holders' ttls leave a majority to this claim."""
        return rules.time_to_majority(self.denied.values(), majority - len(self.granted))

    def failure(self, members: Members) -> StoreError:
        replies = dict.fromkeys(self.denied, "held by another client") | dict.fromkeys(self.granted, "granted")
        return failure(members, self.errors, replies)


class RenewalVotes:
    """The replies to a batch of renewals. Each renewal has its own vote:

    a majority renewed it                      renewed; restored on the members that do not have it
    too many denied it for a majority to exist lost; removed from the members that still have it
    neither, because replies are missing       unknown (None); the keepalive sends it again
    """

    def __init__(self, renewals: Sequence[Renewal], members: Members) -> None:
        self._renewals = renewals
        self._members = members
        self._renewed = [0] * len(renewals)
        self._denied: list[list[Member]] = [[] for _ in renewals]
        self._errors: dict[int, StoreError] = {}
        self._replies = 0

    def count(self, member: Member, reply: Any) -> bool:
        """Count one member's reply; True when every renewal has a majority."""
        if isinstance(reply, StoreError):
            self._errors[member.number] = reply
            return False
        self._replies += 1
        for index, renewed in enumerate(reply):
            if renewed:
                self._renewed[index] += 1
            elif renewed is False:
                self._denied[index].append(member)
        return min(self._renewed) >= self._members.majority

    def results(self) -> list[bool | None]:
        """Return each renewal's result; raise if fewer members than a majority replied."""
        if self._replies < self._members.majority:
            raise failure(self._members, self._errors, {})
        return [self._result(index) for index in range(len(self._renewals))]

    def _result(self, index: int) -> bool | None:
        if self._renewed[index] >= self._members.majority:
            return True
        possible = len(self._members.all) - len(self._denied[index])
        return False if possible < self._members.majority else None

    def lost(self) -> list[Renewal]:
        return [renewal for index, renewal in enumerate(self._renewals) if self._result(index) is False]

    def forgotten(self) -> list[tuple[Member, Renewal]]:
        """Return the leases that a majority renewed, each with a member that does not have it."""
        return [
            (member, renewal)
            for index, renewal in enumerate(self._renewals)
            if self._result(index) and not renewal.final
            for member in self._denied[index]
        ]
