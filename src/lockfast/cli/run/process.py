"""The command's process, its guardian, and the terminal that they share.

Rules:
- lockfast forks both before it acquires the lock, while it has one thread: forking a process with threads is unsafe.
  The command's process does nothing until `start`.
- The command has its own process group, so that lockfast can end the command and its children together.
- The guardian reads a pipe whose write end only lockfast holds. End of file without DONE means that lockfast died: the
  group gets SIGTERM and, after the grace, SIGKILL. A parent-death signal would not reach the command's children.
- The guardian has its own session and keeps no inherited file open.
- While the command runs, its group is in the terminal's foreground, so that Ctrl-C and Ctrl-Z reach the command.
"""

from __future__ import annotations

import errno
import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from typing import NoReturn
else:
    import _signal as signal  # `signal` builds enums, which takes longer than a short command

DONE = b"."
POLL = 0.02  # seconds between two checks for the end of a group
NOT_FOUND, NOT_RUNNABLE = 127, 126


class NotStarted(Exception):
    """The command could not be executed; `code` is the exit code for it."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class CommandProcess:
    """Invariants: `pid` is also the command's process group; the process waits for `start` while lockfast lives."""

    def __init__(self, command: list[str], grace: float) -> None:
        self._command = command
        # Open /dev/null for closed standard streams, lest a pipe gets one of their numbers. The command does not
        # inherit them: its closed streams stay closed.
        spare = 0
        while spare <= 2:
            spare = os.open(os.devnull, os.O_RDWR)
        os.close(spare)
        start_read, self._start = os.pipe()
        self._failure, failure_write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _become(command, start_read, (self._start, self._failure), failure_write)
        os.close(start_read)
        os.close(failure_write)
        alive_read, self._alive = os.pipe()
        self._guardian = os.fork()
        if self._guardian == 0:
            _guard(self.pid, alive_read, (self._alive, self._start, self._failure), grace)
        os.close(alive_read)
        _make_group(self.pid)

    def start(self, **environment: str) -> None:
        """Execute the command with these variables, or raise `NotStarted`."""
        variables = [f"{name}={value}" for name, value in environment.items()]
        try:
            os.write(self._start, "\0".join(variables).encode("utf-8", "surrogateescape") + b"\n")
        except BrokenPipeError:
            pass  # it was killed; its exit status says so
        os.close(self._start)
        self._start = -1
        failure = _read_all(self._failure)
        if failure:
            number = int(failure)
            code = NOT_FOUND if number in (errno.ENOENT, errno.ENOTDIR) else NOT_RUNNABLE
            raise NotStarted(f"{self._command[0]!a} cannot be run: {os.strerror(number)}", code)

    def close(self) -> None:
        """Dismiss both processes; a command that was not started never runs."""
        if self._start >= 0:
            os.close(self._start)
            os.waitpid(self.pid, 0)
        try:
            os.write(self._alive, DONE)
        except BrokenPipeError:
            pass  # the guardian was killed
        os.close(self._alive)
        os.close(self._failure)
        os.waitpid(self._guardian, 0)


class Foreground:
    """The controlling terminal, if there is one. It changes groups only if the current one is known to be in front."""

    def __init__(self) -> None:
        self._group = os.getpgrp()
        self._terminal = -1
        try:
            self._terminal = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC)
            # tcsetpgrp() from the background raises this signal, which would stop lockfast.
            signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        except OSError:
            pass
        self.exists = self._terminal >= 0

    def give(self, group: int) -> None:
        """Move `group` to the foreground, if lockfast is there."""
        self._move(self._group, group)

    def take_back(self, group: int) -> None:
        """Return to the foreground, if `group` is there."""
        self._move(group, self._group)

    def _move(self, old: int, new: int) -> None:
        try:
            if self.exists and os.tcgetpgrp(self._terminal) == old:
                os.tcsetpgrp(self._terminal, new)
        except OSError:
            pass  # the terminal is closed


def signal_group(group: int, number: int) -> bool:
    """Send a signal to a process group; return False if the group is empty."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # one process changed its user; the others got the signal
    return True


def end_group(group: int, grace: float) -> None:
    """End a process group: SIGTERM, and SIGKILL after the grace."""
    kill_at = time.monotonic() + grace
    signal_group(group, signal.SIGTERM)
    signal_group(group, signal.SIGCONT)  # a stopped process handles SIGTERM only when it continues
    while signal_group(group, 0):
        if time.monotonic() >= kill_at:
            signal_group(group, signal.SIGKILL)
            return
        time.sleep(POLL)


def _make_group(pid: int) -> None:
    """Called by parent and child, since either may run first."""
    try:
        os.setpgid(pid, pid)
    except OSError:
        pass  # the child already did


def _become(command: list[str], start: int, foreign: tuple[int, ...], failure: int) -> NoReturn:
    """In the command's process: wait for the environment and execute the command."""
    try:
        _make_group(0)
        for fd in foreign:
            os.close(fd)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)  # Python ignores both
        environment, paths = dict(os.environ), [command[0]]
        if "/" not in command[0]:
            folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
            paths = [os.path.join(folder, command[0]) for folder in folders]
        message = _read_all(start)
        if not message.endswith(b"\n"):
            os._exit(0)  # not acquired, or lockfast died
        for line in message[:-1].decode("utf-8", "surrogateescape").split("\0"):
            name, _, value = line.partition("=")
            environment[name] = value
        os.write(failure, b"%d" % _execute(paths, command, environment))
    except BaseException:
        os.write(failure, b"%d" % errno.ENOEXEC)  # such as a NUL in an argument
    finally:
        os._exit(NOT_RUNNABLE)


def _execute(paths: list[str], command: list[str], environment: dict[str, str]) -> int:
    """Execute the first path that works, or return an error number. An existing file's error wins over ENOENT."""
    found = errno.ENOENT
    for path in paths:
        try:
            os.execve(path, command, environment)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR) or len(paths) == 1:
                found = error.errno or errno.ENOEXEC
    return found


def _guard(group: int, alive: int, foreign: tuple[int, ...], grace: float) -> NoReturn:
    """In the guardian: wait for DONE or for lockfast's death."""
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        for fd in foreign:
            os.close(fd)
        if os.read(alive, 1) != DONE:
            end_group(group, grace)
    finally:
        os._exit(0)


def _read_all(fd: int) -> bytes:
    with open(fd, "rb", buffering=0, closefd=False) as stream:
        return stream.read()
