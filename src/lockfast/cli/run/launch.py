"""The command's process, and the guardian that ends it if lockfast is killed.

Rules kept here:

- Both are made before the lock is asked for, while this process has one thread and little in memory: a fork of a
  process with threads is not sound. The command's process does nothing until it is given the word.
- The command has a process group of its own, so that all it starts can be ended together.
- The guardian holds one end of a pipe whose other end only lockfast has. When that is closed without a word, lockfast
  is dead, and the group gets SIGTERM, and after the grace SIGKILL. A parent-death signal would reach only the command
  itself, and not what it started.
- The guardian keeps nothing open that somebody else might wait for, and has a session of its own.
"""

from __future__ import annotations

import errno
import os
import time

from lockfast.cli.run.signals import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

DONE = b"."
LOOK_EVERY = 0.02
NOT_FOUND, NOT_RUNNABLE = 127, 126


class NotStarted(Exception):
    """The command could not be started; `code` is the exit code for it."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Launch:
    """Invariants: `pid` is also the command's process group; it waits for `begin` until this process lives no more."""

    def __init__(self, command: list[str], grace: float) -> None:
        self._command = command
        _keep_standard_streams()
        go_read, self._go = os.pipe()
        self._report, report_write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _become(command, go_read, (self._go, self._report), report_write)
        os.close(go_read)
        os.close(report_write)
        life_read, self._life = os.pipe()
        self._guardian = os.fork()
        if self._guardian == 0:
            _guard(self.pid, life_read, (self._life, self._go, self._report), grace)
        os.close(life_read)
        _join_group(self.pid)

    def begin(self, environment: dict[str, str]) -> None:
        """Let the command run; `NotStarted` when it cannot."""
        words = [f"{name}={value}" for name, value in environment.items()]
        try:
            os.write(self._go, "\0".join(words).encode("utf-8", "surrogateescape") + b"\n")
        except BrokenPipeError:
            pass  # somebody killed it; its exit status will tell
        os.close(self._go)
        self._go = -1
        failure = _read_all(self._report)
        if failure:
            number = int(failure)
            code = NOT_FOUND if number in (errno.ENOENT, errno.ENOTDIR) else NOT_RUNNABLE
            raise NotStarted(f"{self._command[0]!a} cannot be run: {os.strerror(number)}", code)

    def end(self) -> None:
        """Let go of both; a command that was not begun never runs."""
        if self._go >= 0:
            os.close(self._go)
            os.waitpid(self.pid, 0)
        try:
            os.write(self._life, DONE)
        except BrokenPipeError:
            pass  # somebody killed the guardian
        os.close(self._life)
        os.close(self._report)
        os.waitpid(self._guardian, 0)


def _keep_standard_streams() -> None:
    """Whoever is started without input or output must not get a pipe of ours in its place. What is opened here is not
    inherited: the command finds closed what was closed."""
    spare = 0
    while spare <= 2:
        spare = os.open(os.devnull, os.O_RDWR)
    os.close(spare)


def signal_group(group: int, number: int) -> bool:
    """Send a signal to all of a process group; False when nobody is left in it."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody in it has become another user; the others got the signal
    return True


def end_group(group: int, grace: float) -> None:
    """End all of a process group: by SIGTERM, and what is left after the grace by SIGKILL."""
    give_up_at = time.monotonic() + grace
    signal_group(group, signal.SIGTERM)
    signal_group(group, signal.SIGCONT)  # a stopped process would not see the other one
    while signal_group(group, 0):
        if time.monotonic() >= give_up_at:
            signal_group(group, signal.SIGKILL)
            return
        time.sleep(LOOK_EVERY)


def _join_group(pid: int) -> None:
    """Made by both sides, since neither knows who comes first."""
    try:
        os.setpgid(pid, pid)
    except OSError:
        pass  # it did so itself


def _become(command: list[str], go: int, not_ours: tuple[int, ...], report: int) -> NoReturn:
    """In the command's process: wait for the word, and become the command."""
    try:
        _join_group(0)
        for number in not_ours:
            os.close(number)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)  # which Python has changed for itself
        environment, places = dict(os.environ), _places(command[0])
        word = _read_all(go)
        if not word.endswith(b"\n"):
            os._exit(0)  # the lock was not had, or lockfast is dead
        for line in word[:-1].decode("utf-8", "surrogateescape").split("\0"):
            name, _, value = line.partition("=")
            environment[name] = value
        os.write(report, b"%d" % _execute(places, command, environment))
    except BaseException:
        os.write(report, b"%d" % errno.ENOEXEC)  # a NUL in an argument, say
    finally:
        os._exit(NOT_RUNNABLE)


def _places(command: str) -> list[str]:
    """Where the command may be, in the order to try."""
    if "/" in command:
        return [command]
    path = os.environ.get("PATH", os.defpath)
    return [os.path.join(folder, command) for folder in path.split(os.pathsep)]


def _execute(places: list[str], command: list[str], environment: dict[str, str]) -> int:
    """Become the command; the error number when that cannot be: that of a file which is there counts for more."""
    found = errno.ENOENT
    for place in places:
        try:
            os.execve(place, command, environment)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR) or len(places) == 1:
                found = error.errno or errno.ENOEXEC
    return found


def _guard(group: int, life: int, not_ours: tuple[int, ...], grace: float) -> NoReturn:
    """In the guardian: wait for the word that all is over, or for lockfast's death."""
    try:
        os.setsid()
        for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(name, signal.SIG_IGN)
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nothing, number)
        for number in not_ours:
            os.close(number)
        if os.read(life, 1) != DONE:
            end_group(group, grace)
    finally:
        os._exit(0)


def _read_all(number: int) -> bytes:
    """All that is written there until it is closed."""
    parts = []
    while part := os.read(number, 65536):
        parts.append(part)
    return b"".join(parts)
