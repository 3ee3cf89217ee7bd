"""`lockfast run`: exit codes, signals, process groups, what is left when something is killed, and who comes first."""

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
from lockfast.stores.sqlite import fast_client
from tests.cli.driving import LOCKFAST, Target, await_gone, descendants, ended, is_alive
from tests.support.servers import Server
from tests.support.terminal import LONGEST
from tests.support.waiting import until

TREE = 'trap "" TERM; sh -c \'trap "" TERM; sleep 300 & echo $!; wait\' & echo $!; echo $$; wait'
"""A command whose grandchildren do not end when asked to; it writes their process ids."""


def shell(script: str) -> list[str]:
    return ["--", "sh", "-c", script]


def lines(process: subprocess.Popen[bytes], count: int) -> list[str]:
    assert process.stdout is not None
    return [process.stdout.readline().decode().strip() for _ in range(count)]


# Exit codes


CODES = {"true": 0, "exit 3": 3, "exit 255": 255, "kill -9 $$": 137, "kill -TERM $$": 143, "exit 75": 75}


@pytest.mark.parametrize(("script", "code"), CODES.items())
def test_the_commands_own_exit_code(embedded: Target, script: str, code: int) -> None:
    done = embedded.run("run", "job", *shell(script))
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")
    assert not embedded.inspect("job").locked


def test_the_commands_own_exit_code_on_a_server(served: Target) -> None:
    for script in ("exit 3", "kill -9 $$"):
        done = served.run("run", "job", *shell(script))
        assert (done.returncode, done.stdout, done.stderr) == (CODES[script], "", "")
        assert not served.inspect("job").locked


def test_a_command_that_is_not_there_or_no_program(place: Target) -> None:
    commands = {"no-such-command": 127, "./no/such": 127, str(place.folder): 126, "./plain.txt": 126}
    plain = place.folder / "plain.txt"
    plain.write_text("no program")
    plain.chmod(0o755)
    for command, code in list(commands.items())[: 4 if place.is_embedded else 1]:
        done = place.run("run", "job", "--", command)
        assert done.returncode == code
        assert re.fullmatch(r"lockfast: '.*' cannot be run: .*\.\n", done.stderr)
    assert not place.inspect("job").locked


def test_a_taken_lock(place: Target) -> None:
    holder = place.held("job", "--label", "in front")
    calls = [(["-n"], 75), (["-w0.1", "-E3"], 3), (["-n", "-E", "9"], 9), (["--wait=0.1", "--busy-code=0"], 0)]
    for words, code in calls if place.is_embedded else calls[:2]:
        done = place.run("run", *words, "job", *shell("echo never"))
        assert (done.returncode, done.stdout) == (code, "")
        assert ("" if "-n" in words else "is taken after 0.1 s: held by in front (") in done.stderr
    assert place.inspect("job").waiting == 0
    assert ended(holder) == 143
    assert place.run("run", "-n", "job", "true").returncode == 0


def test_a_store_that_cannot_be_used(embedded: Target) -> None:
    for url, code in (("redis://127.0.0.1:1", 69), ("nonsense", 2), ("ftp://x", 2), ("sqlite:///", 2)):
        done = embedded.run("run", "-w", "0.2", "--url", url, "job", *shell("echo never"))
        if url == "sqlite:///":
            continue  # the default place: it may be there
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
def test_called_wrongly(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"lockfast: .* Try lockfast run --help\.\n", err)


@pytest.mark.parametrize(
    "words", [["--ttl", "0", "job"], ["lockfast:x"], ["evil\nname"], ["job", "--label", "x" * 200]], ids=repr
)
def test_values_that_cannot_be(embedded: Target, words: list[str]) -> None:
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
    assert max(map(len, out.splitlines())) <= 100


# What belongs to the command


def test_the_command_is_told_its_fence(place: Target) -> None:
    done = place.run("run", "job", "--label", "us", *shell("env | grep ^LOCKFAST_; sleep 0"), LOCKFAST_FENCE="old")
    told = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert told["LOCKFAST_NAME"] == "job"
    assert int(told["LOCKFAST_FENCE"]) == place.inspect("job").fence
    assert len(told["LOCKFAST_HOLDER"]) >= 20


def test_words_after_the_name_are_the_commands(embedded: Target) -> None:
    done = embedded.run("run", "job", "printf", "%s,", "-n", "--", "--help", "-w")
    assert (done.returncode, done.stdout) == (0, "-n,--,--help,-w,")


def test_standard_input_and_output_pass_through(place: Target) -> None:
    sent = os.urandom(10_000_000)
    process = subprocess.run(
        [*LOCKFAST, "run", "job", "--", "sh", "-c", "cat; echo said >&2"],
        input=sent,
        env=place.environment(),
        capture_output=True,
        timeout=LONGEST,
        check=False,
    )
    assert process.returncode == 0
    assert hashlib.sha256(process.stdout).digest() == hashlib.sha256(sent).digest()
    assert process.stderr == b"said\n"


def test_signals_are_as_a_program_expects_them(embedded: Target) -> None:
    """Python ignores SIGPIPE for itself; a command must not inherit that."""
    done = embedded.run("run", "job", *shell("yes | head -n 1; grep -i sigign /proc/self/status"))
    assert done.stdout.splitlines()[0] == "y"
    ignored = int(done.stdout.split("SigIgn:")[1], 16)
    assert not ignored & 1 << (signal.SIGPIPE - 1)
    assert done.stderr == ""


# Signals


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP", "USR1", "QUIT"])
def test_signals_are_passed_on_to_the_command_and_its_children(embedded: Target, name: str) -> None:
    inner = f"trap 'echo child; exit 0' {name}; echo ready; while :; do sleep 0.02; done"
    script = f"trap 'echo parent; exit 9' {name}; sh -c \"$0\"; echo parent was not asked"
    process = embedded.start("run", "job", "--", "sh", "-c", script, inner)
    assert lines(process, 1) == ["ready"]
    process.send_signal(getattr(signal, f"SIG{name}"))
    out, err = process.communicate(timeout=LONGEST)
    assert (process.returncode, out.split()) == (9, [b"child", b"parent"]), err
    assert not embedded.inspect("job").locked


def test_under_nohup_a_hangup_is_ignored(embedded: Target) -> None:
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


def test_a_signal_while_waiting_leaves_no_place_behind(place: Target) -> None:
    place.held("job")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)[: 3 if place.is_embedded else 1]:
        waiting = place.start("run", "job", *shell("echo never"))
        place.await_waiting("job", 1)
        family = descendants(waiting.pid)
        waiting.send_signal(number)
        out, err = waiting.communicate(timeout=LONGEST)
        assert (waiting.returncode, out, err) == (128 + number, b"", b"")
        assert place.inspect("job").waiting == 0
        await_gone(*family)


def test_a_command_that_somebody_stops_keeps_its_lock(embedded: Target) -> None:
    """Without a terminal no shell could go on with lockfast, so it goes on by itself and renews."""
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


# What is left when something is killed


def test_a_lost_lock_ends_the_whole_group(place: Target) -> None:
    process = place.start("run", "job", "--ttl", "6", "--grace", "0.3", *shell(TREE))
    pids = [int(line) for line in lines(process, 3)]
    with lockfast.connect(place.url) as locks:
        broken = locks.lock("job").force_release()
    assert broken is not None
    assert broken.owner is not None
    assert broken.owner.pid == process.pid
    _, err = process.communicate(timeout=LONGEST)
    assert process.returncode == 76
    assert re.fullmatch(rb"lockfast: the lock 'job' was lost, so the command was ended: .*\.\n", err)
    assert not any(map(is_alive, pids))


def test_a_command_that_ends_when_asked_is_not_killed(embedded: Target) -> None:
    script = "trap 'echo tidy; exit 0' TERM; echo ready; while :; do sleep 0.02; done"
    process = embedded.start("run", "job", "--ttl", "1", "--max-hold", "1", *shell(script))
    out, err = process.communicate(timeout=LONGEST)
    assert (process.returncode, out) == (76, b"ready\ntidy\n")
    assert b"max_hold" in err


def test_lockfast_killed_takes_its_command_along(place: Target) -> None:
    process = place.start("run", "job", "--grace", "0.2", *shell(TREE))
    pids = [int(line) for line in lines(process, 3)]
    family = descendants(process.pid)
    assert set(pids) <= family
    process.kill()
    await_gone(*family)


def test_lockfast_killed_while_it_waits_leaves_nothing_running(place: Target) -> None:
    place.held("job")
    waiting = place.start("run", "job", *shell("echo never"))
    place.await_waiting("job", 1)
    family = descendants(waiting.pid)
    assert len(family) >= 2
    waiting.kill()
    await_gone(*family)


def test_nothing_is_left_running_and_no_output_is_kept_open(place: Target) -> None:
    process = place.start("run", "job", *shell("echo $PPID; sleep 0.1"))
    family = descendants(process.pid)
    out, _ = process.communicate(timeout=LONGEST)  # ends only when nobody has the output open any more
    assert out.decode().strip() == str(process.pid)
    await_gone(*family)


def test_stopped_past_its_deadline_it_ends_the_command_when_it_runs_again(place: Target) -> None:
    process = place.start("run", "job", "--ttl", "1", "--grace", "0.2", *shell("echo ready; exec sleep 300"))
    assert lines(process, 1) == ["ready"]
    os.kill(process.pid, signal.SIGSTOP)
    until(lambda: not place.inspect("job").locked, "the ttl to be over", LONGEST)
    os.kill(process.pid, signal.SIGCONT)
    assert process.wait(LONGEST) == 76


def test_a_command_that_outlasts_the_ttl_keeps_the_lock(place: Target) -> None:
    """On the embedded store the lock is taken without the library, which has to take over in time."""
    process = place.start("run", "job", "--ttl", "3", *shell("echo $LOCKFAST_FENCE; sleep 4; echo $LOCKFAST_FENCE"))
    (fence,) = lines(process, 1)
    while process.poll() is None:
        info = place.inspect("job")
        assert (info.locked and info.fence == int(fence)) or process.wait(LONGEST) == 0
        time.sleep(0.1)
    assert process.communicate()[0].decode().split() == [fence]
    assert process.returncode == 0


def test_a_successor_gets_the_lock_from_one_that_took_it_at_once(embedded: Target) -> None:
    holder = embedded.start("run", "job", *shell("echo ready; read _"), stdin=subprocess.PIPE)
    assert lines(holder, 1) == ["ready"]
    waiting = embedded.start("run", "job", *shell("echo mine"))
    embedded.await_waiting("job", 1)
    assert holder.stdin is not None
    holder.stdin.close()
    assert waiting.communicate(timeout=LONGEST)[0] == b"mine\n"
    assert holder.wait(LONGEST) == 1


def test_a_store_that_stops_answering_ends_the_command_before_the_lease_ends(
    fresh_server: Server, tmp_path: Path
) -> None:
    place = Target(fresh_server.url, tmp_path)
    script = "trap 'date +%s.%N > ended; exit 0' TERM; echo ready; while :; do sleep 0.02; done"
    process = place.start("run", "job", "--ttl", "6", "--grace", "2", *shell(script))
    assert lines(process, 1) == ["ready"]
    fresh_server.pause()
    paused = time.time()
    try:
        _, err = process.communicate(timeout=LONGEST)
    finally:
        fresh_server.resume()
        place.close()
    assert process.returncode == 76
    assert b"cannot be renewed" in err
    assert float((tmp_path / "ended").read_text()) - paused < 6


def test_started_without_input_and_output(embedded: Target) -> None:
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


# Many


@pytest.mark.timeout(200)
def test_many_at_once_run_one_at_a_time_in_the_order_of_the_queue(place: Target) -> None:
    count = 50 if place.is_embedded else 12  # with a server each of them takes long to start
    script = "mkdir inside || echo clash >> log; echo $PPID $LOCKFAST_FENCE >> log; rmdir inside"
    with lockfast.connect(place.url) as locks:
        lease = locks.lock("job").acquire()
        assert lease is not None
        processes = [place.start("run", "job", *shell(script)) for _ in range(count)]
        queue = place.await_waiting("job", count, 3 * LONGEST)
        lease.release()
        assert [process.wait(LONGEST) for process in processes] == [0] * count
    log = [line.split() for line in (place.folder / "log").read_text().splitlines()]
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


def test_a_short_command_loads_next_to_nothing(embedded: Target) -> None:
    """Counted in modules, for the seconds of a busy machine say nothing; `python -m bench.command` has the times."""
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
    for _ in range(3):  # one in 256 is left to the library, which sweeps
        code, _, *modules = loaded(COUNT.format(words=["run", "job", "--", "true"]))
        if "lockfast.client.locks" not in modules:
            break
    assert code == "0"
    assert not HEAVY & set(modules)
    assert len(set(modules) - baseline) < 45, sorted(set(modules) - baseline)


def test_on_a_server_nothing_is_loaded_that_is_not_needed(served: Target) -> None:
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


def test_many_short_commands_leave_a_short_log_behind(embedded: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them waits for the disk, unless the log has become long."""
    log = embedded.folder / "locks.db-wal"
    sizes = []
    for _ in range(60):
        child = os.fork()
        if child == 0:
            grant = fast_client.acquire(f"{embedded.folder}/locks.db", "job", 30.0, "host:1:us")
            os._exit(0 if grant is None or grant.release() else 1)
        assert os.waitpid(child, 0)[1] == 0
        sizes.append(log.stat().st_size if log.exists() else 0)
    assert max(sizes) > 0
    monkeypatch.setattr(fast_client, "LONG_LOG_BYTES", 1)
    grant = fast_client.acquire(f"{embedded.folder}/locks.db", "job", 30.0, "host:1:us")
    assert grant is None or grant.release()
    assert grant is None or not log.exists()
    assert not embedded.inspect("job").locked


def test_the_embedded_store_that_is_not_there_yet_is_made(tmp_path: Path) -> None:
    place = Target(f"sqlite:///{tmp_path}/new/folder/locks.db", tmp_path)
    assert [place.run("run", "job", "true").returncode for _ in range(2)] == [0, 0]


# Once


def test_at_least_keeps_the_others_away_however_soon_the_command_ends(place: Target) -> None:
    words = ["run", "--at-least", "1h", "job"]
    assert place.run(*words, *shell("echo ran")).stdout == "ran\n"
    done = place.run(*words, *shell("echo ran twice"))
    assert (done.returncode, done.stdout, done.stderr) == (75, "", "")
    assert place.run("run", "-E", "0", *words[1:], "true").returncode == 0
    assert place.run("run", "-n", "job", "true").returncode == 75
    left = place.inspect("job").ttl_left
    assert left is not None
    assert 3600 - 2 * LONGEST < left <= 3600


def test_once_per_lets_a_failed_run_be_repeated(place: Target) -> None:
    words = ["run", "--once-per", "1d", "job"]
    assert place.run(*words, *shell("exit 3")).returncode == 3
    assert place.run(*words, "true").returncode == 0
    assert place.run(*words, *shell("echo never")).returncode == 75
    left = place.inspect("job").ttl_left
    assert left is not None
    assert 0.9 * 86400 - 2 * LONGEST < left <= 0.9 * 86400


def test_three_machines_and_one_runs(served: Target) -> None:
    """As three crontabs do at 02:00, but for the hosts."""
    words = ["run", "-E", "0", "--at-least", "10m", "report", "--", "sh", "-c", "echo $PPID >> ran"]
    machines = [served.start(*words) for _ in range(3)]
    assert [machine.wait(LONGEST) for machine in machines] == [0, 0, 0]
    ran = (served.folder / "ran").read_text().split()
    assert len(ran) == 1
    assert int(ran[0]) in [machine.pid for machine in machines]
