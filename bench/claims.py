"""Cost of a reader and of a permit: an uncontended cycle against our own mutex and other libraries, and hand-off.

The ZSET recipe is the one that many programs contain: permits in a sorted set, scored by the time of the client, in one
pipeline of redis-py. It neither waits nor renews.
"""

from __future__ import annotations

import time
import uuid
from functools import partial
from typing import Any

from bench import peers
from bench.children import Placement, pinned, placements
from bench.cycle import COLUMNS
from bench.cycles import blocking_body, medians, present, rows, time_cycles, times
from bench.harness import Bench, Report, Spread, in_turns, multiple, ratio
from bench.peers import TTL, Lock, Peer
from bench.waiters import INBOX, Queue
from tests.support.wire import WireClient

TITLE = "readers and permits"
LIMIT = 4
CASES = ((1, 10), (1, 5000), (1000, 10), (1000, 5000))
"""Holders and waiters of a semaphore."""

MUTEX, PERMIT, READER = "lockfast, mutex", "lockfast, semaphore", "lockfast, reader"
RECIPE = "ZSET recipe on redis-py"


def _permit(url: str, name: str) -> Lock:
    import lockfast

    return lockfast.connect(url).semaphore(name, LIMIT, ttl=TTL)


def _reader(url: str, name: str) -> Lock:
    import lockfast

    return lockfast.connect(url).rwlock(name, ttl=TTL).reader


class _Recipe:
    def __init__(self, url: str, name: str) -> None:
        import redis

        self._client: Any = redis.Redis.from_url(url)
        self._name = name
        self._id = ""

    def __enter__(self) -> None:
        self._id, now = str(uuid.uuid4()), time.time()
        pipeline = self._client.pipeline(transaction=True)
        pipeline.zremrangebyscore(self._name, "-inf", now - TTL)
        pipeline.zadd(self._name, {self._id: now})
        pipeline.zrank(self._name, self._id)
        if pipeline.execute()[-1] >= LIMIT:
            self._client.zrem(self._name, self._id)
            raise RuntimeError("no permit is free")

    def __exit__(self, *_: object) -> None:
        self._client.zrem(self._name, self._id)


class _Reused:
    """A lock object without a `with` statement of its own."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _py_redis_semaphore(url: str, name: str) -> Lock:
    import redis
    from redis_semaphore import Semaphore, SemaphoreConfig

    lock: Lock = Semaphore(redis.Redis.from_url(url), SemaphoreConfig(name=name, limit=LIMIT))
    return lock


def _redis_rw_lock(url: str, name: str) -> Lock:
    import redis
    from redis_rw_lock import RWLock

    return _Reused(RWLock(redis.StrictRedis.from_url(url), name, RWLock.READ, expire=TTL))


PEERS = (
    Peer(MUTEX, "", peers.lockfast_lock),
    Peer(PERMIT, "", _permit),
    Peer(READER, "", _reader),
    Peer(RECIPE, "", _Recipe),
    Peer("py-redis-semaphore", "py-redis-semaphore", _py_redis_semaphore),
    Peer("redis-rw-lock, reader", "redis-rw-lock", _redis_rw_lock),
)
NOT_MEASURED = {
    "Redis-Semaphore": "has the same module name as py-redis-semaphore",
    "redis-semaphore-async": "pins an older redis-py",
    "aioredis-semaphore": "needs aioredis, which does not load on Python 3.11",
    "self-limiters": "has only a semaphore for asyncio that cannot be reused",
}


def measure(bench: Bench) -> Report:
    report = Report("claims", TITLE)
    report.missing.update(NOT_MEASURED)
    taking_part = present(report, PEERS)
    for placement in placements():
        _cycles(bench, report, taking_part, placement)
    _handoffs(bench, report)
    return report


def _cycles(bench: Bench, report: Report, taking_part: list[Peer], placement: Placement) -> None:
    server, where = bench.server, placement.name
    bodies = {
        peer.name: blocking_body(partial(peer.make, server.url, f"claims:{at}")) for at, peer in enumerate(taking_part)
    }
    with pinned(server.pid, placement.server):
        timings = time_cycles(bench, report, bodies, bench.pick(100, 80), placement.clients)
    report.table(f"per cycle, {where}; multiples of our mutex", COLUMNS, rows(timings, MUTEX))
    report.figure(f"wall time per cycle, {where}", "µs", medians(timings, "wall"))
    for name in (PERMIT, READER):
        report.target(f"{name}: wall against our mutex, {where}", times(timings, name, MUTEX, "wall"), 1.25)
    report.target(f"{PERMIT}: wall against the ZSET recipe, {where}", times(timings, PERMIT, RECIPE, "wall"), 1.0)


def _handoffs(bench: Bench, report: Report) -> None:
    """Server time of a release that grants the permit to the next waiter."""
    import lockfast

    bench.server.clear()
    with WireClient(bench.server.port) as inbox, lockfast.connect(bench.server.url) as locks:
        inbox.call("SUBSCRIBE", INBOX)
        queues = {
            f"{holders:,} holders, {waiters:,} waiters": Queue(bench.server, locks, waiters, holders)
            for holders, waiters in CASES
        }
        costs = in_turns({name: queue.burst for name, queue in queues.items()}, *bench.pick((60, 20.0), (15, 3.0)))
    least, *_, most = costs.values()
    table = [(name, str(Spread.of(took)), multiple(ratio(took, least))) for name, took in costs.items()]
    report.table("server time of a release that hands off a permit", ("", "µs", "against the first row"), table)
    report.target("server cost of 1,000 holders and 5,000 waiters against 1 and 10", ratio(most, least), 1.5)
