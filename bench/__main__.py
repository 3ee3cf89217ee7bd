"""`python -m bench`: measure the claims, print the figures, and report which targets were met."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bench.children import leave_out_hiredis
from bench.harness import Bench, Report, laid_out
from tests.support.servers import KINDS, NEEDS, available

CLAIMS = (
    "cycle",
    "cycle_asyncio",
    "forms",
    "handoff",
    "contention",
    "threads",
    "tasks",
    "waiters",
    "takeover",
    "renewals",
    "imports",
    "command",
    "sqlite",
    "quorum",
    "memory_per_lock",
    "updates",
    "claims",
)
PACKAGES = ("redis", "python-redis-lock", "pottery", "sherlock", "filelock", "portalocker", "py-redis-semaphore")


def main() -> int:
    chosen = _arguments()
    leave_out_hiredis()
    if not available(chosen.server):
        print(f"{chosen.server} is not installed: it needs {NEEDS[chosen.server]}", file=sys.stderr)
        return 2
    circumstances = _circumstances(chosen)
    print("# lockfast, measured\n")
    print("\n".join(f"- {what}: {value}" for what, value in circumstances.items()) + "\n", flush=True)
    bench, before = Bench(chosen.server, quick=chosen.quick), _processor_time()
    try:
        reports = [_run(name, bench) for name in chosen.only or CLAIMS]
    finally:
        bench.close()
    circumstances["host"] = stolen_time(before, _processor_time())
    print(_summary(reports) + f"\n\nhost: {circumstances['host']}")
    if chosen.json:
        claims = {report.name: report.as_json() for report in reports}
        if chosen.only and Path(chosen.json).exists():  # keep the other claims of the file
            claims = {**json.loads(Path(chosen.json).read_text("utf-8"))["claims"], **claims}
        found = {"circumstances": circumstances, "claims": {name: claims[name] for name in CLAIMS if name in claims}}
        Path(chosen.json).write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", "utf-8")
    return 1 if any("failed" in report.missing for report in reports) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure lockfast against other libraries.")
    parser.add_argument("--only", metavar="NAME", action="append", choices=CLAIMS, help="one claim; may be repeated")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: under a minute, and rougher")
    parser.add_argument("--json", metavar="FILE", help="write all figures to this file too")
    parser.add_argument("--server", choices=KINDS, default="valkey9", help="which server to measure on")
    return parser.parse_args()


def _run(name: str, bench: Bench) -> Report:
    started = time.monotonic()
    module = import_module(f"bench.{name}")
    try:
        report: Report = module.measure(bench)
    except Exception as error:
        report = Report(name, module.TITLE)
        report.missing["failed"] = f"{type(error).__name__}: {error}"
    print(report.text())
    print(f"({name}: {time.monotonic() - started:.1f} s)\n", flush=True)
    return report


def _circumstances(chosen: argparse.Namespace) -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "server": chosen.server,
        "rounds": "few (--quick)" if chosen.quick else "all",
        "load": _load(os.getloadavg()[0]),
        "packages": ", ".join(f"{package} {_version(package)}" for package in PACKAGES)
        + f"; where a row says so, hiredis {_version('hiredis')}",
    }


def _load(before: float) -> str:
    """The load average at the start of the run."""
    busy = before > (os.cpu_count() or 1) / 2
    return f"load average {before:.1f} before the run" + (
        ": busy with other work, so the figures are less reliable" if busy else ""
    )


def _processor_time() -> list[int]:
    """CPU ticks so far: user, nice, system, idle, iowait, irq, softirq, steal; empty without /proc."""
    try:
        return [int(word) for word in Path("/proc/stat").read_text("ascii").split("\n", 1)[0].split()[1:9]]
    except OSError:
        return []


def stolen_time(before: list[int], after: list[int]) -> str:
    """Share of its busy CPU time that the host of a virtual machine gave to others.

    Stolen time slows everything down, and most of all code that sleeps and wakes up often.

    >>> stolen_time([50, 0, 0, 1000, 0, 0, 0, 10], [130, 0, 10, 5000, 0, 0, 0, 20])
    "took 10 % of this machine's busy CPU time"
    """
    if not before:
        return "does not report how much CPU time it took"
    user, nice, system, _, _, irq, softirq, steal = (now - then for then, now in zip(before, after, strict=True))
    busy = user + nice + system + irq + softirq + steal
    return f"took {100 * steal / max(1, busy):.0f} % of this machine's busy CPU time"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _summary(reports: list[Report]) -> str:
    rows = [(report.name, v.what, v.shown, v.wanted, v.word) for report in reports for v in report.verdicts]
    failed = [f"\n{report.name} failed: {report.missing['failed']}" for report in reports if "failed" in report.missing]
    return "## summary\n\n" + laid_out(("claim", "target", "measured", "wanted", ""), rows) + "".join(failed)


if __name__ == "__main__":
    sys.exit(main())
