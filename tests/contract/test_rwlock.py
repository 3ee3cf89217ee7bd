"""Read/write locks: many readers or one writer, fairness, downgrade, and callers that would wait for themselves."""

import asyncio
from typing import Any

import pytest

from lockfast import ConfigurationError, LeaseLost, NotHeld, State, WouldDeadlock
from lockfast.values import Mode
from tests.contract.driver import BOUND, Contender, Driver, Gate, done, held, scenario
from tests.contract.stores import IN_ORDER, QUEUEING, capabilities, only


@pytest.fixture(autouse=True)
def offers_readers(d: Driver) -> None:
    if not capabilities(d).readers:
        pytest.skip("the store grants no readers")


class Member:
    """A contender that reads or writes until `leave()`, on a connection of its own."""

    def __init__(self, d: Driver, side: str, **options: Any) -> None:
        self.lease: Any = None
        self._go: Gate = d.gate()
        self._lock = getattr(d.connect().rwlock("config", **{"timeout": BOUND, **options}), side)
        self._d = d
        self.contender: Contender = d.start(self._hold)

    async def _hold(self) -> None:
        async with held(self._lock) as self.lease:
            await self._go.passed()

    async def entered(self) -> Any:
        return await self._d.until(lambda: self.lease, "the member to enter")

    async def leave(self) -> None:
        self._go.open()
        await self.contender.result()


async def holders(lock: Any) -> list[str]:
    return [one.holder for one in (await done(lock.inspect())).holders]


@scenario
async def test_readers_share_the_lock_and_keep_writers_out(d: Driver) -> None:
    config, elsewhere, writer = d.locks.rwlock("config"), d.connect().rwlock("config"), d.connect().lock("config")
    async with held(config.reader) as first, held(elsewhere.reader) as second:
        assert first.fence != second.fence
        assert await done(writer.acquire(timeout=0)) is None
        info = await done(config.reader.inspect())
        assert (info.mode, {one.holder for one in info.holders}) == (Mode.READ, {first.holder, second.holder})
    async with held(config.writer):
        assert await done(elsewhere.reader.acquire(timeout=0)) is None
        assert await done(elsewhere.writer.acquire(timeout=0)) is None
    assert await done(writer.locked()) is False


@scenario
async def test_lock_of_that_name_is_the_writer(d: Driver) -> None:
    reader = d.connect().rwlock("config").reader
    async with held(d.lock("config")):
        assert await done(reader.acquire(timeout=0)) is None
    async with held(reader):
        assert await done(d.lock("config").acquire(timeout=0)) is None


@only(stores=QUEUEING)
@scenario
async def test_waiting_readers_enter_together_after_a_writer(d: Driver) -> None:
    config = d.locks.rwlock("config")
    writer = await done(config.writer.acquire())
    readers = [Member(d, "reader") for _ in range(4)]
    await d.queue_length(config.writer, 4)
    await done(writer.release())
    entered = {(await reader.entered()).holder for reader in readers}
    assert set(await holders(config.reader)) == entered
    for reader in readers:
        await reader.leave()


@only(stores=IN_ORDER)
@scenario
async def test_waiting_writer_stops_later_readers(d: Driver) -> None:
    config = d.locks.rwlock("config")
    reading = await done(config.reader.acquire())
    writer = Member(d, "writer")
    await d.queue_length(config.reader, 1)
    late = Member(d, "reader")
    info = await d.queue_length(config.reader, 2)
    assert [waiter.mode for waiter in info.waiters] == [Mode.EXCLUSIVE, Mode.READ]
    assert await holders(config.reader) == [reading.holder]
    await done(reading.release())
    await writer.entered()
    assert late.lease is None
    await writer.leave()
    await late.entered()
    await late.leave()


@only(stores=QUEUEING)
@scenario
async def test_reader_reads_again_while_a_writer_waits(d: Driver) -> None:
    config = d.locks.rwlock("config")
    async with held(config.reader) as lease:
        writer = Member(d, "writer")
        await d.queue_length(config.reader, 1)
        async with held(d.locks.rwlock("config").reader) as again:
            assert again is lease
            assert config.reader.depth == 2
        assert config.reader.depth == 1
        assert writer.lease is None
    await writer.entered()
    await writer.leave()


@scenario
async def test_reader_that_wants_to_write_is_told_at_once(d: Driver) -> None:
    config = d.locks.rwlock("config")
    async with held(config.reader) as lease:
        writers = (config.writer, d.lock("config"), d.locks.rlock("config"), d.locks.all_of("config", "other"))
        for writer in writers:
            with pytest.raises(WouldDeadlock, match="already reads 'config'"):
                await done(writer.acquire())
            with pytest.raises(WouldDeadlock):
                await done(writer.acquire(timeout=0))
        info = await done(config.reader.inspect())
        assert ([one.holder for one in info.holders], info.waiting) == ([lease.holder], 0), "nothing was queued"
        lease.ensure_held()
    async with held(config.writer):
        pass


@scenario
async def test_writer_that_wants_to_read_is_told_at_once(d: Driver) -> None:
    config = d.locks.rwlock("config")
    async with held(config.writer) as lease:
        for reader in (config.reader, d.locks.all_of(config.reader, "other")):
            with pytest.raises(WouldDeadlock, match="already holds the lock 'config' to write"):
                await done(reader.acquire())
        lease.ensure_held()
        assert (await done(config.writer.inspect())).waiting == 0
    async with held(config.reader):
        pass


@only(stores=QUEUEING)
@scenario
async def test_another_thread_or_task_may_wait_to_write(d: Driver) -> None:
    config = d.locks.rwlock("config", timeout=BOUND)

    async def write() -> int:
        async with held(config.writer) as lease:
            fence: int = lease.fence
            return fence

    async with held(config.reader) as reading:
        writing = d.start(write)
        await d.queue_length(config.reader, 1)
    assert await writing.result() > reading.fence


@scenario
async def test_downgraded_writer_reads_with_the_same_lease(d: Driver) -> None:
    config, elsewhere = d.locks.rwlock("config"), d.connect().rwlock("config")
    async with held(config.writer) as lease:
        fence = lease.fence
        await done(lease.downgrade())
        assert (lease.fence, lease.state) == (fence, State.HELD)
        async with held(elsewhere.reader) as other:
            assert set(await holders(config.reader)) == {lease.holder, other.holder}
        async with held(config.reader) as again:
            assert again is lease, "it may read again"
        with pytest.raises(WouldDeadlock):
            await done(config.writer.acquire())
        with pytest.raises(NotHeld, match="shared already"):
            await done(lease.downgrade())
    assert await done(config.writer.locked()) is False
    async with held(config.writer):
        pass


@scenario
async def test_downgraded_lease_lasts_until_its_last_reading_block_ends(d: Driver) -> None:
    config = d.locks.rwlock("config")
    async with held(config.writer) as lease:
        await done(lease.downgrade())
        again = held(config.reader)
        await again.__aenter__()
    assert await holders(config.reader) == [lease.holder], "the writer's block has ended, and the reader's has not"
    lease.ensure_held()
    await again.__aexit__(None, None, None)
    assert await holders(config.reader) == []

    lease = await done(config.writer.acquire())
    await done(lease.downgrade())
    assert await done(config.reader.acquire()) is lease
    assert await done(config.writer.release()) is True
    assert await holders(config.reader) == [lease.holder]
    assert await done(config.reader.release()) is True
    assert await holders(config.reader) == []


@scenario
async def test_downgraded_re_entrant_lease_cannot_be_acquired_again_to_write(d: Driver) -> None:
    lock = d.locks.rlock("config")
    async with held(lock) as lease:
        await done(lease.downgrade())
        with pytest.raises(WouldDeadlock):
            await done(lock.acquire())
        assert lock.depth == 1
    assert await done(lock.locked()) is False


@only(stores=QUEUEING)
@scenario
async def test_downgrade_lets_waiting_readers_in_and_no_writer(d: Driver) -> None:
    config = d.locks.rwlock("config")
    lease = await done(config.writer.acquire())
    reader = Member(d, "reader")
    await d.queue_length(config.writer, 1)
    writer = Member(d, "writer")
    await d.queue_length(config.writer, 2)
    await done(lease.downgrade())
    await reader.entered()
    assert writer.lease is None
    await reader.leave()
    assert await holders(config.writer) == [lease.holder]
    assert await done(lease.release()) is True
    await writer.entered()
    await writer.leave()


@scenario
async def test_downgraded_lease_is_renewed(d: Driver) -> None:
    config = d.locks.rwlock("config", ttl=0.9)
    lease = await done(config.writer.acquire())
    await done(lease.downgrade())
    now = d.locks.session.runtime.now
    ends = now() + 2.0
    while now() < ends:
        assert await holders(config.reader) == [lease.holder]
        await d.pause()
    assert await done(lease.release()) is True


@scenario
async def test_lost_writer_cannot_become_a_reader(d: Driver) -> None:
    lease = await done(d.locks.rwlock("config", ttl=0.1, renew=False).writer.acquire())
    successor = await done(d.connect().lock("config").acquire(timeout=BOUND))
    with pytest.raises(LeaseLost):
        await done(lease.downgrade())
    assert await holders(d.lock("config")) == [successor.holder]


@scenario
async def test_readers_expire_one_by_one(d: Driver) -> None:
    steady = await done(d.locks.rwlock("config").reader.acquire())
    brief = await done(d.connect().rwlock("config", ttl=0.1, renew=False).reader.acquire())
    await d.until(lambda: brief.state is State.LOST, "the brief lease to end")

    async def alone() -> bool:
        return await holders(d.lock("config")) == [steady.holder]

    await d.until(alone, "the brief reader to expire in the store")
    steady.ensure_held()
    assert await done(d.connect().lock("config").acquire(timeout=0)) is None


@scenario
async def test_readers_are_renewed_beyond_their_ttl(d: Driver) -> None:
    readers = [await done(client.rwlock("config", ttl=0.9).reader.acquire()) for client in (d.locks, d.connect())]
    watcher, now = d.lock("config"), d.locks.session.runtime.now
    ends = now() + 2.0
    while now() < ends:
        assert len(await holders(watcher)) == 2
        await d.pause()
    assert [await done(reader.release()) for reader in readers] == [True, True]
    assert await done(watcher.locked()) is False


@scenario
async def test_forced_release_of_one_reader_is_the_loss_of_that_lease_only(d: Driver) -> None:
    kept = await done(d.locks.rwlock("config").reader.acquire())
    lost = await done(d.connect().rwlock("config", ttl=0.6).reader.acquire())
    await done(d.lock("config").force_release(lost.holder))
    assert await done(lost.lost.wait(timeout=BOUND)) is True
    kept.ensure_held()
    assert await done(lost.release()) is False
    assert await holders(d.lock("config")) == [kept.holder]


@only(flavour="asyncio")
@scenario
async def test_loss_of_a_read_lease_cancels_the_body(d: Driver) -> None:
    config = d.locks.rwlock("config", ttl=0.6)

    async def work() -> None:
        async with config.reader as lease:
            await d.connect().lock("config").force_release(lease.holder)
            await asyncio.sleep(BOUND)

    with pytest.raises(LeaseLost):
        await work()
    async with config.reader:
        pass


@only(flavour="asyncio")
@scenario
async def test_loss_cancels_the_body_after_an_inner_block_of_another_object(d: Driver) -> None:
    config = d.locks.rwlock("config")

    async def lose(lease: Any) -> None:
        async with d.locks.rwlock("config").reader as again:
            assert again is lease
        lease._lose("a test")
        await asyncio.sleep(BOUND)
        pytest.fail("the body was not cancelled")

    async def read() -> None:
        async with config.reader as lease:
            await lose(lease)

    async def write_and_read() -> None:
        async with config.writer as lease:
            await lease.downgrade()
            await lose(lease)

    async def read_one_of_several() -> None:
        async with d.locks.all_of("a", config.reader) as leases:
            await lose(leases["config"])

    for work in (read, write_and_read, read_one_of_several):
        with pytest.raises(LeaseLost):
            await work()
        await asyncio.sleep(0)  # the task is not cancelled any more
        await done(config.writer.force_release())


@scenario
async def test_exported_read_lease_is_adopted_by_a_reader(d: Driver) -> None:
    reader = d.locks.rwlock("config").reader
    other = await done(d.connect().rwlock("config").reader.acquire())
    lease = await done(reader.acquire())
    adopter = d.connect()
    adopted = await done(adopter.adopt(lease.export()))
    assert adopted.fence > lease.fence
    assert set(await holders(reader)) == {other.holder, adopted.holder}
    with pytest.raises(WouldDeadlock):
        await done(adopter.lock("config").acquire())
    assert await done(adopted.release()) is True
    assert await holders(reader) == [other.holder]


@scenario
async def test_adopting_a_read_lease_keeps_the_levels_of_another(d: Driver) -> None:
    reader = d.locks.rwlock("config").reader
    async with held(reader) as lease, held(reader):
        exported = await done(d.connect().rwlock("config").reader.acquire())
        adopted = await done(d.locks.adopt(exported.export()))
        assert reader.depth == 2
        assert await done(adopted.release()) is True
        assert reader.depth == 2
        assert await holders(reader) == [lease.holder]
    assert await done(reader.locked()) is False


@scenario
async def test_decorated_functions_read_or_write(d: Driver) -> None:
    config = d.locks.rwlock("config")

    async def mode() -> Mode:
        found: Mode = (await done(config.writer.inspect())).mode
        return found

    assert await done(config.reader(d.function(mode))()) is Mode.READ
    assert await done(config.writer(d.function(mode))()) is Mode.EXCLUSIVE
    assert await mode() is None


@scenario
async def test_name_of_a_semaphore_is_refused_and_nothing_changes(d: Driver) -> None:
    if not capabilities(d).permits:
        pytest.skip("the store grants no permits")
    async with held(d.locks.rwlock("config").reader) as lease:
        with pytest.raises(ConfigurationError, match="in use as a read/write lock"):
            await done(d.connect().semaphore("config", 2).acquire())
        info = await done(d.lock("config").inspect())
        assert ([one.holder for one in info.holders], info.waiting) == ([lease.holder], 0)
    async with held(d.locks.semaphore("config", 2)):
        with pytest.raises(ConfigurationError, match="in use as a semaphore"):
            await done(d.connect().rwlock("config").reader.acquire())
