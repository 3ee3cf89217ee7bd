"""Sequence diagrams of the documentation are rendered as SVG when the pages are built, without external resources."""

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from verify.sequence_diagram import fence, svg

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SVG = "{http://www.w3.org/2000/svg}"

TEXT = """
sequenceDiagram
    participant A as holder A
    participant S as Server
    A->>S: release door & go
    S-->>A: 1
    Note over A,S: Violation: none
    Note over A: has finished
"""


def texts(drawing: str) -> list[str]:
    return ["".join(one.itertext()) for one in ET.fromstring(drawing).iter(f"{SVG}text")]


def test_every_text_is_drawn() -> None:
    assert texts(svg(TEXT)) == ["holder A", "Server", "release door & go", "1", "Violation: none", "has finished"]


def test_arrows_point_to_the_receiver_and_replies_are_dashed() -> None:
    arrows = [one for one in ET.fromstring(svg(TEXT)).iter(f"{SVG}line") if one.get("marker-end")]
    assert [float(one.get("x1", "")) < float(one.get("x2", "")) for one in arrows] == [True, False]
    assert [one.get("stroke-dasharray") is not None for one in arrows] == [False, True]


def test_long_texts_wrap_inside_the_drawing() -> None:
    drawing = ET.fromstring(svg(TEXT.replace("has finished", "word " * 60)))
    _, _, width, height = map(float, drawing.get("viewBox", "").split())
    spans = list(drawing.iter(f"{SVG}tspan"))
    assert len(spans) > 10
    assert all(0 < float(span.get("x", "")) < width and float(span.get("y", "")) < height for span in spans)


@pytest.mark.parametrize(
    "text", ["graph LR\n A-->B", "sequenceDiagram\n participant A\n A->>B: hello", "sequenceDiagram\n loop for ever"]
)
def test_unsupported_text_raises(text: str) -> None:
    with pytest.raises(ValueError, match=r"cannot draw|not a participant"):
        svg(text)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if FENCE.search(page.read_text("utf-8"))], ids=lambda p: p.name
)
def test_diagrams_of_every_page_can_be_drawn(page: Path) -> None:
    for text in FENCE.findall(page.read_text("utf-8")):
        drawing = fence(text, "mermaid", "diagram", {}, None)
        assert "<script" not in drawing
        assert "href" not in drawing
        assert ET.fromstring(drawing).tag == "div"


def test_pages_are_built_with_this_renderer() -> None:
    assert "!!python/name:verify.sequence_diagram.fence" in (ROOT / "mkdocs.yml").read_text("utf-8")
