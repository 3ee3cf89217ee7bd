"""`lockfast demo`: its output, its escape codes, and its clean-up."""

import io
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import lockfast
from lockfast.cli.demo import (
    DID,
    DONE,
    FINISHED,
    HOLDING,
    HOLDS,
    KILLED,
    QUICK,
    SIZE,
    STALLS,
    VICTIM,
    WAITING,
    Crew,
    Round,
    Scene,
    explain,
)
from lockfast.cli.main import main
from lockfast.cli.terminal import Block, Terminal
from lockfast.errors import LockError
from tests.support.servers import Server
from tests.support.terminal import Pty
from tests.support.waiting import until

DEMO = [sys.executable, "-m", "lockfast", "demo", "--quick"]
STYLE = re.compile(r"\x1b\[[0-9;]*m")
UP = re.compile(r"\x1b\[\d+A")
SHOWN, HIDDEN = "\x1b[?25h", "\x1b[?25l"
LONGEST = 30.0
"""Seconds for a demo of two, on a loaded machine."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The TMPDIR of the demo. Its path identifies the demo's processes."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    return folder


def environment(folder: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("CI", "NO_COLOR", "COLUMNS", "LINES")}
    return {**kept, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", "TMPDIR": str(folder), **more}


def run_plain(folder: Path, *more: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*DEMO, *more],
        env=environment(folder, **variables),
        capture_output=True,
        encoding="utf-8",
        timeout=LONGEST,
        check=False,
    )


class Row(NamedTuple):
    """A row of the final table."""

    made: int
    found: int
    lost: int


def results(text: str) -> list[Row]:
    """The rows of the final table."""
    found = re.findall(r"^  \d  \S.*? +(\d+) +(\d+) +(-?\d+)$", text, re.MULTILINE)
    rows = [Row(*map(int, row)) for row in found]
    assert all(row.lost == row.made - row.found for row in rows)
    return rows


def check_numbers(text: str) -> None:
    without, with_lock, killed = results(text)
    assert without.made == with_lock.made == SIZE * QUICK.rounds
    assert without.lost > 0 or "luck" in text
    assert with_lock.lost == killed.lost == 0
    assert killed.made == (SIZE - 1) * QUICK.rounds_3 + QUICK.rounds_3 // 3 - 1
    (after,) = re.findall(rf"([\d.]+) s after worker {VICTIM + 1} was killed", text)
    # No closer bound: a busy machine may have renewed the lease late.
    assert 0 < float(after) < LONGEST
    assert re.search(rf"worker {VICTIM + 1}  killed", text)
    assert "with locks.lock(" in text


def test_pipe_gets_plain_lines_and_no_update_is_lost_under_the_lock(folder: Path) -> None:
    done = run_plain(folder)
    assert (done.returncode, done.stderr) == (0, "")
    check_numbers(done.stdout)
    assert "\x1b" not in done.stdout
    assert "\r" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 96
    assert list(folder.iterdir()) == []


def test_demo_on_a_server(folder: Path, valkey: Server) -> None:
    done = run_plain(folder, "--url", valkey.url)
    assert (done.returncode, done.stderr) == (0, "")
    check_numbers(done.stdout)


def test_ascii_output(folder: Path) -> None:
    done = run_plain(folder, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()


def test_broken_pipe_exits_with_141(folder: Path) -> None:
    command = f"{shlex.join(DEMO)} | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], env=environment(folder), capture_output=True, timeout=LONGEST, check=False
    )
    assert (done.returncode, done.stderr) == (141, b"")
    assert list(folder.iterdir()) == []


class Screen(Pty):
    """The demo on its own controlling terminal, so that Ctrl-C typed here reaches it."""

    def __init__(self, folder: Path, **variables: str) -> None:
        super().__init__(DEMO, environment(folder, **variables), (24, 80))


@pytest.fixture
def screen(folder: Path) -> Iterator[Callable[..., Screen]]:
    opened: list[Screen] = []

    def start(**variables: str) -> Screen:
        opened.append(Screen(folder, **variables))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def test_terminal_is_redrawn_in_color(screen: Callable[..., Screen], folder: Path) -> None:
    shown = screen()
    assert shown.end() == 0
    assert UP.search(shown.text)
    assert "\x1b[32m" in shown.text
    assert shown.text.count(HIDDEN) == shown.text.count(SHOWN) == 3
    plain = STYLE.sub("", shown.text).replace("\r\n", "\n")
    check_numbers(plain)
    assert max(map(len, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", plain).replace("\r", "").splitlines())) < 80
    assert list(folder.iterdir()) == []


def test_no_color_disables_styles_but_not_redrawing(screen: Callable[..., Screen]) -> None:
    shown = screen(NO_COLOR="1")
    assert shown.end() == 0
    assert UP.search(shown.text)
    assert not STYLE.search(shown.text)


@pytest.mark.parametrize(
    ("variables", "live", "color"),
    [
        ({"TERM": "xterm"}, True, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, True, False),
        ({"TERM": "xterm", "NO_COLOR": ""}, True, True),
        ({"TERM": "dumb"}, False, False),
        ({}, False, False),
        ({"TERM": "xterm", "CI": "true"}, False, False),
        ({"TERM": "xterm", "COLUMNS": "30", "LINES": "24"}, False, False),
    ],
)
def test_terminal_capabilities(
    variables: dict[str, str], live: bool, color: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TERM", "CI", "NO_COLOR", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    master, slave = os.openpty()
    with os.fdopen(master, "rb"), os.fdopen(slave, "w", encoding="utf-8") as stream:
        terminal = Terminal(stream)
        assert (terminal.live, terminal.color) == (live, color)


def test_dumb_terminal_gets_no_escape_codes(screen: Callable[..., Screen]) -> None:
    shown = screen(TERM="dumb")
    assert shown.end() == 0
    assert "\x1b" not in shown.text


def processes(folder: Path) -> list[int]:
    """Processes that were started with a path below `folder`."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.fsencode(folder) in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            pass  # it exited meanwhile
    return found


needs_proc = pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs /proc")


@needs_proc
@pytest.mark.parametrize("act", [1, 2, 3])
def test_ctrl_c_leaves_no_process_and_no_file(screen: Callable[..., Screen], folder: Path, act: int) -> None:
    shown = screen()
    until(lambda: f"Act {act}." in shown.read(), f"act {act}", LONGEST)
    assert len(processes(folder)) == SIZE
    shown.type("\x03")
    assert shown.end() == 130
    assert processes(folder) == []
    assert list(folder.iterdir()) == []
    assert "lockfast: interrupted." in shown.text
    assert "Traceback" not in shown.text
    assert shown.text.count(HIDDEN) == shown.text.count(SHOWN)


@needs_proc
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_and_sighup_leave_no_process_and_no_file(
    screen: Callable[..., Screen], folder: Path, number: signal.Signals
) -> None:
    shown = screen()
    until(lambda: "Act 2." in shown.read(), "act 2", LONGEST)
    shown.process.send_signal(number)
    assert shown.end() == 128 + number
    assert processes(folder) == []
    assert list(folder.iterdir()) == []


@needs_proc
def test_workers_exit_when_their_parent_is_killed(screen: Callable[..., Screen], folder: Path) -> None:
    shown = screen()
    until(lambda: "Act 2." in shown.read(), "act 2", LONGEST)
    assert processes(folder)
    shown.process.kill()
    until(lambda: not processes(folder), "the workers to end", LONGEST)


def test_unexpected_exit_of_a_worker_is_reported(tmp_path: Path) -> None:
    with Crew() as crew:
        crew.start(2, tmp_path / "counter", f"sqlite:///{tmp_path / 'locks.db'}")
        os.kill(crew.workers[0].process.pid, signal.SIGKILL)
        with pytest.raises(LockError, match="Worker 1 exited unexpectedly"):
            crew.receive(LONGEST)
    assert [worker.process.returncode for worker in crew.workers] == [-signal.SIGKILL, 0]


def test_error_of_a_worker_is_reported(tmp_path: Path) -> None:
    with pytest.raises(LockError, match=r"Worker 1 failed: .*scheme"), Crew() as crew:
        crew.start(1, tmp_path / "counter", "gopher://localhost")


# Scenes and findings


def scene_of_a_kill() -> Scene:
    scene = Scene(size=2, rounds_each=2, locked=True)
    scene.update(0, HOLDS, 7, 1.0)
    scene.update(0, STALLS, None, 1.1)
    return scene


def test_scene_tracks_holder_victim_and_successor() -> None:
    scene = scene_of_a_kill()
    assert scene.states == [HOLDING, WAITING]
    scene.kill(2.0)
    assert scene.states == [KILLED, WAITING]
    scene.update(1, HOLDS, 8, 3.5)
    assert (scene.successor, scene.succeeded_at, scene.fence) == (1, 3.5, 8)
    scene.update(1, DID, Round(3.5, 3.6, 8), 3.6)
    scene.update(1, DONE, None, 3.7)
    assert scene.states == [KILLED, FINISHED]
    assert scene.over


def scene_of_rounds(*fences: int) -> Scene:
    scene = Scene(size=2, rounds_each=len(fences) // 2, locked=True)
    for number, fence in enumerate(fences):
        scene.update(number % 2, DID, Round(number, number + 0.75, fence), 0.0)
    return scene


def test_scene_measures_speed_and_fairness() -> None:
    scene = scene_of_rounds(1, 2, 3, 4, 5, 6)
    assert scene.seconds() == 5.75
    assert scene.handoff() == 0.25
    assert scene.counts_at_first_finish() == [2]
    assert scene.fences() == (1, 6, True)


@pytest.mark.parametrize(
    ("scene", "found", "kept"),
    [
        (scene_of_rounds(1, 2, 3, 4), 4, True),
        (scene_of_rounds(1, 2, 3, 4), 3, False),
        (scene_of_rounds(1, 2, 3, 4), 5, False),
        (scene_of_rounds(1, 2, 2, 4), 4, False),
        (scene_of_rounds(1, 3, 2, 4), 4, False),
    ],
)
def test_lost_updates_and_repeated_fences_fail_the_act(scene: Scene, found: int, kept: bool) -> None:
    scene.total = found
    assert scene.kept is kept


def test_race_without_losses_is_called_luck() -> None:
    scene = Scene(size=2, rounds_each=1, locked=False)
    scene.update(0, DID, Round(0.0, 1.0), 0.0)
    scene.total = 1
    said = io.StringIO()
    explain(Terminal(said), scene)
    assert "none was lost" in said.getvalue()
    assert "luck" in said.getvalue()


def test_uneven_rounds_are_reported() -> None:
    scene = Scene(size=2, rounds_each=10, locked=True)
    for number in range(10):
        scene.update(0, DID, Round(number, number + 0.5, number), 0.0)
    scene.update(1, DID, Round(20.0, 20.5, 20), 0.0)
    scene.total = 11
    said = io.StringIO()
    explain(Terminal(said), scene)
    assert "uneven" in said.getvalue()


def test_block_in_a_file_is_its_last_drawing() -> None:
    said = io.StringIO()
    with Block(Terminal(said)) as block:
        block.draw([[("first", "red")]])
        block.draw([[("last", "red")]])
    assert said.getvalue() == "last\n"


# Errors and help


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["perform"], 2, "invalid choice"),
        (["demo", "--loud"], 2, "unrecognized arguments: --loud"),
        (["demo", "--url", "memory://"], 1, "memory://"),
        (["demo", "--url", "nonsense"], 1, "is not a URL"),
        (["demo", "--url", "redis://127.0.0.1:1"], 1, "No connection"),
    ],
)
def test_errors_are_one_line_and_an_exit_code(
    argv: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == code
    out, error = capsys.readouterr()
    assert out == ""
    assert error.count("\n") == 1
    assert error.startswith("lockfast: ")
    assert said in error


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "$ lockfast demo" in capsys.readouterr().out
    assert main(["demo", "--help"]) == 0
    assert "$ lockfast demo --url redis://" in capsys.readouterr().out


def test_missing_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "demo" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"lockfast {lockfast.__version__}\n"
