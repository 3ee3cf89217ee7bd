"""Cost of a quorum of five servers, against one server and against pottery."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import lockfast
from bench.harness import Bench, Report, Spread, in_turns, percentile, ratio
from tests.support.servers import Server

TITLE = "acquire on five servers"
OURS = "lockfast, five servers"
SLOWEST = "lockfast, the slowest of the five alone"
THEIRS = "pottery, five servers"
DOWN = "lockfast, two of the five down"
SERVERS = 5
MICRO = 1e6


def measure(bench: Bench) -> Report:
    report = Report("quorum", TITLE)
    with ExitStack() as stack:
        servers = [stack.enter_context(Server(bench.kind)) for _ in range(SERVERS)]
        urls = [server.url for server in servers]
        quorum = stack.enter_context(lockfast.connect(urls))
        alone = [stack.enter_context(lockfast.connect(url)).lock("alone") for url in urls]
        batch = bench.pick(200, 50)
        cases: dict[str, Callable[[], float]] = {
            OURS: lambda: median([quorum.lock("five")], batch),
            SLOWEST: lambda: median(alone, batch),
        }
        theirs = pottery(urls, report)
        if theirs is not None:
            cases[THEIRS] = lambda: pottery_median(theirs, bench.pick(40, 10))
        found = in_turns(cases, *bench.pick((15, 40.0), (3, 8.0)))
        for server in servers[:2]:
            server.kill()
        found[DOWN] = in_turns({DOWN: cases[OURS]}, bench.pick(15, 3))[DOWN]
    add_table(report, found)
    report.target("against the slowest of the five alone", ratio(found[OURS], found[SLOWEST]), 2.0)
    report.target("against pottery", ratio(found[OURS], found[THEIRS]) if THEIRS in found else None, 1 / 3)
    report.target("with two of five down, against all up", ratio(found[DOWN], found[OURS]), 2.0)
    return report


def add_table(report: Report, found: dict[str, list[float]]) -> None:
    spreads = {name: Spread.of(took * MICRO for took in times) for name, times in found.items()}
    report.figure("acquire", "µs", {name: float(spread.median) for name, spread in spreads.items()})
    report.table("acquire, µs", ("", "p50 of each round"), [(name, str(spread)) for name, spread in spreads.items()])


def median(locks: list[lockfast.Lock], count: int) -> float:
    """Median of `count` rounds. A round is the time of the slowest of `locks`, acquired one after the other."""
    times = []
    for _ in range(count):
        slowest = 0.0
        for lock in locks:
            started_at = time.perf_counter()
            lease = lock.acquire(timeout=0)
            slowest = max(slowest, time.perf_counter() - started_at)
            if lease is None:
                raise RuntimeError("A free lock was not acquired.")
            lease.release()
        times.append(slowest)
    return percentile(times, 0.5)


def pottery(urls: list[str], report: Report) -> Any:
    """Pottery's lock on the same servers; None if pottery is not installed."""
    try:
        import redis
        from pottery import Redlock
    except ImportError as error:
        report.missing[THEIRS] = str(error)
        return None
    return Redlock(key="five", masters={redis.Redis.from_url(url) for url in urls}, auto_release_time=30)


def pottery_median(lock: Any, count: int) -> float:
    times = []
    for _ in range(count):
        started_at = time.perf_counter()
        if not lock.acquire(blocking=False):
            raise RuntimeError("A free lock was not acquired.")
        times.append(time.perf_counter() - started_at)
        lock.release()
    return percentile(times, 0.5)
