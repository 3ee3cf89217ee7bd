"""Text on a terminal or in a file: styles, lines that are redrawn, the full screen, and keys.

Rules:
- Escape codes go only to a terminal, and never if TERM is dumb or CI is set. NO_COLOR disables styles, not redrawing.
- A redrawn line is clipped: a wrapped line could not be overwritten.
- The cursor, the screen and the keyboard mode are restored however a block ends.
"""

from __future__ import annotations

import os
import select
import shutil
import sys
import termios
import textwrap
import tty
from collections.abc import Sequence
from typing import Self, TextIO

Line = Sequence[tuple[str, str]]  # pieces of text with their styles; a style is "" or a key of STYLES

STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
MAX_TEXT_WIDTH = 96  # columns beyond which running text is hard to read
MIN_SIZE = (40, 10)  # columns and lines below which nothing is redrawn
NBSP = "\u00a0"  # a space that never ends a line
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
ENTER_SCREEN, LEAVE_SCREEN = "\x1b[?1049h" + HIDE_CURSOR, SHOW_CURSOR + "\x1b[?1049l"


class Terminal:
    """One output stream and what it can display."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = sys.stdout if stream is None else stream
        size = shutil.get_terminal_size()
        plain = not self.stream.isatty() or os.environ.get("TERM", "dumb") == "dumb" or os.environ.get("CI")
        self.live = not plain and size.columns >= MIN_SIZE[0] and size.lines >= MIN_SIZE[1]
        self.color = self.live and not os.environ.get("NO_COLOR")
        try:
            self.symbols = bool("█░✓✗·".encode(self.stream.encoding or "ascii"))
        except (LookupError, UnicodeEncodeError):
            self.symbols = False

    @property
    def width(self) -> int:
        """Columns to use now; the user may resize the window."""
        return shutil.get_terminal_size().columns if self.live else MAX_TEXT_WIDTH

    @property
    def height(self) -> int:
        return shutil.get_terminal_size().lines

    def say(self, text: str = "", style: str = "", *, indent: str = "", hang: str | None = None) -> None:
        """Print a wrapped paragraph; `hang` indents every line after the first."""
        width = max(20, min(self.width - 1, MAX_TEXT_WIDTH))
        hang = indent if hang is None else hang
        wrapped = textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=hang, break_on_hyphens=False)
        self.lines([[(line.replace(NBSP, " "), style)] for line in wrapped or [""]])

    def lines(self, lines: Sequence[Line]) -> None:
        """Print lines unwrapped."""
        self.write("".join(self.rendered(line) + "\n" for line in lines))

    def rendered(self, line: Line) -> str:
        if not self.color:
            return "".join(text for text, _ in line)
        return "".join(f"\x1b[{STYLES[style]}m{text}\x1b[0m" if style else text for text, style in line)

    def write(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()


class Block:
    """Lines redrawn in place. A stream that cannot redraw gets only the last version, at the end."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._last: Sequence[Line] = ()
        self._height = 0

    def draw(self, lines: Sequence[Line]) -> None:
        self._last = lines
        if not self._terminal.live:
            return
        up = f"\x1b[{self._height}A" if self._height else ""
        width = self._terminal.width - 1
        written = "".join(f"\r{self._terminal.rendered(clipped(line, width))}\x1b[K\n" for line in lines)
        self._height = len(lines)
        self._terminal.write(up + written + "\x1b[J")

    def __enter__(self) -> Self:
        if self._terminal.live:
            self._terminal.write(HIDE_CURSOR)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._terminal.live:
            self._terminal.write(SHOW_CURSOR)
        elif kind is None:
            self._terminal.lines(self._last)


class Screen:
    """The whole terminal; leaving restores its earlier content."""

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal

    def __enter__(self) -> Self:
        self.terminal.write(ENTER_SCREEN)
        return self

    def __exit__(self, *_: object) -> None:
        self.terminal.write(LEAVE_SCREEN)

    def draw(self, lines: Sequence[Line]) -> None:
        width = self.terminal.width - 1
        drawn = "\x1b[K\n".join(self.terminal.rendered(clipped(line, width)) for line in lines)
        self.terminal.write("\x1b[H" + drawn + "\x1b[K\x1b[J")


class Keys:
    """Single key presses, without echo. Ctrl-C is a key like any other."""

    def __init__(self, stream: TextIO) -> None:
        self._fd = stream.fileno()
        self._before = termios.tcgetattr(self._fd)

    def __enter__(self) -> Self:
        tty.setraw(self._fd, termios.TCSADRAIN)
        mode = termios.tcgetattr(self._fd)
        mode[1] |= termios.OPOST  # output still needs its carriage returns
        termios.tcsetattr(self._fd, termios.TCSADRAIN, mode)
        return self

    def __exit__(self, *_: object) -> None:
        termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)

    def pressed(self, seconds: float) -> str:
        """Wait up to `seconds` for keys. Escape sequences, such as arrow keys, are dropped."""
        ready, _, _ = select.select([self._fd], [], [], max(0.0, seconds))
        if not ready:
            return ""
        data = os.read(self._fd, 1024)
        if not data:
            return "q"  # the terminal is closed
        text = data.decode("utf-8", "replace")
        return "" if text.startswith("\x1b") and len(text) > 1 else text


def clipped(line: Line, width: int) -> Line:
    """Cut a line to `width` columns.

    >>> clipped([("worker ", ""), ("waiting", "dim")], 9)
    [('worker ', ''), ('wa', 'dim')]
    """
    pieces = []
    for text, style in line:
        pieces.append((text[:width], style))
        width -= len(pieces[-1][0])
    return pieces
