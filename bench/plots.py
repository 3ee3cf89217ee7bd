"""Bar charts as SVG, without a library.

An image cannot see the theme of its page, but its own style sheet can query the theme of the reader. So one file is
readable on white and on black.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from bench.harness import is_ours, number

WIDTH = 720
LABEL = 230
BAR = 18
GAP = 8
TOP = 46
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1f2328 }
  .title { font-weight: 600; font-size: 15px }
  .hint, .value { fill: #59636e }
  .ours { fill: #0969da }
  .theirs { fill: #8c959f }
  .floor { fill: #d0d7de }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc }
    .hint, .value { fill: #9198a1 }
    .ours { fill: #4493f8 }
    .theirs { fill: #6e7681 }
    .floor { fill: #3d444d }
  }
"""


def bars(figure: Mapping[str, Any]) -> str:
    """Draw one figure of a report. The axis is logarithmic if the values differ by more than a factor of 30.

    >>> drawn = bars({"title": "t", "unit": "ms", "values": {"lockfast": 1.0, "other": 2.0}, "less_is_better": True})
    >>> drawn.count("<rect")
    2
    """
    values: Mapping[str, float] = {name: value for name, value in figure["values"].items() if value and value > 0}
    height = TOP + len(values) * (BAR + GAP) + 8
    logarithmic = bool(values) and max(values.values()) > 30 * min(values.values())
    better = "less" if figure["less_is_better"] else "more"
    hint = f"{figure['unit']}, {better} is better{', logarithmic' if logarithmic else ''}"
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(figure["title"])}">',
        f"<style>{STYLE}</style>",
        f'<text class="title" x="8" y="20">{escape(figure["title"])}</text>',
        f'<text class="hint" x="8" y="37">{escape(hint)}</text>',
    ]
    for at, (name, value) in enumerate(values.items()):
        lines += _bar(name, value, _share(value, list(values.values()), logarithmic), TOP + at * (BAR + GAP))
    return "\n".join([*lines, "</svg>\n"])


def _share(value: float, values: Sequence[float], logarithmic: bool) -> float:
    if not logarithmic:
        return value / max(values)
    low, high = math.log(min(values) / 2), math.log(max(values))
    return (math.log(value) - low) / (high - low)


def _bar(name: str, value: float, share: float, y: int) -> list[str]:
    longest = WIDTH - LABEL - 90
    width = max(2.0, longest * share)
    kind = "ours" if is_ours(name) else "floor" if name.startswith("floor") else "theirs"
    return [
        f'<text x="{LABEL - 8}" y="{y + 13}" text-anchor="end">{escape(name)}</text>',
        f'<rect class="{kind}" x="{LABEL}" y="{y}" width="{width:.1f}" height="{BAR}" rx="2"/>',
        f'<text class="value" x="{LABEL + width + 6:.1f}" y="{y + 13}">{number(value)}</text>',
    ]
