"""Several locks at once: all or none, in any order, under one deadline."""

import asyncio
import time
from typing import Any

import pytest

from lockfast import AcquireTimeout, ConfigurationError, LeaseLost, State, StoreUnavailable
from lockfast.values import Mode
from tests.contract.driver import BOUND, Driver, TaskContender, done, held, scenario
from tests.contract.stores import QUEUEING, capabilities, only


async def locked(d: Driver, *names: str) -> list[str]:
    return [name for name in names if await done(d.lock(name).locked())]


async def nothing_left(d: Driver, *names: str) -> None:
    """Check that nobody holds or waits for these locks."""
    for name in names:
        info = await done(d.lock(name).inspect())
        assert (info.holders, info.waiting) == ((), 0), name


@scenario
async def test_all_locks_are_held_in_the_block_and_free_after_it(d: Driver) -> None:
    async with held(d.locks.all_of("b", "a", "c")) as leases:
        assert leases.names == ("a", "b", "c")
        assert await locked(d, "a", "b", "c") == ["a", "b", "c"]
        assert leases.fences == {name: leases[name].fence for name in "abc"}
        assert leases.state is State.HELD
        assert 0 < leases.remaining <= leases["a"].ttl
        leases.ensure_held()
        with pytest.raises(KeyError):
            leases["d"]
    with pytest.raises(LeaseLost, match="already released"):
        leases.ensure_held()
    await nothing_left(d, "a", "b", "c")


@scenario
async def test_one_lock_is_enough(d: Driver) -> None:
    async with held(d.locks.all_of("a")):
        assert await locked(d, "a") == ["a"]
    await nothing_left(d, "a")


@scenario
async def test_acquire_and_release_without_a_block(d: Driver) -> None:
    both = d.locks.all_of("a", "b")
    leases = await done(both.acquire(timeout=BOUND))
    assert await done(d.connect().all_of("b", "c").acquire(timeout=0)) is None
    assert await done(leases.release()) is True
    assert await done(leases.release()) is False
    await nothing_left(d, "a", "b", "c")


@scenario
async def test_locks_of_every_mode_together(d: Driver) -> None:
    offered = capabilities(d)
    locks: list[Any] = ["a"]
    modes = {"a": Mode.EXCLUSIVE}
    if offered.readers:
        locks.append(d.locks.rwlock("b").reader)
        modes["b"] = Mode.READ
    if offered.permits:
        locks.append(d.locks.semaphore("c", 4, permits=2))
        modes["c"] = Mode.PERMITS
    async with held(d.locks.all_of(*locks)) as leases:
        assert {name: (await done(d.lock(name).inspect())).mode for name in modes} == modes
        if offered.permits:
            assert leases["c"].slots == (0, 1)
    await nothing_left(d, *modes)


@scenario
async def test_opposite_order_is_no_deadlock(d: Driver) -> None:
    async def work(locks: Any, names: tuple[str, ...]) -> None:
        for _ in range(10):
            async with held(locks.all_of(*names, timeout=BOUND)):
                await d.pause()

    orders = [("a", "b"), ("b", "a"), ("b", "c", "a")]
    contenders = [d.start(work, client, names) for client in (d.locks, d.connect()) for names in orders]
    for contender in contenders:
        await contender.result()
    await nothing_left(d, "a", "b", "c")


@scenario
async def test_waits_until_the_last_lock_is_free(d: Driver) -> None:
    other = await done(d.connect().lock("b").acquire())

    async def work() -> Any:
        async with held(d.locks.all_of("a", "b", timeout=BOUND)) as leases:
            return leases.fences

    waiting = d.start(work)
    await d.queue_length(d.lock("b"), 1)
    await done(other.release())
    assert (await waiting.result())["b"] > other.fence
    await nothing_left(d, "a", "b")


@scenario
async def test_timeout_leaves_nothing_behind(d: Driver) -> None:
    other = await done(d.connect().lock("b").acquire())
    names = d.locks.all_of("a", "b", "c", timeout=0.1)
    assert await done(names.acquire()) is None
    assert await done(names.acquire(timeout=0)) is None
    assert await done(names.acquire(blocking=False)) is None
    with pytest.raises(AcquireTimeout, match=r"'a', 'b', 'c' could not all be acquired within 0\.1 s") as caught:
        async with held(names):
            pass
    assert caught.value.timeout == 0.1
    assert (await done(d.lock("b").inspect())).holder == other.holder
    await nothing_left(d, "a", "c")
    await done(other.release())
    await nothing_left(d, "b")


@only(stores=["memory"])
@scenario
async def test_useless_sets_are_refused(d: Driver) -> None:
    with pytest.raises(ConfigurationError, match="at least one lock"):
        d.locks.all_of()
    with pytest.raises(ConfigurationError, match="got 'a' twice"):
        d.locks.all_of("a", "b", d.lock("a"))
    with pytest.raises(ConfigurationError, match="got 'a' twice"):
        d.locks.all_of(d.locks.rwlock("a").reader, d.locks.semaphore("a", 2))
    with pytest.raises(ConfigurationError, match="of its own connection only"):
        d.locks.all_of("a", d.connect().lock("b"))
    for wrong in (d.locks.rwlock("a"), 7, None, ["a", "b"]):
        with pytest.raises(ConfigurationError, match="name must be text"):
            d.locks.all_of(wrong, "b")
    with pytest.raises(ConfigurationError, match="timeout"):
        d.locks.all_of("a", timeout=-1)
    with pytest.raises(ConfigurationError, match="no option"):
        d.locks.all_of("a", limit=3)


@scenario
async def test_loss_of_one_lease_is_the_loss_of_all(d: Driver) -> None:
    leases = await done(d.locks.all_of("a", "b", ttl=0.6).acquire())
    await done(d.connect().lock("b").force_release())
    assert await done(leases.lost.wait(timeout=BOUND)) is True
    assert leases.state is State.LOST
    assert leases.remaining == 0
    with pytest.raises(LeaseLost) as caught:
        leases.ensure_held()
    assert caught.value.name == "b"
    leases["a"].ensure_held()
    assert await done(leases.release()) is False
    await nothing_left(d, "a", "b")


@scenario
async def test_loss_is_reported_at_the_end_of_the_block(d: Driver) -> None:
    async def work() -> None:
        async with held(d.locks.all_of("a", "b", cancel_on_loss=False)):
            await done(d.connect().lock("a").force_release())

    with pytest.raises(LeaseLost) as caught:
        await work()
    assert caught.value.name == "a"
    await nothing_left(d, "a", "b")


@only(flavour="asyncio")
@scenario
async def test_loss_of_one_lease_cancels_the_body(d: Driver) -> None:
    async def work() -> None:
        async with d.locks.all_of("a", "b", ttl=0.6):
            await d.connect().lock("a").force_release()
            await asyncio.sleep(BOUND)

    with pytest.raises(LeaseLost) as caught:
        await work()
    assert caught.value.name == "a"
    await nothing_left(d, "a", "b")
    await asyncio.sleep(0)  # the task is not cancelled any more


@scenario
async def test_error_of_the_body_releases_all(d: Driver) -> None:
    async def work() -> None:
        async with held(d.locks.all_of("a", "b")):
            raise KeyError("the body's own")

    with pytest.raises(KeyError, match="own"):
        await work()
    await nothing_left(d, "a", "b")


@scenario
async def test_failed_release_does_not_keep_the_other_locks(d: Driver) -> None:
    client = d.connect()
    leases = await done(client.all_of("a", "b", "c", ttl=1).acquire())
    release = client.session.store.release

    async def fail_once(name: str, holder: str, until: float) -> Any:
        if name == "b":
            raise StoreUnavailable("out of order")
        return await release(name, holder, until)

    client.session.store.release = fail_once
    with pytest.raises(StoreUnavailable):
        await done(leases.release())
    await nothing_left(d, "a", "c")
    client.session.store.release = release
    await d.until(lambda: done(d.connect().lock("b").acquire(timeout=0)), "the other lock to be released or to expire")


@scenario
async def test_reader_reads_again_as_one_of_several(d: Driver) -> None:
    if not capabilities(d).readers:
        pytest.skip("the store grants no readers")
    config = d.locks.rwlock("config")
    async with held(config.reader) as lease:
        async with held(d.locks.all_of("a", config.reader)) as leases:
            assert leases["config"] is lease
        lease.ensure_held()
        assert config.reader.depth == 1
        assert await locked(d, "a", "config") == ["config"]
    await nothing_left(d, "a", "config")


@scenario
async def test_re_entrant_lock_as_one_of_several(d: Driver) -> None:
    lock = d.locks.rlock("r")
    both = d.locks.all_of("a", lock)
    async with held(both) as leases:
        assert lock.depth == 1
        async with held(lock) as again:
            assert again is leases["r"]
            assert lock.depth == 2
    assert lock.depth == 0
    async with held(lock):
        async with held(both):
            assert lock.depth == 2
        assert await locked(d, "a", "r") == ["r"]
    await nothing_left(d, "a", "r")


@scenario
async def test_decorated_function_runs_under_all_locks(d: Driver) -> None:
    async def transfer() -> list[str]:
        """Moves money."""
        return await locked(d, "a", "b")

    guarded = d.locks.all_of("a", "b")(d.function(transfer))
    assert guarded.__doc__ == "Moves money."
    assert await done(guarded()) == ["a", "b"]
    assert await transfer() == []


@only(flavour="asyncio", stores=QUEUEING)
@scenario
async def test_cancelled_waiter_leaves_nothing_and_the_object_stays_usable(d: Driver) -> None:
    other = await d.connect().lock("b").acquire()
    both = d.locks.all_of("a", "b")
    waiting = TaskContender(both.acquire, ())
    await d.queue_length(d.lock("b"), 1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting.result()
    await d.queue_length(d.lock("b"), 0)
    assert await locked(d, "a", "b") == ["b"]
    await other.release()
    async with both:
        assert await locked(d, "a", "b") == ["a", "b"]


@only(flavour="asyncio")
@scenario
async def test_cancelled_request_does_not_wait_for_each_clean_up(d: Driver) -> None:
    client = d.connect()
    if not capabilities(d).batches:
        pytest.skip("the store grants one lock at a time")
    asked = asyncio.Event()

    async def hang(*_: Any) -> Any:
        asked.set()
        await asyncio.sleep(BOUND)

    store = client.session.store
    release, store.acquire_all, store.release = store.release, hang, hang
    task = asyncio.ensure_future(client.all_of(*map(str, range(20))).acquire())
    await asked.wait()
    started = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - started < 0.8, "20 clean-ups, one after the other, take 1.6 s"
    store.release = release


@scenario
async def test_closed_connection_refuses(d: Driver) -> None:
    client = d.connect()
    both = client.all_of("a", "b")
    leases = await done(both.acquire())
    await done(client.close())
    assert leases.state is State.RELEASED
    await nothing_left(d, "a", "b")
    with pytest.raises(ConfigurationError, match="closed"):
        await done(both.acquire())
