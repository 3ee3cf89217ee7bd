"""The documentation is true: its Python examples run, and the files that it names exist.

The code blocks of a page share one namespace and run from top to bottom, with an embedded store of their own as the
default target. A URL on localhost is replaced by that of a real server. `await` works at the top level, as in a
notebook. A block that starts with `>>>` is a doctest. Only ```` ```python no-run ```` blocks do not run.
"""

import ast
import asyncio
import doctest
import gc
import importlib
import inspect
import pkgutil
import re
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import lockfast
from lockfast import ports
from tests.support.servers import Server

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROSE = [*PAGES, *(ROOT / f"{name}.md" for name in ("CHANGELOG", "CONTRIBUTING", "SECURITY"))]
FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^`\n]*)\n(?P<body>.*?)^(?P=indent)```[ ]*$", re.MULTILINE | re.DOTALL)
SERVER = re.compile(r"(?:redis|valkey)://(?:localhost|127\.0\.0\.1)(?::6379)?(?:/0)?")


class Fence(NamedTuple):
    """One block of Python on a page; `line` is the line number of its first line."""

    line: int
    body: str
    run: bool


def fences(text: str) -> list[Fence]:
    found = []
    for match in FENCE.finditer(text):
        language, *marks = match["info"].split() or [""]
        if language in ("python", "py", "pycon"):
            if marks not in ([], ["no-run"]):
                raise ValueError(f"A Python block is marked {marks}. The only valid mark is no-run.")
            body = "\n".join(line.removeprefix(match["indent"]) for line in match["body"].split("\n"))
            found.append(Fence(text.count("\n", 0, match.start("body")) + 1, body, not marks))
    return found


def run_page(text: str, path: str) -> int:
    """Run the code blocks of a page and return their number."""
    names: dict[str, Any] = {"__name__": "__page__"}
    chosen = [fence for fence in fences(text) if fence.run]
    with asyncio.Runner() as runner:
        for fence in chosen:
            if fence.body.lstrip().startswith(">>>"):
                _run_examples(fence, names, path)
            else:
                _run_code(fence, names, path, runner)
    return len(chosen)


def _run_code(fence: Fence, names: dict[str, Any], path: str, runner: asyncio.Runner) -> None:
    padded = "\n" * (fence.line - 1) + fence.body  # a traceback then names the line on the page
    code = compile(padded, path, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(code, names)
    if code.co_flags & inspect.CO_COROUTINE:
        runner.run(result)


def _run_examples(fence: Fence, names: dict[str, Any], path: str) -> None:
    test = doctest.DocTestParser().get_doctest(fence.body, names, path, path, fence.line - 1)
    report: list[str] = []
    failed, _ = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.append, clear_globs=False)
    names.update(test.globs)
    assert not failed, "".join(report)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_of_a_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared_server: Callable[[str], Server]
) -> None:
    text = page.read_text(encoding="utf-8")
    if any(fence.run and SERVER.search(fence.body) for fence in fences(text)):
        text = SERVER.sub(shared_server("valkey9").url, text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCKFAST_URL", f"sqlite:///{tmp_path}/locks.db")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # pages do not close their clients
        run_page(text, str(page))
        gc.collect()


def test_the_readme_has_examples_that_run() -> None:
    found = fences((ROOT / "README.md").read_text(encoding="utf-8"))
    assert any(fence.run for fence in found)


PAGE = """
Text with `code`.

```python
first = 1
```

```console
$ not python
```

1. In a list:

   ```python
   second = first + 1
   ```

```python no-run
raise AssertionError("must not run")
```

```python
import asyncio
await asyncio.sleep(0)
async with asyncio.timeout(1):
    third = second + 1
```

```python
>>> third
3
```
"""


def test_code_blocks_run_from_top_to_bottom() -> None:
    assert run_page(PAGE, "page.md") == 4


@pytest.mark.parametrize(
    ("fence", "error"),
    [
        ("```python\nmissing\n```", NameError),
        ("```python\nimport asyncio\nawait asyncio.sleep(0)\nmissing\n```", NameError),
        ("```python\n>>> 1 + 1\n3\n```", AssertionError),
        ("```python\n1 +\n```", SyntaxError),
        ("```python skip\n1\n```", ValueError),
    ],
)
def test_a_broken_example_fails(fence: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        run_page(f"Text.\n\n{fence}\n", "page.md")


def test_a_traceback_names_the_line_of_the_page() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        run_page("One.\n\n```python\nx = 1\ny = x / 0\n```\n", "page.md")
    last = traceback.extract_tb(caught.tb)[-1]
    assert (last.filename, last.lineno) == ("page.md", 5)


MODULES = ["lockfast"] + [
    module.name
    for module in pkgutil.walk_packages(lockfast.__path__, "lockfast.")
    if not module.name.endswith("__main__")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCKFAST_URL", f"sqlite:///{tmp_path}/locks.db")
    outcome = doctest.testmod(importlib.import_module(name), report=True)
    assert outcome.failed == 0


PACKAGE = ROOT / "src" / "lockfast"
PLACES = (ROOT, ROOT / "src", PACKAGE, PACKAGE / "stores" / "redis")
NAMED_FILE = re.compile(r"`((?:[\w*]+/)+(?:[\w*]+\.(?:py|lua|sql|md))?)`")


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md", "docs/verification.md"])
def test_the_files_that_a_page_names_exist(page: str) -> None:
    named = [name for name in NAMED_FILE.findall((ROOT / page).read_text("utf-8")) if "NAME" not in name]
    assert named
    assert [name for name in named if not any(any(place.glob(name)) for place in PLACES)] == []


def test_the_ports_that_the_architecture_page_names_exist() -> None:
    named = re.findall(r"`ports\.(\w+)`", (ROOT / "docs" / "architecture.md").read_text("utf-8"))
    assert named
    assert [name for name in named if name != "py" and not hasattr(ports, name)] == []


def test_links_between_pages_lead_somewhere() -> None:
    for page in PROSE:
        for link in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text("utf-8")):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
