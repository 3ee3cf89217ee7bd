"""The tree shows the architecture, and this test keeps it: who may import whom, and how long things may be.

    errors ← values, facts ← ports ← core ← the public modules ← cli
                               ↑
            runtime, stores/memory, stores/redis, stores/sqlite: each knows ports, facts, values, errors and itself

Nothing imports `testing` or `cli`; `core` imports no clock, thread, socket, event loop or chance.
"""

import ast
import functools
import statistics
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import lockfast

ROOT = Path(lockfast.__file__).parent
PACKAGE = "lockfast"

LONGEST_FUNCTION = 60
MEDIAN_FUNCTION = 10
LONGEST_MODULE = 400

PUBLIC = {
    *(
        "",
        "aio",
        "basis",
        "connect",
        "connection",
        "exports",
        "losses",
        "guarantees",
        "guards",
        "leases",
        "locking",
        "locks",
        "options",
        "sharing",
        "simple",
        "targets",
    ),
    *("blocks", "compat", "fenced", "once", "optimistic", "recipes", "reentrant", "scopes"),
}
"""The modules that users meet, the package itself among them."""

BELOW: dict[str, set[str]] = {
    "_version": set(),
    "errors": set(),
    "values": {"errors"},
    "facts": set(),
    "ports": {"errors", "values", "facts"},
    "core": {"errors", "values", "facts", "ports"},
    "runtime": {"errors", "values", "facts", "ports"},
    "stores": {"errors", "values", "facts", "ports"},
}
"""For each layer what it may import besides itself; what is not named here is public, `testing` or `cli`."""

IMPURE = {"asyncio", "os", "random", "secrets", "select", "socket", "threading", "time"}
DOORS = {("fenced", "stores"), ("", "_version")} | {
    (top, target) for top in ("compat", "connect", "simple", "targets") for target in ("runtime", "stores")
}
"""Public modules reach the runtimes and stores only to make them, `fenced` for the names of keys; `runner` is how a
public method blocks."""
RUNNER = "runtime.runner"


class Edge(NamedTuple):
    """One module imports another; both without the package's name in front."""

    importer: str
    imported: str
    line: int


class Module(NamedTuple):
    """The package itself is named ""."""

    name: str
    tree: ast.Module
    text: str


@functools.cache
def modules(root: Path) -> list[Module]:
    """Every module below `root`."""
    found = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        text = path.read_text(encoding="utf-8")
        found.append(Module(".".join(part for part in parts if part != "__init__"), ast.parse(text, str(path)), text))
    return found


def imports(name: str, tree: ast.Module, known: set[str]) -> Iterator[Edge]:
    """Every import in a module, wherever it stands; those of other packages by their full name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Edge(name, _inside(alias.name), node.lineno)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield Edge(name, f"relative import of {node.module or '.'}", node.lineno)
                continue
            module = node.module or ""
            for alias in node.names:
                # `from lockfast.core import release` imports a module, `from lockfast import errors` too.
                full = _inside(f"{module}.{alias.name}")
                yield Edge(name, full if full in known else _inside(module), node.lineno)


def _inside(module: str) -> str:
    return module.removeprefix(PACKAGE).lstrip(".") if module.split(".", maxsplit=1)[0] == PACKAGE else f"/{module}"


def layer(module: str) -> str:
    """The first part of a module's name, and for a store its folder too."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "stores" and len(parts) > 1 else parts[0]


def is_allowed(edge: Edge) -> bool:
    importer, imported = edge.importer, edge.imported
    if imported.startswith("relative"):
        return False
    top, target = importer.split(".")[0], imported.split(".")[0]
    if imported.startswith("/"):
        return not (top == "core" and imported[1:].split(".")[0] in IMPURE)
    if target in ("testing", "cli"):
        return top == target or (top, target) == ("__main__", "cli")
    if top == "testing":
        return True
    if layer(importer) == layer(imported):
        return True
    if top in BELOW:
        return target in BELOW[top]
    if top == "cli":
        return target in PUBLIC | {"errors", "values", "facts", "_version"}
    if top in PUBLIC:
        top = "simple" if importer == "aio.simple" else top
        inner = target in PUBLIC | {"errors", "values", "facts", "ports", "core"}
        return inner or (top, target) in DOORS or imported == RUNNER
    return False  # a module that this test does not know


def wrong_edges(root: Path) -> list[Edge]:
    names = [module.name.split(".") for module in modules(root)]
    known = {".".join(name[:length]) for name in names for length in range(1, len(name) + 1)}
    edges = (edge for module in modules(root) for edge in imports(module.name, module.tree, known))
    return [edge for edge in edges if not is_allowed(edge)]


def test_no_wrong_import() -> None:
    assert wrong_edges(ROOT) == []


def plant(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")


SOUND = {
    "__init__": "from lockfast.client.connect import connect",
    "errors": "import enum",
    "values": "import math\nfrom lockfast.errors import LockError",
    "ports": "from lockfast.values import Ask",
    "core/acquire": "import logging\nfrom lockfast.core.deadline import Deadline\nfrom lockfast.ports import Store",
    "core/deadline": "from typing import NamedTuple",
    "runtime/threads": "import threading\nfrom lockfast.runtime.clock import now",
    "runtime/clock": "import time",
    "stores/memory": "from lockfast.ports import Runtime",
    "stores/redis/store": "from lockfast.stores.redis.keys import keys_of\nfrom lockfast.values import Ask",
    "stores/redis/keys": "from lockfast.errors import LockError",
    "stores/sqlite/store": "import sqlite3\nfrom lockfast.ports import Runtime",
    "locks": "from lockfast.core import acquire as core\nfrom lockfast.runtime.runner import run",
    "runtime/runner": "",
    "connect": "def connect():\n    from lockfast.stores.memory import MemoryStore",
    "testing/world": "from lockfast.core import acquire\nfrom lockfast.stores.redis import store",
    "cli/main": "import lockfast\nfrom lockfast.cli.show import table\nfrom lockfast.errors import LockError",
    "cli/show": "from lockfast.values import LockInfo",
}


def test_the_checker_accepts_a_sound_tree(tmp_path: Path) -> None:
    plant(tmp_path, SOUND)
    assert wrong_edges(tmp_path) == []


WRONG = [
    ("errors", "from lockfast.values import Ask"),
    ("values", "from lockfast.ports import Store"),
    ("values", "import lockfast"),
    ("ports", "from lockfast.core import acquire"),
    ("ports", "from lockfast.runtime.clock import now"),
    ("core/acquire", "import time"),
    ("core/acquire", "import asyncio.events"),
    ("core/acquire", "from os import urandom"),
    ("core/acquire", "def f():\n    import random"),
    ("core/acquire", "if TYPE_CHECKING:\n    import threading"),
    ("core/acquire", "from lockfast.runtime import clock"),
    ("core/acquire", "from lockfast.stores.memory import MemoryStore"),
    ("core/acquire", "from lockfast.client.lock import Lock"),
    ("core/acquire", "from .deadline import Deadline"),
    ("core/acquire", "from .. import errors"),
    ("runtime/threads", "from lockfast.core.acquire import acquire"),
    ("runtime/threads", "from lockfast.stores.memory import MemoryStore"),
    ("runtime/threads", "import lockfast.client.connect"),
    ("stores/memory", "from lockfast.core.acquire import acquire"),
    ("stores/memory", "from lockfast.runtime.clock import now"),
    ("stores/memory", "from lockfast.stores.redis import keys"),
    ("stores/redis/store", "from lockfast.stores import memory"),
    ("stores/redis/store", "from lockfast.stores.sqlite.store import SqliteStore"),
    ("stores/redis/store", "from lockfast import locks"),
    ("stores/sqlite/store", "import lockfast.stores.redis.keys"),
    ("locks", "from lockfast.stores.memory import MemoryStore"),
    ("locks", "from lockfast.runtime.threads import ThreadRuntime"),
    ("locks", "from lockfast.cli import main"),
    ("__init__", "from lockfast import testing"),
    ("connect", "from verify.world import World"),
    ("cli/main", "from lockfast.testing import world"),
    ("cli/main", "from lockfast.core import acquire"),
    ("cli/main", "from lockfast.stores.redis.store import RedisStore"),
    ("testing/world", "from lockfast.cli.main import main"),
    ("surprise", "from lockfast.errors import LockError"),
]


@pytest.mark.parametrize(("module", "line"), WRONG, ids=lambda value: value.replace("\n", " "))
def test_the_checker_finds_a_planted_edge(tmp_path: Path, module: str, line: str) -> None:
    plant(tmp_path, {**SOUND, module: SOUND.get(module, "") + "\n" + line})
    found = wrong_edges(tmp_path)
    assert [edge.importer for edge in found] == [module.removesuffix("__init__").replace("/", ".")]


# How it is written


class Function(NamedTuple):
    name: str
    lines: int


def functions(root: Path) -> Iterator[Function]:
    """Every function with its length, docstring included, decorators not."""
    for module, tree, _ in modules(root):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                yield Function(f"{module}.{node.name}", lines)


def test_functions_fit_on_a_screen() -> None:
    found = list(functions(ROOT))
    assert [one for one in found if one.lines > LONGEST_FUNCTION] == []
    assert statistics.median(one.lines for one in found) < MEDIAN_FUNCTION


def test_modules_are_short() -> None:
    lengths = {name or PACKAGE: text.count("\n") for name, _, text in modules(ROOT)}
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST_MODULE} == {}


def test_every_module_says_what_it_is() -> None:
    assert [name for name, tree, _ in modules(ROOT) if not ast.get_docstring(tree)] == []


def test_nothing_relies_on_assert() -> None:
    """It vanishes under `python -O`."""
    found = [
        f"{name}:{node.lineno}"
        for name, tree, _ in modules(ROOT)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
    ]
    assert found == []


def test_nothing_is_left_to_do() -> None:
    marks = ("TODO", "FIXME", "XXX")
    files = [path for path in ROOT.rglob("*") if path.suffix in (".py", ".lua", ".sql")]
    assert [path.name for path in files if any(mark in path.read_text("utf-8") for mark in marks)] == []


def test_scripts_and_statements_have_a_contract_on_top() -> None:
    files = [path for path in ROOT.rglob("*") if path.suffix in (".lua", ".sql")]
    assert files
    assert [path.name for path in files if not path.read_text("utf-8").startswith("-- ")] == []


def test_the_limits_find_what_breaks_them(tmp_path: Path) -> None:
    body = "\n".join(f"    x = {number}" for number in range(LONGEST_FUNCTION))
    plant(tmp_path, {"long": f"def f():\n{body}\n"})
    assert [one.lines for one in functions(tmp_path)] == [LONGEST_FUNCTION + 1]
