"""`lockfast run`: exit codes, signals, process groups, crashes, the order of the queue, and start-up."""

import hashlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import lockfast
from lockfast.cli.main import main
from lockfast.stores.sqlite import connection
from tests.cli.harness import LOCKFAST, Target, await_gone, descendants, ended, is_alive
from tests.support.servers import Server
from tests.support.terminal import LONGEST
from tests.support.waiting import until

TREE = 'trap "" TERM; sh -c \'trap "" TERM; sleep 300 & echo $!; wait\' & echo $!; echo $$; wait'
"""A command whose children and grandchildren ignore SIGTERM; it prints their process ids."""


def shell(script: str) -> list[str]:
    return ["--", "sh", "-c", script]


def lines(process: subprocess.Popen[bytes], count: int) -> list[str]:
    assert process.stdout is not None
    return [process.stdout.readline().decode().strip() for _ in range(count)]


# Exit codes


CODES = {"true": 0, "exit 3": 3, "exit 255": 255, "kill -9 $$": 137, "kill -TERM $$": 143, "exit 75": 75}


@pytest.mark.parametrize(("script", "code"), CODES.items())
def test_exit_code_is_that_of_the_command(embedded: Target, script: str, code: int) -> None:
    done = embedded.run("run", "job", *shell(script))
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")
    assert not embedded.inspect("job").locked


def test_exit_code_is_that_of_the_command_on_a_server(served: Target) -> None:
    for script in ("exit 3", "kill -9 $$"):
        done = served.run("run", "job", *shell(script))
        assert (done.returncode, done.stdout, done.stderr) == (CODES[script], "", "")
        assert not served.inspect("job").locked


def test_missing_command_exits_with_127_and_unrunnable_one_with_126(target: Target) -> None:
    commands = {"no-such-command": 127, "./no/such": 127, str(target.folder): 126, "./plain.txt": 126}
    plain = target.folder / "plain.txt"
    plain.write_text("no program")
    plain.chmod(0o755)
    for command, code in list(commands.items())[: 4 if target.is_embedded else 1]:
        done = target.run(
            "run", "job", "--", command, PATH="/usr/bin:/bin"
        )  # execvp reports 126 for unreadable folders
        assert done.returncode == code
        assert re.fullmatch(r"lockfast: '.*' cannot be run: .*\.\n", done.stderr)
    assert not target.inspect("job").locked


def test_held_lock_exits_with_the_busy_code(target: Target) -> None:
    holder = target.held("job", "--label", "in front")
    calls = [(["-n"], 75), (["-w0.1", "-E3"], 3), (["-n", "-E", "9"], 9), (["--wait=0.1", "--busy-code=0"], 0)]
    for words, code in calls if target.is_embedded else calls[:2]:
        done = target.run("run", *words, "job", *shell("echo never"))
        assert (done.returncode, done.stdout) == (code, "")
        assert ("" if "-n" in words else "could not acquire 'job' after 0.1 s: held by in front (") in done.stderr
    assert target.inspect("job").waiting == 0
    assert ended(holder) == 143
    assert target.run("run", "-n", "job", "true").returncode == 0


def test_unusable_store_exits_with_69_and_invalid_url_with_2(embedded: Target) -> None:
    for url, code in (("redis://127.0.0.1:1", 69), ("nonsense", 2), ("ftp://x", 2), ("sqlite:///", 2)):
        done = embedded.run("run", "-w", "0.2", "--url", url, "job", *shell("echo never"))
        if url == "sqlite:///":
            continue  # the default store, which may exist
        assert (done.returncode, done.stdout) == (code, ""), url
        assert done.stderr.count("\n") == 1
        assert done.stderr.startswith("lockfast: ")


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["job"],
        ["--", "true"],
        ["job", "--"],
        ["--nonsense", "job", "true"],
        ["-w", "soon", "job", "true"],
        ["-w", "nan", "job", "true"],
        ["-w", "-1", "job", "true"],
        ["-E", "256", "job", "true"],
        ["-n", "-w", "1", "job", "true"],
        ["--at-least", "1m", "-w", "1", "job", "true"],
        ["--ttl"],
        ["--url", "memory://", "job", "true"],
    ],
)
def test_wrong_usage_exits_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"lockfast: .* Try lockfast run --help\.\n", err)


@pytest.mark.parametrize(
    "words", [["--ttl", "0", "job"], ["lockfast:x"], ["evil\nname"], ["job", "--label", "x" * 200]], ids=repr
)
def test_invalid_values_exit_with_2(embedded: Target, words: list[str]) -> None:
    done = embedded.run("run", *words, "true")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("lockfast: ")
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "examples:" in out
    assert max(map(len, out.splitlines())) < 80


# Input, output and environment


def test_command_gets_name_fence_and_holder_in_its_environment(target: Target) -> None:
    done = target.run("run", "job", "--label", "us", *shell("env | grep ^LOCKFAST_; sleep 0"), LOCKFAST_FENCE="old")
    variables = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert variables["LOCKFAST_NAME"] == "job"
    assert int(variables["LOCKFAST_FENCE"]) == target.inspect("job").fence
    assert len(variables["LOCKFAST_HOLDER"]) >= 20


def test_words_after_the_lock_name_belong_to_the_command(embedded: Target) -> None:
    done = embedded.run("run", "job", "printf", "%s,", "-n", "--", "--help", "-w")
    assert (done.returncode, done.stdout) == (0, "-n,--,--help,-w,")


def test_standard_input_and_output_pass_through(target: Target) -> None:
    sent = os.urandom(10_000_000)
    process = subprocess.run(
        [*LOCKFAST, "run", "job", "--", "sh", "-c", "cat; echo said >&2"],
        input=sent,
        env=target.environment(),
        capture_output=True,
        timeout=LONGEST,
        check=False,
    )
    assert process.returncode == 0
    assert hashlib.sha256(process.stdout).digest() == hashlib.sha256(sent).digest()
    assert process.stderr == b"said\n"


def test_command_does_not_inherit_an_ignored_sigpipe(embedded: Target) -> None:
    """Python ignores SIGPIPE in its own process."""
    done = embedded.run("run", "job", *shell("yes | head -n 1; grep -i sigign /proc/self/status"))
    assert done.stdout.splitlines()[0] == "y"
    ignored = int(done.stdout.split("SigIgn:")[1], 16)
    assert not ignored & 1 << (signal.SIGPIPE - 1)
    assert done.stderr == ""


# Signals


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP", "USR1", "QUIT"])
def test_signals_are_forwarded_to_the_command_and_its_children(embedded: Target, name: str) -> None:
    inner = f"trap 'echo child; exit 0' {name}; echo ready; while :; do sleep 0.02; done"
    script = f"trap 'echo parent; exit 9' {name}; sh -c \"$0\"; echo parent got no signal"
    process = embedded.start("run", "job", "--", "sh", "-c", script, inner)
    assert lines(process, 1) == ["ready"]
    process.send_signal(getattr(signal, f"SIG{name}"))
    out, err = process.communicate(timeout=LONGEST)
    assert (process.returncode, out.split()) == (9, [b"child", b"parent"]), err
    assert not embedded.inspect("job").locked


def test_sighup_is_ignored_under_nohup(embedded: Target) -> None:
    words = [*LOCKFAST, "run", "job", "--", "sh", "-c", "echo ready; sleep 0.3; echo survived"]
    process = subprocess.Popen(
        ["nohup", *words], env=embedded.environment(), stdout=subprocess.PIPE, stdin=-3, stderr=-3
    )
    try:
        assert lines(process, 1) == ["ready"]
        process.send_signal(signal.SIGHUP)
        assert lines(process, 1) == ["survived"]
        assert process.wait(LONGEST) == 0
    finally:
        process.kill()
        process.communicate()


def test_signal_while_waiting_leaves_no_ticket(target: Target) -> None:
    target.held("job")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)[: 3 if target.is_embedded else 1]:
        waiting = target.start("run", "job", *shell("echo never"))
        target.await_waiting("job", 1)
        family = descendants(waiting.pid)
        waiting.send_signal(number)
        out, err = waiting.communicate(timeout=LONGEST)
        assert (waiting.returncode, out, err) == (128 + number, b"", b"")
        assert target.inspect("job").waiting == 0
        await_gone(*family)


def test_stopped_command_keeps_its_lock(embedded: Target) -> None:
    """Without a terminal no shell could continue lockfast, so it keeps running and renews."""
    process = embedded.start("run", "job", "--ttl", "3", *shell("echo $$; sleep 0.1; echo on"))
    (pid,) = lines(process, 1)
    os.kill(int(pid), signal.SIGSTOP)
    fence = embedded.inspect("job").fence
    stopped_at = time.monotonic()
    while time.monotonic() < stopped_at + 3.5:
        info = embedded.inspect("job")
        assert (info.locked, info.fence) == (True, fence)
        time.sleep(0.1)
    os.kill(int(pid), signal.SIGCONT)
    assert process.communicate(timeout=LONGEST)[0] in (b"on\n", b"")
    assert process.returncode == 0


# Crashes and lost locks


def test_lost_lock_ends_the_whole_process_group(target: Target) -> None:
    process = target.start("run", "job", "--ttl", "6", "--grace", "0.3", *shell(TREE))
    pids = [int(line) for line in lines(process, 3)]
    with lockfast.connect(target.url) as locks:
        released = locks.lock("job").force_release()
    assert released is not None
    assert released.owner is not None
    assert released.owner.pid == process.pid
    _, err = process.communicate(timeout=LONGEST)
    assert process.returncode == 76
    assert re.fullmatch(rb"lockfast: the command was terminated\. The lease on 'job' was lost: .*\.\n", err)
    assert not any(map(is_alive, pids))


def test_command_that_handles_sigterm_is_not_killed(embedded: Target) -> None:
    script = "trap 'echo tidy; exit 0' TERM; echo ready; while :; do sleep 0.02; done"
    process = embedded.start("run", "job", "--ttl", "1", "--max-hold", "1", *shell(script))
    out, err = process.communicate(timeout=LONGEST)
    assert (process.returncode, out) == (76, b"ready\ntidy\n")
    assert b"max_hold" in err


def test_guardian_ends_the_command_when_lockfast_is_killed(target: Target) -> None:
    process = target.start("run", "job", "--grace", "0.2", *shell(TREE))
    pids = [int(line) for line in lines(process, 3)]
    family = descendants(process.pid)
    assert set(pids) <= family
    process.kill()
    await_gone(*family)


def test_no_process_survives_when_lockfast_is_killed_while_waiting(target: Target) -> None:
    target.held("job")
    waiting = target.start("run", "job", *shell("echo never"))
    target.await_waiting("job", 1)
    family = descendants(waiting.pid)
    assert len(family) >= 2
    waiting.kill()
    await_gone(*family)


def test_no_process_remains_and_no_output_stays_open(target: Target) -> None:
    process = target.start("run", "job", *shell("echo $PPID; sleep 0.1"))
    family = descendants(process.pid)
    out, _ = process.communicate(timeout=LONGEST)  # returns once no process has the output open
    assert out.decode().strip() == str(process.pid)
    await_gone(*family)


def test_lockfast_that_continues_after_its_ttl_ends_the_command(target: Target) -> None:
    process = target.start("run", "job", "--ttl", "1", "--grace", "0.2", *shell("echo ready; exec sleep 300"))
    assert lines(process, 1) == ["ready"]
    os.kill(process.pid, signal.SIGSTOP)
    until(lambda: not target.inspect("job").locked, "the lock to expire", LONGEST)
    os.kill(process.pid, signal.SIGCONT)
    assert process.wait(LONGEST) == 76


def test_lock_is_renewed_beyond_its_ttl(target: Target) -> None:
    """On the embedded store the lock is acquired without the library, which takes over in time."""
    process = target.start("run", "job", "--ttl", "3", *shell("echo $LOCKFAST_FENCE; sleep 4; echo $LOCKFAST_FENCE"))
    (fence,) = lines(process, 1)
    while process.poll() is None:
        info = target.inspect("job")
        assert (info.locked and info.fence == int(fence)) or process.wait(LONGEST) == 0
        time.sleep(0.1)
    assert process.communicate()[0].decode().split() == [fence]
    assert process.returncode == 0


def test_waiter_gets_a_lock_that_was_acquired_without_the_library(embedded: Target) -> None:
    holder = embedded.start("run", "job", *shell("echo ready; read _"), stdin=subprocess.PIPE)
    assert lines(holder, 1) == ["ready"]
    waiting = embedded.start("run", "job", *shell("echo mine"))
    embedded.await_waiting("job", 1)
    assert holder.stdin is not None
    holder.stdin.close()
    assert waiting.communicate(timeout=LONGEST)[0] == b"mine\n"
    assert holder.wait(LONGEST) == 1


def test_command_ends_before_its_lease_when_the_store_stops_answering(fresh_server: Server, tmp_path: Path) -> None:
    target = Target(fresh_server.url, tmp_path)
    script = "trap 'date +%s.%N > ended; exit 0' TERM; echo ready; while :; do sleep 0.02; done"
    process = target.start("run", "job", "--ttl", "6", "--grace", "2", *shell(script))
    assert lines(process, 1) == ["ready"]
    fresh_server.pause()
    paused = time.time()
    try:
        _, err = process.communicate(timeout=LONGEST)
    finally:
        fresh_server.resume()
        target.close()
    assert process.returncode == 76
    assert b"cannot be renewed" in err
    assert float((tmp_path / "ended").read_text()) - paused < 6


def test_command_runs_with_closed_standard_streams(embedded: Target) -> None:
    words = shlex.join([*LOCKFAST, "run", "job", "--", "sh", "-c", "echo ran > out; ls -l /proc/self/fd > fds 2>&1"])
    done = subprocess.run(
        ["sh", "-c", f"exec {words} <&- >&- 2>&-"],
        env=embedded.environment(),
        cwd=embedded.folder,
        timeout=LONGEST,
        check=False,
    )
    assert done.returncode == 0
    assert (embedded.folder / "out").read_text() == "ran\n"
    assert "pipe:" not in (embedded.folder / "fds").read_text()


# Queue


@pytest.mark.timeout(200)
def test_many_commands_run_one_at_a_time_in_queue_order(target: Target) -> None:
    count = 50 if target.is_embedded else 12  # with a server, each loads the library
    script = "mkdir inside || echo clash >> log; echo $PPID $LOCKFAST_FENCE >> log; rmdir inside"
    with lockfast.connect(target.url) as locks:
        lease = locks.lock("job").acquire()
        assert lease is not None
        processes = [target.start("run", "job", *shell(script)) for _ in range(count)]
        queue = target.await_waiting("job", count, 3 * LONGEST)
        lease.release()
        assert [process.wait(LONGEST) for process in processes] == [0] * count
    log = [line.split() for line in (target.folder / "log").read_text().splitlines()]
    assert [int(pid) for pid, _ in log] == [one.owner.pid for one in queue.waiters if one.owner]
    fences = [int(fence) for _, fence in log]
    assert fences == sorted(set(fences))
    assert fences[0] > lease.fence


# Start-up


COUNT = """
import sys
from lockfast.cli.main import main
code = main({words!r})
own = [name for name in sys.modules if name.partition(".")[0] == "lockfast"]
print(code, len(sys.modules), *sorted(sys.modules))
"""
HEAVY = {
    "typing",
    "argparse",
    "logging",
    "asyncio",
    "json",
    "re",
    "enum",
    "pathlib",
    "subprocess",
    "socket",
    "threading",
}


def test_short_command_loads_few_modules(embedded: Target) -> None:
    """Counts modules, because times on a busy machine mean little; `python -m bench.command` measures the times."""
    environment = {**embedded.environment(), "PYTHONSTARTUP": ""}

    def loaded(code: str) -> list[str]:
        ran = subprocess.run(
            [sys.executable, "-I", "-S", "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{code}"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=LONGEST,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout.split()

    baseline = set(loaded("import sys; print(*sys.modules)"))
    for _ in range(3):  # one in 256 runs uses the library, which sweeps
        code, _, *modules = loaded(COUNT.format(words=["run", "job", "--", "true"]))
        if "lockfast.client.locks" not in modules:
            break
    assert code == "0"
    assert not HEAVY & set(modules)
    assert len(set(modules) - baseline) < 45, sorted(set(modules) - baseline)


def test_server_store_loads_no_unneeded_modules(served: Target) -> None:
    code = COUNT.format(words=["run", "job", "--", "true"])
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=served.environment(),
        capture_output=True,
        text=True,
        timeout=LONGEST,
        check=True,
    )
    assert not {"sqlite3", "argparse", "lockfast.stores.sqlite", "lockfast.runtime.asyncio"} & set(ran.stdout.split())


def test_short_commands_keep_the_write_ahead_log_short(embedded: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release syncs to disk only once the log has grown long."""
    log = embedded.folder / "locks.db-wal"
    sizes = []
    for _ in range(60):
        child = os.fork()
        if child == 0:
            grant = connection.fast_acquire(f"sqlite:///{embedded.folder}/locks.db", "job", 30.0, "host:1:us")
            os._exit(0 if grant is None or grant.release() else 1)
        assert os.waitpid(child, 0)[1] == 0
        sizes.append(log.stat().st_size if log.exists() else 0)
    assert max(sizes) > 0
    monkeypatch.setattr(connection, "LONG_LOG_BYTES", 1)
    grant = connection.fast_acquire(f"sqlite:///{embedded.folder}/locks.db", "job", 30.0, "host:1:us")
    assert grant is None or grant.release()
    assert grant is None or not log.exists()
    assert not embedded.inspect("job").locked


def test_missing_embedded_store_is_created(tmp_path: Path) -> None:
    target = Target(f"sqlite:///{tmp_path}/new/folder/locks.db", tmp_path)
    assert [target.run("run", "job", "true").returncode for _ in range(2)] == [0, 0]


# Once


def test_at_least_keeps_the_lock_after_the_command_ends(target: Target) -> None:
    words = ["run", "--at-least", "1h", "job"]
    assert target.run(*words, *shell("echo ran")).stdout == "ran\n"
    done = target.run(*words, *shell("echo ran twice"))
    assert (done.returncode, done.stdout, done.stderr) == (75, "", "")
    assert target.run("run", "-E", "0", *words[1:], "true").returncode == 0
    assert target.run("run", "-n", "job", "true").returncode == 75
    left = target.inspect("job").ttl_left
    assert left is not None
    assert 3600 - 2 * LONGEST < left <= 3600


def test_once_per_allows_another_run_after_a_failure(target: Target) -> None:
    words = ["run", "--once-per", "1d", "job"]
    assert target.run(*words, *shell("exit 3")).returncode == 3
    assert target.run(*words, "true").returncode == 0
    assert target.run(*words, *shell("echo never")).returncode == 75
    left = target.inspect("job").ttl_left
    assert left is not None
    assert 0.9 * 86400 - 2 * LONGEST < left <= 0.9 * 86400


def test_one_of_three_machines_runs_the_job(served: Target) -> None:
    """Like three crontabs at 02:00."""
    words = ["run", "-E", "0", "--at-least", "10m", "report", "--", "sh", "-c", "echo $PPID >> ran"]
    machines = [served.start(*words) for _ in range(3)]
    assert [machine.wait(LONGEST) for machine in machines] == [0, 0, 0]
    ran = (served.folder / "ran").read_text().split()
    assert len(ran) == 1
    assert int(ran[0]) in [machine.pid for machine in machines]
