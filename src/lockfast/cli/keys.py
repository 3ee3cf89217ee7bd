"""Keys as they are pressed, and a screen that is drawn over: for `top`. Both leave the terminal as they found it."""

from __future__ import annotations

import os
import select
import shutil
import termios
import tty
from collections.abc import Sequence
from types import TracebackType
from typing import Self, TextIO

from lockfast.cli.terminal import UNKNOWN_SIZE, Line, Terminal

ENTER_SCREEN, LEAVE_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"


class Keys:
    """The keyboard without echo and without waiting for a line; Ctrl-C is a key like any other."""

    def __init__(self, stream: TextIO) -> None:
        self._number = stream.fileno()
        self._before = termios.tcgetattr(self._number)

    def __enter__(self) -> Self:
        tty.setraw(self._number, termios.TCSADRAIN)
        changed = termios.tcgetattr(self._number)
        changed[1] |= termios.OPOST  # what is written still has its carriage returns
        termios.tcsetattr(self._number, termios.TCSADRAIN, changed)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        termios.tcsetattr(self._number, termios.TCSADRAIN, self._before)

    def pressed(self, seconds: float) -> str:
        """What was pressed, if anything was in that time; an escape sequence such as an arrow's is left out."""
        ready, _, _ = select.select([self._number], [], [], max(0.0, seconds))
        if not ready:
            return ""
        data = os.read(self._number, 1024)
        if not data:
            return "q"  # the terminal is gone
        text = data.decode("utf-8", "replace")
        return "" if text.startswith("\x1b") and len(text) > 1 else text


class Screen:
    """The whole terminal, given back with what was on it."""

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines; asked again each time, for windows change."""
        size = shutil.get_terminal_size(UNKNOWN_SIZE)
        return size.columns, size.lines

    def __enter__(self) -> Self:
        self._write(ENTER_SCREEN)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._write(LEAVE_SCREEN)

    def draw(self, lines: Sequence[Line]) -> None:
        """Show these lines from the top, and nothing else."""
        drawn = "\x1b[K\n".join(self.terminal.rendered(line) for line in lines)
        self._write("\x1b[H" + drawn + "\x1b[K\x1b[J")

    def _write(self, text: str) -> None:
        self.terminal.stream.write(text)
        self.terminal.stream.flush()
