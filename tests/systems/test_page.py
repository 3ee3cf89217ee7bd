"""`docs/systems.md` lists every lock system once, with links that exist, and every system has marked tests."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
COUNTS = {"A": 5, "B": 3, "C": 7, "D": 4, "E": 5}
IDS = [f"{letter}{number + 1}" for letter, count in COUNTS.items() for number in range(count)]


class Row(NamedTuple):
    id: str
    links: list[str]


def rows() -> list[Row]:
    page = (ROOT / "docs" / "systems.md").read_text("utf-8")
    cells = ([cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines())
    return [
        Row(row[0], re.findall(r"\]\(([^)]+)\)", row[3]))
        for row in cells
        if len(row) >= 4 and re.fullmatch("[A-E][0-9]", row[0])
    ]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as the site generator makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", title.replace("`", "")).strip().lower() for title in titles]
    return {re.sub(r"[-\s]+", "-", title) for title in plain}


def marked_tests() -> Iterator[tuple[str, str]]:
    """(row id, test) for every test with a `system` marker: its own, or the `pytestmark` of its module."""
    for path in (ROOT / "tests").rglob("test_*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        of_module = [
            row
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
            for row in row_ids(node.value)
        ]
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                own = [row for mark in node.decorator_list for row in row_ids(mark)]
                for row in [*of_module, *own]:
                    yield row, f"{path.name}::{node.name}"


def row_ids(expression: ast.expr) -> list[str]:
    """The literal arguments of every `pytest.mark.system(...)` in an expression; the gallery computes others."""
    calls = [node for node in ast.walk(expression) if isinstance(node, ast.Call)]
    marks = [call for call in calls if ast.unparse(call.func) == "pytest.mark.system"]
    return [str(argument.value) for mark in marks for argument in mark.args if isinstance(argument, ast.Constant)]


def test_page_lists_every_system_once() -> None:
    assert [row.id for row in rows()] == IDS


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.id)
def test_links_exist(row: Row) -> None:
    assert row.links
    for link in row.links:
        page, _, anchor = link.partition("#")
        assert (ROOT / "docs" / page).exists(), link
        assert not anchor or anchor in anchors(ROOT / "docs" / page), link


def test_every_system_has_a_marked_test() -> None:
    marked = dict(marked_tests())
    assert [row for row in IDS if row not in marked] == []


def test_every_marker_names_a_system() -> None:
    assert [(row, test) for row, test in marked_tests() if row not in IDS] == []


def test_ids_are_markers_and_not_names() -> None:
    named = [path.name for path in (ROOT / "tests").rglob("test_*.py") if re.match("test_[a-e][0-9]_", path.name)]
    texts = [path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    named += [name for text in texts for name in re.findall("def (test_[a-e][0-9]_[a-z_0-9]*)", text)]
    assert named == []
