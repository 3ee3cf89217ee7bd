"""How a waiter of the embedded store hears of its grant: the pipe, who reads it, and what is left of it."""

import asyncio
import gc
import os
import select
import stat
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import lockfast
import lockfast.aio
from lockfast.errors import ConfigurationError, StoreUnavailable
from lockfast.runtime.runner import run
from lockfast.stores.sqlite import SqliteStore, inbox
from lockfast.values import FirstNotification, Granted, GrantNotification, Queued
from tests.support.waiting import until
from tests.test_sqlite_kit import FLAVOURS, LONG, Bed, Waiter, claim

pytestmark = pytest.mark.timing


@pytest.fixture(params=FLAVOURS)
def bed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bed]:
    with Bed(request.param, tmp_path, real_time=True) as bed:
        yield bed


def inboxes(bed: Bed) -> list[str]:
    folder = Path(f"{bed.path}-inbox")
    return sorted(entry.name for entry in folder.iterdir()) if folder.exists() else []


def soon(bed: Bed) -> float:
    return bed.runtime.now() + 20


def test_there_is_no_pipe_before_somebody_waits_and_one_for_all_who_do(bed: Bed) -> None:
    store = bed.store()
    bed.run(store.acquire(claim("one"), None, LONG))
    assert not store.inbox_open
    assert inboxes(bed) == []
    second, third = Waiter(bed, store, "two"), Waiter(bed, store, "three")
    assert store.inbox_open
    assert inboxes(bed) == [second.box.address] == [third.box.address]
    mode = (Path(f"{bed.path}-inbox") / second.box.address).stat().st_mode
    assert stat.S_ISFIFO(mode)
    assert stat.S_IMODE(mode) == 0o600


def test_a_grant_comes_from_another_client(bed: Bed) -> None:
    here, there = bed.store(), bed.store()
    bed.run(there.acquire(claim("one"), None, LONG))
    waiter = Waiter(bed, here, "two")
    assert isinstance(waiter.request(), Queued)
    assert bed.run(there.release("report", "one", LONG)) is True
    push = bed.run(waiter.box.wait(soon(bed)))
    assert isinstance(push, GrantNotification)
    assert waiter.request() == Granted(push.fence)


def test_many_grants_reach_each_who_waits_for_one(bed: Bed) -> None:
    here, there = bed.store(), bed.store()
    names = [f"lock{number}" for number in range(20)]
    for name in names:
        bed.run(there.acquire(claim("one", name=name), None, LONG))
    waiters = [Waiter(bed, here, f"two-{name}", name=name) for name in names]
    for waiter in waiters:
        waiter.request()
    for name in reversed(names):
        bed.run(there.release(name, "one", LONG))
    pushes = [bed.run(waiter.box.wait(soon(bed))) for waiter in waiters]
    assert all(push is not None and push.attempt == 1 for push in pushes)


def test_what_is_no_line_of_ours_is_ignored(bed: Bed) -> None:
    here, there = bed.store(), bed.store()
    bed.run(there.acquire(claim("one"), None, LONG))
    waiter = Waiter(bed, here, "two")
    waiter.request()
    noise = b"\n\xff\xfe\ntwo 1\ntwo one 2\nstranger 1 2\ntwo 1 2 3\ntwo 1 last 2\ntwo 1 next x\n"
    with (Path(f"{bed.path}-inbox") / waiter.box.address).open("wb", buffering=0) as end:
        end.write(noise)
    bed.run(there.release("report", "one", LONG))
    push = bed.run(waiter.box.wait(soon(bed)))
    assert isinstance(push, GrantNotification)
    assert push.fence > 2


def test_a_full_pipe_passes_its_reader_over(bed: Bed) -> None:
    deaf, there, other = bed.store(), bed.store(), bed.store()
    bed.run(there.acquire(claim("one"), None, LONG))
    second, third = Waiter(bed, deaf, "two"), Waiter(bed, other, "three")
    second.request(), third.request()
    end = os.open(Path(f"{bed.path}-inbox") / second.box.address, os.O_WRONLY | os.O_NONBLOCK)
    with suppress(BlockingIOError):
        while True:
            os.write(end, b"\n" * 4096)
    os.close(end)
    assert bed.run(there.release("report", "one", LONG)) is True
    assert bed.run(third.box.wait(soon(bed))) is not None


class AsksBeforeTheNews:
    """The way to a waiter that asks between the commit of its grant and the push."""

    def __init__(self, waiter: Waiter, outlet: Any) -> None:
        self.waiter = waiter
        self.outlet = outlet

    def send(self, holder: str, news: GrantNotification | FirstNotification) -> bool:
        assert isinstance(self.waiter.request(), Granted)
        self.waiter.box.close()
        return bool(self.outlet.send(holder, news))


@pytest.mark.parametrize("same_client", [True, False])
def test_who_learns_of_its_grant_by_asking_keeps_it(
    same_client: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Bed("threads", tmp_path, real_time=True) as bed:
        holding = bed.store()
        bed.run(holding.acquire(claim("one"), None, LONG))
        waiter = Waiter(bed, holding if same_client else bed.store(), "two")
        waiter.request()
        reach = holding._inbox.channel_to
        monkeypatch.setattr(
            holding._inbox, "channel_to", lambda address, holder: AsksBeforeTheNews(waiter, reach(address, holder))
        )
        assert bed.run(holding.release("report", "one", LONG)) is True
        assert bed.run(holding.inspect("report", LONG)).holder == "two"


def test_waiting_ends_when_its_time_is_up(bed: Bed) -> None:
    waiter = Waiter(bed, bed.store(), "two")
    started = bed.runtime.now()
    assert bed.run(waiter.box.wait(started + 0.05)) is None
    assert 0.05 <= bed.runtime.now() - started < 5


def test_close_removes_the_pipe_and_is_final(bed: Bed) -> None:
    store = bed.store()
    waiter = Waiter(bed, store, "two")
    bed.run(store.close())
    bed.run(store.close())
    assert inboxes(bed) == []
    with pytest.raises(ConfigurationError, match="closed"):
        bed.run(waiter.box.wait(LONG))
    with pytest.raises(ConfigurationError, match="closed"):
        bed.run(store.acquire(claim("one"), None, LONG))


def test_pipes_of_dead_processes_are_swept_and_others_left(bed: Bed) -> None:
    folder = Path(f"{bed.path}-inbox")
    folder.mkdir(parents=True, mode=0o700)
    living = inbox.Pipe(str(folder))
    for name in ("inbox-dead", "inbox-young"):
        os.mkfifo(folder / name)
    long_ago = time.time() - 2 * inbox.STALE_AFTER
    os.utime(folder / "inbox-dead", (long_ago, long_ago))
    os.utime(folder / living.name, (long_ago, long_ago))
    mine = Waiter(bed, bed.store(), "two").box.address
    assert inboxes(bed) == sorted([living.name, "inbox-young", mine])
    living.close(remove=True)


def test_no_pipe_can_be_made(bed: Bed) -> None:
    store = bed.store()
    bed.run(store.acquire(claim("one"), None, LONG))
    Path(f"{bed.path}-inbox").write_text("in the way")
    with pytest.raises(StoreUnavailable, match="Waiting for a lock is not possible"):
        bed.run(store.mailbox("two").open(LONG))


def test_a_store_that_is_never_closed_leaves_nothing(bed: Bed) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        store = SqliteStore(bed.path, bed.runtime, flavour=bed.flavour)
        bed.run(store.acquire(claim("one"), None, LONG))
        bed.run(store.mailbox("two").open(LONG))
        assert len(inboxes(bed)) == 1
        del store
        gc.collect()
    assert inboxes(bed) == []


def waiting_threads(store: SqliteStore, count: int) -> int:
    inbox: Any = store._inbox
    return len(inbox._waiting) == count


def test_threads_that_wait_take_turns_in_reading(tmp_path: Path) -> None:
    """The one that reads is interrupted, times out or is served; each time another goes on reading."""
    with Bed("threads", tmp_path, real_time=True) as bed:
        here, there = bed.store(), bed.store()
        names = [f"lock{number}" for number in range(8)]
        for name in names:
            bed.run(there.acquire(claim("one", name=name), None, LONG))
        served: dict[str, GrantNotification | FirstNotification | None] = {}
        waiters = [Waiter(bed, here, f"two-{name}", name=name) for name in names]

        def wait(waiter: Waiter) -> None:
            served[waiter.claim.name] = run(waiter.box.wait(soon(bed)))

        short = Waiter(bed, here, "short", name="unheard")
        leaver = threading.Thread(target=lambda: run(short.box.wait(bed.runtime.now() + 0.02)))
        leaver.start()
        threads = [threading.Thread(target=wait, args=(waiter,)) for waiter in waiters]
        for waiter, thread in zip(waiters, threads, strict=True):
            waiter.request()
            thread.start()
        leaver.join()
        until(lambda: waiting_threads(here, len(names)), "all threads to wait")
        for name in names:
            bed.run(there.release(name, "one", LONG))
        for thread in threads:
            thread.join()
        assert [name for name in names if served[name] is None] == []
        inbox: Any = here._inbox
        assert inbox._reader is None


def test_an_interrupted_reader_leaves_the_reading_to_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupting:
        def register(self, fd: int, events: int) -> None:
            until(lambda: waiting_threads(here, 2), "the other to wait")

        def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
            monkeypatch.undo()
            raise KeyboardInterrupt

    with Bed("threads", tmp_path, real_time=True) as bed:
        here, there = bed.store(), bed.store()
        bed.run(there.acquire(claim("one"), None, LONG))
        first, second = Waiter(bed, here, "first", name="unheard"), Waiter(bed, here, "two")
        second.request()
        monkeypatch.setattr(select, "poll", Interrupting)
        served: list[GrantNotification | FirstNotification | None] = []
        errors: list[str] = []

        def interrupted() -> None:
            try:
                run(first.box.wait(soon(bed)))
            except KeyboardInterrupt:
                errors.append("interrupted")

        reader = threading.Thread(target=interrupted)
        reader.start()
        until(lambda: waiting_threads(here, 1), "the reader to read")
        follower = threading.Thread(target=lambda: served.append(run(second.box.wait(soon(bed)))))
        follower.start()
        reader.join()
        bed.run(there.release("report", "one", LONG))
        follower.join()
        assert errors == ["interrupted"]
        assert served[0] is not None


def test_closing_wakes_the_threads_that_wait(tmp_path: Path) -> None:
    with Bed("threads", tmp_path, real_time=True) as bed:
        store = bed.store()
        told: list[str] = []

        def wait(waiter: Waiter) -> None:
            try:
                run(waiter.box.wait(LONG))
            except ConfigurationError as error:
                told.append(str(error))

        waiters = [Waiter(bed, store, f"h{number}") for number in range(3)]
        threads = [threading.Thread(target=wait, args=(waiter,)) for waiter in waiters]
        for thread in threads:
            thread.start()
        until(lambda: waiting_threads(store, 3), "all to wait")
        run(store.close())
        for thread in threads:
            thread.join()
        assert len(told) == 3
        assert inboxes(bed) == []


def test_a_place_can_be_given_up_after_closing(bed: Bed) -> None:
    here, there = bed.store(), bed.store()
    bed.run(there.acquire(claim("one"), None, LONG))
    Waiter(bed, here, "two").request()
    bed.run(here.close())
    assert bed.run(here.release("report", "two", LONG)) is False
    assert bed.run(there.inspect("report", LONG)).waiting == 0
    assert here._database._connection is None


def test_a_new_event_loop_starts_with_no_mailboxes(tmp_path: Path) -> None:
    async def hold_and_wait(locks: lockfast.aio.Locks) -> None:
        holder = locks.lock("report")
        async with holder:
            assert await locks.lock("report").acquire(timeout=0.02) is None

    locks = lockfast.aio.connect(f"sqlite:///{tmp_path / 'state' / 'locks.db'}")
    asyncio.run(hold_and_wait(locks))
    asyncio.run(hold_and_wait(locks))
    asyncio.run(locks.close())


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_waiting_costs_next_to_nothing(flavour: str, tmp_path: Path) -> None:
    """Less than 2 % of a core, requests to keep the place included."""
    target = f"sqlite:///{tmp_path / 'state' / 'locks.db'}"
    seconds = 2.0

    def measure_threads() -> float:
        before = time.process_time()
        assert waiting.lock("report", ttl=3).acquire(timeout=seconds) is None
        return time.process_time() - before

    async def measure_asyncio() -> float:
        async with lockfast.aio.connect(target) as locks:
            before = time.process_time()
            assert await locks.lock("report", ttl=3).acquire(timeout=seconds) is None
            return time.process_time() - before

    with (
        lockfast.connect(target) as holding,
        lockfast.connect(target) as waiting,
        holding.lock("report", ttl=60),
    ):
        spent = measure_threads() if flavour == "threads" else asyncio.run(measure_asyncio())
    assert spent < 0.02 * seconds
