"""The command on a terminal: whom it waits for, Ctrl-C, Ctrl-Z, colours, and the live view."""

import re
import shlex
import signal

import lockfast
from tests.cli.driving import LOCKFAST, Target, Terminals, await_gone, descendants, ended
from tests.support.terminal import ESCAPES
from tests.support.waiting import until


def test_a_waiting_run_says_whom_it_waits_for_and_its_place(place: Target, terminals: Terminals) -> None:
    holder = place.held("job", "--label", "nightly")
    screen = terminals(place, "run", "job", "--", "sh", "-c", "echo now it runs")
    until(lambda: re.search(r"waiting for job \(.*\), place 1 of 1: held by nightly \(", screen.plain), "the line")
    assert ended(holder) == 143
    assert screen.end() == 0
    assert screen.text.endswith("\r\x1b[Know it runs\r\n"), screen.text[-100:]


def test_quiet_says_nothing(embedded: Target, terminals: Terminals) -> None:
    embedded.held("job")
    screen = terminals(embedded, "run", "-q", "-w", "1", "job", "true")
    assert (screen.end(), screen.text) == (75, "")


def test_ctrl_c_is_the_commands(place: Target, terminals: Terminals) -> None:
    """It reaches the command and its children, not lockfast, which gives the lock back and ends as the command did."""
    script = "trap 'echo tidy; exit 5' INT; echo ready; while :; do sleep 0.02; done"
    screen = terminals(place, "run", "job", "--", "sh", "-c", script)
    screen.await_text("ready")
    screen.type("\x03")
    assert screen.end() == 5
    assert "tidy" in screen.text
    assert not place.inspect("job").locked


def test_ctrl_c_on_a_command_that_does_not_care(embedded: Target, terminals: Terminals) -> None:
    screen = terminals(embedded, "run", "job", "--", "sh", "-c", "echo ready; exec sleep 300")
    screen.await_text("ready")
    screen.type("\x03")
    assert screen.end() == 130
    assert "Traceback" not in screen.text


def test_ctrl_c_while_waiting(place: Target, terminals: Terminals) -> None:
    place.held("job")
    screen = terminals(place, "run", "job", "--", "echo", "never")
    place.await_waiting("job", 1)
    family = descendants(screen.process.pid)
    screen.type("\x03")
    assert screen.end() == 130
    assert "Traceback" not in screen.text
    assert place.inspect("job").waiting == 0
    await_gone(*family)


def test_the_command_reads_the_terminal(embedded: Target, terminals: Terminals) -> None:
    """Which only the group in the foreground may."""
    screen = terminals(embedded, "run", "job", "--", "sh", "-c", "echo ready; read line; echo got $line")
    screen.await_text("ready")
    screen.type("some text\n")
    assert screen.end() == 0
    assert "got some text" in screen.text


def test_ctrl_z_and_fg(embedded: Target, terminals: Terminals) -> None:
    bash = terminals(embedded, command=["bash", "--norc", "--noprofile", "-i"], PS1="$ ")
    script = "echo begun; read line; echo got $line"
    bash.type(f"{shlex.join([*LOCKFAST, 'run', 'job', '--', 'sh', '-c', script])}\n")
    bash.await_text("\rbegun")
    bash.type("\x1a")
    bash.await_text("Stopped")
    bash.type("echo the shell is $((40+2))\n")
    bash.await_text("the shell is 42")
    assert embedded.inspect("job").locked
    at = len(bash.look())
    bash.type("fg\n")
    bash.await_text("lockfast", at)  # bash says what it goes on with
    bash.type("and on\n")
    bash.await_text("got and on")
    bash.type("echo code $?; exit\n")
    bash.await_text("code 0")
    assert bash.end() == 0


def test_tables_are_coloured_and_fit(place: Target, terminals: Terminals) -> None:
    place.held("a-lock-with-a-very-long-name-" + "x" * 100, "--label", "y" * 60)
    screen = terminals(place, "ls")
    assert screen.end() == 0
    assert "\x1b[1m" in screen.text
    assert max(map(len, screen.plain.splitlines())) < 100
    plain = terminals(place, "ls", NO_COLOR="1")
    assert plain.end() == 0
    assert "\x1b" not in plain.text
    assert "…" in plain.text


def test_a_question_before_a_lock_is_broken(embedded: Target, terminals: Terminals) -> None:
    holder = embedded.held("job", "--label", "stuck", "--ttl", "6")
    screen = terminals(embedded, "break", "job")
    screen.await_text("[y/N]")
    assert "job is held by stuck (" in screen.text
    screen.type("\n")
    assert screen.end() == 1
    assert embedded.inspect("job").locked
    screen = terminals(embedded, "break", "job")
    screen.await_text("[y/N]")
    screen.type("y\n")
    assert screen.end() == 0
    assert "job was taken away from stuck (" in screen.plain
    assert "it is free" in screen.plain
    assert holder.wait(50) == 76


def test_the_live_view(place: Target, terminals: Terminals) -> None:
    place.held("report:nightly", "--label", "nightly")
    place.held("backup")
    screen = terminals(place, "top", "--every", "0.2")
    screen.await_text("report:nightly")
    assert "\x1b[?1049h" in screen.text
    assert "2 held, 0 waiting" in ESCAPES.sub("", screen.text)
    with lockfast.connect(place.url) as locks:
        for _ in range(20):
            with locks.lock("busy"):
                pass
    at = len(screen.look())
    screen.type("/back")
    screen.await_text("filter: back_".replace("filter: ", ""), at)
    screen.type("\r")
    until(lambda: "only *back*" in ESCAPES.sub("", screen.look()[at:]), "the filter")
    until(lambda: "report" not in screen.look().rpartition("\x1b[H")[2], "the others to be gone")
    screen.type("a")
    until(lambda: "by age" in ESCAPES.sub("", screen.look()[at:]), "another order")
    screen.type("q")
    assert screen.end() == 0
    assert screen.text.endswith("\x1b[?1049l")


def test_the_live_view_gives_the_terminal_back_when_it_is_ended(embedded: Target, terminals: Terminals) -> None:
    for key in ("\x03", "q"):
        screen = terminals(embedded, "top", "--every", "0.2")
        screen.await_text("quit")
        screen.type(key)
        assert screen.end() == 0
        assert screen.text.endswith("\x1b[?1049l")
    assert signal.SIGINT  # nothing was printed of it
    assert "Traceback" not in screen.text
