"""Eight processes compete for one lock: throughput, waiting times, and cost for the server."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from bench import peers
from bench.children import FORK, Child, ChildFailed, closing
from bench.cycles import present
from bench.harness import Bench, Report, Spread, in_turns, jain, percentile, ratio
from bench.servers import requests_by_lockfast, server_cpu
from tests.support.servers import Server

TITLE = "eight processes, each holding for 1 ms"
PROCESSES = 8
HOLD_SECONDS = 0.001
SETTLE_SECONDS = 0.3
"""Not counted: eight processes connect at once on two cores, and import their libraries."""
MILLI = 1e3
Counts = dict[str, int]


class Result(NamedTuple):
    """One run; waits in seconds."""

    throughput: float
    waits: list[float]
    fairness: float
    requests: float
    server_cpu: float

    @property
    def longest(self) -> float:
        """Milliseconds."""
        return max(self.waits) * MILLI


def _by_redis_py(calls: Counts) -> int:
    return calls.get("set", 0) + calls.get("evalsha", 0)


def _by_python_redis_lock(calls: Counts) -> int:
    # Its release script runs one GET of its own.
    return sum(calls.get(name, 0) for name in ("get", "set", "blpop"))


REQUESTS: dict[peers.Peer, Callable[[Counts], float]] = {
    peers.LOCKFAST: requests_by_lockfast,
    peers.PYTHON_REDIS_LOCK: _by_python_redis_lock,
    peers.REDIS_PY_1MS: _by_redis_py,
    peers.REDIS_PY: _by_redis_py,
    peers.SHERLOCK: lambda _: math.nan,
    peers.POTTERY: lambda _: math.nan,
}
"""Requests sent by clients. The server also counts commands called by scripts; these functions leave them out."""


def measure(bench: Bench) -> Report:
    report = Report("contention", TITLE)
    seconds = bench.pick(2.0, 1.0)
    cases = {peer.name: _case(report, bench.server, peer, seconds) for peer in present(report, tuple(REQUESTS))}
    rounds = in_turns(cases, bench.pick(5, 1))
    found = {name: [one for one in runs if one] for name, runs in rounds.items()}
    columns = ("", "holds/s", "wait p50 ms", "p99 ms", "longest ms", "Jain", "requests/hold", "server µs/hold")
    report.table(f"{seconds:g} s each", columns, [_row(name, runs) for name, runs in found.items() if runs])
    ours = found[peers.LOCKFAST.name]
    theirs = found.get(peers.PYTHON_REDIS_LOCK.name)
    for title, value, unit in (("holds per second", "throughput", "1/s"), ("longest wait", "longest", "ms")):
        values = {name: Spread.of(getattr(one, value) for one in runs).median for name, runs in found.items() if runs}
        report.figure(f"eight processes: {title}", unit, values, less_is_better=value == "longest")
    through = ratio([one.throughput for one in ours], [one.throughput for one in theirs]) if theirs else None
    report.target("throughput against python-redis-lock", through, 1.1, at_least=True)
    report.target("longest wait", _longest(ours), 25, " ms")
    report.target("requests per acquisition", max(one.requests for one in ours), 2.6, "")
    report.target("Jain's index", min(one.fairness for one in ours), 0.99, "", at_least=True)
    report.target("longest wait against python-redis-lock", _longest(ours) / _longest(theirs) if theirs else None, 0.25)
    return report


def _longest(runs: list[Result]) -> float:
    return Spread.of(one.longest for one in runs).median


def _row(name: str, runs: list[Result]) -> list[Any]:
    waits = [wait * MILLI for one in runs for wait in one.waits]
    return [
        name,
        str(Spread.of(one.throughput for one in runs)),
        percentile(waits, 0.5),
        percentile(waits, 0.99),
        str(Spread.of(one.longest for one in runs)),
        f"{Spread.of(one.fairness for one in runs).median:.3f}",
        "—" if math.isnan(runs[0].requests) else Spread.of(one.requests for one in runs).median,
        Spread.of(one.server_cpu * 1e6 for one in runs).median,
    ]


def _case(report: Report, server: Server, peer: peers.Peer, seconds: float) -> Callable[[], Result | None]:
    def case() -> Result | None:
        try:
            return _contend(server, peer, seconds)
        except ChildFailed as error:
            report.missing[peer.name] = str(error)
            return None

    return case


def _contend(server: Server, peer: peers.Peer, seconds: float) -> Result:
    server.clear()
    start = FORK.Barrier(PROCESSES)
    body = partial(_member, partial(peer.make, server.url, "contention"), start, seconds)
    members = [Child(body) for _ in range(PROCESSES)]
    cpu = server_cpu(server)
    with closing(members):
        answers: list[tuple[int, list[float]]] = [member.receive(seconds + 30) for member in members]
        cpu, calls = server_cpu(server) - cpu, server.commands_processed()
    waits = [wait for _, of_one in answers for wait in of_one]
    all_holds = len(waits) + sum(early for early, _ in answers)
    return Result(
        throughput=len(waits) / seconds,
        waits=waits,
        fairness=jain([len(of_one) for _, of_one in answers]),
        requests=REQUESTS[peer](calls) / all_holds,
        server_cpu=cpu / all_holds,
    )


def _member(make: Callable[[], peers.Lock], start: Any, seconds: float, pipe: Connection) -> None:
    """Send the number of holds before the measurement, and the waits during it, cut off at its end."""
    lock = make()
    early, waits = 0, []
    start.wait()
    begin = time.monotonic() + SETTLE_SECONDS
    end = begin + seconds
    while (sent_at := time.monotonic()) < end:
        with lock:
            held = time.monotonic()
            if held < begin:
                early += 1
            else:
                waits.append(min(held, end) - max(sent_at, begin))
            time.sleep(HOLD_SECONDS)
    pipe.send((early, waits))
