"""Who has the terminal: while the command runs, its group does, so that Ctrl-C and Ctrl-Z are the command's.

Rules kept here: the terminal is handed on only by whom it belongs to, and only that is taken back; a command in the
background leaves it alone.
"""

from __future__ import annotations

import os

from lockfast.cli.run.signals import signal


class Foreground:
    """The controlling terminal, if there is one and we are in its foreground."""

    def __init__(self) -> None:
        self._terminal = -1
        self._group = os.getpgrp()
        try:
            self._terminal = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return
        # Whoever changes the foreground from the background gets this signal, and would be stopped.
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)

    @property
    def is_there(self) -> bool:
        """Whether there is a terminal that could stop anybody."""
        return self._terminal >= 0

    def give(self, group: int) -> None:
        """Put `group` in front, if we are there."""
        if self._in_front(self._group):
            self._put(group)

    def take_back(self, group: int) -> None:
        """Be in front again, if `group` still is."""
        if self._in_front(group):
            self._put(self._group)

    def _in_front(self, group: int) -> bool:
        try:
            return self._terminal >= 0 and os.tcgetpgrp(self._terminal) == group
        except OSError:
            return False  # the terminal was hung up

    def _put(self, group: int) -> None:
        try:
            os.tcsetpgrp(self._terminal, group)
        except OSError:
            pass
