"""Time from a release in one process until a waiter in another process holds the lock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

from bench import peers
from bench.children import ChildFailed
from bench.cycles import present
from bench.harness import Bench, Report, Spread, in_turns, number, percentile, ratio
from bench.ping_pong import ping_pong

TITLE = "hand-off between two processes"
FAST = (peers.LOCKFAST, peers.PYTHON_REDIS_LOCK, peers.REDIS_PY_1MS)
SLOW = (peers.REDIS_PY, peers.POTTERY, peers.SHERLOCK)
"""They poll a few times a second, so they get fewer hand-offs, in rounds of their own."""
SLOW_POLL = 0.1
MILLI = 1e3

_fresh = count()


def measure(bench: Bench) -> Report:
    report = Report("handoff", TITLE)
    url = bench.server.url
    fast = {peer.name: _case(report, peer, url, 60) for peer in present(report, FAST)}
    slow = {peer.name: _case(report, peer, url, bench.pick(24, 8), SLOW_POLL) for peer in present(report, SLOW)}
    rounds = in_turns(fast, bench.pick(25, 3), 40.0) | in_turns(slow, bench.pick(5, 2))
    found = {name: batches for name, batches in rounds.items() if all(batches)}
    ours, theirs = peers.LOCKFAST.name, peers.PYTHON_REDIS_LOCK.name
    add_times(report, "from release to held", found)
    report.target("p50 against python-redis-lock", median_ratio(found, ours, theirs), 0.5)
    report.target(
        "p50 against redis-py's Lock with its defaults", _ratio_of_all(found, ours, peers.REDIS_PY.name), 0.01
    )
    return report


def _case(report: Report, peer: peers.Peer, url: str, count: int, *poll: float) -> Callable[[], list[float]]:
    def case() -> list[float]:
        try:
            return ping_pong(partial(peer.make, url, f"handoff:{next(_fresh)}"), count, *poll)
        except ChildFailed as error:
            report.missing[peer.name] = str(error)
            return []

    return case


def add_times(report: Report, title: str, found: dict[str, list[list[float]]]) -> None:
    """Add one row per peer: the median of the rounds with its spread, and the tail of all hand-offs."""
    rows = []
    for name, batches in found.items():
        every = [took * MILLI for batch in batches for took in batch]
        medians = Spread.of(percentile(batch, 0.5) * MILLI for batch in batches)
        tail = (percentile(every, 0.99), max(every))
        rows.append([name, str(medians), *map(number, tail), f"{len(every)}"])
    report.figure(title, "ms", {name: float(Spread.of(_medians(each)).median * MILLI) for name, each in found.items()})
    report.table(f"{title}, ms", ("", "p50", "p99", "longest", "hand-offs"), rows)


def median_ratio(found: dict[str, list[list[float]]], ours: str, theirs: str) -> float | None:
    if ours not in found or theirs not in found:
        return None
    return ratio(_medians(found[ours]), _medians(found[theirs]))


def _ratio_of_all(found: dict[str, list[list[float]]], ours: str, theirs: str) -> float | None:
    """The ratio of the medians of all hand-offs, for peers without common rounds."""
    if ours not in found or theirs not in found:
        return None
    mine, other = (percentile([took for batch in found[name] for took in batch], 0.5) for name in (ours, theirs))
    return mine / other


def _medians(batches: Sequence[Sequence[float]]) -> list[float]:
    return [percentile(batch, 0.5) for batch in batches]
