"""Timing of uncontended cycles: one process per peer, interleaved batches, wall and CPU time per cycle."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple

from bench.children import Child, ChildFailed, closing
from bench.harness import Bench, Report, Spread, in_turns, multiple, ratio
from bench.peers import Lock, Peer

MICRO = 1e6


class Sample(NamedTuple):
    """Microseconds per cycle in one batch."""

    wall: float
    cpu: float


class Timing(NamedTuple):
    """All batches of one peer."""

    samples: list[Sample]

    @property
    def wall(self) -> list[float]:
        return [sample.wall for sample in self.samples]

    @property
    def cpu(self) -> list[float]:
        return [sample.cpu for sample in self.samples]


Body = Callable[[Connection], None]


def blocking_body(make: Callable[[], Lock]) -> Body:
    """Body of a process that receives a number of cycles and sends their timing."""

    def body(pipe: Connection) -> None:
        lock = make()
        while True:
            count = pipe.recv()
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(count):
                with lock:
                    pass
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            pipe.send(Sample(wall / count * MICRO, cpu / count * MICRO))

    return body


def time_cycles(
    bench: Bench, report: Report, bodies: Mapping[str, Body], count: int, cpus: set[int] | None
) -> dict[str, Timing]:
    """The timing of each peer. A peer that fails is named in the report and left out."""
    children = {name: Child(body, cpus) for name, body in bodies.items()}
    with closing(children):
        working: dict[str, Child] = {}
        for name, child in children.items():
            try:
                child.request(max(20, count // 4))  # connects, loads scripts, warms caches
                working[name] = child
            except ChildFailed as error:
                report.missing[name] = str(error)
        batches = in_turns({name: _batch(child, count) for name, child in working.items()}, *_rounds(bench))
    return {name: Timing(samples) for name, samples in batches.items()}


def _rounds(bench: Bench) -> tuple[int, float]:
    return bench.pick((31, 24.0), (7, 3.0))


def _batch(child: Child, count: int) -> Callable[[], Sample]:
    def batch() -> Sample:
        sample: Sample = child.request(count)
        return sample

    return batch


def present(report: Report, peers: Sequence[Peer]) -> list[Peer]:
    """The installed peers. The others are named in the report."""
    for peer in peers:
        if peer.absent:
            report.missing[peer.name] = peer.absent
    return [peer for peer in peers if not peer.absent]


def rows(timings: Mapping[str, Timing], against: str) -> list[list[str]]:
    """One row per peer: wall and CPU time with spread, and both as a multiple of `against`."""
    base = timings.get(against)
    table = []
    for name, timing in timings.items():
        row = [name, str(Spread.of(timing.wall)), str(Spread.of(timing.cpu))]
        for ours, theirs in ((timing.wall, base and base.wall), (timing.cpu, base and base.cpu)):
            row.append(multiple(ratio(ours, theirs) if theirs else None))
        table.append(row)
    return table


def medians(timings: Mapping[str, Timing], what: str) -> dict[str, float]:
    """The median of each peer in `what` ("wall" or "cpu"), in microseconds."""
    return {name: Spread.of(getattr(timing, what)).median for name, timing in timings.items()}


def times(timings: Mapping[str, Timing], ours: str, theirs: str, what: str) -> float | None:
    """The ratio of ours to theirs in `what` ("wall" or "cpu"); None if either is missing."""
    if ours not in timings or theirs not in timings:
        return None
    return ratio(getattr(timings[ours], what), getattr(timings[theirs], what))
