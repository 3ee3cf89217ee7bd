"""A minimal terminal emulator: only the escape codes that the command line uses."""

from __future__ import annotations

import re
from typing import NamedTuple

ESCAPE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])")
SWITCH_SCREEN = "?1049"


class Cell(NamedTuple):
    """A character and its style: "" or SGR numbers such as "1" and "33"."""

    char: str
    style: str


BLANK = Cell(" ", "")


class Screen:
    """The cells of the screen, row by row. Unknown escape codes are ignored."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._rows: list[list[Cell]] = [[]]
        self._row = self._column = 0
        self._style = ""

    def feed(self, text: str) -> None:
        at = 0
        while at < len(text):
            found = ESCAPE.match(text, at)
            if found:
                self._escape(found[1], found[2])
                at = found.end()
            else:
                self._put(text[at])
                at += 1

    def rows(self) -> list[list[Cell]]:
        """The rows of the screen, without empty ones at the end."""
        rows = [list(row) for row in self._rows]
        while rows and not any(cell.char.strip() for cell in rows[-1]):
            rows.pop()
        return rows

    def _put(self, char: str) -> None:
        if char == "\r":
            self._column = 0
        elif char == "\n":
            self._row += 1
            self._grow()
        elif char >= " ":
            row = self._rows[self._row]
            row.extend([BLANK] * (self._column + 1 - len(row)))
            row[self._column] = Cell(char, self._style)
            self._column += 1

    def _grow(self) -> None:
        while len(self._rows) <= self._row:
            self._rows.append([])

    def _escape(self, numbers: str, what: str) -> None:
        if what == "m":
            self._style = "" if numbers in ("", "0") else numbers
        elif what == "K":
            del self._rows[self._row][self._column :]
        elif what == "J":
            del self._rows[self._row][self._column :]
            del self._rows[self._row + 1 :]
        elif what == "H":
            self._row = self._column = 0
        elif what == "A":
            self._row = max(0, self._row - int(numbers or 1))
        elif numbers == SWITCH_SCREEN and what == "h":
            self._rows, self._row, self._column = [[]], 0, 0
