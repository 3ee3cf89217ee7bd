"""How many files an operation enters: a reader follows it from `with` to the socket in that many places."""

import asyncio
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

import lockfast.aio
from lockfast import LeaseLost
from lockfast.runtime.base import run
from tests.support.servers import Server

ROOT = f"{Path(lockfast.__file__).parent}/"


@contextmanager
def files_entered() -> Iterator[set[str]]:
    """The modules of the package whose functions this thread calls in the block."""
    entered: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            entered.add(frame.f_code.co_filename.removeprefix(ROOT))

    sys.setprofile(note)
    try:
        yield entered
    finally:
        sys.setprofile(None)


def warm(locks: lockfast.Locks, name: str) -> None:
    for _ in range(3):
        with locks.lock(name):
            pass


def test_uncontended_acquire_and_release(valkey: Server) -> None:
    with lockfast.connect(valkey.url) as locks:
        warm(locks, "thing")
        with files_entered() as entered, locks.lock("thing"):
            pass
    assert len(entered) <= 12, sorted(entered)


def wait_behind(holder: lockfast.Locks, waiter: lockfast.Locks) -> set[str]:
    lease = holder.lock("thing").acquire()
    assert lease is not None
    timer = threading.Timer(0.05, lease.release)
    timer.start()
    with files_entered() as found, waiter.lock("thing"):
        pass
    timer.join()
    return found


def test_contended_acquire_takes_the_same_path_each_time(valkey: Server) -> None:
    with lockfast.connect(valkey.url) as holder, lockfast.connect(valkey.url) as waiter:
        for locks in (holder, waiter):
            warm(locks, "thing")
        wait_behind(holder, waiter)  # connects the inbox
        found = [wait_behind(holder, waiter) for _ in range(3)]
    assert len(found[0]) <= 16, sorted(found[0])
    assert found[1:] == found[:-1]


def test_renewal(valkey: Server) -> None:
    with lockfast.connect(valkey.url) as locks, locks.lock("thing", ttl=30) as lease:
        lease.renew()  # loads the script
        keepalive = locks.session.keepalive
        lease._core.next_renewal = 0.0
        with files_entered() as entered:
            run(keepalive._round())
    assert len(entered) <= 8, sorted(entered)


async def test_lost_async_lease(valkey: Server) -> None:
    async with lockfast.aio.connect(valkey.url) as locks:
        async with locks.lock("thing") as lease:
            await lease.renew()
        with pytest.raises(LeaseLost), files_entered() as entered:  # noqa: PT012
            async with locks.lock("thing"):
                valkey.raw("DEL", "thing")
                entered.clear()
                locks.session.keepalive._on_change("thing")
                await asyncio.sleep(30)
    assert len(entered) <= 10, sorted(entered)
