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
from tests.quorum import reader_scenarios as readers
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
    for module in (scenarios, readers)
    for one in vars(module).values()
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

READER_MUTANTS = {
    "the fence of a reader is not raised": mutant(
        QuorumStore,
        "settle",
        "if lower:",
        "if lower and not record.claim.weight:",
        readers.the_fence_of_a_reader_is_raised_before_it_is_used,
    ),
    "no check that a majority has the raised fence of a reader": mutant(
        QuorumStore,
        "settle",
        RECHECK,
        RECHECK.replace("if ", "if not record.claim.weight and (").replace("[1]:", "[1]):"),
        readers.the_fence_of_a_reader_is_not_used_before_a_majority_has_it,
    ),
    "votes for earlier attempts of a reader count": mutant(
        QuorumMailbox,
        "_count_received",
        "elif received.attempt != votes.attempt:",
        "elif received.attempt != votes.attempt and not self._record.claim.weight:",
        readers.a_vote_for_an_earlier_attempt_of_a_reader_does_not_count,
    ),
    "a reader needs no majority": mutant(
        QuorumStore,
        "settle",
        "if len(granted) < members.majority:\n        return None",
        "if len(granted) < members.majority - record.claim.weight:\n        return None",
        readers.a_reader_on_half_of_the_servers_does_not_hold,
    ),
    "a downgrade needs no majority": mutant(
        QuorumStore,
        "downgrade",
        "(downgraded,) = votes.results()",
        "downgraded = True",
        readers.a_downgrade_needs_a_majority_that_had_the_lease,
    ),
    "a member without the lease votes for a downgrade": mutant(
        QuorumStore,
        "downgrade",
        "votes.count(member, [reply])",
        "votes.count(member, [True])",
        readers.a_downgrade_needs_a_majority_that_had_the_lease,
    ),
    "a denied downgrade leaves votes": mutant(
        QuorumStore,
        "downgrade",
        "if not downgraded:",
        "if False:",
        readers.a_downgrade_needs_a_majority_that_had_the_lease,
    ),
    "missing replies deny a downgrade": mutant(
        QuorumStore,
        "downgrade",
        "raise self.members.not_reached({}, sent=True)",
        "return False",
        readers.a_downgrade_with_missing_replies_is_unknown,
    ),
    "a member that missed a downgrade stays exclusive": mutant(
        QuorumStore,
        "downgrade",
        "record.exclusive_on = set(record.sent_to)",
        "record.exclusive_on = set()",
        readers.a_renewal_finishes_a_downgrade,
    ),
    "a renewal from before a downgrade ends the lease": mutant(
        QuorumStore,
        "renew",
        " if one.shared or one.holder not in downgraded",
        "",
        readers.a_renewal_from_before_a_downgrade_does_not_end_the_lease,
    ),
    "a downgraded lease is restored as exclusive": mutant(
        QuorumStore,
        "_restore",
        "if claim.weight:",
        "if False:",
        readers.a_downgraded_lease_is_restored_as_a_reader,
    ),
    "a restored reader outlives its release": mutant(
        QuorumStore,
        "_restore",
        "if renewal.holder not in self._records:",
        "if False:",
        readers.a_released_reader_is_not_restored,
    ),
    "readers exclude each other": mutant(
        rules,
        "standing",
        " and not one.mode is claim.mode is Mode.READ",
        "",
        readers.a_reader_does_not_wait_for_the_majority_of_another,
    ),
    "each reader is a party of its own": mutant(
        rules,
        "_party",
        "(True, holder) if mode is Mode.EXCLUSIVE else (False, mode.value)",
        "(True, holder)",
        readers.a_writer_yields_to_readers_that_wait_for_one_another,
    ),
    "a reader that yields keeps its ticket": mutant(
        QuorumMailbox,
        "_resolve_split",
        "if claim.weight:",
        "if False:",
        readers.readers_that_are_behind_yield_together,
    ),
    "a refused reader keeps its votes": mutant(
        QuorumStore,
        "acquire",
        "except ConfigurationError:",
        "except ZeroDivisionError:",
        readers.a_server_with_a_semaphore_refuses_a_reader_everywhere,
    ),
    "a reader on one member is shown": mutant(
        QuorumStore,
        "inspect",
        "views, self.members.majority",
        "views, 1",
        readers.only_readers_of_a_majority_are_shown,
    ),
    "one exclusive grant is shown as a writer": mutant(
        rules,
        "_merge_votes",
        "len(grants) - len(shared) < needed",
        "len(grants) - len(shared) < 1",
        readers.a_holder_is_shown_as_exclusive_while_a_majority_is,
    ),
}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: str(scenario.__name__))
def test_the_shipped_store_decides_correctly(scenario: Scenario) -> None:
    play(scenario)


@pytest.mark.parametrize("name", [*MUTANTS, *READER_MUTANTS])
def test_a_planted_error_is_detected(name: str) -> None:
    plant, scenario = (MUTANTS | READER_MUTANTS)[name]
    with plant(), pytest.raises((AssertionError, LockError, pytest.fail.Exception)):
        play(scenario)
