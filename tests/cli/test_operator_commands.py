"""`ls`, `show`, `top`, `force-release`, `doctor`, `bench` and `completion`: text, JSON and exit codes."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import lockfast
from lockfast.cli import completion
from lockfast.cli.main import COMMANDS, main
from tests.cli.harness import Target, descendants
from tests.support.servers import Server
from tests.support.terminal import LONGEST, Pty
from tests.support.waiting import until


def test_ls_show_and_top_list_holders_and_waiters(target: Target) -> None:
    assert target.run("ls").stdout == "No lock is held or waited for.\n"
    assert target.json("ls") == []
    with lockfast.connect(target.url, label="nightly") as locks:
        lease = locks.lock("report:nightly").acquire()
        assert lease is not None
        locks.lock("backup").acquire()
        waiting = target.start("run", "report:nightly", "true")
        target.await_waiting("report:nightly", 1)
        text = target.run("ls").stdout.splitlines()
        assert text[0].split() == ["LOCK", "HOLDER", "HELD", "FOR", "TTL", "LEFT", "FENCE", "WAITING"]
        assert [line.split()[0] for line in text[1:]] == ["backup", "report:nightly"]
        assert re.search(rf"nightly \(.*, pid \d+\) .* s  +{lease.fence} +1$", text[2])
        (one,) = target.json("ls", "report:*")
        assert (one["name"], one["holder"], one["fence"]) == ("report:nightly", lease.holder, lease.fence)
        assert (one["owner"]["label"], one["waiting"]) == ("nightly", 1)
        assert target.run("ls", "--names", "--sort", "waiting").stdout == "report:nightly\nbackup\n"
        shown = target.run("show", "report:nightly").stdout
        assert re.search(r"waiting +1\n +1  true \(.*, pid \d+\), for ", shown)
        output = target.json("show", "report:nightly")
        assert output["waiters"][0]["owner"]["label"] == "true"
        assert "report:nightly" in target.run("top").stdout
    assert waiting.wait(LONGEST) == 0
    assert target.run("ls").stdout == "No lock is held or waited for.\n"
    assert {one["name"] for one in target.json("ls", "--all")} == {"report:nightly", "backup"}
    assert "state      free" in target.run("show", "backup").stdout


def test_force_release_grants_the_lock_to_the_first_waiter(target: Target) -> None:
    holder = target.held("job", "--ttl", "6", "--label", "stuck")
    refused = target.run("force-release", "job")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "use --yes" in refused.stderr
    assert target.run("force-release", "--yes", "--holder", "another", "job").returncode == 1
    next_one = target.start("run", "job", "--label", "next", "--", "sleep", "300")
    target.await_waiting("job", 1)
    fence = target.inspect("job").fence
    assert fence is not None
    done = target.run("force-release", "--yes", "job")
    assert (done.returncode, done.stderr) == (0, "")
    said, now = done.stdout.splitlines()
    assert re.fullmatch(r"job is no longer held by stuck \(.*\)\.", said)
    assert re.fullmatch(r"next \(.*\) holds it now, with fence \d+\.", now)
    assert int(re.findall(r"\d+", now)[-1]) > fence
    assert holder.wait(LONGEST) == 76
    output = target.json("force-release", "--yes", "job")
    assert (output["released"]["owner"]["label"], output["now"]["locked"]) == ("next", False)
    again = target.run("force-release", "--yes", "job")
    assert (again.returncode, again.stderr) == (1, "lockfast: 'job' is free; there is nothing to release.\n")
    del next_one


EVIL = "evil\x1b[2J\x07\r\u202e"


def test_control_characters_in_names_and_labels_do_not_reach_the_terminal(served: Target, valkey: Server) -> None:
    key = f"lockfast:{{{EVIL}}}:m"
    valkey.raw("SET", EVIL, "mallory-id", "PX", "60000")
    valkey.raw("SET", key, f"1700000000000000 mallor host:1:{EVIL}", "PX", "60000")
    for words in (["ls"], ["ls", "--names"], ["top"]):
        done = served.run(*words)
        assert (done.returncode, done.stderr) == (0, "")
        assert "evil\ufffd[2J" in done.stdout
        assert not set("\x1b\x07\r\u202e") & set(done.stdout)
    (output,) = served.json("ls")
    assert output["name"] == EVIL
    assert "\x1b" not in output["owner"]["label"]


def test_doctor_accepts_a_working_store(target: Target) -> None:
    done = target.run("doctor")
    lines = done.stdout.splitlines()
    topics = {line.split()[1]: line.split()[0] for line in lines if line[:1].isalpha() and len(line.split()) > 2}
    for topic in ("connection", "locking", "waiting", "force", "sharing", "listing"):
        assert topics[topic] == "ok", done.stdout
    output = json.loads(target.run("doctor", "--json").stdout)
    assert output["fit"] is (done.returncode == 0)
    assert target.json("ls", "--all") == [] or all("doctor" in one["name"] for one in target.json("ls", "--all"))
    assert target.json("ls") == []


def test_doctor_rejects_a_server_without_persistence(served: Target) -> None:
    done = served.run("doctor")
    assert done.returncode == 1
    assert re.search(r"^bad +restart ", done.stdout, re.MULTILINE)
    assert done.stdout.rstrip().endswith("1 finding is bad: fix that before you rely on locks in this store.")


def test_unreachable_store_is_reported_in_one_line(embedded: Target) -> None:
    done = embedded.run("doctor", "--url", "redis://127.0.0.1:1")
    assert done.returncode == 1
    assert done.stdout.startswith("bad      connection     No connection to the server")
    done = embedded.run("ls", "--url", "redis://127.0.0.1:1")
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"lockfast: .*\n", done.stderr)


def test_doctor_reports_missing_permissions(served: Target, valkey: Server) -> None:
    valkey.raw("ACL", "SETUSER", "weak", "on", ">pw", "~*", "&*", "+@read", "+@connection", "-scan")
    try:
        done = served.run("doctor", "--url", valkey.url.replace("//", "//weak:pw@"))
        assert done.returncode == 1
        assert "permissions.md" in done.stdout
        assert "Traceback" not in done.stdout + done.stderr
    finally:
        valkey.raw("ACL", "DELUSER", "weak")


def test_bench_prints_three_measurements(target: Target) -> None:
    done = target.run("bench", "--seconds", "0.05")
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split("  ")[0] for line in done.stdout.splitlines()[1:]] == [
        "one request (inspect)",
        "acquire and release a free lock",
        "hand off to a waiter",
    ]
    assert target.json("ls") == []


WRONG = [
    ["nonsense"],
    ["ls", "--sort", "size"],
    ["show"],
    ["top", "--every", "0"],
    ["bench", "--seconds", "x"],
    ["completion", "tcsh"],
    ["force-release"],
    [],
]


@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_wrong_usage_exits_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert not words or err.count("\n") == 1


@pytest.mark.parametrize("words", [["show", "lockfast:x"], ["show", ""], ["ls", "--url", "nonsense"], ["ls", ""]])
def test_invalid_values_are_reported_in_one_line(embedded: Target, words: list[str]) -> None:
    done = embedded.run(*words)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"lockfast: .*\n", done.stderr)


@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_command_has_help_with_an_example_in_80_columns(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([command, "--help"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert f"$ lockfast {command}" in out or f"(lockfast {command}" in out
    assert max(map(len, out.splitlines())) < 80


def test_broken_pipe_exits_with_141(embedded: Target) -> None:
    with lockfast.connect(embedded.url) as locks:
        for number in range(2000):
            locks.lock(f"{number:0100}", renew=False).acquire(timeout=0)
        process = embedded.start("ls")
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(LONGEST) == 141
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert descendants(process.pid) == set()


COMPLETIONS = [
    (["lockfast", ""], "completion"),
    (["lockfast", "ru"], "run"),
    (["lockfast", "run", "--at"], "--at-least"),
    (["lockfast", "show", "rep"], "report:nightly"),
    (["lockfast", "show", "report:n"], "nightly"),
]


SCRIPTS = {"bash": completion.bash, "zsh": completion.zsh, "fish": completion.fish}


@pytest.mark.parametrize("shell", SCRIPTS)
def test_completion_scripts_are_valid(shell: str, tmp_path: Path) -> None:
    script = SCRIPTS[shell]()
    assert all(command in script for command in COMMANDS)
    if shell == "bash" or shutil.which(shell):
        path = tmp_path / "script"
        path.write_text(script)
        subprocess.run([shell, "-n", str(path)], check=True, timeout=LONGEST)


@pytest.mark.parametrize(("words", "wanted"), COMPLETIONS)
def test_bash_completes_commands_options_and_lock_names(tmp_path: Path, words: list[str], wanted: str) -> None:
    (tmp_path / "lockfast").write_text("#!/bin/sh\necho report:nightly\n")
    (tmp_path / "lockfast").chmod(0o755)
    program = (
        f"{completion.bash()}\nCOMP_WORDS=({' '.join(map(repr, words))})\nCOMP_LINE='{' '.join(words)}'\n"
        f"COMP_POINT=${{#COMP_LINE}}\n_lockfast\nprintf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    path = f"{tmp_path}:/usr/bin:/bin"
    done = subprocess.run(
        ["bash", "-c", program], env={"PATH": path}, capture_output=True, text=True, timeout=LONGEST, check=True
    )
    assert wanted in done.stdout.split()


HOSTILE = ("evil:$(touch owned)", "evil:`touch owned`", "evil:;touch owned;", "evil:${IFS}'\"", "evil:a b")
START = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], ". ./script"),
    "zsh": (["zsh", "-f", "-i"], "autoload -U compinit; compinit -u; . ./script"),
    "fish": (["fish", "--no-config", "-i"], "source ./script"),
}


@pytest.mark.parametrize("shell", START)
def test_completing_a_strangers_lock_name_runs_nothing(shell: str, tmp_path: Path) -> None:
    """In an interactive shell on a terminal, with TAB alone."""
    if not shutil.which(shell):
        pytest.skip(f"{shell} is missing")
    listed = "\n".join(HOSTILE)
    (tmp_path / "names").write_text(listed + "\n")
    (tmp_path / "lockfast").write_text(f"#!/bin/sh\necho asked >> '{tmp_path}/asked'\ncat '{tmp_path}/names'\n")
    (tmp_path / "lockfast").chmod(0o755)
    (tmp_path / "script").write_text(SCRIPTS[shell]())
    command, load = START[shell]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path), "TERM": "xterm", "PS1": "> "}
    terminal = Pty(["env", "-C", str(tmp_path), *command], environment)
    try:
        terminal.type(f"{load}; echo rea''dy\n")
        terminal.await_text("ready")
        terminal.type("lockfast show ev\t\t\t")
        until((tmp_path / "asked").exists, "the shell to ask for names", LONGEST)
        terminal.await_text("evil:")
        assert not (tmp_path / "owned").exists()
    finally:
        terminal.close()
