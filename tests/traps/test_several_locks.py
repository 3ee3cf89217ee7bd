"""Several locks at once: troubles that users of other libraries had, on a real server."""

import asyncio
from contextlib import ExitStack, suppress

import pytest

import lockfast.aio
from lockfast import LockError, StoreUnavailable
from tests.contract.driver import BOUND, FLAVOURS, Driver, done, held, scenario
from tests.support.proxy import FaultProxy
from tests.support.servers import Server
from tests.support.waiting import until
from tests.traps.observation import Stopwatch, await_queue, on, traces
from tests.traps.programs import Program

pytestmark = pytest.mark.timing

PROCESSES = 8
ROUNDS = 25


@pytest.fixture(params=FLAVOURS)
def d(request: pytest.FixtureRequest, valkey: Server) -> Driver:
    return FLAVOURS[request.param]("valkey9", valkey.url, valkey)


def left(server: Server, *names: str) -> list[str]:
    return [key for name in names for key in traces(server, name)]


def script_calls(server: Server) -> int:
    return sum(count for command, count in server.commands_processed().items() if command.lower().startswith("eval"))


def run_together(role: str, url: str, names: list[str]) -> None:
    """Run one process for each name, and wait until all of them are done."""
    with ExitStack() as stack:
        programs = [stack.enter_context(Program(role, "threads", url, name, ttl=10)) for name in names]
        for program in programs:
            program.tell()
        assert [program.line() for program in programs] == ["done"] * len(programs)


def test_processes_that_take_locks_in_opposite_order_do_not_wait_for_each_other(valkey: Server) -> None:
    run_together("take_pairs", valkey.url, ["a,b", "b,a"] * (PROCESSES // 2))
    assert left(valkey, "a", "b") == []


def test_processes_with_random_sets_of_locks_make_progress(valkey: Server) -> None:
    """Three of ten locks each time, one of them often to read. The requests per round are bounded."""
    before = script_calls(valkey)
    run_together("take_random_sets", valkey.url, [str(seed) for seed in range(PROCESSES)])
    assert left(valkey, *(f"set:{number}" for number in range(10))) == []
    # One request for all, then at most three acquisitions and as many releases; some repeat after a wait.
    assert (script_calls(valkey) - before) / (PROCESSES * ROUNDS) < 12


@pytest.mark.parametrize("taken", [None, "b"], ids=["all free", "one taken"])
async def test_cancellation_at_any_moment_leaves_no_lock_held(valkey: Server, taken: str | None) -> None:
    async with lockfast.aio.connect(valkey.url) as locks, lockfast.aio.connect(valkey.url) as others:
        names = locks.all_of("a", "b", locks.rwlock("c").reader, locks.semaphore("d", 2))
        for steps in range(40):
            other = await others.lock(taken).acquire() if taken else None
            task = asyncio.create_task(names.acquire())
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            with suppress(asyncio.CancelledError):
                leases = await task
                assert leases is not None
                await leases.release()
            if other is not None:
                await other.release()
            await asyncio.to_thread(until, lambda: not left(valkey, *"abcd"), f"a clean-up at step {steps}")
        assert locks.session.keepalive.held() == []


async def test_cancellation_while_waiting_for_the_last_lock_gives_the_first_ones_back(valkey: Server) -> None:
    async with lockfast.aio.connect(valkey.url) as locks, lockfast.aio.connect(valkey.url) as others:
        async with others.lock("c"):
            waiting = asyncio.create_task(locks.all_of("a", "b", "c").acquire())
            await asyncio.to_thread(await_queue, valkey, "c", 1)
            assert valkey.raw("EXISTS", "a", "b") == 2
            waiting.cancel()
            await asyncio.wait([waiting])
            assert left(valkey, "a", "b") == []
        assert left(valkey, "c") == []


@scenario
async def test_free_locks_take_one_request(d: Driver, proxy: FaultProxy) -> None:
    """As long as their keys may be used together: on one server, or in one slot of a cluster."""
    client = d.connect(url=proxy.url)
    async with held(client.all_of("a", "b")):
        pass  # loads the scripts
    seen = len(proxy.requests)
    leases = await done(client.all_of("a", "b", "c").acquire())
    assert len(proxy.requests) - seen == 1
    await done(leases.release())


@scenario
async def test_failed_release_of_one_lock_does_not_keep_the_others(
    d: Driver, valkey: Server, proxy: FaultProxy
) -> None:
    client = d.connect(url=proxy.url)
    leases = await done(client.all_of("a", "b", "c", ttl=30).acquire())
    lost = proxy.drop_request(on("b"), times=2)
    with suppress(LockError):
        await done(leases.release())
    assert lost.hits
    await d.until(lambda: not left(valkey, "a", "b", "c"), "all locks to be released", bound=BOUND)


@pytest.mark.parametrize("end", ["block", "release", "cancel"])
async def test_silent_server_delays_the_end_of_several_locks_only_once(fresh_server: Server, end: str) -> None:
    """Not once per lock: a release takes at most two seconds, a cancellation a tenth of one."""
    names = [f"thing:{number}" for number in range(8)]
    async with lockfast.aio.connect(fresh_server.url) as locks, lockfast.aio.connect(fresh_server.url) as others:
        taken = await others.lock(names[-1]).acquire() if end == "cancel" else None
        if end == "cancel":
            waiting = asyncio.ensure_future(locks.all_of(*names).acquire())
            await asyncio.to_thread(await_queue, fresh_server, names[-1], 1)
            fresh_server.pause()
            watch = Stopwatch()
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        elif end == "block":
            async with locks.all_of(*names):
                fresh_server.pause()
                watch = Stopwatch()
        else:
            leases = await locks.all_of(*names).acquire()
            assert leases is not None
            fresh_server.pause()
            watch = Stopwatch()
            with pytest.raises(StoreUnavailable):
                await leases.release()
        assert watch.seconds < watch.most(0.15 if end == "cancel" else 2.25)
        fresh_server.resume()
        if taken is not None:
            await taken.release()
        for name in names:
            lease = await others.lock(name).acquire(timeout=20)
            assert lease is not None
            await lease.release()
