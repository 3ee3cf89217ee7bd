"""A value that many processes update under WATCH: throughput and wasted attempts.

Three ways in one run: redis-py's `transaction`, which retries at once and without limit; `update` with pauses only; and
`update` with its defaults, which switches to a lock while conflicts are frequent. Each change takes a millisecond,
either of computing, so that a wasted attempt costs CPU time, or of waiting, so that it costs none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import lockfast
from bench.children import FORK, Child, ChildFailed, closing
from bench.harness import Bench, Report, Spread, in_turns, jain, multiple, ratio
from tests.support.servers import Server

TITLE = "one value, updated by many processes"
WORK_SECONDS = 0.001
RUNS = ((1, "computing"), (8, "computing"), (8, "waiting"))
"""Number of processes, and the kind of work of a change."""
KEY = "stock"
Change = Callable[[bytes | None], int]
Update = Callable[[Change], Any]


class Result(NamedTuple):
    """One run: changes per second, attempts per change, longest change in seconds, fairness, lost changes."""

    throughput: float
    attempts: float
    longest: float
    fairness: float
    lost: int


def _redis_py(url: str) -> Update:
    import redis

    client = redis.Redis.from_url(url)

    def update(change: Change) -> Any:
        def body(pipe: Any) -> None:
            value = change(pipe.get(KEY))
            pipe.multi()
            pipe.set(KEY, value)

        return client.transaction(body, KEY)

    return update


def _lockfast(adaptive: bool, url: str) -> Update:
    locks = lockfast.connect(url)
    return lambda change: locks.update(KEY, change, adaptive=adaptive, attempts=100_000, timeout=60)


CASES: dict[str, Callable[[str], Update]] = {
    "redis-py transaction": _redis_py,
    "update, pauses only": partial(_lockfast, False),
    "update": partial(_lockfast, True),
}


def measure(bench: Bench) -> Report:
    report = Report("updates", TITLE)
    seconds = bench.pick(3.0, 1.5)
    for processes, work in RUNS:
        cases = {
            name: _case(report, name, partial(_update, bench.server, way, processes, work, seconds))
            for name, way in CASES.items()
        }
        rounds = in_turns(cases, bench.pick(5, 3))
        found = {name: [one for one in runs if one] for name, runs in rounds.items()}
        _add_table(report, f"{processes} at once, {work} for 1 ms, {seconds:g} s each", found)
        if processes > 1:
            _add_targets(report, work, found["update"])
    return report


def _add_table(report: Report, title: str, found: dict[str, list[Result]]) -> None:
    naive = found["redis-py transaction"]
    columns = ("", "changes/s", "against redis-py", "attempts/change", "wasted", "longest ms", "Jain", "lost")
    rows = [_row(name, runs, naive) for name, runs in found.items() if runs]
    report.table(title, columns, rows)


def _add_targets(report: Report, work: str, ours: list[Result]) -> None:
    wasted = 1 - 1 / Spread.of(one.attempts for one in ours).median if ours else None
    report.target(f"share of wasted attempts, {work}", wasted, 0.25, "")
    report.target(f"changes lost, {work}", max(one.lost for one in ours) if ours else None, 0, "")


def _row(name: str, runs: list[Result], naive: list[Result]) -> list[Any]:
    attempts = Spread.of(one.attempts for one in runs)
    return [
        name,
        str(Spread.of(one.throughput for one in runs)),
        multiple(ratio([one.throughput for one in runs], [one.throughput for one in naive])),
        str(attempts),
        f"{1 - 1 / attempts.median:.0%}",
        str(Spread.of(one.longest * 1e3 for one in runs)),
        f"{Spread.of(one.fairness for one in runs).median:.2f}",
        sum(one.lost for one in runs),
    ]


def _case(report: Report, name: str, run: Callable[[], Result]) -> Callable[[], Result | None]:
    def case() -> Result | None:
        try:
            return run()
        except ChildFailed as error:
            report.missing[name] = str(error)
            return None

    return case


def _update(server: Server, way: Callable[[str], Update], processes: int, work: str, seconds: float) -> Result:
    server.clear()
    start = FORK.Barrier(processes)
    members = [Child(partial(_member, partial(way, server.url), WORKS[work], start, seconds)) for _ in range(processes)]
    with closing(members):
        answers = [member.receive(seconds + 90) for member in members]
    changes = [len(times) for times, _ in answers]
    return Result(
        throughput=sum(changes) / seconds,
        attempts=sum(attempts for _, attempts in answers) / sum(changes),
        longest=max(max(times) for times, _ in answers if times),
        fairness=jain(changes),
        lost=sum(changes) - int(server.raw("GET", KEY)),
    )


def _compute() -> None:
    enough = time.process_time() + WORK_SECONDS
    while time.process_time() < enough:
        pass


def _wait() -> None:
    time.sleep(WORK_SECONDS)


WORKS = {"computing": _compute, "waiting": _wait}


def _member(make: Callable[[], Update], work: Callable[[], None], start: Any, seconds: float, pipe: Connection) -> None:
    update, attempts, times = make(), 0, []

    def change(value: bytes | None) -> int:
        nonlocal attempts
        attempts += 1
        work()
        return int(value or 0) + 1

    start.wait()
    end = time.monotonic() + seconds
    while (began := time.monotonic()) < end:
        update(change)
        times.append(time.monotonic() - began)
    pipe.send((times, attempts))
