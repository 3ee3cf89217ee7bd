"""Cost of an uncontended `with lock:`, against other libraries and three floors.

A floor is no lock, but a lower bound. The raw socket sends `SET NX PX` and `DEL` and checks nothing. The raw socket
with our scripts shows the cost without a client library. redis-py's commands are the two plain commands through that
client.
"""

from __future__ import annotations

from functools import partial

from bench import peers
from bench.children import Placement, pinned, placements
from bench.cycles import blocking_body, medians, present, rows, time_cycles, times
from bench.harness import Bench, Report

TITLE = "uncontended acquire and release, threads"
PEERS = (
    peers.LOCKFAST,
    peers.REDIS_PY,
    peers.REDIS_PY_HIREDIS,
    peers.PYTHON_REDIS_LOCK,
    peers.POTTERY,
    peers.SHERLOCK,
    peers.COMMANDS,
    peers.RAW_SCRIPTS,
    peers.RAW,
)
COLUMNS = ("", "wall µs", "CPU µs", "wall", "CPU")


def measure(bench: Bench) -> Report:
    report = Report("cycle", TITLE)
    taking_part = present(report, PEERS)
    for placement in placements():
        _measure(bench, report, taking_part, placement)
    return report


def _measure(bench: Bench, report: Report, taking_part: list[peers.Peer], placement: Placement) -> None:
    server = bench.server
    bodies = {
        peer.name: blocking_body(partial(peer.make, server.url, f"cycle:{at}")) for at, peer in enumerate(taking_part)
    }
    with pinned(server.pid, placement.server):
        timings = time_cycles(bench, report, bodies, bench.pick(100, 80), placement.clients)
    where, ours, base = placement.name, peers.LOCKFAST.name, peers.REDIS_PY.name
    report.table(f"per cycle, {where}; multiples of {base}", COLUMNS, rows(timings, base))
    report.figure(f"CPU time per cycle, {where}", "µs", medians(timings, "cpu"))
    report.figure(f"wall time per cycle, {where}", "µs", medians(timings, "wall"))
    report.target(f"CPU against redis-py's Lock, {where}", times(timings, ours, base, "cpu"), 0.5)
    report.target(f"wall against redis-py's Lock, {where}", times(timings, ours, base, "wall"), 0.85)
    report.target(f"wall against the raw socket, {where}", times(timings, ours, peers.RAW.name, "wall"), 1.5)
