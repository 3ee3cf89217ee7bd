"""Time to the next holder after kill −9 of the holder, and of the first waiter."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import count
from multiprocessing.connection import Connection

from bench import peers
from bench.children import Child, ChildFailed, closing
from bench.cycles import present
from bench.harness import Bench, Report, Spread, in_turns, number
from bench.peers import Lock, Make

TITLE = "after kill −9"
PEERS = (peers.LOCKFAST, peers.PYTHON_REDIS_LOCK, peers.REDIS_PY)
TTL = 1
QUEUE_SECONDS = 0.15
"""Time for a waiter to enqueue; less than a third of the ttl, after which the holder renews."""
NOTICE_SECONDS = 0.05
"""Time for the kernel to end a killed process and for the server to notice the closed connections."""
MILLI = 1e3

_fresh = count()


def measure(bench: Bench) -> Report:
    report = Report("takeover", TITLE)
    taking_part = present(report, PEERS)
    rounds = bench.pick(5, 1)
    holders, waiters = (
        in_turns({peer.name: partial(_attempt, report, scene, peer, bench) for peer in taking_part}, rounds)
        for scene in (_holder_dies, _waiter_dies)
    )
    rows = []
    for peer in taking_part:
        cells = [[took for took in found[peer.name] if took is not None] for found in (holders, waiters)]
        rows.append([peer.name, *(_shown(cell) for cell in cells)])
    columns = ("", "holder killed: after its ttl, ms", "first waiter killed: after release, ms")
    report.table("time to the next holder: median, longest", columns, rows)
    report.target("holder killed with 1 s left: next holder after", _longest(holders, 1.0), 1.25, " s")
    report.target("first waiter killed: next holder after release", _longest(waiters, 0.0, MILLI), 50, " ms")
    return report


def _shown(values: list[float]) -> str:
    if not values:
        return "—"
    return f"{number(Spread.of(values).median * MILLI)}, {number(max(values) * MILLI)}"


def _longest(found: dict[str, list[float | None]], plus: float, scale: float = 1.0) -> float | None:
    ours = [took for took in found[peers.LOCKFAST.name] if took is not None]
    return plus + max(ours) * scale if ours else None


def _attempt(report: Report, scene: Callable[[Make, str, str], float], peer: peers.Peer, bench: Bench) -> float | None:
    try:
        return scene(_short_lived(peer), bench.server.url, f"takeover:{next(_fresh)}")
    except ChildFailed as error:
        report.missing[peer.name] = str(error)
        return None


def _short_lived(peer: peers.Peer) -> Make:
    """The peer's lock with a ttl of one second, created in the child."""

    def make(url: str, name: str) -> Lock:
        peers.TTL = TTL
        return peer.make(url, name)

    return make


def _body(make: Make, url: str, name: str) -> Callable[[Connection], None]:
    """Body of a process that enters and leaves the lock on request, and sends the time."""

    def body(pipe: Connection) -> None:
        lock = make(url, name)
        while True:
            if pipe.recv() == "enter":
                lock.__enter__()
                pipe.send(time.monotonic())
            else:
                leaving_at = time.monotonic()
                lock.__exit__(None, None, None)
                pipe.send(leaving_at)

    return body


def _holder_dies(make: Make, url: str, name: str) -> float:
    """Seconds from the end of the dead holder's ttl until the waiter holds the lock."""
    holder, waiter = (Child(_body(make, url, name)) for _ in range(2))
    with closing([holder, waiter]):
        held_at: float = holder.request("enter")
        waiter.send("enter")
        time.sleep(QUEUE_SECONDS)
        holder.kill()
        taken_at: float = waiter.receive()
        return taken_at - held_at - TTL


def _waiter_dies(make: Make, url: str, name: str) -> float:
    """Seconds from the release until the second waiter holds the lock; the first one is dead."""
    holder, first, second = (Child(_body(make, url, name)) for _ in range(3))
    with closing([holder, first, second]):
        holder.request("enter")
        for waiter in (first, second):
            waiter.send("enter")
            time.sleep(QUEUE_SECONDS)
        first.kill()
        time.sleep(NOTICE_SECONDS)
        released_at: float = holder.request("leave")
        taken_at: float = second.receive()
        return taken_at - released_at
