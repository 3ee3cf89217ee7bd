"""The embedded store against file locks: a cycle, a hand-off, and the cost of waiting.

filelock and portalocker use a file lock of the kernel: no ttl, no fence, no queue, and waiters poll.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path

from bench import peers
from bench.children import Child, ChildFailed, closing, placements
from bench.cycles import blocking_body, medians, present, rows, time_cycles, times
from bench.handoff import add_times
from bench.harness import Bench, Report, Spread, in_turns, percentile
from bench.ping_pong import ping_pong

TITLE = "the embedded store"
PEERS = (peers.SQLITE, peers.FILELOCK, peers.PORTALOCKER)
POLLS = {peers.FILELOCK: 0.05, peers.PORTALOCKER: 0.25}
"""Default pause of a polling waiter, in seconds."""
MILLI = 1e3

_fresh = count()


def measure(bench: Bench) -> Report:
    report = Report("sqlite", TITLE)
    taking_part = present(report, PEERS)
    with tempfile.TemporaryDirectory(prefix="lockfast-bench-") as folder:
        path = str(Path(folder, "locks.db"))
        _cycle(bench, report, taking_part, path)
        _handoff(bench, report, taking_part, path)
        _waiting(bench, report, taking_part, path)
    return report


def _cycle(bench: Bench, report: Report, taking_part: list[peers.Peer], path: str) -> None:
    bodies = {peer.name: blocking_body(partial(peer.make, path, "cycle")) for peer in taking_part}
    timings = time_cycles(bench, report, bodies, bench.pick(200, 60), placements()[0].clients)
    base = peers.FILELOCK.name
    report.table(f"per cycle; multiples of {base}", ("", "wall µs", "CPU µs", "wall", "CPU"), rows(timings, base))
    report.figure("wall time per cycle, embedded", "µs", medians(timings, "wall"))
    report.target("wall against filelock", times(timings, peers.SQLITE.name, base, "wall"), 2.0)


def _handoff(bench: Bench, report: Report, taking_part: list[peers.Peer], path: str) -> None:
    cases = {peer.name: partial(_ping_pong, report, peer, path, bench) for peer in taking_part}
    found = {name: batches for name, batches in in_turns(cases, bench.pick(5, 1)).items() if all(batches)}
    add_times(report, "from release to held between two processes", found)
    ours = found.get(peers.SQLITE.name)
    median = None if ours is None else Spread.of(percentile(batch, 0.5) * MILLI for batch in ours).median
    report.target("hand-off p50", median, 3, " ms")


def _ping_pong(report: Report, peer: peers.Peer, path: str, bench: Bench) -> list[float]:
    fast = peer not in POLLS
    count_of_handoffs = bench.pick(80, 40) if fast else bench.pick(12, 4)
    try:
        make = partial(peer.make, path, f"handoff{next(_fresh)}")
        return ping_pong(make, count_of_handoffs) if fast else ping_pong(make, count_of_handoffs, POLLS[peer])
    except ChildFailed as error:
        report.missing[peer.name] = str(error)
        return []


def _waiting(bench: Bench, report: Report, taking_part: list[peers.Peer], path: str) -> None:
    seconds = bench.pick(4.0, 1.0)
    table = []
    for peer in taking_part:
        try:
            table.append((peer.name, _share_of_a_core(partial(peer.make, path, f"wait{next(_fresh)}"), seconds)))
        except ChildFailed as error:
            report.missing[peer.name] = str(error)
    report.table(f"one waiter, {seconds:g} s", ("", "% of a core"), [[name, share] for name, share in table])
    report.target("processor time of one waiter", dict(table).get(peers.SQLITE.name), 2, " %")


def _share_of_a_core(make: Callable[[], peers.Lock], seconds: float) -> float:
    """Percent of one core that a waiting process uses."""

    def hold(pipe: Connection) -> None:
        with make():
            pipe.send(None)
            pipe.recv()

    def wait(pipe: Connection) -> None:
        lock = make()
        wall, cpu = time.perf_counter(), time.process_time()
        pipe.send(None)
        with lock:
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        pipe.send(100 * cpu / wall)

    children = [Child(hold)]
    with closing(children):
        children[0].receive()
        children.append(Child(wait))
        children[1].receive()
        time.sleep(seconds)
        children[0].send(None)
        share: float = children[1].receive()
        return share
