"""The command on a terminal: the status line, Ctrl-C, Ctrl-Z, styles, and `top`."""

import re
import shlex

import lockfast
from tests.cli.harness import LOCKFAST, Target, Terminals, await_gone, descendants, ended
from tests.support.terminal import ESCAPES
from tests.support.waiting import until


def test_waiting_run_shows_the_holder_and_its_position(target: Target, terminals: Terminals) -> None:
    holder = target.held("job", "--label", "nightly")
    screen = terminals(target, "run", "job", "--", "sh", "-c", "echo now it runs")
    until(lambda: re.search(r"waiting for job \(.*\), position 1 of 1: held by nightly \(", screen.plain), "the line")
    assert ended(holder) == 143
    assert screen.end() == 0
    assert screen.text.endswith("\r\x1b[Know it runs\r\n"), screen.text[-100:]


def test_quiet_prints_nothing(embedded: Target, terminals: Terminals) -> None:
    embedded.held("job")
    screen = terminals(embedded, "run", "-q", "-w", "1", "job", "true")
    assert (screen.end(), screen.text) == (75, "")


def test_ctrl_c_reaches_the_command(target: Target, terminals: Terminals) -> None:
    """Only the command gets it; lockfast then releases the lock and exits with the command's code."""
    script = "trap 'echo tidy; exit 5' INT; echo ready; while :; do sleep 0.02; done"
    screen = terminals(target, "run", "job", "--", "sh", "-c", script)
    screen.await_text("ready")
    screen.type("\x03")
    assert screen.end() == 5
    assert "tidy" in screen.text
    assert not target.inspect("job").locked


def test_ctrl_c_ends_a_command_without_a_handler(embedded: Target, terminals: Terminals) -> None:
    screen = terminals(embedded, "run", "job", "--", "sh", "-c", "echo ready; exec sleep 300")
    screen.await_text("ready")
    screen.type("\x03")
    assert screen.end() == 130
    assert "Traceback" not in screen.text


def test_ctrl_c_ends_the_wait(target: Target, terminals: Terminals) -> None:
    target.held("job")
    screen = terminals(target, "run", "job", "--", "echo", "never")
    target.await_waiting("job", 1)
    family = descendants(screen.process.pid)
    screen.type("\x03")
    assert screen.end() == 130
    assert "Traceback" not in screen.text
    assert target.inspect("job").waiting == 0
    await_gone(*family)


def test_command_can_read_the_terminal(embedded: Target, terminals: Terminals) -> None:
    """Only the foreground group may read."""
    screen = terminals(embedded, "run", "job", "--", "sh", "-c", "echo ready; read line; echo got $line")
    screen.await_text("ready")
    screen.type("some text\n")
    assert screen.end() == 0
    assert "got some text" in screen.text


def test_ctrl_z_stops_and_fg_continues_the_command(embedded: Target, terminals: Terminals) -> None:
    bash = terminals(embedded, command=["bash", "--norc", "--noprofile", "-i"], PS1="$ ")
    script = "echo begun; read line; echo got $line"
    bash.type(f"{shlex.join([*LOCKFAST, 'run', 'job', '--', 'sh', '-c', script])}\n")
    bash.await_text("\rbegun")
    bash.type("\x1a")
    bash.await_text("Stopped")
    bash.type("echo the shell is $((40+2))\n")
    bash.await_text("the shell is 42")
    assert embedded.inspect("job").locked
    at = len(bash.read())
    bash.type("fg\n")
    bash.await_text("lockfast", at)  # bash prints the command that it continues
    bash.type("and on\n")
    bash.await_text("got and on")
    bash.type("echo code $?; exit\n")
    bash.await_text("code 0")
    assert bash.end() == 0


def test_tables_have_styles_and_fit_the_terminal(target: Target, terminals: Terminals) -> None:
    target.held("a-lock-with-a-very-long-name-" + "x" * 100, "--label", "y" * 60)
    screen = terminals(target, "ls")
    assert screen.end() == 0
    assert "\x1b[1m" in screen.text
    assert max(map(len, screen.plain.splitlines())) < 100
    plain = terminals(target, "ls", NO_COLOR="1")
    assert plain.end() == 0
    assert "\x1b" not in plain.text
    assert "…" in plain.text


def test_force_release_asks_for_confirmation(embedded: Target, terminals: Terminals) -> None:
    holder = embedded.held("job", "--label", "stuck", "--ttl", "6")
    screen = terminals(embedded, "force-release", "job")
    screen.await_text("[y/N]")
    assert "job is held by stuck (" in screen.text
    screen.type("\n")
    assert screen.end() == 1
    assert embedded.inspect("job").locked
    screen = terminals(embedded, "force-release", "job")
    screen.await_text("[y/N]")
    screen.type("y\n")
    assert screen.end() == 0
    assert "job is no longer held by stuck (" in screen.plain
    assert "The lock is free now." in screen.plain
    assert holder.wait(50) == 76


def test_top_updates_sorts_and_filters(target: Target, terminals: Terminals) -> None:
    target.held("report:nightly", "--label", "nightly")
    target.held("backup")
    screen = terminals(target, "top", "--every", "0.2")
    screen.await_text("report:nightly")
    assert "\x1b[?1049h" in screen.text
    assert "2 held, 0 waiting" in ESCAPES.sub("", screen.text)
    with lockfast.connect(target.url) as locks:
        for _ in range(20):
            with locks.lock("busy"):
                pass
    at = len(screen.read())
    screen.type("/back")
    screen.await_text("filter: back_".replace("filter: ", ""), at)
    screen.type("\r")
    until(lambda: "only *back*" in ESCAPES.sub("", screen.read()[at:]), "the filter")
    until(lambda: "report" not in screen.read().rpartition("\x1b[H")[2], "the other rows to disappear")
    screen.type("a")
    until(lambda: "by age" in ESCAPES.sub("", screen.read()[at:]), "the new order")
    screen.type("q")
    assert screen.end() == 0
    assert screen.text.endswith("\x1b[?1049l")


def test_top_restores_the_terminal(embedded: Target, terminals: Terminals) -> None:
    for key in ("\x03", "q"):
        screen = terminals(embedded, "top", "--every", "0.2")
        screen.await_text("quit")
        screen.type(key)
        assert screen.end() == 0
        assert screen.text.endswith("\x1b[?1049l")
    assert "Traceback" not in screen.text
