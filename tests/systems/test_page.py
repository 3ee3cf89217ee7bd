"""`docs/systems.md` lists every system, with a test that exists and pages that exist."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
COUNTS = {"A": 5, "B": 3, "C": 7, "D": 4, "E": 5}
IDS = [f"{letter}{number + 1}" for letter, count in COUNTS.items() for number in range(count)]


class Row(NamedTuple):
    id: str
    links: list[str]
    tests: list[str]


def rows() -> list[Row]:
    page = (ROOT / "docs" / "systems.md").read_text("utf-8")
    found = []
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 5 and re.fullmatch("[A-E][0-9]", cells[0]):
            found.append(
                Row(cells[0], re.findall(r"\]\(([^)]+)\)", cells[3]), re.findall("`(test_[a-z0-9_]+)`", cells[4]))
            )
    return found


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as the site generator makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", title.replace("`", "")).strip().lower() for title in titles]
    return {re.sub(r"[-\s]+", "-", title) for title in plain}


def test_every_system_is_there_once() -> None:
    assert [row.id for row in rows()] == IDS


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.id)
def test_what_is_linked_exists(row: Row) -> None:
    assert row.links
    for link in row.links:
        page, _, anchor = link.partition("#")
        assert (ROOT / "docs" / page).exists(), link
        assert not anchor or anchor in anchors(ROOT / "docs" / page), link


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.id)
def test_what_is_named_is_tested(row: Row) -> None:
    text = "".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert row.tests
    assert [test for test in row.tests if not re.search(rf"def {test}\b", text)] == []
