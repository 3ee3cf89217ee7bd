"""Under every fault, calls return in time: acquire by its timeout, release within two seconds, a cancellation at once.

In each scenario one client is connected, holds a lock and waits for another when the fault starts; several calls share
its connections. A scenario lasts seconds, so all scenarios run concurrently, once, and the tests check their
measurements.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest

from lockfast import StoreUnavailable
from tests.conftest import require
from tests.support.lateness import lateness, stolen, watch
from tests.support.proxy import FaultProxy
from tests.support.servers import Server
from tests.support.waiting import until
from tests.support.wire import WireClient
from tests.traps.flavours import FLAVOURS, Client, Flavour
from tests.traps.observation import Stopwatch, await_nothing_left, await_queue

pytestmark = pytest.mark.timing

SLACK = 0.15
"""Seconds: 0.1 are promised; the rest allows for the proxy and the tests."""
TIMEOUT = 0.4
QUEUED_TIMEOUT = 1.5
SHORT_TTL = 0.9
LASTS = 3.6
"""Seconds that a fault lasts: longer than every measurement."""


@dataclass
class Bench:
    """The parts of a scenario, and its measurements: seconds and outcome by operation."""

    server: Server
    proxy: FaultProxy
    flavour: Flavour
    client: Client
    measured: dict[str, tuple[float, Any]] = field(default_factory=dict)
    left_behind: list[str] = field(default_factory=list)
    works_again: bool = False
    lateness: float = 0.0


@contextmanager
def stalled(bench: Bench, direction: Any) -> Iterator[None]:
    bench.proxy.stall(direction)
    yield
    bench.proxy.unstall()


@contextmanager
def refused(bench: Bench) -> Iterator[None]:
    bench.proxy.refuse()
    bench.proxy.reset_connections()
    yield
    bench.proxy.accept()


@contextmanager
def client_pause(bench: Bench) -> Iterator[None]:
    bench.server.raw("CLIENT", "PAUSE", int(LASTS * 1000), "ALL")
    yield


@contextmanager
def debug_sleep(bench: Bench) -> Iterator[None]:
    with WireClient(bench.server.port) as sleeper:
        assert sleeper.call("PING") == "PONG"  # connected, so that the server reads its command before later ones
        sleeper.send("DEBUG", "SLEEP", LASTS)
        sleeper.send("PING")
        yield
        assert sleeper.receive() == "OK"


@contextmanager
def stopped(bench: Bench) -> Iterator[None]:
    bench.server.pause()
    yield
    bench.server.resume()


FAULTS: dict[str, Callable[[Bench], Any]] = {
    "requests stall": lambda bench: stalled(bench, "to_server"),
    "replies stall": lambda bench: stalled(bench, "to_client"),
    "everything stalls": lambda bench: stalled(bench, None),
    "connections are refused": refused,
    "CLIENT PAUSE": client_pause,
    "DEBUG SLEEP": debug_sleep,
    "the process is stopped": stopped,
}


def timed(bench: Bench, what: str, call: Callable[[], Any]) -> Future[None]:
    """Run `call` in the background; record its duration and its outcome."""
    watch = Stopwatch()

    async def in_a_task() -> None:
        try:
            outcome = await call()
        except Exception as error:
            outcome = error
        bench.measured[what] = watch.seconds, outcome

    def in_a_thread() -> None:
        try:
            outcome = call()
        except Exception as error:
            outcome = error
        bench.measured[what] = watch.seconds, outcome

    future: Future[None] = bench.client.start(in_a_task if bench.flavour.name == "asyncio" else in_a_thread)
    return future


def run_scenario(flavour_name: str, fault: str) -> Bench:
    with ExitStack() as stack:
        server = stack.enter_context(Server())
        proxy = stack.enter_context(FaultProxy(server.port))
        flavour = stack.enter_context(FLAVOURS[flavour_name]())
        bench = Bench(server, proxy, flavour, flavour.connect(proxy.url).warm_up_inbox())
        watch()
        began = time.monotonic()
        measure(bench, FAULTS[fault])
        bench.lateness = lateness() + stolen(began)
        names = ("free", "tried", "held", "queued", "cancelled", "cancelled in flight", "short")
        for name in names:
            try:
                await_nothing_left(server, name)
            except TimeoutError as error:
                bench.left_behind.append(str(error))
        bench.works_again = bench.client.acquire("afterwards", timeout=20) is not None
        return bench


def measure(bench: Bench, fault: Callable[[Bench], Any]) -> None:
    client, server = bench.client, bench.server
    lock = client.locks.lock
    for taken in ("queued", "cancelled"):
        server.raw("SET", taken, "a stranger's", "PX", 4500)
    held = client.acquire("held")
    under_way = [timed(bench, "queued", lambda: lock("queued").acquire(timeout=QUEUED_TIMEOUT))]
    waiting = client.acquiring("cancelled", ttl=60)
    await_queue(server, "queued", 1)
    await_queue(server, "cancelled", 1)
    short = client.acquire("short", ttl=SHORT_TTL)
    with fault(bench):
        struck = Stopwatch()
        under_way += [
            timed(bench, "short", lambda: short.lost.wait(20)),
            timed(bench, "free", lambda: lock("free").acquire(timeout=TIMEOUT)),
            timed(bench, "tried", lambda: lock("tried").acquire(blocking=False)),
            timed(bench, "held", held.release),
        ]
        if bench.flavour.name == "asyncio":
            record_cancellation(bench, "cancelled", waiting)
            record_cancellation(bench, "cancelled in flight", client.acquiring("cancelled in flight"))
        for future in under_way:
            future.result(20)
        until(lambda: struck.seconds >= LASTS, "the fault to have lasted")
    if bench.flavour.name == "threads":
        client.release(waiting.result(20))


def record_cancellation(bench: Bench, what: str, future: Future[Any]) -> None:
    """Cancel the task of a future, and record when it ends; the future itself is cancelled at once."""
    tasks = bench.client.do(asyncio.all_tasks)
    watch = Stopwatch()
    future.cancel()
    cancelled = [task for task in tasks if bench.client.do(task.cancelling)]
    until(lambda: all(task.done() for task in cancelled), "the cancelled task to end")
    bench.measured[what] = watch.seconds, [task.cancelled() for task in cancelled]


@cache
def scenarios(flavour_name: str) -> dict[str, Future[Bench]]:
    """Run all faults concurrently, for one flavour."""
    with ThreadPoolExecutor(len(FAULTS)) as pool:
        return {fault: pool.submit(run_scenario, flavour_name, fault) for fault in FAULTS}


@pytest.fixture(params=FLAVOURS, scope="module")
def flavour_name(request: pytest.FixtureRequest) -> str:
    require("valkey9")
    name: str = request.param
    return name


@pytest.fixture(params=FAULTS)
def bench(request: pytest.FixtureRequest, flavour_name: str) -> Bench:
    return scenarios(flavour_name)[request.param].result()


def test_acquire_returns_by_its_timeout(bench: Bench) -> None:
    seconds, outcome = bench.measured["free"]
    assert isinstance(outcome, StoreUnavailable)
    assert seconds < TIMEOUT + SLACK + bench.lateness


def test_non_blocking_acquire_returns_at_once(bench: Bench) -> None:
    seconds, outcome = bench.measured["tried"]
    assert isinstance(outcome, StoreUnavailable)
    assert seconds < SLACK + bench.lateness


def test_a_wait_in_the_queue_ends_by_its_timeout(bench: Bench) -> None:
    seconds, outcome = bench.measured["queued"]
    assert outcome is None or isinstance(outcome, StoreUnavailable)
    assert QUEUED_TIMEOUT - 0.05 < seconds < QUEUED_TIMEOUT + SLACK + bench.lateness


def test_release_returns_within_two_seconds(bench: Bench) -> None:
    seconds, outcome = bench.measured["held"]
    assert isinstance(outcome, StoreUnavailable)
    assert seconds < 2 + 0.2 + bench.lateness


@pytest.mark.parametrize("fault", FAULTS)
def test_a_cancellation_takes_effect_at_once(fault: str) -> None:
    require("valkey9")
    bench = scenarios("asyncio")[fault].result()
    for what in ("cancelled", "cancelled in flight"):
        seconds, cancelled = bench.measured[what]
        assert cancelled == [True]
        assert seconds < 0.1 + 0.1 + bench.lateness


def test_the_local_clock_alone_reports_a_lost_lease(bench: Bench) -> None:
    seconds, outcome = bench.measured["short"]
    assert outcome is True
    assert SHORT_TTL / 2 - bench.lateness < seconds < SHORT_TTL + 0.05 + 0.1 + bench.lateness


def test_nothing_is_left_behind_after_the_fault(bench: Bench) -> None:
    assert bench.left_behind == []
    assert bench.works_again
