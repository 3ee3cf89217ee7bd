"""`lockfast run`: run a command under a lock.

    lockfast ──fork──▶ command process: waits for the start message, then execs
        │  └──fork──▶ guardian: ends the command if lockfast dies
        │
        acquire the lock: one SQLite statement, or with the library and a status line
        start the command; forward signals, watch the lease and the terminal
        release the lock; exit with the command's code

    RUNNING ──lock lost──▶ ENDING: SIGTERM to the group ──grace over──▶ SIGKILL to the group
       └── command exits ─────┴──▶ its exit code, or LOST

Rules:
- Cron jobs and scripts run this often, so start-up time counts: a short command loads only what it needs. This module
  and `run_options` import no typing, argparse, logging, threading or pathlib at their top. What needs the library is in
  `run_lease`.
- lockfast forks both before it acquires the lock, while it has one thread: forking a process with threads is unsafe.
- The library takes over an unrenewed lease before its first renewal is due, with the same holder id and fence.
- A lease at risk counts as lost early enough to end the command before another client can hold the lock.
- A signal ends the wait for the lock and leaves no ticket in the queue. The status line goes only to a terminal.
- One thread supervises the command and waits on one pipe. Every event is a byte there: a signal number, or 0 for a
  change of the lease. Signals are forwarded to the whole group. After a loss no process of the group survives.
- The command has its own process group, so that lockfast can end the command and its children together. The group is
  in the terminal's foreground while it runs, so that Ctrl-C and Ctrl-Z reach the command.
- If the terminal stops the command (Ctrl-Z), lockfast stops too, so that the shell shows its prompt. If another process
  stops the command, lockfast keeps running and keeps the lock.
- The guardian reads a pipe whose write end only lockfast holds. End of file without DONE means that lockfast died: the
  group gets SIGTERM and, after the grace, SIGKILL. A parent-death signal would not reach the command's children.
"""

from __future__ import annotations

import errno
import os
import select
import time

from lockfast.cli.main import report
from lockfast.cli.run_options import HELP, LOST, STORE, USAGE, Busy, Options, UsageError, parse

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable
    from typing import Any, NoReturn

    from lockfast.cli.run_lease import CommandLease
else:
    import _signal as signal  # `signal` builds enums, which takes longer than a short command

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
FORWARDED = (*ENDING, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGALRM)
LIBRARY_AFTER = 1.0  # seconds that a command may run before the library is loaded to renew its lease
MAX_SLEEP = 1.0  # seconds; after a suspend of the machine, timers fire late
STOP_TIMEOUT = 0.2  # seconds after which lockfast assumes that it cannot be stopped (no shell would continue it)
POLL = 0.02  # seconds between two checks for the end of a group
NOT_FOUND, NOT_RUNNABLE = 127, 126  # exit codes
DONE = b"."


class Signalled(BaseException):
    """A signal, whose number is the argument, ended the wait."""


class NotStarted(Exception):
    """The command could not be executed. The arguments are a message and the exit code."""


def run(words: list[str]) -> int:
    """Run `lockfast run *words` and return its exit code."""
    try:
        options = parse(words)
    except UsageError as error:
        return report(f"{error}. Try lockfast run --help.", USAGE)
    if options.help:
        print(HELP, end="")
        return 0
    process = CommandProcess(options.command, options.grace)
    try:
        wake = WakePipe()
        wake.catch_signals()
        return _supervise(options, process, _acquire_at_once(options) or _acquire(options, wake), wake)
    except Busy as busy:
        return report(str(busy), options.busy_code) if str(busy) else options.busy_code
    except Signalled as ended:
        return 128 + int(ended.args[0])
    except Exception as error:
        from lockfast.errors import ConfigurationError, LockError

        if not isinstance(error, LockError):
            raise
        return report(str(error), USAGE if isinstance(error, ConfigurationError) else STORE)
    finally:
        process.close()


def _supervise(options: Options, process: CommandProcess, lease: UnrenewedLease | CommandLease, wake: WakePipe) -> int:
    """Run the command under the lease, then release it."""
    wake.catch_signals()
    terminal = Foreground()
    supervisor = Supervisor(options.grace, process.pid, lease, wake, terminal)
    code = LOST
    try:
        terminal.give(process.pid)
        process.start(lease.environment)
        code = supervisor.run()
    except NotStarted as error:
        message, code = error.args
        return report(message, code)
    except BaseException:
        end_group(process.pid, options.grace)  # nothing supervises it any more
        raise
    finally:
        terminal.take_back(process.pid)
        _release(supervisor, code)
    if code == LOST and supervisor.why_lost:
        report(f"the command was terminated. {supervisor.why_lost}", code)
    return code


def _release(supervisor: Supervisor, code: int) -> None:
    """Release the lock. A failure here does not change the exit code: the command ran under the lock."""
    try:
        supervisor.lease.release(code)
    except Exception as error:
        from lockfast.errors import LockError

        if not isinstance(error, LockError):
            raise
        if not supervisor.why_lost:
            report(f"the lock could not be released; it expires at the end of its ttl: {error}", code)


class UnrenewedLease:
    """A grant of the embedded store that no keepalive renews yet."""

    why_lost = ""

    def __init__(self, options: Options, grant: Any) -> None:
        self._options = options
        self._grant = grant
        self.environment = {
            "LOCKFAST_NAME": options.names[0],
            "LOCKFAST_FENCE": str(grant.fence),
            "LOCKFAST_HOLDER": grant.holder,
        }
        self.renew_at = time.monotonic() + min(LIBRARY_AFTER, grant.ttl / 6)

    def renewed(self, wake: Callable[[], None]) -> CommandLease:
        """Hand the grant over to the library, which renews it."""
        from lockfast.cli.run_lease import resume_lease

        return resume_lease(self._options, self._grant, wake)

    def release(self, code: int) -> None:
        if not self._grant.release():
            self.renewed(lambda: None).release(code)


def _acquire_at_once(options: Options) -> UnrenewedLease | None:
    """Acquire a free lock of the embedded store with one statement; None if it needs the library."""
    if options.once or options.max_hold is not None or not options.is_plain:
        return None
    from lockfast.client.connect import take_at_once

    grant = take_at_once(options.url, options.names[0], options.ttl, options.shown_label)
    return None if grant is None else UnrenewedLease(options, grant)


def _acquire(options: Options, wake: WakePipe) -> CommandLease:
    """Acquire with the library: on a server, or where the claim has to wait.

    Raises `Busy` if the lock stays held, and `Signalled` if a signal comes first."""

    def end_wait(number: int, frame: object) -> NoReturn:
        raise Signalled(number)

    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as SIGHUP is under nohup
            signal.signal(number, end_wait)
    for early in wake.wait(0.0):
        if early in ENDING:
            raise Signalled(early)
    from lockfast.cli.run_lease import acquire

    return acquire(options, wake.wake)


class WakePipe:
    """Collects signals and lease changes. Made before the lock is acquired, so that none is missed."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    def wake(self) -> None:
        """Report a change of the lease, from any thread."""
        try:
            os.write(self._write, b"\0")
        except OSError:
            pass  # full: a wake-up is already pending

    def catch_signals(self) -> None:
        """Receive signals here, except ignored ones such as SIGHUP under nohup."""
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGCONT, *FORWARDED):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, frame: None)

    def wait(self, seconds: float) -> bytes:
        select.select([self._read], [], [], max(0.0, seconds))
        try:
            return os.read(self._read, 4096)
        except BlockingIOError:
            return b""


class Supervisor:
    """Supervises one run. `_kill_at` is set once the command was asked to end because the lock was lost, `_continue_at`
    while lockfast is stopped together with the command."""

    def __init__(
        self, grace: float, group: int, lease: UnrenewedLease | CommandLease, wake: WakePipe, terminal: Foreground
    ) -> None:
        self._grace = grace
        self._group = group
        self.lease = lease
        self._wake = wake
        self._terminal = terminal
        self._kill_at: float | None = None
        self._continue_at: float | None = None
        self._code: int | None = None
        self.why_lost = ""

    def run(self) -> int:
        """Return the exit code when the command, and after a loss its whole group, has ended."""
        while True:
            changing = self._kill_at is not None or self._continue_at is not None
            sleep = POLL if changing else min(MAX_SLEEP, self.lease.renew_at - time.monotonic())
            for number in self._wake.wait(sleep):
                if number == signal.SIGCONT:
                    self._continue()
                elif number not in (0, signal.SIGCHLD):
                    signal_group(self._group, number)
            self._reap()
            if self._code is not None and self._kill_at is None:
                return self._code
            if self._code is not None and not signal_group(self._group, 0):
                return LOST
            self._check()

    def _check(self) -> None:
        """Have the library renew the lease in time, and end the command when the lock is lost."""
        now = time.monotonic()
        if self._continue_at is not None and now >= self._continue_at:
            self._continue()
        if now >= self.lease.renew_at:
            self.lease = self.lease.renewed(self._wake.wake)
        if self._kill_at is None and self.lease.why_lost:
            self.why_lost = self.lease.why_lost
            self._kill_at = time.monotonic() + self._grace
            terminate_group(self._group)
        elif self._kill_at is not None and time.monotonic() >= self._kill_at:
            signal_group(self._group, signal.SIGKILL)

    def _reap(self) -> None:
        while self._code is None:
            pid, status = os.waitpid(self._group, os.WNOHANG | os.WUNTRACED)
            if pid == 0:
                return
            if os.WIFSTOPPED(status):
                self._stopped(os.WSTOPSIG(status))
            else:
                code = os.waitstatus_to_exitcode(status)
                self._code = 128 - code if code < 0 else code

    def _stopped(self, by: int) -> None:
        """If the terminal stopped the command, stop lockfast's own group too."""
        by_terminal = by in (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU) and self._terminal.exists
        if self._kill_at is not None or not by_terminal:
            return
        self._terminal.take_back(self._group)
        self._continue_at = time.monotonic() + STOP_TIMEOUT
        os.killpg(os.getpgrp(), signal.SIGTSTP)

    def _continue(self) -> None:
        """Continue the command: the shell continued lockfast, or lockfast could not be stopped."""
        self._continue_at = None
        self._terminal.give(self._group)
        signal_group(self._group, signal.SIGCONT)


class CommandProcess:
    """Invariants: `pid` is also the command's process group; the process waits for `start` while lockfast lives."""

    def __init__(self, command: list[str], grace: float) -> None:
        self._command = command
        # Open /dev/null for closed standard streams, so that no pipe gets one of their numbers. The command
        # does not inherit them: its closed streams stay closed.
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

    def start(self, environment: dict[str, str]) -> None:
        """Execute the command with these variables, or raise `NotStarted`."""
        variables = [f"{name}={value}" for name, value in environment.items()]
        try:
            os.write(self._start, os.fsencode("\0".join(variables)) + b"\n")
        except BrokenPipeError:
            pass  # it was killed; its exit status says so
        os.close(self._start)
        self._start = -1
        failure = _read_all(self._failure)
        if failure:
            number = int(failure)
            code = NOT_FOUND if number in (errno.ENOENT, errno.ENOTDIR) else NOT_RUNNABLE
            raise NotStarted(f"{self._command[0]!a} cannot be run: {os.strerror(number)}.", code)

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
    """The controlling terminal, if there is one. Its foreground group changes only if the expected group is there."""

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


def terminate_group(group: int) -> None:
    signal_group(group, signal.SIGTERM)
    signal_group(group, signal.SIGCONT)  # a stopped process handles SIGTERM only when it continues


def end_group(group: int, grace: float) -> None:
    """End a process group: SIGTERM, and SIGKILL after the grace."""
    kill_at = time.monotonic() + grace
    terminate_group(group)
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
        for line in os.fsdecode(message[:-1]).split("\0"):
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
    """In the guardian, with its own session and no inherited file open: wait for DONE or for lockfast's death."""
    try:
        os.setsid()
        for number in ENDING:
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
