"""Cost of `lockfast run` for a short command: the whole process, from start to end."""

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

TITLE = "a command under a lock"
NOTHING, REDIS, EMBEDDED, SERVED = (
    "python -c pass",
    "import redis",
    "run x -- true, embedded",
    "run x -- true, on a server",
)
START = "import sys; from lockfast.cli.main import main; sys.exit(main())"
"""The installed script; scripts of some installers also import `re`."""
MILLI = 1e3


def measure(bench: Bench) -> Report:
    report = Report("command", TITLE)
    with tempfile.TemporaryDirectory(prefix="lockfast-bench-") as folder:
        words = ["run", "bench", "--", "true"]
        cases: dict[str, Callable[[], float]] = {
            NOTHING: partial(_run, "pass", [], ""),
            EMBEDDED: partial(_run, START, words, f"sqlite:///{folder}/locks.db"),
            REDIS: partial(_run, "import redis", [], ""),
            SERVED: partial(_run, START, words, bench.server.url),
        }
        in_turns(cases, 3)  # creates the lock file, writes bytecode, fills the page cache
        found = in_turns(cases, bench.pick(41, 15), 60.0)
    rows = [[name, str(Spread.of(took))] for name, took in found.items()]
    report.table("whole process, ms", ("", "median"), rows)
    report.target("embedded, against an empty program", ratio(found[EMBEDDED], found[NOTHING]), 3.0)
    report.target("on a server, against import redis", ratio(found[SERVED], found[REDIS]), 1.3)
    return report


def _run(code: str, words: list[str], url: str) -> float:
    """Milliseconds."""
    paths = os.pathsep.join(str(Path(path).resolve()) for path in sys.path)
    environment = {**os.environ, "PYTHONPATH": paths, "LOCKFAST_URL": url}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", WITHOUT_HIREDIS + code, *words], check=True, env=environment)
    return (time.perf_counter() - started) * MILLI
