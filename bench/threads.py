"""Sixteen threads of one process compete for one lock, and another process competes with them.

Each thread acquires and releases the lock in a loop. lockfast hands it off inside the process for at most 50 ms at a
time; the row `local_handoff=False` shows the effect. The other process measures its waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from bench import peers
from bench.children import Child, ChildFailed, closing
from bench.cycles import present
from bench.harness import Bench, Report, Spread, in_turns, jain, number, percentile, ratio

TITLE = "sixteen threads of one process on one lock"
THREADS = 16
MILLI = 1e3
MakeMany = Callable[[str, str, int], list[peers.Lock]]
"""Create one lock per thread of one process, as the documentation of the library shows."""

_fresh = count()


def _lockfast(url: str, name: str, threads: int, **options: Any) -> list[peers.Lock]:
    import lockfast

    return [lockfast.connect(url).lock(name, ttl=peers.TTL, **options)] * threads


def _python_redis_lock(url: str, name: str, threads: int) -> list[peers.Lock]:
    import redis
    import redis_lock

    client = redis.Redis.from_url(url)
    return [redis_lock.Lock(client, name, expire=peers.TTL) for _ in range(threads)]


def _redis_py(url: str, name: str, threads: int, **options: Any) -> list[peers.Lock]:
    import redis

    client = redis.Redis.from_url(url)
    return [client.lock(name, timeout=peers.TTL, **options) for _ in range(threads)]


OURS = "lockfast"
THEIRS = "python-redis-lock"
CASES: dict[str, tuple[peers.Peer, MakeMany]] = {
    OURS: (peers.LOCKFAST, _lockfast),
    "lockfast, local_handoff=False": (peers.LOCKFAST, partial(_lockfast, local_handoff=False)),
    THEIRS: (peers.PYTHON_REDIS_LOCK, _python_redis_lock),
    "redis-py Lock, 1 ms poll": (peers.REDIS_PY_1MS, partial(_redis_py, sleep=0.001)),
    "redis-py Lock": (peers.REDIS_PY, _redis_py),
}


class Result(NamedTuple):
    """One run; waits in seconds, `cpu` in microseconds per hold."""

    throughput: float
    waits: list[float]
    fairness: float
    cpu: float
    beside: list[float]


def measure(bench: Bench) -> Report:
    report = Report("threads", TITLE)
    here = present(report, [peer for peer, _ in CASES.values()])
    seconds = bench.pick(1.5, 0.5)
    cases = {
        name: partial(_attempt, report, name, make, bench.server.url, seconds)
        for name, (peer, make) in CASES.items()
        if peer in here
    }
    rounds = in_turns(cases, bench.pick(3, 1))
    found = {name: [one for one in results if one] for name, results in rounds.items()}
    found = {name: results for name, results in found.items() if results}
    columns = ("", "holds/s", "CPU µs/hold", "wait p99 ms", "longest ms", "Jain", "longest wait of another process, ms")
    report.table(f"{seconds:g} s each", columns, [_row(name, results) for name, results in found.items()])
    values = {name: Spread.of(one.throughput for one in results).median for name, results in found.items()}
    report.figure("16 threads: holds per second", "1/s", values, less_is_better=False)
    ours, theirs = found.get(OURS, []), found.get(THEIRS, [])
    gain = ratio([one.throughput for one in ours], [one.throughput for one in theirs])
    report.target("throughput against python-redis-lock", gain, 8, at_least=True)
    beside = [wait * MILLI for one in ours for wait in one.beside]
    report.target("longest wait of another process", max(beside) if beside else None, 100, " ms")
    return report


def _row(name: str, results: list[Result]) -> list[Any]:
    waits = [wait * MILLI for one in results for wait in one.waits]
    beside = [wait * MILLI for one in results for wait in one.beside]
    return [
        name,
        str(Spread.of(one.throughput for one in results)),
        str(Spread.of(one.cpu for one in results)),
        percentile(waits, 0.99) if waits else "—",
        max(waits) if waits else "—",
        f"{Spread.of(one.fairness for one in results).median:.3f}",
        number(max(beside)) if beside else "never got it",
    ]


def _attempt(report: Report, name: str, make: MakeMany, url: str, seconds: float) -> Result | None:
    try:
        return _run(make, url, f"threads:{next(_fresh)}", seconds)
    except ChildFailed as error:
        report.missing[name] = str(error)
        return None


def _run(make: MakeMany, url: str, name: str, seconds: float) -> Result:
    """Measure the threads alone, then together with another process."""
    busy = Child(partial(_threads, make, url, name))
    other = Child(partial(_beside, make, url, name))
    with closing([busy, other]):
        other.request(0.0)  # connects and imports
        throughput, waits, fairness, cpu = busy.request(seconds)
        busy.send(seconds + 0.1)
        time.sleep(0.05)  # until the threads run
        beside: list[float] = other.request(seconds)
        busy.receive()
    return Result(throughput, waits, fairness, cpu, beside)


def _threads(make: MakeMany, url: str, name: str, pipe: Connection) -> None:
    locks = make(url, name, THREADS)
    while True:
        seconds = pipe.recv()
        counts = [0] * THREADS
        waits: list[float] = []
        end = time.monotonic() + seconds
        threads = [threading.Thread(target=_hold, args=(lock, at, counts, waits, end)) for at, lock in enumerate(locks)]
        cpu = time.process_time()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        cpu = time.process_time() - cpu
        pipe.send((sum(counts) / seconds, waits, jain(counts), cpu / max(1, sum(counts)) * 1e6))


def _hold(lock: peers.Lock, at: int, counts: list[int], waits: list[float], end: float) -> None:
    while (sent_at := time.monotonic()) < end:
        with lock:
            held = time.monotonic()
            if held < end:
                counts[at] += 1
                waits.append(held - sent_at)


def _beside(make: MakeMany, url: str, name: str, pipe: Connection) -> None:
    lock = make(url, name, 1)[0]
    while True:
        end = time.monotonic() + pipe.recv()
        waits: list[float] = []
        while not waits or time.monotonic() < end:
            sent_at = time.monotonic()
            with lock:
                waits.append(time.monotonic() - sent_at)
            time.sleep(0.01)
        pipe.send(waits)
