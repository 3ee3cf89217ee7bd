"""A thousand tasks of one event loop compete for one lock and hold it for no time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

from bench import peers
from bench.children import Child, ChildFailed, closing
from bench.harness import Bench, Cell, Report, Spread, in_turns, jain, ratio

TITLE = "a thousand tasks of one event loop on one lock"
TASKS = 1000
SETTLE_SECONDS = 1.0
"""Not counted: a thousand tasks start, and some libraries open a connection for each."""
MILLI = 1e3
Lock = AbstractAsyncContextManager[Any]
Connect = Callable[[str, str], Callable[[], Lock]]
"""From a URL and a name to a function that creates the lock of one task."""

_fresh = count()


def _lockfast(url: str, name: str, **options: Any) -> Callable[[], Lock]:
    import lockfast.aio

    locks = lockfast.aio.connect(url)
    return lambda: locks.lock(name, ttl=peers.TTL, **options)


def _redis(url: str, name: str) -> Callable[[], Lock]:
    import redis.asyncio

    client = redis.asyncio.Redis.from_url(url)
    return lambda: client.lock(name, timeout=peers.TTL)


OURS = "lockfast.aio"
THEIRS = "redis.asyncio lock"
CASES: dict[str, Connect] = {
    OURS: _lockfast,
    "lockfast.aio, local_handoff=False": partial(_lockfast, local_handoff=False),
    THEIRS: _redis,
}


def measure(bench: Bench) -> Report:
    report = Report("tasks", TITLE)
    seconds = bench.pick(3.0, 1.0)
    cases = {name: partial(_attempt, report, name, make, bench.server.url, seconds) for name, make in CASES.items()}
    rounds = in_turns(cases, bench.pick(3, 1))
    found = {name: [one for one in results if one] for name, results in rounds.items()}
    found = {name: results for name, results in found.items() if results}
    rows: list[list[Cell]] = [
        [
            name,
            str(Spread.of(one[0] for one in results)),
            str(Spread.of(one[1] for one in results)),
            f"{Spread.of(one[2] for one in results).median:.3f}",
            Spread.of(one[3] for one in results).median,
        ]
        for name, results in found.items()
    ]
    columns = ("", "holds/s", "longest wait ms", "Jain", "CPU µs/hold")
    report.table(f"{seconds:g} s each; tasks that never got the lock count as waiting until the end", columns, rows)
    values = {name: Spread.of(one[0] for one in results).median for name, results in found.items()}
    report.figure("1,000 tasks: holds per second", "1/s", values, less_is_better=False)
    gain = ratio([one[0] for one in found.get(OURS, [])], [one[0] for one in found.get(THEIRS, [])])
    report.target(f"throughput against {THEIRS}", gain, 20, at_least=True)
    return report


Result = tuple[float, float, float, float]
"""Holds per second, longest wait in milliseconds, Jain's index, CPU microseconds per hold."""


def _attempt(report: Report, name: str, make: Connect, url: str, seconds: float) -> Result | None:
    child = Child(partial(_body, make, url, f"tasks:{next(_fresh)}"))
    try:
        with closing([child]):
            found: Result = child.request(seconds, seconds + 40)
            return found
    except ChildFailed as error:
        report.missing[name] = str(error)
        return None


def _body(make: Connect, url: str, name: str, pipe: Connection) -> None:
    asyncio.run(_contend(make(url, name), pipe.recv(), pipe.send))


async def _contend(lock_of: Callable[[], Lock], seconds: float, send: Callable[[Result], None]) -> None:
    """Send the result while the tasks still run: the parent kills this process, because some peers end slowly."""
    async with lock_of():
        pass  # connects and imports
    counts = [0] * TASKS
    longest = 0.0
    begin = time.monotonic() + SETTLE_SECONDS
    end = begin + seconds
    sent_at = [begin] * TASKS

    async def compete(me: int) -> None:
        nonlocal longest
        lock = lock_of()
        while True:
            sent_at[me] = time.monotonic()
            async with lock:
                held = time.monotonic()
                if begin <= held < end:
                    counts[me] += 1
                    longest = max(longest, held - sent_at[me])

    tasks = [asyncio.ensure_future(compete(me)) for me in range(TASKS)]
    await asyncio.sleep(SETTLE_SECONDS)
    cpu = time.process_time()
    await asyncio.sleep(max(0.0, end - time.monotonic()))
    cpu = time.process_time() - cpu
    longest = max(longest, *(end - sent for sent in sent_at))
    holds = sum(counts)
    send((holds / seconds, longest * MILLI, jain(counts), cpu / max(1, holds) * 1e6))
    await asyncio.wait(tasks)
