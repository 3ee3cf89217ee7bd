"""`locks.once()` under real schedulers: every machine has one, all fire at the same time, and one job runs."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import pytest

import lockfast
import lockfast.aio
from tests.support.servers import Server
from tests.support.waiting import until

pytestmark = pytest.mark.system("C5")

MACHINES = 3


def test_apscheduler(valkey: Server) -> None:
    schedulers = pytest.importorskip("apscheduler.schedulers.background")
    ran, skipped, connections, running = [], [], [], []
    at = datetime.now(UTC)
    for machine in range(MACHINES):
        connections.append(locks := lockfast.connect(valkey.url, label=f"machine {machine}"))

        @locks.once("report", every=3600)
        def report(machine: int) -> None:
            ran.append(machine)

        def job(machine: int, report: object = report) -> None:
            if (outcome := report(machine)) is not None:  # type: ignore[operator]
                skipped.append(outcome)

        running.append(scheduler := schedulers.BackgroundScheduler(timezone="UTC"))
        scheduler.add_job(job, "date", run_date=at, args=[machine], misfire_grace_time=60)
    for scheduler in running:
        scheduler.start()
    until(lambda: len(ran) + len(skipped) == MACHINES, "all jobs to be run or skipped", timeout=10)
    for scheduler, locks in zip(running, connections, strict=True):
        scheduler.shutdown()
        locks.close()
    assert len(ran) == 1
    assert {one.owner.label for one in skipped} == {f"machine {ran[0]}"}


async def test_fastapi_lifespans(tmp_path: Path) -> None:
    """Three worker processes of one web server, on the embedded store."""
    fastapi = pytest.importorskip("fastapi")
    ran: list[int] = []
    tried = 0

    def worker(number: int) -> object:
        @asynccontextmanager
        async def lifespan(app: object) -> AsyncIterator[None]:
            nonlocal tried
            async with lockfast.aio.connect(f"sqlite:///{tmp_path}/locks/locks.db") as locks:

                @locks.once("refresh", every=3600)
                async def refresh() -> None:
                    ran.append(number)

                await refresh()
                tried += 1
                yield

        return fastapi.FastAPI(lifespan=lifespan)

    async with AsyncExitStack() as stack, asyncio.timeout(10):
        for number in range(MACHINES):
            app = worker(number)
            await stack.enter_async_context(app.router.lifespan_context(app))  # type: ignore[attr-defined]
    assert (ran, tried) == ([0], MACHINES)


def test_machines_that_fire_at_different_times_run_once_per_period(valkey: Server) -> None:
    period, fences = 0.4, []
    stop = threading.Event()

    def machine() -> None:
        with lockfast.connect(valkey.url) as locks:
            while not stop.wait(0.02):
                with locks.once("report", every=period) as run:
                    if run:
                        fences.append(run.fence)

    threads = [threading.Thread(target=machine) for _ in range(MACHINES)]
    for thread in threads:
        thread.start()
    until(lambda: len(fences) >= 4, "four runs", timeout=20)
    stop.set()
    for thread in threads:
        thread.join(10)
    gaps = [
        (after - before) / 1e6 for before, after in pairwise(fences)
    ]  # a fence is the server time of its grant, in µs
    assert min(gaps) >= 0.9 * period, "after a run the name stays taken for nine tenths of the period"
