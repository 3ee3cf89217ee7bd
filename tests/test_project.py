"""The Makefile, the pre-commit hooks and the continuous integration agree with each other."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")


def recipe(target: str) -> list[str]:
    """The commands of a target, with the variables that it uses here."""
    match = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert match is not None, target
    return [line.strip().replace("$(BIN)", ".venv/bin") for line in match[1].splitlines()]


def targets() -> list[str]:
    match = re.search(r"^\.PHONY: ((?:.*\\\n)*.*)$", MAKEFILE, re.MULTILINE)
    assert match is not None
    return match[1].replace("\\\n", " ").split()


def test_pre_commit_runs_what_make_check_runs() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text("utf-8")
    assert re.findall(r"^ +entry: (.+)$", hooks, re.MULTILINE) == recipe("check")


def test_help_lists_every_target() -> None:
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"^  ([a-z-]+) ", shown, re.MULTILINE) == targets()


@pytest.mark.parametrize("target", ["check", "test-all"])
def test_continuous_integration_runs(target: str) -> None:
    assert re.search(rf"^make {target}\b", (ROOT / ".ci" / "run").read_text("utf-8"), re.MULTILINE)
