"""The `lockfast` command and its demo: what it prints, where it prints escape codes, and what it leaves behind."""

import io
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import lockfast
from lockfast.cli.demo.acts import QUICK, SIZE, VICTIM, acts
from lockfast.cli.demo.crew import Crew
from lockfast.cli.demo.messages import DID, DONE, HOLDS, STALLS, Turn
from lockfast.cli.demo.scene import FINISHED, HOLDING, KILLED, WAITING, Scene
from lockfast.cli.demo.verdict import Result, judge, tell
from lockfast.cli.main import main
from lockfast.cli.terminal import Block, Terminal
from lockfast.errors import LockError
from tests.support.servers import Server
from tests.support.terminal import Pty
from tests.support.waiting import until

DEMO = [sys.executable, "-m", "lockfast", "demo", "--quick"]
FLAVOUR = re.compile(r"\x1b\[[0-9;]*m")
UP = re.compile(r"\x1b\[\d+A")
SHOWN, HIDDEN = "\x1b[?25h", "\x1b[?25l"
LONGEST = 30.0
"""Seconds for a demo of two, on a machine that does much else."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder in which the demo makes its own. Its name also tells the demo's processes from others."""
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


def results(text: str) -> list[Result]:
    """The rows of the final table."""
    rows = re.findall(r"^  \d  (\S.*?) +(\d+) +(\d+) +(-?\d+)$", text, re.MULTILINE)
    found = [Result(title, int(made), int(found), True) for title, made, found, _ in rows]
    assert [result.lost for result in found] == [int(row[3]) for row in rows]
    return found


def check_numbers(text: str) -> None:
    without, with_lock, killed = results(text)
    assert without.made == with_lock.made == SIZE * QUICK.times
    assert without.lost > 0 or "luck" in text
    assert with_lock.lost == killed.lost == 0
    assert killed.made == (SIZE - 1) * QUICK.times_3 + QUICK.times_3 // 3 - 1
    (after,) = re.findall(rf"([\d.]+) s after worker {VICTIM + 1} was killed", text)
    # How much of the ttl was left is chance: a busy machine may have renewed the lease late.
    assert 0 < float(after) < LONGEST
    assert re.search(rf"worker {VICTIM + 1}  killed", text)
    assert "with locks.lock(" in text


def test_in_a_pipe_it_prints_plain_lines_and_loses_nothing_with_the_lock(folder: Path) -> None:
    done = run_plain(folder)
    assert (done.returncode, done.stderr) == (0, "")
    check_numbers(done.stdout)
    assert "\x1b" not in done.stdout
    assert "\r" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 96
    assert list(folder.iterdir()) == []


def test_on_a_server(folder: Path, valkey: Server) -> None:
    done = run_plain(folder, "--url", valkey.url)
    assert (done.returncode, done.stderr) == (0, "")
    check_numbers(done.stdout)


def test_without_unicode(folder: Path) -> None:
    done = run_plain(folder, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()


def test_a_reader_who_leaves_early_is_no_error(folder: Path) -> None:
    command = f"{shlex.join(DEMO)} | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], env=environment(folder), capture_output=True, timeout=LONGEST, check=False
    )
    assert (done.returncode, done.stderr) == (141, b"")
    assert list(folder.iterdir()) == []


class Screen(Pty):
    """The demo in a terminal of its own, which it controls: Ctrl-C typed here arrives there."""

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


def test_on_a_terminal_it_redraws_in_colour(screen: Callable[..., Screen], folder: Path) -> None:
    shown = screen()
    assert shown.end() == 0
    assert UP.search(shown.text)
    assert "\x1b[32m" in shown.text
    assert shown.text.count(HIDDEN) == shown.text.count(SHOWN) == 3
    plain = FLAVOUR.sub("", shown.text).replace("\r\n", "\n")
    check_numbers(plain)
    assert max(map(len, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", plain).replace("\r", "").splitlines())) < 80
    assert list(folder.iterdir()) == []


def test_no_color_takes_the_colours_and_leaves_the_redrawing(screen: Callable[..., Screen]) -> None:
    shown = screen(NO_COLOR="1")
    assert shown.end() == 0
    assert UP.search(shown.text)
    assert not FLAVOUR.search(shown.text)


@pytest.mark.parametrize(
    ("variables", "live", "flavours"),
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
def test_what_a_terminal_can_do(
    variables: dict[str, str], live: bool, flavours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TERM", "CI", "NO_COLOR", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    master, slave = os.openpty()
    with os.fdopen(master, "rb"), os.fdopen(slave, "w", encoding="utf-8") as stream:
        terminal = Terminal(stream)
        assert (terminal.live, terminal.flavours) == (live, flavours)


def test_on_a_dumb_terminal_there_are_no_escape_codes(screen: Callable[..., Screen]) -> None:
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
            pass  # it ended while we looked
    return found


needs_proc = pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="processes are looked up in /proc")


@needs_proc
@pytest.mark.parametrize("act", [1, 2, 3])
def test_ctrl_c_leaves_nothing_behind(screen: Callable[..., Screen], folder: Path, act: int) -> None:
    shown = screen()
    until(lambda: f"Act {act}." in shown.look(), f"act {act}", LONGEST)
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
def test_a_signal_to_end_leaves_nothing_behind(
    screen: Callable[..., Screen], folder: Path, number: signal.Signals
) -> None:
    shown = screen()
    until(lambda: "Act 2." in shown.look(), "act 2", LONGEST)
    shown.process.send_signal(number)
    assert shown.end() == 128 + number
    assert processes(folder) == []
    assert list(folder.iterdir()) == []


@needs_proc
def test_workers_do_not_outlive_a_parent_that_is_killed(screen: Callable[..., Screen], folder: Path) -> None:
    shown = screen()
    until(lambda: "Act 2." in shown.look(), "act 2", LONGEST)
    assert processes(folder)
    shown.process.kill()
    until(lambda: not processes(folder), "the workers to end", LONGEST)


def test_a_worker_that_ends_by_itself_ends_the_demo_with_a_sentence(tmp_path: Path) -> None:
    with Crew() as crew:
        crew.start(2, tmp_path / "counter", f"sqlite:///{tmp_path / 'locks.db'}")
        os.kill(crew.workers[0].process.pid, signal.SIGKILL)
        with pytest.raises(LockError, match="Worker 1 ended by itself"):
            crew.hear(LONGEST)
    assert [worker.process.returncode for worker in crew.workers] == [-signal.SIGKILL, 0]


def test_what_a_worker_cannot_do_is_told_in_its_words(tmp_path: Path) -> None:
    with pytest.raises(LockError, match=r"Worker 1 gave up: .*scheme"), Crew() as crew:
        crew.start(1, tmp_path / "counter", "gopher://localhost")


# What is known of an act, and what is said of it


def scene_of_a_kill() -> Scene:
    scene = Scene(size=2, times=2, locked=True)
    scene.hear(0, HOLDS, 7, 1.0)
    scene.hear(0, STALLS, None, 1.1)
    return scene


def test_a_scene_follows_the_lock() -> None:
    scene = scene_of_a_kill()
    assert scene.states == [HOLDING, WAITING]
    scene.kill(2.0)
    assert scene.states == [KILLED, WAITING]
    scene.hear(1, HOLDS, 8, 3.5)
    assert (scene.follower, scene.followed_at, scene.fence) == (1, 3.5, 8)
    scene.hear(1, DID, Turn(3.5, 3.6, 8), 3.6)
    scene.hear(1, DONE, None, 3.7)
    assert scene.states == [KILLED, FINISHED]
    assert scene.over


def scene_of_turns(*fences: int, rose: bool = True) -> Scene:
    scene = Scene(size=2, times=len(fences) // 2, locked=True)
    for number, fence in enumerate(fences):
        scene.hear(number % 2, DID, Turn(number, number + 0.75, fence, rose), 0.0)
    return scene


def test_a_scene_is_measured() -> None:
    scene = scene_of_turns(1, 2, 3, 4, 5, 6)
    assert scene.seconds() == 5.75
    assert scene.hand_over() == 0.25
    assert scene.when_first_was_done() == [2]
    assert scene.fences() == (1, 6, True)


@pytest.mark.parametrize(
    ("scene", "found", "kept"),
    [
        (scene_of_turns(1, 2, 3, 4), 4, True),
        (scene_of_turns(1, 2, 3, 4), 3, False),
        (scene_of_turns(1, 2, 3, 4), 5, False),
        (scene_of_turns(1, 2, 2, 4), 4, False),
        (scene_of_turns(1, 2, 3, 4, rose=False), 4, False),
    ],
)
def test_the_lock_is_judged_by_what_is_found(scene: Scene, found: int, kept: bool) -> None:
    assert judge(acts(QUICK)[1], scene, found).kept is kept


def test_a_race_that_lost_nothing_is_called_luck() -> None:
    scene = Scene(size=2, times=1, locked=False)
    scene.hear(0, DID, Turn(0.0, 1.0), 0.0)
    said = io.StringIO()
    act = acts(QUICK)[0]
    tell(Terminal(said), act, scene, judge(act, scene, 1))
    assert "none was lost" in said.getvalue()
    assert "luck" in said.getvalue()


def test_turns_that_are_not_fair_are_not_called_so() -> None:
    scene = Scene(size=2, times=10, locked=True)
    for number in range(10):
        scene.hear(0, DID, Turn(number, number + 0.5, number), 0.0)
    scene.hear(1, DID, Turn(20.0, 20.5, 20), 0.0)
    said = io.StringIO()
    act = acts(QUICK)[1]
    tell(Terminal(said), act, scene, judge(act, scene, 11))
    assert "uneven" in said.getvalue()


def test_a_block_in_a_file_is_its_last_drawing() -> None:
    said = io.StringIO()
    with Block(Terminal(said)) as block:
        block.draw([[("first", "red")]])
        block.draw([[("last", "red")]])
    assert said.getvalue() == "last\n"


# The command


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["perform"], 2, "invalid choice"),
        (["demo", "--loud"], 2, "unrecognized arguments: --loud"),
        (["demo", "--url", "memory://"], 1, "memory://"),
        (["demo", "--url", "nonsense"], 1, "no URL"),
        (["demo", "--url", "redis://127.0.0.1:1"], 1, "No connection"),
    ],
)
def test_errors_are_a_sentence_and_a_code(
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


def test_without_a_command_it_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "demo" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"lockfast {lockfast.__version__}\n"
