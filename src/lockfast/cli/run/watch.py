"""Look after the command while it runs: its signals, its end, the terminal, and the lock above all.

    RUNNING ──the lock is lost──▶ ENDING: SIGTERM to the group ──grace over──▶ SIGKILL to the group
       │                             │
       └── the command ends ─────────┴──▶ its exit code, or that of a lost lock

Rules kept here: one thread, one place to wait; whatever happens arrives there as a byte: a signal's number, or 0 for
news of the lock. Signals are passed on to the whole group. When the lock is lost, nobody of the group is left running.
A command that its terminal stopped (Ctrl-Z) stops lockfast too, so that the shell has its prompt; one that somebody
stopped otherwise does not, and keeps its lock.
"""

from __future__ import annotations

import os
import select
import time

from lockfast.cli.run.launch import LOOK_EVERY, signal_group
from lockfast.cli.run.options import LOST
from lockfast.cli.run.signals import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from lockfast.cli.run.hold import LeaseHold, QuickHold
    from lockfast.cli.run.launch import Launch
    from lockfast.cli.run.options import Options
    from lockfast.cli.run.terminal import Foreground

PASSED_ON = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGWINCH", "SIGALRM")
NEWS = b"\0"
LONGEST_NAP = 1.0
"""Seconds; a machine that was suspended runs its timers late."""
STOPS_WITHIN = 0.2
"""Seconds in which we are surely stopped, once we asked for it; who is not, cannot be (no shell is there to go on)."""


class Bell:
    """Where everything arrives. Made before the lock is taken, so that nothing is missed."""

    def __init__(self) -> None:
        self.ear, self._mouth = os.pipe()
        os.set_blocking(self.ear, False)
        os.set_blocking(self._mouth, False)

    def ring(self) -> None:
        """News of the lock; from any thread."""
        try:
            os.write(self._mouth, NEWS)
        except OSError:
            pass  # full: then it rings already

    def listen(self) -> None:
        """From now on signals arrive here too, except those that are ignored, as SIGHUP under nohup."""
        signal.set_wakeup_fd(self._mouth, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGCONT, *(getattr(signal, name) for name in PASSED_ON)):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, frame: None)

    def wait(self, seconds: float) -> bytes:
        """What has arrived, if anything did in time."""
        select.select([self.ear], [], [], max(0.0, seconds))
        try:
            return os.read(self.ear, 4096)
        except BlockingIOError:
            return b""


class Watch:
    """One run. `_kill_at` is set once the command has been told to end because the lock was lost, `_resume_at` while it
    is stopped and is to go on with us."""

    def __init__(
        self, options: Options, launch: Launch, hold: QuickHold | LeaseHold, bell: Bell, front: Foreground
    ) -> None:
        self._options = options
        self._group = launch.pid
        self.hold = hold
        self._bell = bell
        self._front = front
        self._kill_at: float | None = None
        self._resume_at: float | None = None
        self._code: int | None = None
        self.why_lost = ""

    def run(self) -> int:
        """The exit code, when the command and, after a loss, all of its group have ended."""
        while True:
            for number in self._bell.wait(self._nap()):
                self._arrived(number)
            self._reap()
            if self._code is not None and self._kill_at is None:
                return self._code
            if self._code is not None and not signal_group(self._group, 0):
                return LOST
            self._look()

    def _nap(self) -> float:
        if self._kill_at is not None or self._resume_at is not None:
            return LOOK_EVERY
        if self.hold.load_at is None:
            return LONGEST_NAP
        return min(LONGEST_NAP, self.hold.load_at - time.monotonic())

    def _arrived(self, number: int) -> None:
        if number in (0, signal.SIGCHLD):
            return
        if number == signal.SIGCONT:
            self._go_on()
        else:
            signal_group(self._group, number)

    def _look(self) -> None:
        """See to the lock: have it looked after by the library in time, and end the command when it is lost."""
        if self._resume_at is not None and time.monotonic() >= self._resume_at:
            self._go_on()
        if self.hold.load_at is not None and time.monotonic() >= self.hold.load_at:
            self.hold = self.hold.load(self._bell.ring)  # type: ignore[union-attr]
        if self._kill_at is None and self.hold.lost:
            self.why_lost = self.hold.lost
            self._kill_at = time.monotonic() + self._options.grace
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
        """The command was stopped. If its terminal did that, stop too, with all of our own group."""
        by_terminal = by in (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU) and self._front.is_there
        if self._kill_at is not None or not by_terminal:
            return
        self._front.take_back(self._group)
        self._resume_at = time.monotonic() + STOPS_WITHIN
        os.killpg(os.getpgrp(), signal.SIGTSTP)

    def _go_on(self) -> None:
        """Somebody goes on with us, or we could not be stopped."""
        self._resume_at = None
        self._front.give(self._group)
        signal_group(self._group, signal.SIGCONT)
