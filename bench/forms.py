"""Cost of an uncontended cycle in the forms that people write, each against the same form of redis-py's lock.

The claims `cycle` and `cycle_asyncio` reuse one lock object. Programs rarely do: they make a lock for each use, set a
timeout, use many names, try without waiting, decorate a function, or pass a client that they already have.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from bench.children import pinned, placements
from bench.cycles import MICRO, Body, Sample, Timing, time_cycles, times
from bench.harness import Bench, Report, multiple
from bench.peers import TTL

TITLE = "uncontended acquire and release, in the forms that people write"
NAMES = [f"forms:{number}" for number in range(1000)]
CPU, WALL = 0.55, 0.8
COLUMNS = ("form", "CPU µs", "redis-py CPU µs", "CPU", "wall")

NEW = "with locks.lock(name)"
TIMEOUT = "with locks.lock(name, timeout=5)"
MANY = "1,000 different names"
TRY = "acquire(timeout=0), release()"
CLIENT = "with lockfast.Lock(client, name)"
GUARD = "@locks.guard"
RLOCK = "with locks.rlock(name)"

Cycles = Callable[[int], Any]
"""Run that many cycles; a coroutine function for asyncio."""


def _ours(form: str, url: str) -> Cycles:
    import redis

    import lockfast

    locks, client, name = lockfast.connect(url), redis.Redis.from_url(url), f"forms:{form}"
    reused = locks.lock(name, ttl=TTL)

    @locks.guard(name + ":{account_id}", ttl=TTL)
    def guarded(account_id: int) -> None:
        return None

    def tries(count: int) -> None:
        for _ in range(count):
            reused.acquire(timeout=0)
            reused.release()

    makers: dict[str, Callable[[int], Any]] = {
        NEW: lambda _: locks.lock(name),
        TIMEOUT: lambda _: locks.lock(name, timeout=5),
        MANY: lambda at: locks.lock(NAMES[at % len(NAMES)]),
        CLIENT: lambda _: lockfast.Lock(client, name),
        RLOCK: lambda _: locks.rlock(name),
    }
    if form == TRY:
        return tries
    return partial(_call, guarded) if form == GUARD else partial(_enter, makers[form])


def _theirs(form: str, url: str) -> Cycles:
    import redis

    client, name = redis.Redis.from_url(url), f"forms:redis-py:{form}"
    reused = client.lock(name, timeout=TTL)

    def guarded(account_id: int) -> None:
        with client.lock(f"{name}:{account_id}", timeout=TTL):
            return

    def tries(count: int) -> None:
        for _ in range(count):
            reused.acquire(blocking=False)
            reused.release()

    if form == TRY:
        return tries
    if form == GUARD:
        return partial(_call, guarded)
    if form == MANY:
        return partial(_enter, lambda at: client.lock(f"redis-py:{NAMES[at % len(NAMES)]}", timeout=TTL))
    wait: dict[str, Any] = {"blocking_timeout": 5} if form == TIMEOUT else {}
    return partial(_enter, lambda _: client.lock(name, timeout=TTL, **wait))


def _enter(make: Callable[[int], Any], count: int) -> None:
    for at in range(count):
        with make(at):
            pass


def _call(function: Callable[[int], None], count: int) -> None:
    for _ in range(count):
        function(7)


def _ours_asyncio(form: str, url: str) -> Cycles:
    import redis.asyncio

    import lockfast.aio

    locks, client, name = lockfast.aio.connect(url), redis.asyncio.Redis.from_url(url), f"forms:asyncio:{form}"
    reused = locks.lock(name, ttl=TTL)

    @locks.guard(name + ":{account_id}", ttl=TTL)
    async def guarded(account_id: int) -> None:
        return None

    async def tries(count: int) -> None:
        for _ in range(count):
            await reused.acquire(timeout=0)
            await reused.release()

    makers: dict[str, Callable[[int], Any]] = {
        NEW: lambda _: locks.lock(name),
        TIMEOUT: lambda _: locks.lock(name, timeout=5),
        MANY: lambda at: locks.lock(NAMES[at % len(NAMES)]),
        CLIENT: lambda _: lockfast.aio.Lock(client, name),
        RLOCK: lambda _: locks.rlock(name),
    }
    if form == TRY:
        return tries
    return partial(_call_asyncio, guarded) if form == GUARD else partial(_enter_asyncio, makers[form])


def _theirs_asyncio(form: str, url: str) -> Cycles:
    import redis.asyncio

    client, name = redis.asyncio.Redis.from_url(url), f"forms:redis-py:asyncio:{form}"
    reused = client.lock(name, timeout=TTL)

    async def guarded(account_id: int) -> None:
        async with client.lock(f"{name}:{account_id}", timeout=TTL):
            return

    async def tries(count: int) -> None:
        for _ in range(count):
            await reused.acquire(blocking=False)
            await reused.release()

    if form == TRY:
        return tries
    if form == GUARD:
        return partial(_call_asyncio, guarded)
    if form == MANY:
        return partial(_enter_asyncio, lambda at: client.lock(f"redis-py:{NAMES[at % len(NAMES)]}", timeout=TTL))
    wait: dict[str, Any] = {"blocking_timeout": 5} if form == TIMEOUT else {}
    return partial(_enter_asyncio, lambda _: client.lock(name, timeout=TTL, **wait))


async def _enter_asyncio(make: Callable[[int], Any], count: int) -> None:
    for at in range(count):
        async with make(at):
            pass


async def _call_asyncio(function: Callable[[int], Coroutine[Any, Any, None]], count: int) -> None:
    for _ in range(count):
        await function(7)


def _body(make: Callable[[str, str], Cycles], form: str, url: str) -> Body:
    def body(pipe: Connection) -> None:
        cycles = make(form, url)
        while True:
            count = pipe.recv()
            wall, cpu = time.perf_counter(), time.process_time()
            cycles(count)
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            pipe.send(Sample(wall / count * MICRO, cpu / count * MICRO))

    return body


def _body_asyncio(make: Callable[[str, str], Cycles], form: str, url: str) -> Body:
    async def answer(pipe: Connection) -> None:
        cycles = make(form, url)
        while True:
            count = pipe.recv()
            wall, cpu = time.perf_counter(), time.process_time()
            await cycles(count)
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            pipe.send(Sample(wall / count * MICRO, cpu / count * MICRO))

    return lambda pipe: asyncio.run(answer(pipe))


FORMS = (NEW, TIMEOUT, MANY, TRY, CLIENT, GUARD, RLOCK)
FLAVOURS = {"threads": (_body, _ours, _theirs), "asyncio": (_body_asyncio, _ours_asyncio, _theirs_asyncio)}


def measure(bench: Bench) -> Report:
    report = Report("forms", TITLE)
    placement = placements()[0]
    for flavour, (body, ours, theirs) in FLAVOURS.items():
        bodies = {
            f"{whose} {form}": body(make, form, bench.server.url)
            for form in FORMS
            for whose, make in (("lockfast", ours), ("redis-py", theirs))
        }
        with pinned(bench.server.pid, placement.server):
            timings = time_cycles(bench, report, bodies, bench.pick(100, 60), placement.clients)
        report.table(f"per cycle, {flavour}, {placement.name}", COLUMNS, [_row(timings, form) for form in FORMS])
        for form in FORMS:
            pair = f"lockfast {form}", f"redis-py {form}"
            report.target(f"CPU, {form}, {flavour}", times(timings, *pair, "cpu"), CPU)
            report.target(f"wall, {form}, {flavour}", times(timings, *pair, "wall"), WALL)
    return report


def _row(timings: dict[str, Timing], form: str) -> list[str]:
    pair = f"lockfast {form}", f"redis-py {form}"
    medians = [
        f"{sorted(timings[name].cpu)[len(timings[name].cpu) // 2]:.1f}" if name in timings else "—" for name in pair
    ]
    return [form, *medians, *(multiple(times(timings, *pair, what)) for what in ("cpu", "wall"))]
