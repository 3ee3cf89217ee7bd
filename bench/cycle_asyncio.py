"""Cost of an uncontended `async with lock:`, against redis-py's asyncio lock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from bench import peers
from bench.children import pinned, placements, with_hiredis
from bench.cycles import MICRO, Body, Sample, medians, rows, time_cycles, times
from bench.harness import Bench, Report

TITLE = "uncontended acquire and release, asyncio"
OURS = "lockfast.aio"
THEIRS = "redis.asyncio lock"
THEIRS_HIREDIS = "redis.asyncio lock, with hiredis"
FLOOR = "floor: redis.asyncio commands"


def _lockfast(url: str) -> Any:
    import lockfast.aio

    return lockfast.aio.connect(url).lock("cycle_asyncio:lockfast", ttl=peers.TTL)


def _redis(url: str) -> Any:
    import redis.asyncio

    return redis.asyncio.Redis.from_url(url).lock("cycle_asyncio:redis", timeout=peers.TTL)


def _redis_hiredis(url: str) -> Any:
    with_hiredis()
    return _redis(url)


def _commands(url: str) -> Any:
    import redis.asyncio

    client = redis.asyncio.Redis.from_url(url)

    class Commands:
        async def __aenter__(self) -> None:
            await client.set("cycle_asyncio:commands", "v" * 20, nx=True, px=peers.TTL * 1000)

        async def __aexit__(self, *_: object) -> None:
            await client.delete("cycle_asyncio:commands")

    return Commands()


def _body(make: Callable[[str], Any], url: str) -> Body:
    def body(pipe: Connection) -> None:
        asyncio.run(_answer(pipe, make(url)))

    return body


async def _answer(pipe: Connection, lock: Any) -> None:
    while True:
        count = pipe.recv()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(count):
            async with lock:
                pass
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        pipe.send(Sample(wall / count * MICRO, cpu / count * MICRO))


def measure(bench: Bench) -> Report:
    report = Report("cycle_asyncio", TITLE)
    url = bench.server.url
    makers = {OURS: _lockfast, THEIRS: _redis, THEIRS_HIREDIS: _redis_hiredis, FLOOR: _commands}
    bodies = {name: _body(make, url) for name, make in makers.items()}
    for placement in placements():
        with pinned(bench.server.pid, placement.server):
            timings = time_cycles(bench, report, bodies, bench.pick(100, 60), placement.clients)
        columns = ("", "wall µs", "CPU µs", "wall", "CPU")
        report.table(f"per cycle, {placement.name}; multiples of {THEIRS}", columns, rows(timings, THEIRS))
        report.figure(f"CPU time per cycle, asyncio, {placement.name}", "µs", medians(timings, "cpu"))
        report.target(f"CPU against {THEIRS}, {placement.name}", times(timings, OURS, THEIRS, "cpu"), 0.5)
    return report
