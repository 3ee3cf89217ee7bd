"""The options of the public interface are checked by mypy and pyright, and decorated functions keep their signature.

Both checkers must report exactly the errors that `tests/typing/program.py` expects.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "tests" / "typing" / "program.py"

Errors = set[tuple[int, str]]


def expected(checker: int) -> Errors:
    """The lines with an error, and its code: 0 for mypy, 1 for pyright."""
    lines = enumerate(PROGRAM.read_text("utf-8").splitlines(), start=1)
    marks = [(number, re.search(r"# expect error: ([a-z-]+) / ([\w, ]+)$", line)) for number, line in lines]
    return {(number, code) for number, mark in marks if mark is not None for code in mark[1 + checker].split(", ")}


def output(command: Sequence[str], **environment: str) -> str:
    checked = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode in (0, 1), checked.stderr
    return checked.stdout


def test_the_program_expects_errors() -> None:
    assert len(expected(0)) > 80
    assert {line for line, _ in expected(0)} == {line for line, _ in expected(1)}


def test_mypy_reports_the_expected_errors() -> None:
    pytest.importorskip("mypy")
    text = output(["mypy", "--no-error-summary", "--hide-error-context", str(PROGRAM)], MYPYPATH=str(ROOT / "src"))
    found = re.findall(r"^(.+?):(\d+): error: .*\[([a-z-]+)\]$", text, re.MULTILINE)
    assert {(ROOT / path).resolve() for path, _, _ in found} == {PROGRAM}
    assert {(int(line), code) for _, line, code in found} == expected(0)


def test_pyright_reports_the_expected_errors() -> None:
    pytest.importorskip("pyright")
    text = output(
        ["pyright", "--outputjson", "--pythonpath", sys.executable, "--project", str(PROGRAM.parent)],
        PYRIGHT_PYTHON_IGNORE_WARNINGS="1",  # else it looks for a newer version on the index
    )
    found = json.loads(text)["generalDiagnostics"]
    assert {Path(one["file"]) for one in found} == {PROGRAM}
    assert {(one["range"]["start"]["line"] + 1, one["rule"]) for one in found} == expected(1)
