"""Mutation tests of the explorer: a small model finds each error that is planted in the shipped core or Lua."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import pytest

from lockfast.core import acquire, lease_state, release
from lockfast.core.acquire import Acquisition, Deadline
from lockfast.core.lease_state import LeaseState
from verify import thread_models
from verify.explorer import Explorer, Report
from verify.models import TTL, adopter, exporter, user
from verify.mutation import attribute, lua, python
from verify.process import LOCK, Process, Program
from verify.world import ALL_RULES, Client, Model

pytestmark = pytest.mark.timeout(600)
MOST_SECONDS = 500.0
"""Generous: the number of states limits the search."""
FOREIGN = (("SET", "door", "X9", "PX", "500"),)
"""A lock of another program; it expires after half a second."""
TICK = (("SET", "clock", "tick", "PX", "1000"),)
"""An unrelated key; its expiry is an instant to which the clock can advance."""


def world(
    *programs: Program,
    seconds: float = 1.1,
    rules: frozenset[str] = ALL_RULES,
    setup: Sequence[tuple[str, ...]] = (),
    mortal: str = "ABC",
    cancellable: str = "ABC",
    rates: Sequence[float] = (1.0, 1.0, 1.0),
    **faults: int,
) -> Model:
    clients = [
        Client(name, program, mortal=name in mortal, cancellable=name in cancellable, rate=rate)
        for name, program, rate in zip("ABC", programs, rates, strict=False)
    ]
    return Model("mutant", clients, faults, seconds, setup=setup, rules=rules)


def adopting(seconds: float = 1.1, **faults: int) -> Model:
    clients = [Client("A", exporter), Client("B", adopter, after="A"), Client("C", adopter, after="A")]
    return Model("mutant", clients, faults, seconds, rules=ALL_RULES - {"CL"})


async def early_and_late(me: Process) -> None:
    """Acquire and release; acquire again after the grant of another client expired, and do not release."""
    lock = me.locks().lock(LOCK, ttl=TTL, renew=False)
    lease = await lock.acquire()
    if lease is not None:
        await lease.release()
    await me.sleep(TTL + 0.05)
    me.record_acquire(await lock.acquire())
    await me.work()


class Mutant(NamedTuple):
    plant: Callable[[], AbstractContextManager[None]]
    model: Model
    killed_by: frozenset[str]


def mutant(plant: Callable[[], AbstractContextManager[None]], model: Model, *killed_by: str) -> Mutant:
    return Mutant(plant, model, frozenset(killed_by))


once, renewing = user(), user(renew=True)
THREADS = {model.name.removeprefix("threads: "): model for model in thread_models.quick()}

MUTANTS = {
    "validity counted from the reply": mutant(
        lambda: python(Acquisition, "run", "self._sent_at = sent_at", "self._sent_at = runtime.now()"),
        world(once, once, seconds=3.1, slow=1),
        "SG",
        "ME",
    ),
    "no allowance for drift": mutant(
        lambda: attribute(lease_state, "DRIFT", 0.0), world(once, seconds=3.1, rates=(0.998,), pause=1), "SG"
    ),
    "a renewal counted from the reply": mutant(
        lambda: python(LeaseState, "renewed", "valid_until(sent_at, ttl)", "self.valid_until + ttl"),
        world(renewing, once, seconds=5.1, pause=1),
        "SG",
    ),
    "renewals are too rare": mutant(
        lambda: python(LeaseState, "renewed", "sent_at + self.ttl / 3", "sent_at + self.ttl * 3"),
        world(renewing, seconds=5.1),
        "KP",
    ),
    "a lost lease is re-asserted although another client had the lock": mutant(
        lambda: lua("reassert", ">= tonumber(ARGV[4])", ">= 2 * tonumber(ARGV[4])"),
        world(user(renew=True, reasserts=True), user(timeout=0.0), rules=ALL_RULES - {"RL"}, restart=1),
        "FT",
    ),
    "a late renewal revives a lost lease": mutant(
        lambda: python(
            LeaseState,
            "renewed",
            "if self.state not in ALIVE:\n            return",
            "self.state = State.HELD",
        ),
        world(renewing, seconds=7.1, slow=3, lose_silently=1),
        "SG",
    ),
    "a notified grant counts from its arrival": mutant(
        lambda: python(
            Acquisition,
            "_wait_for_notification",
            "left = valid_until(",
            "self._sent_at = self._runtime.now()\n    left = valid_until(",
        ),
        world(once, once, seconds=3.1, pause=1, mortal="B"),
        "SG",
    ),
    "a stale notification is not confirmed": mutant(
        lambda: python(Acquisition, "_wait_for_notification", "if not useful(", "if False and not useful("),
        world(once, once, seconds=3.1, rules=frozenset({"AL"}), pause=1, mortal="B"),
        "AL",
    ),
    "an expired grant is returned": mutant(
        lambda: python(Acquisition, "run", "if runtime.now() < grant.valid_until - self._spare:", "if True:"),
        world(once, seconds=3.1, pause=1),
        "AL",
    ),
    "an expired adopted lease is returned": mutant(
        lambda: python(acquire, "adopt", "if ports.runtime.now() >= grant.valid_until:", "if False:"),
        adopting(seconds=3.1, pause=1),
        "AL",
    ),
    "the attempt of a notification is not checked": mutant(
        lambda: python(Acquisition, "_wait_for_notification", " or notification.attempt != self._attempt", ""),
        world(early_and_late, once, seconds=3.1, rules=ALL_RULES - {"CL"}, pause=1, mortal="B"),
        "SG",
        "FT",
    ),
    "no timer at the holder's expiry": mutant(
        lambda: python(Acquisition, "_poll_at", "if answer.ttl_left is not None:", "if False:"),
        world(once, setup=FOREIGN),
        "LW",
    ),
    "the first waiter does not poll": mutant(
        lambda: python(
            Acquisition,
            "_poll_at",
            "min(self._sent_at + claim.ttl / 3, now + POLL_AFTER * (1 + answer.position // together))",
            "now + 1000.0",
        ),
        world(once, once, lose_notification=1),
        "LW",
    ),
    "a timed-out waiter keeps its ticket": mutant(
        lambda: python(Acquisition, "run", "await self._clean_up(inline=True)", "pass"),
        world(once, user(timeout=0.5)),
        "CL",
    ),
    "a cancelled waiter keeps its ticket": mutant(
        lambda: python(Acquisition, "_clean_up", "if self._traces:", "if False:"),
        world(once, once, cancel=1, cancellable="B"),
        "CL",
    ),
    "a lost reply counts as denied": mutant(
        lambda: python(
            Acquisition,
            "run",
            "self._traces = traces or error.outcome is not Outcome.NOT_DONE",
            "self._traces = traces",
        ),
        world(user(timeout=0.5), rules=frozenset({"CF"}), lose_silently=1),
        "CF",
    ),
    "the deadline is ignored": mutant(
        lambda: python(Deadline, "earliest", "moment if self.at is None else min(moment, self.at)", "moment"),
        world(once, user(timeout=0.5)),
        "BD",
    ),
    "a repeated release returns False": mutant(
        lambda: python(release, "release", "ours and (released or maybe_done)", "ours and released"),
        world(once, lose_reply=1),
        "RL",
    ),
    "no owner check in renew": mutant(
        lambda: lua("renew", "if held == ARGV[at] then", "if held then"),
        world(renewing, once, seconds=3.1, crash=1, mortal="A"),
        "OW",
    ),
    "a renewal does not set the ttl": mutant(
        lambda: lua("renew", "redis.call('PEXPIRE', KEYS[at], ARGV[at + 1])", "redis.call('PTTL', KEYS[at])"),
        world(renewing, seconds=4.1),
        "SG",
    ),
    "no owner check in release": mutant(
        lambda: lua("release", "local ours = held == ARGV[1]", "local ours = held ~= false"),
        world(once, user(timeout=0.5)),
        "OW",
    ),
    "a release does not remove the ticket": mutant(
        lambda: lua("release", "    remove(ARGV[1])\n", ""),
        world(once, user(timeout=0.5)),
        "CL",
    ),
    "a release does not hand off": mutant(
        lambda: lua("release", "  head = call('ZPOPMIN', queue)[1]\n  if not head", "  if not head"),
        world(once, once),
        "LW",
    ),
    "a hand-off has no ttl": mutant(
        lambda: lua("release", "if not notified then", "call('PERSIST', lock) if not notified then"),
        world(once, once, crash=1, mortal="B"),
        "ST",
    ),
    "a dead first waiter is not skipped": mutant(
        lambda: lua("release", "call('DEL', lock)\n    else", "call('DEL', lock)\n      return\n    else"),
        world(once, once, once, seconds=0.9, crash=1, mortal="B"),
        "LW",
    ),
    "the reply of PUBLISH is ignored": mutant(
        lambda: lua("release", "attempt, fence_digits)) == 0", "attempt, fence_digits)) < 0"),
        world(once, once, seconds=0.9, crash=1, mortal="B"),
        "FQ",
    ),
    "an expired ticket is not skipped": mutant(
        lambda: lua("release", "tonumber(dead_at) * 1000 <= now", "false"),
        world(renewing, once, seconds=3.1, pause=1, mortal="B"),
        "FQ",
    ),
    "a newcomer overtakes the queue": mutant(
        lambda: lua("acquire", "call('EXISTS', lock, queue) == 0", "call('EXISTS', lock) == 0"),
        world(once, once, setup=FOREIGN, slow=1),
        "FQ",
    ),
    "an earlier ticket is ignored": mutant(
        lambda: lua("acquire", "ticket = ARGV[6]\n    if ticket == '' then", "do"),
        world(once, once, once, seconds=0.9, cut_inbox=1),
        "FQ",
    ),
    "a repeated claim does not renew the ttl": mutant(
        lambda: lua("acquire", "    extend(lock, ttl_ms)\n", ""),
        world(once, seconds=4.1, setup=TICK, slow=1, lose_reply=1),
        "SG",
    ),
    "a repeated claim is denied": mutant(
        lambda: lua("acquire", "  if held == holder then\n    extend", "  if false then\n    extend"),
        world(once, lose_reply=1),
        "NL",
    ),
    "the fence does not grow": mutant(
        lambda: lua(
            "release",
            "local notified =",
            "fence_digits = before and before:match('^%d+') or digits local notified =",
        ),
        world(once, once),
        "FT",
    ),
    "an adoption does not check the old holder": mutant(
        lambda: lua("adopt", "if exclusive and held == old_holder then", "if exclusive and held then"),
        adopting(),
        "OW",
        "SG",
    ),
    "sync: validity counted from the reply": mutant(
        lambda: python(Acquisition, "run", "self._sent_at = sent_at", "self._sent_at = runtime.now()"),
        THREADS["pause"],
        "SG",
    ),
    "sync: an expired grant is returned": mutant(
        lambda: python(Acquisition, "run", "if runtime.now() < grant.valid_until - self._spare:", "if True:"),
        THREADS["pause"],
        "AL",
    ),
    "sync: an interrupted acquisition is not cleaned up": mutant(
        lambda: python(Acquisition, "run", "except BaseException as error:", "except Exception as error:"),
        THREADS["interrupt"],
        "CL",
    ),
    "sync: an interrupted release does not continue in the background": mutant(
        lambda: python(release, "release", "except BaseException as error:", "except Exception as error:"),
        THREADS["clean-up"],
        "CF",
    ),
    "sync: a released lease stays HELD": mutant(
        lambda: python(LeaseState, "release", "self.state = RELEASED", "pass"), THREADS["mutex"], "SG"
    ),
    "sync: a lost reply to a release counts as not released": mutant(
        lambda: python(release, "release", "ours and (released or maybe_done)", "ours and released"),
        THREADS["lost reply"],
        "RL",
    ),
    "sync: a lost reply to a release counts as released": mutant(
        lambda: python(release, "release", "failures += 1\n", "released = True\n                break\n"),
        THREADS["clean-up"],
        "CF",
    ),
}


def explore_mutant(name: str) -> Report:
    mutant = MUTANTS[name]
    with mutant.plant():
        return Explorer(mutant.model).run(most_states=60_000, most_seconds=MOST_SECONDS)


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_error_is_found(name: str) -> None:
    report = explore_mutant(name)
    assert report.violation is not None, f"the mutant survived: {report.verdict}, {report.states} states"
    assert report.violation.rule in MUTANTS[name].killed_by, str(report.trace)


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.soak  # the models of `make explore` and test_explorer.py cover the same
def test_same_model_without_the_error_has_no_violation(name: str) -> None:
    model = MUTANTS[name].model
    report = Explorer(model).run(most_states=3_000, most_seconds=MOST_SECONDS)
    assert report.violation is None, str(report.trace)


def test_number_of_mutants() -> None:
    assert len(MUTANTS) >= 20
