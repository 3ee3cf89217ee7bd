"""The embedded store under load: many threads and tasks, a busy file, and the time of one cycle."""

import asyncio
import os
import sqlite3
import statistics
import threading
import time
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest

import lockfast
import lockfast.aio
from lockfast.runtime.base import run
from lockfast.runtime.threads import ThreadRuntime
from lockfast.stores.sqlite import store as sqlite_store
from lockfast.stores.sqlite.store import SqliteStore
from tests.sqlite_kit import LONG, claim
from tests.support import lateness

pytestmark = pytest.mark.timing


@pytest.fixture
def target(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'state' / 'locks.db'}"


@pytest.mark.parametrize(("count", "rounds"), [(50, 10), (300, 2)])
def test_threads_exclude_each_other(target: str, count: int, rounds: int) -> None:
    number = 0
    fences: list[int] = []

    def work() -> None:
        nonlocal number
        for _ in range(rounds):
            with locks.lock("report", ttl=20) as lease:
                seen = number
                fences.append(lease.fence)
                number = seen + 1

    with lockfast.connect(target) as locks:
        threads = [threading.Thread(target=work) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        info = locks.lock("report").inspect()
    assert number == count * rounds
    assert fences == sorted(set(fences))
    assert (info.locked, info.waiting) == (False, 0)


def test_tasks_exclude_each_other(target: str) -> None:
    fences: list[int] = []
    inside = 0

    async def work(locks: lockfast.aio.Locks) -> None:
        nonlocal inside
        for _ in range(10):
            async with locks.lock("report", ttl=20) as lease:
                inside += 1
                await asyncio.sleep(0)
                assert inside == 1
                fences.append(lease.fence)
                inside -= 1

    async def main() -> None:
        async with lockfast.aio.connect(target) as locks, asyncio.TaskGroup() as group:
            for _ in range(50):
                group.create_task(work(locks))

    asyncio.run(main())
    assert len(fences) == 500
    assert fences == sorted(set(fences))


def test_threads_and_tasks_share_one_lock(target: str) -> None:
    """Two clients of one process, one in each flavour, notify each other through their pipes."""
    held: list[str] = []

    def threads_side() -> None:
        with lockfast.connect(target) as locks:
            for _ in range(30):
                with locks.lock("report"):
                    held.append("thread")

    async def tasks_side() -> None:
        async with lockfast.aio.connect(target) as locks:
            for _ in range(30):
                async with locks.lock("report"):
                    held.append("task")

    thread = threading.Thread(target=threads_side)
    thread.start()
    asyncio.run(tasks_side())
    thread.join()
    assert (held.count("thread"), held.count("task")) == (30, 30)


def test_busy_file_does_not_block_the_event_loop(target: str, tmp_path: Path) -> None:
    """While one task retries, another runs normally."""
    beats: list[float] = []
    enough = asyncio.Event()

    async def beat() -> None:
        while True:
            beats.append(time.monotonic())
            if len(beats) == 100:
                enough.set()
            await asyncio.sleep(0.001)

    async def main() -> None:
        lateness.watch()
        async with lockfast.aio.connect(target) as locks:
            await locks.lock("report").inspect()
            writer = sqlite3.connect(tmp_path / "state" / "locks.db", isolation_level=None)
            writer.execute("BEGIN IMMEDIATE")
            beating = asyncio.create_task(beat())
            acquiring = asyncio.create_task(locks.lock("report").acquire(timeout=20))
            await enough.wait()
            assert not acquiring.done()
            writer.execute("ROLLBACK")
            writer.close()
            assert await acquiring is not None
            beating.cancel()

    asyncio.run(main())
    gaps = [after - before for before, after in pairwise(beats)]
    assert statistics.median(gaps) < 0.01 + lateness.usual(beats[0])


def test_uncontended_cycle_is_fast(tmp_path: Path) -> None:
    """The aim is 80 µs on an idle machine; the bound allows for a busy one."""
    runtime = ThreadRuntime()
    store = SqliteStore(tmp_path / "state" / "locks.db", runtime)
    times: list[float] = []
    lateness.watch()
    began = time.monotonic()
    for number in range(1000):
        mine = claim(f"holder{number}")
        started = time.perf_counter()
        run(store.acquire(mine, None, LONG))
        run(store.release(mine.name, mine.holder, LONG))
        times.append(time.perf_counter() - started)
    run(store.close())
    assert statistics.median(times) < 0.0003 + lateness.usual(began)


def test_write_ahead_log_stays_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_store, "LONGEST_LOG_BYTES", 100_000)
    path = tmp_path / "state" / "locks.db"
    store = SqliteStore(path, ThreadRuntime())
    longest = 0
    for number in range(1000):
        mine = claim(f"holder{number}")
        run(store.acquire(mine, None, LONG))
        run(store.release(mine.name, mine.holder, LONG))
        longest = max(longest, path.with_name("locks.db-wal").stat().st_size)
    connection = store._database._connection
    assert connection is not None
    assert connection.execute("PRAGMA wal_autocheckpoint").fetchone() == (0,)
    run(store.close())
    assert 100_000 < longest < 500_000


def test_checkpoint_of_a_busy_file_is_postponed(tmp_path: Path) -> None:
    path = tmp_path / "state" / "locks.db"
    store = SqliteStore(path, ThreadRuntime())
    run(store.acquire(claim("one"), None, LONG))
    connection = store._database._connection
    assert connection is not None
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert sqlite_store.checkpoint(connection, str(path)) is False
        other.execute("ROLLBACK")
        assert sqlite_store.checkpoint(connection, str(path)) is True
    assert run(store.release("report", "one", LONG)) is True
    run(store.close())


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_forks_under_load_lose_nothing(target: str) -> None:
    """Other threads use the lock during the forks; each child opens the file itself."""
    failures: list[BaseException] = []
    stop = threading.Event()

    def work() -> None:
        try:
            while not stop.is_set():
                with locks.lock("report", ttl=20):
                    pass
        except BaseException as error:
            failures.append(error)

    with lockfast.connect(target) as locks:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        statuses = []
        for number in range(10):
            pid = os.fork()
            if pid == 0:
                try:
                    taken = locks.lock(f"child{number}").acquire(timeout=20)
                    os._exit(0 if taken is not None else 1)
                finally:
                    os._exit(2)
            statuses.append(os.waitpid(pid, 0)[1])
        stop.set()
        for thread in threads:
            thread.join()
        children = [locks.lock(f"child{number}").inspect().locked for number in range(10)]
    assert failures == []
    assert statuses == [0] * 10
    assert children == [True] * 10
