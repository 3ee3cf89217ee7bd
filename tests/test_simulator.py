"""The simulator: no seed breaks a rule, a seed replays exactly, and planted errors are found and shrunk."""

import re
import subprocess
import sys

import pytest

from lockfast.core import acquire
from verify import simulate as command
from verify.mutation import lua, python
from verify.scenario import Scenario
from verify.simulator import Outcome, Simulation, shrink, simulate

SEEDS = 500
pytestmark = pytest.mark.timeout(600)  # a busy machine is slow


def test_no_seed_breaks_a_rule(capsys: pytest.CaptureFixture[str]) -> None:
    failed = command.main(["--seeds", str(SEEDS), "--jobs", "2"])
    output = capsys.readouterr().out
    assert not failed, output
    found = re.search(r"([\d,]+) grants", output)
    assert found is not None
    assert int(found[1].replace(",", "")) > 20 * SEEDS, "the runs acquire too few locks"


def test_seed_gives_the_same_trace_on_every_run() -> None:
    for seed in (1, 2, 3):
        assert simulate(seed) == simulate(seed)


def test_digest_of_a_seed_is_the_same_in_another_process() -> None:
    script = "from verify.simulator import simulate; print(simulate(7).digest)"
    found = {
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
        for _ in range(2)
    }
    assert found == {simulate(7).digest}


def first_failure(seeds: int = 60) -> Outcome:
    for seed in range(seeds):
        outcome = simulate(seed)
        if outcome.violation:
            return outcome
    pytest.fail("no seed found the planted error")


def test_planted_error_is_found_and_shrunk() -> None:
    with lua("release", "local ours = held == ARGV[1]", "local ours = held ~= false"):
        outcome = first_failure()
        small = shrink(outcome.scenario)
    assert outcome.violation.startswith("OW")
    assert small.violation
    assert small.scenario.clients <= 3
    assert not small.scenario.faults
    assert small.trace


def test_validity_from_the_reply_is_found() -> None:
    with python(acquire.Acquisition, "run", "self._sent_at = sent_at", "self._sent_at = runtime.now()"):
        assert first_failure().violation.startswith("SG")


@pytest.mark.parametrize(
    ("script", "old", "new", "rule"),
    [
        ("release", "held and call('BITPOS', slots, '0') or index - 1", "index - 1", "AD"),
        ("downgrade", "serve(READ, '', true)", "serve(false, '', true)", "SG"),
        ("acquire", "for _, holder in ipairs(expired) do drop(holder) end", "do return held end", "LW"),
        ("release", "    drop(ARGV[1])\n    held = fit(held)\n", "    drop(ARGV[1])\n", "MK"),
    ],
)
def test_planted_error_of_shared_grants_is_found(script: str, old: str, new: str, rule: str) -> None:
    with lua(script, old, new):
        assert first_failure().violation.startswith(rule)


def test_waiter_that_is_never_woken_is_found_in_liveness_mode() -> None:
    with (
        lua("release", "  head = call('ZPOPMIN', queue)[1]\n  if not head", "  if not head"),
        python(acquire.Acquisition, "_poll_at", "return moment", "return now + 1000.0"),
    ):
        assert first_failure().violation.startswith("LIVE")


def test_command_reports_a_failing_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--seeds", "3"]) == 0
    assert "0 failed" in capsys.readouterr().out
    with lua("release", "local ours = held == ARGV[1]", "local ours = held ~= false"):
        assert command.main(["--seeds", "5"]) == 1
    assert "shrunk to" in capsys.readouterr().out


def test_scenario_can_be_run_with_its_trace() -> None:
    outcome = Simulation(Scenario.of_seed(4), keep_trace=True).run()
    assert outcome.digest == simulate(4).digest
    assert outcome.trace
