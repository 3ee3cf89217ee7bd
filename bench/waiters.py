"""Cost of a hand-off for the server with a long queue, and the number of connections of many waiters.

The queue is filled through the store port, with a subscribed inbox, and only releases are counted: each grants the lock
to the next waiter. The queue is refilled between short bursts of releases, so its length stays the same.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Iterator
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

from bench.children import Child, closing
from bench.harness import Bench, Report, Spread, in_turns, multiple, ratio
from tests.support.servers import Server
from tests.support.waiting import until
from tests.support.wire import WireClient

TITLE = "many waiters"
WAITERS = (10, 100, 1000, 5000)
BURST = 8
INBOX = "lockfast:inbox:bench"
WAIT_SECONDS = 600.0
TASKS = 2000
THREADS = 300


def measure(bench: Bench) -> Report:
    report = Report("waiters", TITLE)
    found = _server_costs(bench)
    few, many = found[WAITERS[0]], found[WAITERS[-1]]
    rows = [
        (f"{waiters:,} waiters", str(Spread.of(took)), multiple(ratio(took, few))) for waiters, took in found.items()
    ]
    report.table("server time of the release script with hand-off", ("", "µs", "against 10 waiters"), rows)
    report.figure(
        "server time of a hand-off",
        "µs",
        {f"{waiters:,} waiters": Spread.of(took).median for waiters, took in found.items()},
    )
    report.target("server cost with 5,000 waiters against 10", ratio(many, few), 1.5)
    tasks = _connections(bench.server, _tasks, TASKS)
    threads = _connections(bench.server, _threads, THREADS)
    taken = [(f"{TASKS:,} tasks", tasks), (f"{THREADS} threads", threads)]
    report.table("connections of one client with many waiters", ("", "connections"), taken)
    report.target(f"connections of {TASKS:,} waiting tasks", tasks, 3, "")
    report.target(f"connections of {THREADS} waiting threads", threads, 3, "")
    return report


def _server_costs(bench: Bench) -> dict[int, list[float]]:
    """Microseconds per release script, by length of the queue."""
    import lockfast

    server = bench.server
    server.clear()
    with WireClient(server.port) as inbox, lockfast.connect(server.url) as locks:
        inbox.call("SUBSCRIBE", INBOX)
        queues = {waiters: Queue(server, locks, waiters) for waiters in WAITERS}
        cases = {str(waiters): queue.burst for waiters, queue in queues.items()}
        costs = in_turns(cases, *bench.pick((60, 20.0), (15, 3.0)))
    return {int(waiters): found for waiters, found in costs.items()}


class Queue:
    """A held lock with waiters, or a semaphore with that many holders, if any.

    `_line` contains the holder ids of the holders, then those of the waiters in order.
    """

    def __init__(self, server: Server, locks: Any, waiters: int, holders: int = 0) -> None:
        self._server = server
        self._locks = locks
        self._name = f"waiters:{holders}:{waiters}"
        self._limit = holders
        self._ids: Iterator[int] = count()
        self._line: list[str] = []
        self._enqueue(waiters + max(1, holders))

    def _enqueue(self, how_many: int) -> None:
        from lockfast.runtime.base import run
        from lockfast.values import Claim, Enqueue

        for _ in range(how_many):
            holder = f"w{next(self._ids)}"
            weight = 1 if self._limit else 0
            claim = Claim(self._name, holder, WAIT_SECONDS, "bench:1:", weight=weight, limit=self._limit)
            session = self._locks.session
            run(session.store.acquire(claim, Enqueue(INBOX, 1, None), session.runtime.now() + 5))
            self._line.append(holder)

    def burst(self) -> float:
        from lockfast.runtime.base import run

        self._server.raw("CONFIG", "RESETSTAT")
        for _ in range(BURST):
            holder = self._line.pop(0)
            run(self._locks.session.store.release(self._name, holder, self._locks.session.runtime.now() + 5))
        stats: str = self._server.raw("INFO", "commandstats")
        self._enqueue(BURST)
        found = re.search(r"cmdstat_evalsha:calls=(\d+),usec=(\d+)", stats)
        if found is None or int(found[1]) != BURST:
            raise RuntimeError(f"The server did not count {BURST} scripts: {stats}")
        return int(found[2]) / BURST


Wait = Callable[[str, str, int], None]


def _connections(server: Server, wait: Wait, waiters: int) -> int:
    """Number of connections of one process after all its waiters are in the queue."""
    import lockfast

    server.clear()
    name = f"waiters:{wait.__name__}"

    def body(_: Connection) -> None:
        wait(server.url, name, waiters)

    with lockfast.connect(server.url) as locks, locks.lock(name, ttl=60):
        before = _clients(server)
        child = Child(body)
        with closing([child]):
            until(lambda: locks.lock(name).inspect().waiting == waiters, f"{waiters} waiters", 30.0)
            return _clients(server) - before


def _tasks(url: str, name: str, waiters: int) -> None:
    import lockfast.aio

    async def wait() -> None:
        locks = lockfast.aio.connect(url)
        await asyncio.gather(*(locks.lock(name, ttl=60).acquire() for _ in range(waiters)))

    asyncio.run(wait())


def _threads(url: str, name: str, waiters: int) -> None:
    import lockfast

    locks = lockfast.connect(url)
    for _ in range(waiters):
        threading.Thread(target=locks.lock(name, ttl=60).acquire, daemon=True).start()
    threading.Event().wait()


def _clients(server: Server) -> int:
    info: str = server.raw("INFO", "clients")
    found = re.search(r"connected_clients:(\d+)", info)
    return int(found[1]) if found else 0
