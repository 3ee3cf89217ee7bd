"""Draw the rows of a terminal as SVG: a dark panel with a border, readable on light and dark pages."""

from __future__ import annotations

import re
from html import escape
from itertools import groupby

from tools.pictures.screen import Cell

CHAR, LINE, PAD = 8.43, 20, 16
FONT = "'DejaVu Sans Mono', 'SF Mono', Menlo, Consolas, monospace"
WORDS = re.compile(r"\S+(?: \S+)*")
PAPER, BORDER, INK = "#1c2128", "#57606a", "#d8dee6"
PALETTE = {"2": "#8b96a3", "31": "#ff7b72", "32": "#56d364", "33": "#e3b341", "36": "#56d4dd"}


def drawn(rows: list[list[Cell]], title: str, width: int) -> str:
    """Return the picture. Screen readers read `title` aloud."""
    wide, high = width * CHAR + 2 * PAD, len(rows) * LINE + 2 * PAD
    lines = "\n".join(_line(row, PAD + (number + 0.72) * LINE) for number, row in enumerate(rows))
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:.0f} {high}" width="{wide:.0f}" role="img">
<title>{escape(title)}</title>
<rect x="0.5" y="0.5" width="{wide - 1:.0f}" height="{high - 1}" rx="8" fill="{PAPER}" stroke="{BORDER}"/>
<g font-family="{FONT}" font-size="14" fill="{INK}" xml:space="preserve">
{lines}
</g>
</svg>
"""


def _line(row: list[Cell], y: float) -> str:
    """Position each run of words by itself, so that a font of another width cannot shift the columns."""
    parts, column = [], 0
    for style, run in groupby(row, key=lambda cell: cell.style):
        text = "".join(cell.char for cell in run)
        for words in WORDS.finditer(text):
            x, length = PAD + (column + words.start()) * CHAR, len(words[0]) * CHAR
            parts.append(
                f'<text x="{x:.1f}" y="{y:.1f}" textLength="{length:.1f}" lengthAdjust="spacingAndGlyphs"'
                f"{_look(style)}>{escape(words[0], quote=False)}</text>"
            )
        column += len(text)
    return "".join(parts)


def _look(style: str) -> str:
    if style == "1":
        return ' font-weight="bold" fill="#ffffff"'
    return f' fill="{PALETTE[style]}"' if style in PALETTE else ""
