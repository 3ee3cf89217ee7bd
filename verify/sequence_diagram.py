"""Render sequence diagrams, written in a subset of Mermaid, as inline SVG: no JavaScript, no network.

The documentation contains diagrams as Mermaid text, which code hosts render themselves. mkdocs.yml names `fence` as the
renderer for the built pages. The drawings inherit text and background colors, so light and dark themes work.

    participant NAME [as text]
    A->>B: text       a solid arrow
    A-->>B: text      a dashed arrow
    Note over A[,B]: text
"""

from __future__ import annotations

import html
import re
import textwrap
from typing import Any, NamedTuple
from zlib import crc32

GAP = 230
"""Pixels between two lifelines."""
MARGIN = 110
LINE = 16
CHAR = 6.7
"""Average width of a character in pixels at the font size used."""

_PARTICIPANT = re.compile(r"participant (?P<name>\w+)(?: as (?P<label>.+))?")
_ARROW = re.compile(r"(?P<source>\w+)(?P<kind>--?>>)(?P<target>\w+): (?P<text>.+)")
_NOTE = re.compile(r"Note over (?P<first>\w+)(?:, ?(?P<last>\w+))?: (?P<text>.+)")


class Step(NamedTuple):
    """An arrow or a note, from one participant to another (or the same)."""

    first: str
    last: str
    text: str
    kind: str


class Diagram:
    """A parsed diagram: participants and steps, in order.

    >>> Diagram("sequenceDiagram\\n participant A\\n participant B\\n A->>B: hello").steps
    [Step(first='A', last='B', text='hello', kind='->>')]
    """

    def __init__(self, text: str) -> None:
        self.labels: dict[str, str] = {}
        self.steps: list[Step] = []
        head, *lines = [line.strip() for line in text.strip().splitlines()]
        if head != "sequenceDiagram":
            raise ValueError(f"cannot draw {head!r}: only sequence diagrams are supported")
        for line in filter(None, lines):
            self._read(line)

    def _read(self, line: str) -> None:
        if match := _PARTICIPANT.fullmatch(line):
            self.labels[match["name"]] = match["label"] or match["name"]
        elif match := _ARROW.fullmatch(line):
            self.steps.append(Step(match["source"], match["target"], match["text"], match["kind"]))
        elif match := _NOTE.fullmatch(line):
            self.steps.append(Step(match["first"], match["last"] or match["first"], match["text"], "note"))
        else:
            raise ValueError(f"cannot draw this line of a sequence diagram: {line!r}")
        for name in self.steps[-1][:2] if self.steps else ():
            if name not in self.labels:
                raise ValueError(f"{name!r} is not a participant: {line!r}")


class _Drawing:
    def __init__(self, diagram: Diagram) -> None:
        self._diagram = diagram
        self._at = {name: MARGIN + GAP * number for number, name in enumerate(diagram.labels)}
        self._width = 2 * MARGIN + GAP * (len(self._at) - 1)
        self._parts: list[str] = []
        self._y = 50.0
        self._tip = f"tip{crc32(repr(diagram.steps).encode()):x}"  # unique on a page with several drawings

    def draw(self) -> str:
        for step in self._diagram.steps:
            if step.kind == "note":
                self._note(step)
            else:
                self._arrow(step)
        height = self._y + 14
        heads = [self._head(name, label, height) for name, label in self._diagram.labels.items()]
        return (
            f'<svg class="sequence" viewBox="0 0 {self._width} {height:g}" role="img" '
            f'style="max-width: {self._width}px; width: 100%" xmlns="http://www.w3.org/2000/svg" font-size="12.5">'
            f"{_MARKER.format(self._tip)}{''.join(heads)}{''.join(self._parts)}</svg>"
        )

    def _head(self, name: str, label: str, height: float) -> str:
        x = self._at[name]
        width = max(60.0, len(label) * CHAR + 20)
        return (
            f'<line x1="{x}" y1="32" x2="{x}" y2="{height:g}" stroke="currentColor" stroke-opacity="0.3"/>'
            f'<rect x="{x - width / 2:g}" y="6" width="{width:g}" height="26" rx="4" fill="{_FILL}" '
            f'stroke="currentColor" stroke-opacity="0.6"/>{_text(x, 23, [label], bold=True)}'
        )

    def _note(self, step: Step) -> None:
        first, last = sorted((self._at[step.first], self._at[step.last]))
        space = last - first + GAP - 34
        lines = textwrap.wrap(step.text, max(12, int(space / CHAR)))
        width = space if first != last else max(len(line) for line in lines) * CHAR + 20
        height = LINE * len(lines) + 8
        left = min(max(4.0, (first + last - width) / 2), self._width - width - 4)
        self._parts.append(
            f'<rect x="{left:g}" y="{self._y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{_NOTE_FILL}" '
            f'stroke="currentColor" stroke-opacity="0.25"/>{_text(left + width / 2, self._y + 16, lines)}'
        )
        self._y += height + 10

    def _arrow(self, step: Step) -> None:
        start, end = self._at[step.first], self._at[step.last]
        lines = textwrap.wrap(step.text, max(16, int((abs(end - start) - 24) / CHAR)))
        self._parts.append(_text((start + end) / 2, self._y + 12, lines))
        self._y += LINE * len(lines) + 4
        dashes = ' stroke-dasharray="5 4"' if step.kind.startswith("--") else ""
        tip = end - 2 if end > start else end + 2
        self._parts.append(
            f'<line x1="{start}" y1="{self._y:g}" x2="{tip}" y2="{self._y:g}" stroke="currentColor"{dashes} '
            f'marker-end="url(#{self._tip})"/>'
        )
        self._y += 14


_FILL = "var(--md-default-bg-color, #fff)"
_NOTE_FILL = "var(--md-code-bg-color, #f4f4f4)"
_MARKER = (
    '<defs><marker id="{}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0 L8 4 L0 8 Z" fill="currentColor"/></marker></defs>'
)


def _text(x: float, y: float, lines: list[str], *, bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    rows = (f'<tspan x="{x:g}" y="{y + LINE * at:g}">{html.escape(line)}</tspan>' for at, line in enumerate(lines))
    return f'<text text-anchor="middle" fill="currentColor"{weight}>{"".join(rows)}</text>'


def svg(text: str) -> str:
    """Render a diagram as SVG.

    >>> svg("sequenceDiagram\\n participant A\\n participant B\\n A->>B: hello")[:20]
    '<svg class="sequence'
    """
    return _Drawing(Diagram(text)).draw()


def fence(source: str, language: str, css_class: str, options: Any, md: Any, **kwargs: Any) -> str:
    """Render a ```` ```mermaid ```` block, for pymdownx.superfences."""
    return f'<div class="{css_class}">{svg(source)}</div>'
