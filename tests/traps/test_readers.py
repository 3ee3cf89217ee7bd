"""Read/write locks: troubles that users of other libraries had, on a real server."""

from collections.abc import Sequence
from typing import Any

import pytest

from lockfast import ConfigurationError, NotHeld, State, WouldDeadlock
from lockfast.values import Mode
from tests.contract.driver import BOUND, FLAVOURS, Driver, done, held, scenario
from tests.support.proxy import FaultProxy
from tests.support.servers import Server
from tests.support.waiting import until
from tests.traps.observation import Stopwatch, companions, queue_length, traces
from tests.traps.programs import Program

pytestmark = pytest.mark.timing


@pytest.fixture(params=FLAVOURS)
def d(request: pytest.FixtureRequest, valkey: Server) -> Driver:
    return FLAVOURS[request.param]("valkey9", valkey.url, valkey)


def is_grant(args: Sequence[bytes]) -> bool:
    """Whether a notification is a grant, with three words; "now first" has four."""
    return args[0] == b"message" and len(args[-1].split()) == 3


async def holders(lock: Any) -> list[str]:
    return [one.holder for one in (await done(lock.inspect())).holders]


@scenario
async def test_steady_readers_do_not_starve_a_writer(d: Driver) -> None:
    """Eight readers in a loop: from the moment the writer is in the queue, no reader enters before it."""
    fences: list[int] = []
    stopped: list[None] = []

    async def read_in_a_loop(reader: Any) -> None:
        while not stopped:
            async with held(reader) as lease:
                fences.append(lease.fence)
                await d.pause()

    readers = [d.connect().rwlock("config", timeout=BOUND).reader for _ in range(8)]
    contenders = [d.start(read_in_a_loop, reader) for reader in readers]
    writer, watcher = d.connect().rwlock("config", timeout=BOUND).writer, d.connect().lock("config")

    async def write() -> int:
        async with held(writer) as lease:
            fence: int = lease.fence
            return fence

    async def last_fence_when_the_writer_waits() -> int:
        info = await done(watcher.inspect())
        return info.fence if any(one.mode is Mode.EXCLUSIVE for one in info.waiters) else 0

    for _ in range(5):
        writing = d.start(write)
        seen = 0
        while not seen and not writing.ended:
            seen = await last_fence_when_the_writer_waits()
        fence = await writing.result()
        assert [one for one in fences if seen and seen < one < fence] == []
    stopped.append(None)
    for contender in contenders:
        await contender.result()


@scenario
async def test_reader_that_asks_to_write_does_not_wait_for_itself(d: Driver, valkey: Server) -> None:
    config = d.locks.rwlock("config")
    async with held(config.reader):
        watch = Stopwatch()
        with pytest.raises(WouldDeadlock):
            await done(config.writer.acquire())
        assert watch.seconds < watch.most(0.05)
        assert queue_length(valkey, "config") == 0


@scenario
async def test_two_readers_that_both_want_to_write_do_not_wait_for_each_other(d: Driver) -> None:
    gates = [d.gate(), d.gate()]

    async def read_then_write(number: int) -> int:
        config = d.connect().rwlock("config", timeout=BOUND)
        async with held(config.reader):
            gates[number].open()
            await gates[1 - number].passed()
            with pytest.raises(WouldDeadlock):
                await done(config.writer.acquire())
        async with held(config.writer) as lease:
            fence: int = lease.fence
            return fence

    both = [d.start(read_then_write, number) for number in (0, 1)]
    assert len({await one.result() for one in both}) == 2


@scenario
async def test_reader_with_a_short_ttl_does_not_shorten_that_of_another(d: Driver, valkey: Server) -> None:
    steady = await done(d.locks.rwlock("config", ttl=5, renew=False).reader.acquire())
    with Program("read", d.flavour, valkey.url, "config", ttl=0.3) as brief:
        assert brief.line().startswith("held")
        brief.kill()

    async def alone() -> bool:
        return await holders(d.lock("config")) == [steady.holder]

    await d.until(alone, "the dead reader to expire")
    assert valkey.raw("PTTL", "config") > 2000
    steady.ensure_held()
    assert await done(d.connect().lock("config").acquire(timeout=0)) is None


@scenario
async def test_each_reader_is_renewed_by_its_own_deadline(d: Driver, valkey: Server) -> None:
    """Readers hold for more than two ttls, and then all of them release cleanly."""
    readers = [await done(d.connect().rwlock("config", ttl=1.2).reader.acquire()) for _ in range(3)]
    watcher, watch = d.lock("config"), Stopwatch()
    while watch.seconds < 2.6:
        assert await holders(watcher) == [one.holder for one in readers]
        await d.pause()
    assert [await done(reader.release()) for reader in readers] == [True] * 3
    assert traces(valkey, "config") == []


@scenario
async def test_nested_reads_leave_no_renewal_running(d: Driver, valkey: Server) -> None:
    reader = d.locks.rwlock("config", ttl=0.3).reader
    for _ in range(3):
        await done(reader.acquire())
    assert len(d.locks.session.keepalive.held()) == 1
    for _ in range(3):
        assert await done(reader.release()) is True
    assert list(d.locks.session.keepalive.held()) == []
    assert traces(valkey, "config") == []
    with pytest.raises(NotHeld):
        await done(reader.release())


@scenario
async def test_downgraded_writer_is_still_renewed(d: Driver, valkey: Server) -> None:
    lease = await done(d.locks.rwlock("config", ttl=1.2).writer.acquire())
    await done(lease.downgrade())
    watch = Stopwatch()
    while watch.seconds < 3.7:
        assert await holders(d.lock("config")) == [lease.holder]
        assert lease.state is not State.LOST
        await d.pause()
    assert await done(lease.release()) is True
    assert traces(valkey, "config") == []


@scenario
async def test_readers_behind_a_writer_enter_at_the_same_instant(d: Driver, valkey: Server) -> None:
    writing = await done(d.locks.rwlock("config").writer.acquire())
    entered = [d.start(acquire, d.connect().rwlock("config").reader) for _ in range(5)]
    await d.queue_length(d.lock("config"), 5)
    await done(writing.release())
    assert len(await holders(d.lock("config"))) == 5, "the release itself granted all of them"
    leases = [await one.result() for one in entered]
    for lease in leases:
        await done(lease.release())


async def acquire(lock: Any) -> Any:
    return await done(lock.acquire())


@scenario
async def test_reader_reads_again_though_a_writer_waits(d: Driver) -> None:
    config = d.locks.rwlock("config")
    async with held(config.reader):
        writing = d.start(acquire, d.connect().rwlock("config").writer)
        await d.queue_length(config.reader, 1)
        watch = Stopwatch()
        async with held(config.reader):
            assert watch.seconds < watch.most(0.05)
    await done((await writing.result()).release())


@scenario
async def test_writer_whose_place_in_the_queue_vanished_queues_again(d: Driver, valkey: Server) -> None:
    reading = await done(d.locks.rwlock("config").reader.acquire())
    writing = d.start(acquire, d.connect().rwlock("config", ttl=1.0).writer)
    await d.queue_length(d.lock("config"), 1)
    aux = companions("config")
    valkey.raw("DEL", aux["q"], aux["w"])
    await d.queue_length(d.lock("config"), 1)
    assert not writing.ended, "a missing place is no grant"
    await done(reading.release())
    await done((await writing.result()).release())


@scenario
async def test_readers_that_miss_their_wake_up_do_not_sleep_on(d: Driver, proxy: FaultProxy) -> None:
    """Each of them polls after a second, because the release may have granted to all."""
    clients = [d.connect(url=proxy.url) for _ in range(3)]
    writing = await done(d.locks.rwlock("config").writer.acquire())
    entered = [d.start(acquire, client.rwlock("config").reader) for client in clients]
    await d.queue_length(d.lock("config"), 3)
    lost = proxy.drop_pushes(is_grant, times=3)
    watch = Stopwatch()
    await done(writing.release())
    leases = [await one.result() for one in entered]
    assert lost.hits == 3
    assert watch.seconds < watch.most(1.15)
    assert sorted(await holders(d.lock("config"))) == sorted(lease.holder for lease in leases)


@scenario
async def test_release_by_a_stranger_frees_no_reader(d: Driver, valkey: Server) -> None:
    reading = await done(d.locks.rwlock("config").reader.acquire())
    stranger = d.connect().rwlock("config")
    for lock in (stranger.reader, stranger.writer, d.connect().lock("config")):
        with pytest.raises(NotHeld):
            await done(lock.release())
    assert await holders(d.lock("config")) == [reading.holder]
    lost = await done(stranger.reader.acquire())
    await done(d.lock("config").force_release(lost.holder))
    successor = await done(d.connect().rwlock("config").reader.acquire())
    assert await done(lost.release()) is False
    assert await holders(d.lock("config")) == [reading.holder, successor.holder]


@scenario
async def test_name_used_as_lock_and_as_semaphore_fails_before_anything_changes(d: Driver, valkey: Server) -> None:
    def content() -> dict[str, Any]:
        kinds = {key: valkey.raw("TYPE", key) for key in sorted(valkey.raw("KEYS", "*"))}
        return {key: (kind, valkey.raw("OBJECT", "ENCODING", key)) for key, kind in kinds.items()}

    async with held(d.locks.rwlock("config").reader) as lease:
        before = content()
        for _ in range(2):
            with pytest.raises(ConfigurationError, match="Use another name"):
                await done(d.connect().semaphore("config", 3).acquire())
        assert content() == before
        lease.ensure_held()
    assert traces(valkey, "config") == []


@scenario
async def test_lock_of_redis_py_and_readers_keep_each_other_out(d: Driver, valkey: Server) -> None:
    import redis

    with redis.Redis.from_url(valkey.url) as other:
        foreign = other.lock("config", timeout=20)
        async with held(d.locks.rwlock("config").reader):
            assert foreign.acquire(blocking=False) is False
        async with held(d.locks.semaphore("config", 2)):
            assert foreign.acquire(blocking=False) is False
        assert foreign.acquire(blocking=False) is True
        assert await done(d.locks.rwlock("config").reader.acquire(timeout=0)) is None
        assert await done(d.locks.rwlock("config").writer.acquire(timeout=0)) is None
        assert await done(d.locks.semaphore("config", 2).acquire(timeout=0)) is None
        foreign.release()
    until(lambda: not traces(valkey, "config"), "nothing to be left")
