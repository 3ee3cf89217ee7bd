"""Notifications of the embedded store: the pipe, its reader, and its removal."""

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
from lockfast.runtime.base import run
from lockfast.stores.sqlite import inbox
from lockfast.stores.sqlite.store import SqliteStore
from lockfast.values import FirstNotification, Granted, GrantNotification, Notification, Queued
from tests.sqlite_kit import FLAVOURS, LONG, Bed, Waiter, claim
from tests.support.waiting import until

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


def test_one_pipe_for_all_waiters_created_with_the_first(bed: Bed) -> None:
    store = bed.store()
    bed.run(store.acquire(claim("one"), None, LONG))
    assert not store._inbox.address
    assert inboxes(bed) == []
    second, third = Waiter(bed, store, "two"), Waiter(bed, store, "three")
    assert store._inbox.address
    assert inboxes(bed) == [second.box.address] == [third.box.address]
    mode = (Path(f"{bed.path}-inbox") / second.box.address).stat().st_mode
    assert stat.S_ISFIFO(mode)
    assert stat.S_IMODE(mode) == 0o600


def test_grant_notification_from_another_client(bed: Bed) -> None:
    here, there = bed.store(), bed.store()
    bed.run(there.acquire(claim("one"), None, LONG))
    waiter = Waiter(bed, here, "two")
    assert isinstance(waiter.request(), Queued)
    assert bed.run(there.release("report", "one", LONG)) is True
    notification = bed.run(waiter.box.wait(soon(bed)))
    assert isinstance(notification, GrantNotification)
    assert waiter.request() == Granted(notification.fence)


def test_each_waiter_receives_its_own_grant(bed: Bed) -> None:
    here, there = bed.store(), bed.store()
    names = [f"lock{number}" for number in range(20)]
    for name in names:
        bed.run(there.acquire(claim("one", name=name), None, LONG))
    waiters = [Waiter(bed, here, f"two-{name}", name=name) for name in names]
    for waiter in waiters:
        waiter.request()
    for name in reversed(names):
        bed.run(there.release(name, "one", LONG))
    notifications = [bed.run(waiter.box.wait(soon(bed))) for waiter in waiters]
    assert all(one is not None and one.attempt == 1 for one in notifications)


def test_batch_of_readers_opens_their_pipe_once(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = bed.store(), bed.store()
    bed.run(there.acquire(claim("writer"), None, LONG))
    readers = [Waiter(bed, here, f"reader{number}", weight=1) for number in range(50)]
    for reader in readers:
        reader.request()
    opened: list[str] = []

    def open_channel(folder: str, address: str) -> inbox.PipeChannel | None:
        opened.append(address)
        return original(folder, address)

    original = inbox.open_channel
    monkeypatch.setattr(inbox, "open_channel", open_channel)
    bed.run(there.release("report", "writer", LONG))
    assert opened == [readers[0].box.address]
    for reader in readers:
        assert isinstance(bed.run(reader.box.wait(soon(bed))), GrantNotification)


def test_waiter_with_very_many_slots_is_told_to_poll(bed: Bed) -> None:
    here, there = bed.store(), bed.store()
    bed.run(there.acquire(claim("one"), None, LONG))
    waiter = Waiter(bed, here, "two", weight=2000, limit=2000)
    waiter.request()
    bed.run(there.release("report", "one", LONG))
    assert bed.run(waiter.box.wait(soon(bed))) == FirstNotification(1, 0.0)
    assert waiter.request().slots == tuple(range(2000))


def test_invalid_lines_are_ignored(bed: Bed) -> None:
    here, there = bed.store(), bed.store()
    bed.run(there.acquire(claim("one"), None, LONG))
    waiter = Waiter(bed, here, "two")
    waiter.request()
    noise = b"\n\xff\xfe\ntwo 1\ntwo one 2\nstranger 1 2\ntwo 1 2 3 4\ntwo 1 2 x\ntwo 1 last 2\ntwo 1 next x\n"
    with (Path(f"{bed.path}-inbox") / waiter.box.address).open("wb", buffering=0) as end:
        end.write(noise)
    bed.run(there.release("report", "one", LONG))
    notification = bed.run(waiter.box.wait(soon(bed)))
    assert isinstance(notification, GrantNotification)
    assert notification.fence > 2


def test_waiter_with_a_full_pipe_is_skipped(bed: Bed) -> None:
    stuck, there, other = bed.store(), bed.store(), bed.store()
    bed.run(there.acquire(claim("one"), None, LONG))
    second, third = Waiter(bed, stuck, "two"), Waiter(bed, other, "three")
    second.request(), third.request()
    end = os.open(Path(f"{bed.path}-inbox") / second.box.address, os.O_WRONLY | os.O_NONBLOCK)
    with suppress(BlockingIOError):
        while True:
            os.write(end, b"\n" * 4096)
    os.close(end)
    assert bed.run(there.release("report", "one", LONG)) is True
    assert bed.run(third.box.wait(soon(bed))) is not None


class ClaimsBeforeTheNotification:
    """The channel to a waiter that repeats its claim between the commit of its grant and the notification."""

    def __init__(self, waiter: Waiter, channel: Any) -> None:
        self.waiter = waiter
        self.channel = channel

    def send(self, holder: str, notification: Notification) -> bool:
        assert isinstance(self.waiter.request(), Granted)
        self.waiter.box.close()
        return bool(self.channel.send(holder, notification))


@pytest.mark.parametrize("same_client", [True, False])
def test_grant_found_by_a_request_survives_a_failed_notification(
    same_client: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Bed("threads", tmp_path, real_time=True) as bed:
        holding = bed.store()
        bed.run(holding.acquire(claim("one"), None, LONG))
        waiter = Waiter(bed, holding if same_client else bed.store(), "two")
        waiter.request()
        reach = holding._inbox.channel_to
        monkeypatch.setattr(
            holding._inbox,
            "channel_to",
            lambda address, holder: ClaimsBeforeTheNotification(waiter, reach(address, holder)),
        )
        assert bed.run(holding.release("report", "one", LONG)) is True
        assert bed.run(holding.inspect("report", LONG)).holder == "two"


def test_wait_times_out(bed: Bed) -> None:
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


def test_only_pipes_of_dead_processes_are_removed(bed: Bed) -> None:
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


def test_failure_to_create_a_pipe_is_reported(bed: Bed) -> None:
    store = bed.store()
    bed.run(store.acquire(claim("one"), None, LONG))
    Path(f"{bed.path}-inbox").write_text("not a folder")
    with pytest.raises(StoreUnavailable, match="Waiting for a lock is not possible"):
        bed.run(store.mailbox("two").open(LONG))


def test_store_that_is_never_closed_leaves_no_pipe(bed: Bed) -> None:
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


def test_waiting_threads_pass_the_reader_role_on(tmp_path: Path) -> None:
    """When the reading thread times out or receives its grant, another one reads."""
    with Bed("threads", tmp_path, real_time=True) as bed:
        here, there = bed.store(), bed.store()
        names = [f"lock{number}" for number in range(8)]
        for name in names:
            bed.run(there.acquire(claim("one", name=name), None, LONG))
        served: dict[str, Notification | None] = {}
        waiters = [Waiter(bed, here, f"two-{name}", name=name) for name in names]

        def wait(waiter: Waiter) -> None:
            served[waiter.claim.name] = run(waiter.box.wait(soon(bed)))

        short = Waiter(bed, here, "short", name="never held")
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


def test_interrupted_reader_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupting:
        def register(self, fd: int, events: int) -> None:
            until(lambda: waiting_threads(here, 2), "the other to wait")

        def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
            monkeypatch.undo()
            raise KeyboardInterrupt

    with Bed("threads", tmp_path, real_time=True) as bed:
        here, there = bed.store(), bed.store()
        bed.run(there.acquire(claim("one"), None, LONG))
        first, second = Waiter(bed, here, "first", name="never held"), Waiter(bed, here, "two")
        second.request()
        monkeypatch.setattr(select, "poll", Interrupting)
        served: list[Notification | None] = []
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


def test_close_wakes_waiting_threads(tmp_path: Path) -> None:
    with Bed("threads", tmp_path, real_time=True) as bed:
        store = bed.store()
        errors: list[str] = []

        def wait(waiter: Waiter) -> None:
            try:
                run(waiter.box.wait(LONG))
            except ConfigurationError as error:
                errors.append(str(error))

        waiters = [Waiter(bed, store, f"h{number}") for number in range(3)]
        threads = [threading.Thread(target=wait, args=(waiter,)) for waiter in waiters]
        for thread in threads:
            thread.start()
        until(lambda: waiting_threads(store, 3), "all to wait")
        run(store.close())
        for thread in threads:
            thread.join()
        assert len(errors) == 3
        assert inboxes(bed) == []


def test_ticket_can_be_removed_after_close(bed: Bed) -> None:
    here, there = bed.store(), bed.store()
    bed.run(there.acquire(claim("one"), None, LONG))
    Waiter(bed, here, "two").request()
    bed.run(here.close())
    assert bed.run(here.release("report", "two", LONG)) is False
    assert bed.run(there.inspect("report", LONG)).waiting == 0
    assert here._database._connection is None


def test_new_event_loop_starts_without_mailboxes(tmp_path: Path) -> None:
    async def hold_and_wait(locks: lockfast.aio.Locks) -> None:
        holder = locks.lock("report")
        async with holder:
            assert await locks.lock("report").acquire(timeout=0.02) is None

    locks = lockfast.aio.connect(f"sqlite:///{tmp_path / 'state' / 'locks.db'}")
    asyncio.run(hold_and_wait(locks))
    asyncio.run(hold_and_wait(locks))
    asyncio.run(locks.close())


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_waiting_uses_almost_no_cpu(flavour: str, tmp_path: Path) -> None:
    """Less than 2 % of a core, including the requests that refresh the ticket."""
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
