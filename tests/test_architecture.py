"""The tree shows the architecture: which layer may import which, and how long things may be.

    cli, web, integrations → client → core → ports → admission, values, facts → errors
    stores, runtime                       → ports → admission, values, facts → errors

Stores and runtimes never import core, the client or one another. `core` imports no clock, thread, socket, event loop
or randomness. Nothing in the package imports `testing`, `cli` or `verify`.
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
LONGEST_MODULE = 600

VALUES = {"errors", "values", "facts", "events", "admission"}
BELOW: dict[str, set[str]] = {
    "_version": set(),
    "errors": set(),
    "values": {"errors"},
    "facts": set(),
    "events": set(),
    "admission": {"errors", "values"},
    "ports": VALUES,
    "core": {*VALUES, "ports"},
    "runtime": {*VALUES, "ports"},
    "stores": {*VALUES, "ports"},
    "client": {*VALUES, "ports", "core"},
    "": {"_version", "errors", "values", "client", "core"},
    "aio": {"client", "simple"},
    "simple": {*VALUES, "ports", "runtime", "stores", "core"},
    "fenced": {*VALUES, "client", "stores"},
    "compat": {*VALUES, "ports", "client", "core", "runtime", "simple"},
    "cli": {*VALUES, "client", "", "aio", "fenced", "_version"},
    "__main__": {"cli"},
    "testing": {*VALUES, "", "aio", "ports", "core", "client", "runtime", "stores"},
}
"""The layers that each layer may import besides itself. A layer that is missing here is an error."""

IMPURE = {"asyncio", "os", "random", "secrets", "select", "socket", "threading", "time"}
DOORS = {
    ("client.connect", "runtime"),
    ("client.connect", "stores"),
}
"""Modules of the client that build stores and runtimes."""
RUNNER = "runtime.base"
"""The module that runs a coroutine of the core for a sync method of the client."""


class Edge(NamedTuple):
    """An import of one module by another; both names without "lockfast."."""

    importer: str
    imported: str
    line: int


class Module(NamedTuple):
    """A module of the package; the name of the package itself is ""."""

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
    """Every import in a module, at any depth; modules of other packages have their full name."""
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
        outside = imported[1:].split(".")[0]
        return outside not in ("verify", "tests") and not (top == "core" and outside in IMPURE)
    if layer(importer) == layer(imported):
        return True
    return (
        target in BELOW.get(top, set())
        or (importer, target) in DOORS
        or (top in ("client", "compat") and imported == RUNNER)
    )


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
    "ports": "from lockfast.values import Claim",
    "core/acquire": "import logging\nfrom lockfast.core.retry import retry\nfrom lockfast.ports import Store",
    "core/retry": "from typing import TypeVar",
    "runtime/threads": "import threading\nfrom lockfast.runtime.base import now",
    "runtime/base": "import time",
    "stores/memory": "from lockfast.ports import Runtime",
    "stores/redis/store": "from lockfast.stores.redis.keys import keys_of\nfrom lockfast.values import Claim",
    "stores/redis/keys": "from lockfast.errors import LockError",
    "stores/sqlite/store": "import sqlite3\nfrom lockfast.ports import Runtime",
    "client/lock": "from lockfast.core import acquire as core\nfrom lockfast.runtime.base import run",
    "client/connect": "def connect():\n    from lockfast.stores.memory import MemoryStore",
    "testing/sandbox": "from lockfast.core import acquire\nfrom lockfast.stores.redis import store",
    "cli/main": "import lockfast\nfrom lockfast.cli.show import table\nfrom lockfast.errors import LockError",
    "cli/show": "from lockfast.values import LockInfo",
}


def test_the_checker_accepts_a_correct_tree(tmp_path: Path) -> None:
    plant(tmp_path, SOUND)
    assert wrong_edges(tmp_path) == []


WRONG = [
    ("errors", "from lockfast.values import Claim"),
    ("values", "from lockfast.ports import Store"),
    ("values", "import lockfast"),
    ("ports", "from lockfast.core import acquire"),
    ("ports", "from lockfast.runtime.base import now"),
    ("core/acquire", "import time"),
    ("core/acquire", "import asyncio.events"),
    ("core/acquire", "from os import urandom"),
    ("core/acquire", "def f():\n    import random"),
    ("core/acquire", "if TYPE_CHECKING:\n    import threading"),
    ("core/acquire", "from lockfast.runtime import base"),
    ("core/acquire", "from lockfast.stores.memory import MemoryStore"),
    ("core/acquire", "from lockfast.client.lock import Lock"),
    ("core/acquire", "from .retry import retry"),
    ("core/acquire", "from .. import errors"),
    ("runtime/threads", "from lockfast.core.acquire import acquire"),
    ("runtime/threads", "from lockfast.stores.memory import MemoryStore"),
    ("runtime/threads", "import lockfast.client.connect"),
    ("stores/memory", "from lockfast.core.acquire import acquire"),
    ("stores/memory", "from lockfast.runtime.base import now"),
    ("stores/memory", "from lockfast.stores.redis import keys"),
    ("stores/redis/store", "from lockfast.stores import memory"),
    ("stores/redis/store", "from lockfast.stores.sqlite.store import SqliteStore"),
    ("stores/redis/store", "from lockfast.client import lock"),
    ("stores/sqlite/store", "import lockfast.stores.redis.keys"),
    ("client/lock", "from lockfast.stores.memory import MemoryStore"),
    ("client/lock", "from lockfast.runtime.threads import ThreadRuntime"),
    ("client/lock", "from lockfast.cli import main"),
    ("__init__", "from lockfast import testing"),
    ("client/connect", "from verify.world import World"),
    ("cli/main", "from lockfast.testing import sandbox"),
    ("cli/main", "from lockfast.core import acquire"),
    ("cli/main", "from lockfast.stores.redis.store import RedisStore"),
    ("testing/sandbox", "from lockfast.cli.main import main"),
    ("surprise", "from lockfast.errors import LockError"),
]


@pytest.mark.parametrize(("module", "line"), WRONG, ids=lambda value: value.replace("\n", " "))
def test_the_checker_finds_a_planted_edge(tmp_path: Path, module: str, line: str) -> None:
    plant(tmp_path, {**SOUND, module: SOUND.get(module, "") + "\n" + line})
    found = wrong_edges(tmp_path)
    assert [edge.importer for edge in found] == [module.removesuffix("__init__").replace("/", ".")]


# Sizes and habits


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


def test_every_module_has_a_docstring() -> None:
    assert [name for name, tree, _ in modules(ROOT) if not ast.get_docstring(tree)] == []


def test_no_module_uses_assert() -> None:
    """It vanishes under `python -O`."""
    found = [
        f"{name}:{node.lineno}"
        for name, tree, _ in modules(ROOT)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
    ]
    assert found == []


def test_no_open_tasks() -> None:
    marks = ("TODO", "FIXME", "XXX")
    files = [path for path in ROOT.rglob("*") if path.suffix in (".py", ".lua", ".sql")]
    assert [path.name for path in files if any(mark in path.read_text("utf-8") for mark in marks)] == []


def test_scripts_and_statements_begin_with_a_contract() -> None:
    files = [path for path in ROOT.rglob("*") if path.suffix in (".lua", ".sql")]
    assert files
    assert [path.name for path in files if not path.read_text("utf-8").startswith("-- ")] == []


def test_the_limits_detect_long_functions(tmp_path: Path) -> None:
    body = "\n".join(f"    x = {number}" for number in range(LONGEST_FUNCTION))
    plant(tmp_path, {"long": f"def f():\n{body}\n"})
    assert [one.lines for one in functions(tmp_path)] == [LONGEST_FUNCTION + 1]
