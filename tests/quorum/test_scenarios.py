"""The scenarios on the shipped quorum store, and with planted errors: every error must be detected by its scenario."""

from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from inspect import iscoroutinefunction
from typing import Any

import pytest

from lockfast.core.quorum import members, rules
from lockfast.core.quorum.members import Member, Members, RenewalVotes, Votes
from lockfast.core.quorum.store import QuorumMailbox, QuorumStore
from lockfast.errors import LockError
from tests.quorum import scenarios
from tests.quorum.scenarios import (
    a_denied_try_leaves_nothing_behind,
    a_fence_is_not_used_before_a_majority_has_it,
    a_grant_that_took_too_long_is_not_used,
    a_grant_whose_fence_took_too_long_to_raise_is_not_used,
    a_lease_is_gone_only_if_a_majority_says_so,
    a_release_wins_over_a_restore,
    a_release_without_enough_replies_is_unknown,
    a_renewal_needs_a_majority,
    a_renewal_with_missing_replies_is_unknown,
    a_renewed_lease_is_restored_where_it_is_missing,
    a_repeated_claim_has_a_greater_fence_after_another_holder,
    a_repeated_claim_has_the_same_fence,
    a_restarted_server_sits_out,
    a_server_listed_twice_is_refused,
    a_silent_server_delays_nobody,
    a_vote_for_an_earlier_attempt_does_not_count,
    a_vote_on_a_server_that_went_down_is_released_when_it_is_back,
    exactly_one_contender_stays_in_a_split_vote,
    fences_grow_across_majorities,
    half_of_the_servers_grant_nothing,
    only_the_holder_of_a_majority_is_shown,
)
from tests.quorum.virtual import World, play
from verify.mutation import python

Scenario = Callable[[World], Coroutine[Any, Any, None]]
SCENARIOS = [
    one
    for one in vars(scenarios).values()
    if iscoroutinefunction(one) and list(one.__annotations__) == ["world", "return"]
]


def mutant(
    owner: Any, function: str, old: str, new: str, killed_by: Scenario
) -> tuple[Callable[[], AbstractContextManager[None]], Scenario]:
    return lambda: python(owner, function, old, new), killed_by


VALIDITY = "if not rules.has_enough_validity(self.runtime.now(), votes.sent_at, record.claim.ttl):"
RECHECK = "if len(granted) < members.majority or rules.choose_fence(granted, len(members.all), record.fence)[1]:"

MUTANTS = {
    "no validity check": mutant(QuorumStore, "settle", VALIDITY, "if False:", a_grant_that_took_too_long_is_not_used),
    "no validity check after the fence was raised": mutant(
        QuorumStore,
        "settle",
        VALIDITY,
        VALIDITY.replace("if not", "if not lower and not"),
        a_grant_whose_fence_took_too_long_to_raise_is_not_used,
    ),
    "validity counts from the last vote": mutant(
        QuorumStore,
        "settle",
        VALIDITY,
        VALIDITY.replace("votes.sent_at", "self.runtime.now()"),
        a_grant_that_took_too_long_is_not_used,
    ),
    "no check that a majority has the raised fence": mutant(
        QuorumStore, "settle", RECHECK, "if False:", a_fence_is_not_used_before_a_majority_has_it
    ),
    "a raised fence needs no vote of the members below it": mutant(
        QuorumStore,
        "_raise_fence",
        "del votes.granted[number]",
        "votes.granted[number] = fence",
        a_fence_is_not_used_before_a_majority_has_it,
    ),
    "fences are not raised": mutant(
        rules,
        "choose_fence",
        "lower if len(fences) - len(lower) < majority(count) else []",
        "[]",
        fences_grow_across_majorities,
    ),
    "one member with the highest fence is enough": mutant(
        rules, "choose_fence", "len(lower) < majority(count)", "len(lower) < 1", fences_grow_across_majorities
    ),
    "the lowest fence is used": mutant(
        rules, "choose_fence", "highest = max(", "highest = min(", fences_grow_across_majorities
    ),
    "a repeat keeps its fence although one member has it": mutant(
        rules,
        "choose_fence",
        "for fence in fences.values()) >= majority(count):",
        "for fence in [*fences.values(), before]) >= 1:",
        a_repeated_claim_has_a_greater_fence_after_another_holder,
    ),
    "a repeat takes the highest fence": mutant(
        rules, "choose_fence", "if before and", "if False and", a_repeated_claim_has_the_same_fence
    ),
    "a repeat does not wait for the members with its fence": mutant(
        QuorumStore,
        "_vote",
        "(fences.count(record.fence) if record.fence else len(fences))",
        "len(fences)",
        a_repeated_claim_has_the_same_fence,
    ),
    "half is a majority": mutant(
        members, "majority", "count // 2 + 1", "(count + 1) // 2", half_of_the_servers_grant_nothing
    ),
    "equal votes are both ahead": mutant(
        rules,
        "standing",
        "(number, party) > (votes[mine], mine)",
        "number > votes[mine]",
        exactly_one_contender_stays_in_a_split_vote,
    ),
    "a denied try keeps its votes": mutant(
        QuorumStore,
        "_retry_split",
        "    await self._undo(record, until)\n    self._records",
        "    self._records",
        a_denied_try_leaves_nothing_behind,
    ),
    "a release skips members that are down": mutant(
        QuorumStore,
        "_release",
        "if not member.store.connected and (",
        "if False and (",
        a_vote_on_a_server_that_went_down_is_released_when_it_is_back,
    ),
    "pending releases are dropped": mutant(
        Members,
        "_admit",
        "if self._runtime.now() < expires_at:",
        "if False:",
        a_vote_on_a_server_that_went_down_is_released_when_it_is_back,
    ),
    "a release with missing replies is a denial": mutant(
        QuorumStore,
        "_release",
        "if len(votes) < members.majority or released < members.majority <= released + missing:",
        "if len(votes) < members.majority:",
        a_release_without_enough_replies_is_unknown,
    ),
    "one member renews": mutant(
        RenewalVotes,
        "_result",
        "if self._renewed[index] >= self._members.majority:",
        "if self._renewed[index]:",
        a_renewal_needs_a_majority,
    ),
    "missing replies deny a renewal": mutant(
        RenewalVotes,
        "_result",
        "len(self._members.all) - len(self._denied[index])",
        "self._renewed[index]",
        a_renewal_with_missing_replies_is_unknown,
    ),
    "a missing lease is not restored": mutant(
        RenewalVotes,
        "forgotten",
        "if self._result(index) and not renewal.final",
        "if not self._result(index)",
        a_renewed_lease_is_restored_where_it_is_missing,
    ),
    "a restored lease outlives its release": mutant(
        QuorumStore, "_restore", "if renewal.holder not in self._records:", "if False:", a_release_wins_over_a_restore
    ),
    "a silent majority denies an adoption": mutant(
        QuorumStore,
        "adopt",
        "if granted is None and len(votes.denied) < self.members.majority:",
        "if False:",
        a_lease_is_gone_only_if_a_majority_says_so,
    ),
    "restarted members vote at once": mutant(
        Members, "_exclusion", "max(0.0, self.sits_out - uptime)", "0.0", a_restarted_server_sits_out
    ),
    "excluded members are available": mutant(
        Member, "is_available", "and now >= self.excluded_until", "", a_restarted_server_sits_out
    ),
    "a new connection keeps its admission": mutant(
        Members, "_admit", "member.admitted = False", "pass", a_restarted_server_sits_out
    ),
    "twins are accepted": mutant(
        Members, "_admit", "self._refuse(member, other)", "pass", a_server_listed_twice_is_refused
    ),
    "silent members are available": mutant(
        Member, "is_available", "now - silent_since < REPLY_TIMEOUT", "True", a_silent_server_delays_nobody
    ),
    "votes of earlier attempts count": mutant(
        QuorumMailbox,
        "_count_received",
        "elif received.attempt != votes.attempt:",
        "elif False:",
        a_vote_for_an_earlier_attempt_does_not_count,
    ),
    "settling needs no majority": mutant(
        QuorumStore,
        "settle",
        "if len(granted) < members.majority:\n        return None",
        "",
        half_of_the_servers_grant_nothing,
    ),
    "a denial counts as a grant": mutant(
        Votes,
        "count",
        "self.denied[number] = reply.ttl_left",
        "self.granted[number] = 1",
        half_of_the_servers_grant_nothing,
    ),
    "a minority's holder is shown": mutant(
        QuorumStore,
        "inspect",
        "views, self.members.majority",
        "views, 1",
        only_the_holder_of_a_majority_is_shown,
    ),
}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: str(scenario.__name__))
def test_the_shipped_store_decides_correctly(scenario: Scenario) -> None:
    play(scenario)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_error_is_detected(name: str) -> None:
    plant, scenario = MUTANTS[name]
    with plant(), pytest.raises((AssertionError, LockError, pytest.fail.Exception)):
        play(scenario)
