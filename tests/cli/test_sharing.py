"""Readers, permits and several locks in the command: `run`, `ls`, `show`, `top`, `force-release`, and JSON."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

import lockfast
from lockfast.cli.main import main
from tests.cli.harness import Target, Terminals, ended
from tests.support.terminal import LONGEST
from tests.support.waiting import until


def shell(script: str) -> list[str]:
    return ["--", "sh", "-c", script]


def variables(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    return dict(line.split("=", 1) for line in done.stdout.splitlines())


@contextmanager
def holding(target: Target, limit: int = 4) -> Iterator[list[lockfast.Permit]]:
    """Two holders of a semaphore, with slots 0 and 1, and slot 2; a third claim waits."""
    with lockfast.connect(target.url, label="train") as locks:
        gpu = locks.semaphore("gpu", limit)
        leases = [gpu.acquire(permits=2), gpu.acquire()]
        assert None not in leases
        yield [lease for lease in leases if lease is not None]


def test_readers_run_together_and_exclude_a_writer(target: Target) -> None:
    first = target.held("config", "--shared")
    second = target.held("config", "-s")
    assert target.run("run", "-n", "config", "true").returncode == 75
    assert [one.mode.value for one in target.inspect("config").holders] == ["read", "read"]
    writer = target.start("run", "config", *shell("echo written"))
    target.await_waiting("config", 1)
    late = target.run("run", "-n", "--shared", "config", *shell("echo overtook"))
    assert (late.returncode, late.stdout) == (75, "")
    assert [ended(first), ended(second)] == [143, 143]
    assert writer.communicate(timeout=LONGEST)[0] == b"written\n"


def test_each_command_gets_its_own_slot(target: Target) -> None:
    first = target.held("gpu", "--limit", "3")
    done = target.run("run", "--limit", "3", "--permits", "2", "gpu", *shell("env | grep ^LOCKFAST_"))
    found = variables(done)
    assert (found["LOCKFAST_SLOT"], found["LOCKFAST_SLOTS"]) == ("1", "1 2")
    assert found["LOCKFAST_NAME"] == "gpu"
    assert target.run("run", "-n", "--limit=3", "--permits=3", "gpu", "true").returncode == 75
    assert ended(first) == 143
    assert variables(target.run("run", "--limit=3", "gpu", *shell("env | grep ^LOCKFAST_")))["LOCKFAST_SLOT"] == "0"


def test_several_locks_are_held_together(target: Target) -> None:
    script = f"{shlex.quote(sys.executable)} -m lockfast ls --names; env | grep ^LOCKFAST_F"
    done = target.run("run", "account:9", "--also", "account:7", *shell(script))
    names, found = done.stdout.splitlines()[:2], done.stdout.splitlines()[2:]
    assert names == ["account:7", "account:9"]
    fences = [target.inspect(name).fence for name in ("account:9", "account:7")]
    assert sorted(found) == [f"LOCKFAST_FENCE={fences[0]}", f"LOCKFAST_FENCES={fences[0]} {fences[1]}"]


def test_one_taken_lock_of_several_leaves_the_others_free(target: Target) -> None:
    target.held("account:9", "--label", "transfer")
    done = target.run("run", "-w", "0.2", "account:7", "--also", "account:9", *shell("echo never"))
    assert (done.returncode, done.stdout) == (75, "")
    assert re.fullmatch(
        r"lockfast: could not acquire 'account:7' and 'account:9' after 0\.2 s: "
        r"'account:9' is held by transfer \(.*\) for .*\.\n",
        done.stderr,
    )
    assert not target.inspect("account:7").locked
    assert target.inspect("account:9").waiting == 0


def test_loss_of_one_of_several_locks_ends_the_command(target: Target) -> None:
    process = target.held("account:7", "--also", "account:9", "--ttl", "6")
    with lockfast.connect(target.url) as locks:
        assert locks.lock("account:9").force_release() is not None
    assert process.wait(LONGEST) == 76
    assert process.stderr is not None
    assert b"The lease on 'account:9' was lost" in process.stderr.read()
    assert not target.inspect("account:7").locked


def test_reader_is_renewed_beyond_its_ttl(target: Target) -> None:
    fence = "echo $LOCKFAST_FENCE"
    process = target.start("run", "--shared", "--ttl", "1", "config", *shell(f"{fence}; sleep 2.5; {fence}"))
    out, err = process.communicate(timeout=LONGEST)
    assert (process.returncode, err) == (0, b"")
    first, second = out.split()
    assert first == second


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--permits", "2"], "--permits needs --limit, the number of permits that all commands share"),
        (["--permits", "3", "--limit", "2"], "--permits 3 can never be granted with --limit 2"),
        (["--shared", "--limit", "2"], "--shared and --limit exclude each other: readers have no limit"),
        (["--limit", "0"], "--limit needs a whole number from 1, not '0'"),
        (["--limit", "many"], "--limit needs a whole number from 1, not 'many'"),
        (["--also", "job"], "--also names the same lock twice"),
        (["--also", "b", "-s"], "--also takes exclusive locks, so it cannot be combined with --shared or --limit"),
        (
            ["--at-least", "1m", "-s"],
            "--once-per and --at-least need one exclusive lock, without --shared, --limit and --also",
        ),
    ],
)
def test_wrong_combination_is_one_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *words, "job", "true"]) == 2
    assert capsys.readouterr() == ("", f"lockfast: {sentence}. Try lockfast run --help.\n")


def test_name_in_use_as_a_semaphore_cannot_be_read(target: Target) -> None:
    with holding(target):
        done = target.run("run", "--shared", "gpu", "true")
    assert done.returncode == 2
    assert re.fullmatch(r"lockfast: 'gpu' is in use as a semaphore, .*\n", done.stderr)


def test_ls_and_top_have_a_row_for_each_holder(target: Target) -> None:
    with holding(target) as leases, lockfast.connect(target.url, label="report") as locks, locks.lock("backup"):
        waiting = target.start("run", "--limit", "4", "--permits", "2", "gpu", "--", "true")
        target.await_waiting("gpu", 1)
        text = target.run("ls").stdout.splitlines()
        assert text[0].split() == ["LOCK", "HOLDER", "MODE", "HELD", "FOR", "TTL", "LEFT", "FENCE", "WAITING"]
        assert re.match(r"backup  report \(.*\)  exclusive  ", text[1])
        assert re.search(rf"^gpu     train \(.*\)   slots 0-1  .* {leases[0].fence}        1$", text[2])
        assert re.search(rf"^        train \(.*\)   slot 2     .* {leases[1].fence}$", text[3])
        assert len(text) == 4
        assert target.run("top", "gpu").stdout.splitlines()[-1].split()[-1] == str(leases[1].fence)
        (info,) = target.json("ls", "gpu")
        assert (info["mode"], info["waiting"]) == ("permits", 1)
        assert [(one["slots"], one["mode"], one["fence"]) for one in info["holders"]] == [
            ([0, 1], "permits", leases[0].fence),
            ([2], "permits", leases[1].fence),
        ]
        for lease in leases:
            lease.release()
        assert waiting.wait(LONGEST) == 0


def test_show_lists_all_holders_and_the_modes_of_the_queue(target: Target) -> None:
    with holding(target) as leases:
        writer = target.start("run", "--label", "resize", "gpu", "true")
        target.await_waiting("gpu", 1)
        wide = target.start("run", "--limit", "4", "--permits", "3", "gpu", "--", "true")
        target.await_waiting("gpu", 2)
        text = target.run("show", "gpu").stdout
        assert re.search(r"\n  state      in use: 3 permits\n", text)
        assert re.search(
            r"\n  holders    2\n +1  train \(.*\)\n +slots 0-1, held for .*, ttl left .*, fence \d+\n", text
        )
        assert all(f"holder id {lease.holder}\n" in text for lease in leases)
        assert re.search(
            r"\n  waiting    2\n +1  resize \(.*\), exclusive, for .*\n +2  true \(.*\), 3 permits, for ", text
        )
        queue = target.json("show", "gpu")["waiters"]
        assert [(one["mode"], one["permits"]) for one in queue] == [("exclusive", 0), ("permits", 3)]
        for lease in leases:
            lease.release()
        assert [writer.wait(LONGEST), wide.wait(LONGEST)] == [0, 0]


def test_show_lists_readers(target: Target) -> None:
    reader = target.held("config", "--shared", "--label", "web")
    text = target.run("show", "config").stdout
    assert re.search(r"\n  state      held to read\n.*\n  readers    1\n +1  web \(.*\)\n +held for ", text)
    assert ended(reader) == 143


def test_crowd_of_readers_is_cut_in_a_table_and_complete_in_json(target: Target) -> None:
    with lockfast.connect(target.url) as locks, ExitStack() as stack:
        for _ in range(12):
            other = stack.enter_context(lockfast.connect(target.url))
            stack.enter_context(other.rwlock("config").reader)
        assert locks.lock("config").locked()
        text = target.run("ls").stdout.splitlines()
        assert len(text) == 1 + 8 + 1
        assert text[-1].strip() == "and 4 more"
        assert len(target.json("ls")[0]["holders"]) == 12
        assert target.run("show", "config").stdout.count("holder id") == 12


def test_force_release_of_one_holder_or_of_all(target: Target) -> None:
    with holding(target) as leases:
        refused = target.run("force-release", "gpu")
        assert refused.returncode == 2
        assert re.match(
            r"gpu \(slots 0-1\) is held by train \(.*\) for .*;\ngpu \(slot 2\) is held by ", refused.stderr
        )
        one = target.run("force-release", "--yes", "--holder", leases[0].holder, "gpu")
        assert one.returncode == 0
        assert re.fullmatch(
            r"gpu is no longer held by train \(.*\)\.\nIt is held by train \(.*\) for .* now\.\n", one.stdout
        )
        assert [holder.holder for holder in target.inspect("gpu").holders] == [leases[1].holder]
    with holding(target) as leases:
        output = target.json("force-release", "--yes", "gpu")
        assert [holder["holder"] for holder in output["released"]["holders"]] == [one.holder for one in leases]
        assert output["now"]["locked"] is False


def test_tables_of_shared_locks_fit_into_80_columns(target: Target, terminals: Terminals) -> None:
    long = "train-the-large-language-model-on-all-documents"
    with lockfast.connect(target.url, label=long) as locks, locks.semaphore(f"cluster:{long}", 4, permits=4):
        screen = terminals(target, "ls", COLUMNS="80")
        assert screen.end() == 0
        lines = [line.rstrip() for line in screen.plain.splitlines() if line.strip()]
        assert max(map(len, lines)) < 80
        assert "FENCE" not in lines[0]
        assert "slots 0-3" in lines[1]


def test_waiting_for_one_of_several_locks_shows_which_one(target: Target, terminals: Terminals) -> None:
    holder = target.held("b", "--label", "nightly")
    screen = terminals(target, "run", "a", "--also", "b", "--", "echo", "now it runs")
    until(lambda: re.search(r"waiting for b \(.*\), position 1 of 1: held by nightly \(", screen.plain), "the line")
    assert ended(holder) == 143
    assert screen.end() == 0


def test_plain_command_on_a_server_loads_no_module_of_the_shared_modes(served: Target) -> None:
    code = "import sys; from lockfast.cli.main import main; main(['run', 'job', '--', 'true']); print(*sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=served.environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=LONGEST,
    )
    unwanted = {f"lockfast.client.{name}" for name in ("semaphore", "rwlock", "all_of")} | {"lockfast.cli.view"}
    assert not unwanted & set(ran.stdout.split())


def test_json_of_a_plain_lock_describes_its_holder_twice(embedded: Target) -> None:
    """Once as the only element of `holders`, and once beside it, for scripts that know no other locks."""
    embedded.held("job")
    info = json.loads(embedded.run("show", "job", "--json").stdout)
    (holder,) = info["holders"]
    assert holder["holder"] == info["holder"]
    assert (info["mode"], holder["mode"], holder["slots"]) == ("exclusive", "exclusive", [])
