"""Mutation tests of the rules for shared claims: a small model finds each error planted in the shipped core or Lua."""

import pytest

from lockfast.client import all_of
from lockfast.core import acquire, keepalive
from lockfast.core.acquire import Acquisition
from tests.test_mutants import MOST_SECONDS, Mutant, mutant
from verify.claim_models import (
    GATE,
    downgrader,
    later,
    lock_user,
    model,
    one_and_one,
    permit_adopter,
    permit_exporter,
    permits,
    reader,
    reads_and_writes,
    writer,
)
from verify.claim_models import all_of as several
from verify.explorer import Explorer, Report
from verify.mutation import lua, python
from verify.process import LOCK, Program
from verify.world import ALL_RULES, Client, Model

pytestmark = pytest.mark.timeout(600)


def world(*programs: Program, seconds: float = 1.1, mortal: str = "ABC", **faults: int) -> Model:
    return model("mutant", "", *programs, seconds=seconds, mortal=mortal, **faults)


def adopting() -> Model:
    clients = [Client("A", permit_exporter), Client("B", permit_adopter, after="A"), Client("C", one_and_one)]
    return Model("mutant", clients, {}, 1.1, rules=ALL_RULES - {"CL"})


renewing, both, reverse = reader(renew=True), several(LOCK, GATE), several(GATE, LOCK)
two_of_three, one_of_three = permits(2, 3), permits(1, 3)

SKIP_THE_HEAD = """
  call('ZREM', queue, head)
  if call('ZCARD', queue) > 0 then serve(held, caller, notify) end
  call('ZADD', queue, now, head)
  do return end
"""
GRANT_THE_FIRST = """
  if index > 1 then
    select_claim(1)
    call('SET', lock, holder, 'PX', ttl_ms)
  end
  return {}
end
"""

MUTANTS: dict[str, Mutant] = {
    "one ttl for all readers": mutant(
        lambda: lua(
            "renew_shared",
            "    keep_shared(holder, ttl_ms)\n",
            "    for _, one in ipairs(call('ZRANGE', grants, '0', '-1')) do keep_shared(one, ttl_ms) end\n",
        ),
        world(renewing, reader(), crash=1, mortal="B"),
        "OW",
    ),
    "expired permits are counted": mutant(
        lambda: lua(
            "acquire", "for _, holder in ipairs(expired) do drop(holder) end", "if #expired > 0 then return held end"
        ),
        world(permits(1, 1), permits(1, 1), seconds=3.1, crash=1, mortal="A"),
        "LW",
    ),
    "a released permit keeps its slot": mutant(
        lambda: lua("release", "do call('SETBIT', slots, slot, '0') end", "do call('GET', lock) end"),
        world(permits(1, 2), permits(1, 2), permits(1, 2)),
        "AD",
        "LW",
    ),
    "a reader overtakes a waiting writer": mutant(
        lambda: lua(
            "acquire",
            "if call('EXISTS', queue) == 1 then\n",
            "if not (mine and held) and call('EXISTS', queue) == 1 then\n",
        ),
        world(reader(), writer(), reader()),
        "FQ",
    ),
    "one permit overtakes a claim for two": mutant(
        lambda: lua(
            "acquire",
            "if call('EXISTS', queue) == 1 then\n",
            "if not (mine and held) and call('EXISTS', queue) == 1 then\n",
        ),
        world(two_of_three, two_of_three, one_of_three),
        "FQ",
    ),
    "a release skips a claim that does not fit": mutant(
        lambda: lua(
            "release",
            "elseif not admitted(held, weight, limit) then\n",
            "elseif not admitted(held, weight, limit) then\n" + SKIP_THE_HEAD,
        ),
        world(two_of_three, permits(3, 3), one_of_three),
        "FQ",
    ),
    "an adopted permit loses its slot": mutant(
        lambda: lua("adopt", "for slot in list:gmatch('%d+') do call('SETBIT', slots, slot, '1') end", ""),
        adopting(),
        "LW",
    ),
    "the limit is not checked": mutant(
        lambda: lua(
            "acquire",
            "used + weight <= tonumber(limit)",
            "used < tonumber(limit)",
        ),
        world(two_of_three, two_of_three),
        "AD",
    ),
    "the limit of the holder counts": mutant(
        lambda: lua(
            "acquire",
            "used + weight <= tonumber(limit)",
            "used + weight <= 2",
        ),
        world(permits(1, 2), permits(1, 1)),
        "AD",
    ),
    "a downgrade takes a new fence": mutant(
        lambda: lua(
            "downgrade", "math.max(1, fence_in(call('GET', meta)))", "math.max(1, fence_in(call('GET', meta))) + 1"
        ),
        world(downgrader()),
        "FT",
    ),
    "a downgrade leaves readers in the queue": mutant(
        lambda: lua("downgrade", "serve(READ, '', true)\n", ""), world(downgrader(), reader()), "LW"
    ),
    "a dead writer blocks readers": mutant(
        lambda: lua("acquire", "  if mine or is_shared(held) then\n", "  if not held then\n"),
        world(renewing, writer(), reader(), seconds=2.1, crash=1, mortal="B"),
        "LW",
    ),
    "readers are granted one by one": mutant(
        lambda: lua("release", "        notify = true\n", "        return\n"), world(writer(), reader(), reader()), "LW"
    ),
    "the marker ends with the first reader": mutant(
        lambda: lua("release", "    held = fit(held)\n  else\n", "    call('DEL', lock) held = false\n  else\n"),
        world(reader(), reader()),
        "OW",
    ),
    "acquire_all grants some of the locks": mutant(
        lambda: lua(
            "acquire_all",
            "not admitted(held, weight, limit)) then return {} end",
            "not admitted(held, weight, limit)) then\n" + GRANT_THE_FIRST,
        ),
        world(both, lock_user(GATE)),
        "LW",
    ),
    "acquire_all overtakes waiters": mutant(
        lambda: lua(
            "acquire_all",
            "(call('EXISTS', queue) == 1 or not admitted(held, weight, limit))",
            "not admitted(held, weight, limit)",
        ),
        world(several("door:read", "gate"), reader(), writer()),
        "FQ",
    ),
    "acquire_all takes a lock that is held": mutant(
        lambda: lua("acquire_all", " or not admitted(held, weight, limit)", ""), world(both, lock_user(GATE)), "OW"
    ),
    "a cancelled all_of leaves one lock held": mutant(
        lambda: python(
            all_of.BaseAllOf,
            "_acquire_in_order",
            "except BaseException:\n        await _roll_back(held)",
            "except BaseException:\n        pass",
        ),
        world(both, lock_user(GATE), cancel=1),
        "CL",
    ),
    "a cancelled all_of leaves its only request": mutant(
        lambda: python(
            acquire,
            "acquire_all",
            "except BaseException:\n        await remove(ports, claims, inline=True)",
            "except BaseException:\n        pass",
        ),
        world(both, cancel=1),
        "CL",
    ),
    "a cancelled release of all_of leaves one lock held": mutant(
        lambda: python(all_of.BaseLeaseSet, "_release", "await _roll_back(rest)", "pass"), world(both, cancel=1), "CL"
    ),
    "all_of returns a lease that expired while it waited": mutant(
        lambda: python(all_of.BaseAllOf, "_acquire", "lease.state in ALIVE", "True"),
        world(both, lock_user(GATE), seconds=3.1),
        "AL",
    ),
    "all_of acquires in the given order": mutant(
        lambda: python(all_of.BaseAllOf, "__init__", "sorted(locks, key=lambda lock: lock.name)", "list(locks)"),
        world(both, reverse, lock_user(GATE)),
        "DL",
    ),
    "a repeated read claim is queued": mutant(
        lambda: lua(
            "acquire", "local entry = is_shared(held) and call('HGET', details, holder)", "local entry = false"
        ),
        world(reader(), lose_reply=1),
        "FT",
        "NL",
    ),
    "a downgrade lets a writer in": mutant(
        lambda: lua("downgrade", "serve(READ, '', true)", "serve(false, '', true)"), world(downgrader(), writer()), "SG"
    ),
    "a slot is used again while it is live": mutant(
        lambda: lua("release", "held and call('BITPOS', slots, '0') or index - 1", "index - 1"),
        world(writer(), permits(1, 2), permits(1, 2)),
        "AD",
    ),
    "the marker ends before the longest reader": mutant(
        lambda: lua("renew_shared", "  call('PEXPIRE', lock, ttl_ms)\n  for", "  for"), world(renewing), "MK"
    ),
    "the marker outlives the longest reader": mutant(
        lambda: lua("release", "    drop(ARGV[1])\n    held = fit(held)\n", "    drop(ARGV[1])\n"),
        world(reader(ttl=6.0), reader()),
        "MK",
    ),
    "a key of shared grants has no ttl": mutant(
        lambda: lua("release", "  call('PEXPIRE', details, aux_ms)\n", ""), world(writer(), reader()), "ST"
    ),
    "a shared grant is renewed as exclusive": mutant(
        lambda: python(keepalive.Keepalive, "renew", "shared=lease.weight > 0", "shared=False"),
        world(renewing, seconds=3.1),
        "KP",
    ),
    "expired permits keep their slots": mutant(
        lambda: lua("acquire", "do call('SETBIT', slots, slot, '0') end", "do call('GET', lock) end"),
        world(permits(1, 2), later(0.5, permits(1, 2)), later(3.05, permits(1, 2, timeout=0.0)), seconds=3.1, crash=1),
        "LW",
    ),
    "a shared notification is accepted after a newer exclusive grant": mutant(
        lambda: python(
            Acquisition, "_wait_for_notification", "if notification.fence < conflicting_fence:", "if False:"
        ),
        world(reads_and_writes(), writer(), restart=1, seconds=0.01),
        "FT",
    ),
}


def explore_mutant(name: str) -> Report:
    chosen = MUTANTS[name]
    with chosen.plant():
        return Explorer(chosen.model).run(most_states=100_000, most_seconds=MOST_SECONDS)


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_error_is_found(name: str) -> None:
    report = explore_mutant(name)
    assert report.violation is not None, f"the mutant survived: {report.verdict}, {report.states} states"
    assert report.violation.rule in MUTANTS[name].killed_by, str(report.trace)


def test_number_of_mutants() -> None:
    assert len(MUTANTS) >= 12
