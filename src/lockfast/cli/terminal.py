"""What is printed, and on what: a terminal that can redraw and colour, or a file that gets plain lines.

Rules kept here: escape codes go to a terminal only, and never when TERM is dumb or CI is set; NO_COLOR takes the
colours and leaves the redrawing; a line that is drawn again is clipped, because a wrapped one could not be drawn
over; the cursor comes back however a block ends.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from types import TracebackType
from typing import Self, TextIO

Piece = tuple[str, str]
"""Text and its style, which is "" or a key of STYLES."""
Line = Sequence[Piece]

STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
WIDEST_TEXT = 96
"""Columns beyond which running text is hard to read."""
UNKNOWN_SIZE = (80, 24)
LEAST_SIZE = (40, 10)
"""Columns and lines below which nothing is redrawn."""
NBSP = "\u00a0"


class Terminal:
    """One output stream and what it can show."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = sys.stdout if stream is None else stream
        self.live = _can_redraw(self.stream)
        self.flavours = self.live and not os.environ.get("NO_COLOR")
        self.symbols = _can_write(self.stream, "█░✓✗·")

    @property
    def width(self) -> int:
        """Columns to use; asked again each time, for windows change."""
        return shutil.get_terminal_size(UNKNOWN_SIZE).columns if self.live else WIDEST_TEXT

    def say(self, text: str = "", style: str = "", *, indent: str = "", hang: str | None = None) -> None:
        """Print a paragraph, wrapped; its lines after the first begin with `hang`. NBSP is a space that never ends a
        line."""
        width = max(20, min(self.width - 1, WIDEST_TEXT))
        hang = indent if hang is None else hang
        wrapped = textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=hang, break_on_hyphens=False)
        self.lines([[(line.replace(NBSP, " "), style)] for line in wrapped or [""]])

    def lines(self, lines: Sequence[Line]) -> None:
        """Print lines as they are."""
        self.stream.write("".join(self.rendered(line) + "\n" for line in lines))
        self.stream.flush()

    def rendered(self, line: Line) -> str:
        """One line as it is written, coloured if that can be."""
        if not self.flavours:
            return "".join(text for text, _ in line)
        return "".join(f"\x1b[{STYLES[style]}m{text}\x1b[0m" if style else text for text, style in line)


class Block:
    """Lines that are drawn again in the same place; where that cannot be, only the last drawing is printed."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._last: Sequence[Line] = ()
        self._drawn = 0

    def draw(self, lines: Sequence[Line]) -> None:
        """Show these lines instead of those before."""
        self._last = lines
        if not self._terminal.live:
            return
        up = f"\x1b[{self._drawn}A" if self._drawn else ""
        room = self._terminal.width - 1
        written = "".join(f"\r{self._terminal.rendered(clipped(line, room))}\x1b[K\n" for line in lines)
        self._drawn = len(lines)
        self._terminal.stream.write(up + written + "\x1b[J")
        self._terminal.stream.flush()

    def __enter__(self) -> Self:
        if self._terminal.live:
            self._terminal.stream.write("\x1b[?25l")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._terminal.live:
            self._terminal.stream.write("\x1b[?25h")
            self._terminal.stream.flush()
        elif kind is None:
            self._terminal.lines(self._last)


def clipped(line: Line, room: int) -> Line:
    """As much of a line as `room` columns hold.

    >>> clipped([("worker ", ""), ("waiting", "dim")], 9)
    [('worker ', ''), ('wa', 'dim')]
    """
    pieces = []
    for text, style in line:
        pieces.append((text[:room], style))
        room -= len(pieces[-1][0])
    return pieces


def _can_redraw(stream: TextIO) -> bool:
    if not stream.isatty() or os.environ.get("TERM", "dumb") == "dumb" or os.environ.get("CI"):
        return False
    size = shutil.get_terminal_size(UNKNOWN_SIZE)
    return size.columns >= LEAST_SIZE[0] and size.lines >= LEAST_SIZE[1]


def _can_write(stream: TextIO, text: str) -> bool:
    try:
        text.encode(stream.encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        return False
    return True
