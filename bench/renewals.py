"""Cost of renewing ten thousand leases: CPU time of the holder and the server, and requests."""

from __future__ import annotations

import time
from functools import partial
from multiprocessing.connection import Connection

from bench.children import Child, closing
from bench.harness import Bench, Report, Spread, in_turns
from bench.servers import requests_by_lockfast, server_cpu
from tests.support.servers import Server

TITLE = "renewal of ten thousand leases"
LEASES = 10_000
TTL = 6.0
"""Seconds; renewed after each third. With the default of 30 s the cost is five times lower."""
PARTS = 20
"""The leases are acquired over a third of the ttl, as in a real program, not all at once."""


def measure(bench: Bench) -> Report:
    report = Report("renewals", TITLE)
    seconds = bench.pick(2, 1) * TTL / 3
    found = in_turns({"once": partial(_run, bench.server, seconds)}, bench.pick(2, 1))["once"]
    columns = ("", "client, % of a core", "server, % of a core", "requests/s", "lost")
    shares = [str(Spread.of(one[at] for one in found)) for at in range(3)]
    lost = max(one[3] for one in found)
    report.table(
        f"{LEASES:,} leases with a ttl of {TTL:g} s", columns, [[f"{LEASES:,} leases", *shares, f"{lost:.0f}"]]
    )
    report.target("leases lost", lost, 0, "")
    report.target("holder's processor time", Spread.of(one[0] for one in found).median, 25, " % of a core")
    return report


def _run(server: Server, seconds: float) -> tuple[float, float, float, float]:
    server.clear()
    child = Child(partial(_holder, server.url))
    with closing([child]):
        child.receive(120)
        cpu, calls = server_cpu(server), requests_by_lockfast(server.commands_processed())
        used, lost = child.request(seconds, seconds + 60)
        cpu = server_cpu(server) - cpu
        calls = requests_by_lockfast(server.commands_processed()) - calls
    return used * 100, cpu / seconds * 100, calls / seconds, lost


def _holder(url: str, pipe: Connection) -> None:
    import lockfast

    locks = lockfast.connect(url)
    leases = []
    for part in range(PARTS):
        started = time.monotonic()
        leases += [locks.lock(f"renewals:{part}:{number}", ttl=TTL).acquire() for number in range(LEASES // PARTS)]
        time.sleep(max(0.0, TTL / 3 / PARTS - (time.monotonic() - started)))
    pipe.send(None)
    seconds = pipe.recv()
    wall, cpu = time.monotonic(), time.process_time()
    time.sleep(seconds)
    used = (time.process_time() - cpu) / (time.monotonic() - wall)
    pipe.send((used, sum(lease is None or not lease.remaining for lease in leases)))
    pipe.recv()
