"""Read/write locks on five real servers: readers together, writers alone, downgrades, nothing left behind."""

import random
import threading
from collections import Counter
from functools import partial
from typing import Any

import pytest

import lockfast
from lockfast.values import Mode
from tests.contract.driver import Driver, done, scenario
from tests.quorum.test_contention import ENOUGH, left_behind
from tests.support.servers import Server

READ = "lockfast:read"
GRANTS = "lockfast:{thing}:g"


def readers_on(server: Server) -> set[str]:
    return set(server.raw("ZRANGE", GRANTS, 0, -1)) if server.raw("GET", "thing") == READ else set()


def has_reader(server: Server, holder: str) -> bool:
    return holder in readers_on(server)


class Section:
    """Checks that no writer is inside beside anybody else, and counts."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._inside: Counter[bool] = Counter()  # by whether it reads
        self.most_readers = self.entered = 0

    def enter(self, *, reads: bool) -> None:
        with self._mutex:
            self._inside[reads] += 1
            assert self._inside[False] == 0 or self._inside.total() == 1, "a writer beside another holder"
            self.most_readers = max(self.most_readers, self._inside[True])
            self.entered += 1

    def leave(self, *, reads: bool) -> None:
        with self._mutex:
            self._inside[reads] -= 1


async def contend(d: Driver, rounds: int, rivals: int, reads: float) -> Section:
    """Let `rivals` clients read and write in turn; some writers are downgraded."""
    section = Section()

    async def rival(number: int) -> None:
        choose = random.Random(number).random
        lock = d.connect().rwlock("thing", ttl=10)
        for _ in range(rounds):
            reading = choose() < reads
            lease = await done((lock.reader if reading else lock.writer).acquire(timeout=ENOUGH))
            section.enter(reads=reading)
            await d.pause()
            section.leave(reads=reading)
            if not reading and choose() < 0.5:
                await done(lease.downgrade())
                section.enter(reads=True)
                await d.pause()
                section.leave(reads=True)
            assert await done(lease.release()) is True

    contenders = [d.start(rival, number) for number in range(rivals)]
    for contender in contenders:
        await d.until(partial(getattr, contender, "ended"), "a rival to finish", ENOUGH)
        await contender.result()
    return section


@scenario
async def test_readers_and_writers_exclude_each_other_and_leave_nothing_behind(
    d: Driver, shared_servers: list[Server]
) -> None:
    section = await contend(d, rounds=10, rivals=4, reads=0.6)
    assert section.entered >= 40
    assert section.most_readers > 1
    await d.until(lambda: left_behind(shared_servers) == [], "nothing to be left behind")


@pytest.mark.faults
@pytest.mark.parametrize("reads", [0.2, 0.5, 0.9])
@scenario
async def test_a_thousand_contended_rounds_of_readers_and_writers(
    d: Driver, shared_servers: list[Server], reads: float
) -> None:
    assert (await contend(d, rounds=200, rivals=5, reads=reads)).entered >= 1000
    await d.until(lambda: left_behind(shared_servers) == [], "nothing to be left behind")


@scenario
async def test_readers_hold_together_and_are_all_shown(d: Driver) -> None:
    leases = [await done(d.connect().rwlock("thing").reader.acquire(timeout=5)) for _ in range(3)]
    fences = [lease.fence for lease in leases]
    assert fences == sorted(set(fences))
    info = await done(d.lock().inspect())
    assert info.mode is Mode.READ
    assert [one.holder for one in info.holders] == [lease.holder for lease in leases]
    assert [one.fence for one in info.holders] == fences
    assert await done(d.connect().lock("thing").acquire(timeout=0)) is None
    for lease in leases:
        assert await done(lease.release()) is True
    writer = await done(d.connect().lock("thing").acquire(timeout=5))
    assert writer.fence > fences[-1]
    assert await done(writer.release()) is True


@scenario
async def test_readers_that_wait_for_a_writer_enter_together(d: Driver) -> None:
    writer = await done(d.lock().acquire(timeout=5))
    over = d.gate()
    inside: list[Any] = []

    async def read() -> None:
        lease = await done(d.connect().rwlock("thing").reader.acquire(timeout=ENOUGH))
        inside.append(lease)
        await over.passed()
        assert await done(lease.release()) is True

    reading = [d.start(read) for _ in range(4)]
    await d.queue_length(d.lock(), 4)
    assert await done(writer.release()) is True
    await d.until(lambda: len(inside) == 4, "all readers at the same time")
    over.open()
    for one in reading:
        await one.result()


@scenario
async def test_a_waiting_writer_enters_among_readers_in_a_loop(d: Driver) -> None:
    stopped: list[int] = []

    async def read() -> int:
        reader, count = d.connect().rwlock("thing").reader, 0
        while not stopped:
            lease = await done(reader.acquire(timeout=ENOUGH))
            await d.pause()
            await done(lease.release())
            count += 1
        return count

    reading = [d.start(read) for _ in range(3)]
    writer = d.connect().rwlock("thing").writer
    for _ in range(3):
        lease = await done(writer.acquire(timeout=9))
        assert lease is not None
        await done(lease.release())
    stopped.append(1)
    assert all([await one.result() for one in reading])


@scenario
async def test_a_semaphore_is_refused_with_the_reason(d: Driver) -> None:
    with pytest.raises(lockfast.ConfigurationError) as caught:
        await done(d.locks.semaphore("thing", 2).acquire(timeout=5))
    assert "has no semaphores. Nothing was sent." in str(caught.value)
    assert "different majorities could grant more than the limit" in str(caught.value)


@scenario
async def test_a_server_that_has_the_name_as_a_semaphore_refuses_readers(
    d: Driver, shared_servers: list[Server]
) -> None:
    alone = d.open(shared_servers[0].url)
    permit = await done(alone.semaphore("thing", 2).acquire(timeout=5))
    reader = d.locks.rwlock("thing").reader
    with pytest.raises(lockfast.ConfigurationError, match="is in use as a semaphore"):
        await _acquire_until_refused(reader)
    await d.until(lambda: left_behind(shared_servers[1:]) == [], "nothing to be left behind")
    assert await done(permit.release()) is True
    await done(alone.close())


async def _acquire_until_refused(reader: Any) -> None:
    """The majority of the other servers may be faster than the refusal."""
    while True:
        await done((await done(reader.acquire(timeout=5))).release())


@scenario
async def test_a_downgraded_writer_admits_readers(d: Driver, shared_servers: list[Server]) -> None:
    lease = await done(d.connect().rwlock("thing").writer.acquire(timeout=5))
    fence = lease.fence

    async def read() -> Any:
        return await done(d.connect().rwlock("thing").reader.acquire(timeout=ENOUGH))

    reading = d.start(read)
    await d.queue_length(d.lock(), 1)
    await done(lease.downgrade())
    reader = await reading.result()
    assert lease.fence == fence < reader.fence
    await d.until(lambda: all(has_reader(server, lease.holder) for server in shared_servers), "all to downgrade")
    assert await done(d.connect().lock("thing").acquire(timeout=0)) is None
    assert await done(lease.release()) is True
    assert await done(reader.release()) is True
    await d.until(lambda: left_behind(shared_servers) == [], "nothing to be left behind")
