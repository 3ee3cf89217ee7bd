"""Supervise a running command: signals, its exit, the terminal and the lease.

    RUNNING ──lock lost──▶ ENDING: SIGTERM to the group ──grace over──▶ SIGKILL to the group
       │                      │
       └── command exits ─────┴──▶ its exit code, or LOST

Rules:
- One thread waits on one pipe. Every event arrives as a byte: a signal number, or 0 for a change of the lease.
- Signals are forwarded to the whole group. After a loss no process of the group survives.
- If the terminal stops the command (Ctrl-Z), lockfast stops too, so that the shell shows its prompt. If another process
  stops the command, lockfast keeps running and keeps the lock.
"""

from __future__ import annotations

import os
import select
import time

from lockfast.cli.run.options import LOST
from lockfast.cli.run.process import POLL, signal_group

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal

    from lockfast.cli.run.lease import CommandLease, UnrenewedLease
    from lockfast.cli.run.options import Options
    from lockfast.cli.run.process import Foreground
else:
    import _signal as signal  # see process.py

FORWARDED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGWINCH", "SIGALRM")
MAX_SLEEP = 1.0
"""Seconds; after a suspend of the machine, timers fire late."""
STOP_TIMEOUT = 0.2
"""Seconds after which lockfast assumes that it cannot be stopped (no shell would continue it)."""


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
        for number in (signal.SIGCHLD, signal.SIGCONT, *(getattr(signal, name) for name in FORWARDED)):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, frame: None)

    def wait(self, seconds: float) -> bytes:
        """Wait up to `seconds` for events."""
        select.select([self._read], [], [], max(0.0, seconds))
        try:
            return os.read(self._read, 4096)
        except BlockingIOError:
            return b""


class Supervisor:
    """One run. `_kill_at` is set once the command was asked to end because the lock was lost; `_continue_at` while
    lockfast stops together with the command."""

    def __init__(
        self, options: Options, group: int, lease: UnrenewedLease | CommandLease, wake: WakePipe, terminal: Foreground
    ) -> None:
        self._grace = options.grace
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
            for number in self._wake.wait(self._sleep_time()):
                self._handle(number)
            self._reap()
            if self._code is not None and self._kill_at is None:
                return self._code
            if self._code is not None and not signal_group(self._group, 0):
                return LOST
            self._check()

    def _sleep_time(self) -> float:
        if self._kill_at is not None or self._continue_at is not None:
            return POLL
        return min(MAX_SLEEP, self.lease.renew_at - time.monotonic())

    def _handle(self, number: int) -> None:
        if number == signal.SIGCONT:
            self._continue()
        elif number not in (0, signal.SIGCHLD):
            signal_group(self._group, number)

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
            signal_group(self._group, signal.SIGTERM)
            signal_group(self._group, signal.SIGCONT)
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
