"""Cost of `import lockfast`, and the number of modules that it loads without need."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench.children import WITHOUT_HIREDIS
from bench.harness import Bench, Report, Spread, in_turns, ratio

TITLE = "cold start"
NOTHING = "python -c pass"
PROGRAMS = {
    NOTHING: "pass",
    "import redis": "import redis",
    "import lockfast": "import lockfast",
}
MORE_PROGRAMS = {
    "import lockfast.aio": "import lockfast.aio",
    "lockfast --version": "from lockfast.cli.main import main; main(['--version'])",
    "lockfast.connect(redis URL)": "import lockfast; lockfast.connect('redis://127.0.0.1:1')",
}
MILLI = 1e3
WITHOUT_REDIS = {
    "memory://": "import sys, lockfast; lockfast.connect('memory://').lock('x').acquire()",
    "sqlite:///": "import sys, lockfast; lockfast.connect('sqlite:///locks.db').lock('x').acquire()",
}


def measure(bench: Bench) -> Report:
    report = Report("imports", TITLE)
    programs = bench.pick(PROGRAMS | MORE_PROGRAMS, PROGRAMS)
    cases: dict[str, Callable[[], float]] = {name: partial(_run, code) for name, code in programs.items()}
    in_turns(cases, 2)  # writes bytecode, fills the page cache
    found = in_turns(cases, bench.pick(31, 15), 60.0)
    base = Spread.of(found[NOTHING]).median
    rows = [
        [name, str(Spread.of(took)), Spread.of(took).median - base if name != NOTHING else "—"]
        for name, took in found.items()
    ]
    report.table("whole process, ms", ("", "median", "beyond an empty program"), rows)
    report.figure("cold start", "ms", {name: Spread.of(took).median for name, took in found.items()})
    report.target("import lockfast against import redis", ratio(found["import lockfast"], found["import redis"]), 1.3)
    for url, code in WITHOUT_REDIS.items():
        report.target(f"modules of redis loaded by {url}", _redis_modules(code), 0, "")
    return report


def _run(code: str) -> float:
    """Milliseconds."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", WITHOUT_HIREDIS + code], check=True, env=_environment())
    return (time.perf_counter() - started) * MILLI


def _redis_modules(code: str) -> int | None:
    count = code + "; print(sum(name.partition('.')[0] in ('redis', 'valkey') for name in sys.modules))"
    with tempfile.TemporaryDirectory(prefix="lockfast-bench-") as folder:
        command = [sys.executable, "-c", count]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=_environment())
    return int(done.stdout) if done.returncode == 0 else None


def _environment() -> dict[str, str]:
    """The environment with absolute import paths: a child can start in another folder."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(str(Path(path).resolve()) for path in sys.path)}
