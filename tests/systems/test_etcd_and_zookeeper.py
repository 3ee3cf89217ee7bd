"""Locks on a real etcd and a real ZooKeeper, in both flavours.

Both keep the contract of `lockfast.testing.contract`, except for the differences that their packages document.
`make test-all` runs the contract, and `make test` the rest of this file.
"""

import logging
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest

from lockfast import ConfigurationError, LeaseLost, State, StoreUnavailable
from lockfast.stores.etcd.records import lock_key, packed
from lockfast.testing import contract, shared_contract
from lockfast.testing.contract import CHECKS, Bench, ContractBroken, run_check
from lockfast.values import Renewal
from tests.contract.driver import FLAVOURS, Driver, done, held, scenario
from tests.support.other_servers import Etcd, ZooKeeper
from tests.traps.observation import Stopwatch

Check = Callable[[Bench], Coroutine[Any, Any, None]]
Server = Etcd | ZooKeeper

pytestmark = pytest.mark.system("C7")

SERVERS: dict[str, type[Server]] = {"etcd": Etcd, "zookeeper": ZooKeeper}
IN_BOTH: dict[Check, str] = {
    contract.first_notification: "the first waiter is not notified",
    shared_contract.waiting_writer_stops_readers: "the first waiter is not notified",
    contract.unreachable_waiter: "a dead waiter is not detected before its ttl ends",
    shared_contract.unreachable_head: "a dead waiter is not detected before its ttl ends",
    contract.tickets: "an earlier ticket does not restore a position",
    contract.listing: "a free lock has no fence",
    contract.force_release: "a free lock has no fence",
}
DIFFERENT: dict[str, dict[Check, str]] = {
    "etcd": {
        **IN_BOTH,
        contract.final_renewal: "a ttl is a number of whole seconds",
        shared_contract.shared_renewal: "a ttl is a number of whole seconds",
        shared_contract.repeated_shared_claim: "a ttl is a number of whole seconds",
    },
    "zookeeper": IN_BOTH,
}


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    kind = SERVERS[request.param]
    kind.require()
    with kind() as server:
        yield server


@pytest.fixture(params=FLAVOURS)
def d(request: pytest.FixtureRequest, server: Server) -> Driver:
    return FLAVOURS[request.param](type(server).__name__.lower(), server.url)


@pytest.fixture
def name() -> str:
    return f"a:{uuid.uuid4()}"


@pytest.mark.repeat
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@scenario
async def test_store_contract_with_documented_differences(
    d: Driver, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    if d.store == "etcd" and check is contract.expired_ticket:
        # etcd rounds up to whole seconds, and the two ttls of this check must differ.
        monkeypatch.setattr(Bench, "brief", 0.5)
    if check not in DIFFERENT[d.store]:
        await run_check(check, lambda: d.connect().session.store, d.locks.session.runtime)
        return
    monkeypatch.setattr(Bench, "patience", 2.0)
    with pytest.raises(ContractBroken):
        await run_check(check, lambda: d.connect().session.store, d.locks.session.runtime)


async def taken_for_others(d: Driver, name: str) -> bool:
    """Whether another client is denied at once. It connects first, because that may take longer."""
    lock = d.connect().lock(name)
    await done(lock.locked())
    return await done(lock.acquire(timeout=0)) is None


@scenario
async def test_one_holder_and_growing_fences(d: Driver, name: str) -> None:
    fences = []
    for _ in range(3):
        async with held(d.lock(name)) as lease:
            assert await taken_for_others(d, name)
            fences.append(lease.fence)
    assert fences == sorted(set(fences))
    assert not await done(d.lock(name).locked())


@scenario
async def test_waiters_are_granted_in_order(d: Driver, name: str) -> None:
    lease = await done(d.lock(name).acquire())
    order: list[int] = []

    async def wait(number: int) -> None:
        async with held(d.connect().lock(name)):
            order.append(number)

    waiting = []
    for number in range(3):
        waiting.append(d.start(wait, number))
        await d.queue_length(d.lock(name), number + 1)
    info = await done(d.lock(name).inspect())
    assert [waiter.owner.pid for waiter in info.waiters] == [info.owner.pid] * 3
    await done(lease.release())
    for one in waiting:
        await one.result()
    assert order == [0, 1, 2]


@scenario
async def test_lease_is_renewed_while_its_holder_lives(d: Driver, name: str) -> None:
    lease = await done(d.lock(name, ttl=2).acquire())
    ran_out_at = d.locks.session.runtime.now() + 3.2  # etcd may keep it for a second longer than its ttl
    await d.until(lambda: d.locks.session.runtime.now() >= ran_out_at, "the ttl to pass")
    lease.ensure_held()  # perhaps at risk: a server on a busy machine may answer late
    assert await taken_for_others(d, name)
    assert await done(lease.release()) is True


@scenario
async def test_renewing_with_a_longer_ttl_keeps_the_fence(d: Driver, name: str) -> None:
    lease = await done(d.lock(name, ttl=2, renew=False).acquire())
    await done(lease.renew(60))
    info = await done(d.lock(name).inspect())
    assert info.fence == lease.fence
    assert info.ttl_left > 50
    assert await done(lease.release()) is True
    assert not await done(d.lock(name).locked())


@scenario
async def test_final_renewal_sets_the_end_of_the_grant(d: Driver, name: str) -> None:
    """A final renewal ends the grant earlier than its ttl."""
    lease = await done(d.lock(name, ttl=60).acquire())
    final = Renewal(name, lease.holder, 2, final=True)
    assert list(await d.locks.session.store.renew([final], d.locks.session.runtime.now() + 20)) == [True]
    assert await taken_for_others(d, name)
    assert await done(d.connect().lock(name).acquire(timeout=20)) is not None


@scenario
async def test_downgraded_lease_lets_readers_in_and_is_renewed(d: Driver, name: str) -> None:
    lease = await done(d.locks.rwlock(name, ttl=2).writer.acquire())
    fence = lease.fence
    elsewhere = d.connect().rwlock(name, timeout=20)

    async def read() -> None:
        async with held(elsewhere.reader):
            lease.ensure_held()

    waiting = d.start(read)
    await d.queue_length(d.lock(name), 1)
    await done(lease.downgrade())
    await waiting.result()
    ran_out_at = d.locks.session.runtime.now() + 3.2  # etcd may keep it for a second longer than its ttl
    await d.until(lambda: d.locks.session.runtime.now() >= ran_out_at, "the ttl to pass")
    lease.ensure_held()
    assert lease.fence == fence
    assert await taken_for_others(d, name)
    await done(lease.release())
    assert not await done(d.lock(name).locked())


@scenario
async def test_waiter_for_a_permit_gets_the_slot_that_becomes_free(d: Driver, name: str) -> None:
    permits = [await done(d.locks.semaphore(name, 2).acquire()) for _ in range(2)]
    elsewhere = d.connect().semaphore(name, 2, timeout=20)
    slots: list[int] = []

    async def wait() -> None:
        async with held(elsewhere) as permit:
            slots.append(permit.slot)

    waiting = d.start(wait)
    await d.queue_length(d.lock(name), 1)
    await done(permits[0].release())
    await waiting.result()
    assert slots == [0]
    await done(permits[1].release())
    assert not await done(d.lock(name).locked())


@scenario
async def test_several_locks_are_all_held_or_none(d: Driver, name: str) -> None:
    names = [f"{name}:{number}" for number in range(3)]
    locks = (names[0], d.locks.rwlock(names[1]).reader, d.locks.semaphore(names[2], 2))
    elsewhere = d.connect()
    await done(elsewhere.lock(name).locked())  # connects
    async with held(d.locks.all_of(*locks)) as leases:
        assert len(leases.fences) == 3
        assert [await taken_for_others(d, each) for each in names] == [True] * 3
        assert await done(elsewhere.all_of(f"{name}:free", names[0]).acquire(timeout=0)) is None
        assert not await done(d.lock(f"{name}:free").locked())
    assert [await done(d.lock(each).locked()) for each in names] == [False] * 3


@scenario
async def test_timed_out_wait_leaves_no_ticket(d: Driver, name: str) -> None:
    lease = await done(d.lock(name).acquire())
    assert await done(d.connect().lock(name).acquire(timeout=0.5)) is None
    await d.queue_length(d.lock(name), 0)  # clean-up may continue in the background
    await done(lease.release())


@scenario
async def test_next_renewal_detects_an_external_change(d: Driver, name: str) -> None:
    lease = await done(d.lock(name, ttl=2).acquire())
    store = d.connect().session.store
    until = d.locks.session.runtime.now() + 20
    if d.store == "etcd":
        await store._client.call("/v3/kv/deleterange", {"key": packed(lock_key(name))}, until)
    else:
        grant = await store.read_grant(name, lease.holder, until)
        await store._session.request(lambda client: client.delete_async(grant.path), until)
    await d.until(lambda: lease.state is State.LOST, "the loss to be detected")
    with pytest.raises(LeaseLost):
        lease.ensure_held()


@scenario
async def test_listing_and_force_release(d: Driver, name: str) -> None:
    store, until = d.locks.session.store, d.locks.session.runtime.now() + 20
    lease = await done(d.lock(name, label="nightly").acquire())
    page = await store.listing("a:*", "", until)
    assert name in [info.name for info in page.infos]
    assert await store.force_release(name, lease.holder, until) is True
    after = await done(d.connect().lock(name).acquire(timeout=20))
    assert after.fence > lease.fence
    assert await done(lease.release()) is False
    await done(after.release())


def test_lock_of_a_killed_holder_expires(server: Server, name: str) -> None:
    program = (
        "import lockfast, sys, time\n"
        "lease = lockfast.connect(sys.argv[1]).lock(sys.argv[2], ttl=2).acquire()\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, server.url, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with child, FLAVOURS["threads"].open(server.url) as locks:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        child.kill()
        watch = Stopwatch()
        assert locks.lock(name).acquire(timeout=20) is not None
        assert watch.seconds < watch.most(2 + 3)  # the ttl, and etcd's rounding


@scenario
async def test_stopped_server_is_reported(d: Driver, server: Server, name: str) -> None:
    await done(d.lock(name).locked())
    server.signal(signal.SIGSTOP)
    try:
        with pytest.raises(StoreUnavailable):
            await done(d.connect().lock(name).acquire(timeout=0.3))
    finally:
        server.signal(signal.SIGCONT)
    async with held(d.connect().lock(name, timeout=20)) as lease:
        assert lease.state is State.HELD


@scenario
async def test_close_ends_a_wait_at_once(d: Driver, name: str) -> None:
    async with held(d.lock(name)):
        client = d.connect()

        async def wait() -> None:
            with pytest.raises(ConfigurationError, match="closed"):
                await done(client.lock(name).acquire())

        waiting = d.start(wait)
        await d.queue_length(d.lock(name), 1)
        watch = Stopwatch()
        await done(client.close())
        await waiting.result()
        assert watch.seconds < watch.most(1.5)
        await d.queue_length(d.lock(name), 0)


def test_threads_share_a_fresh_connection(server: Server, name: str) -> None:
    for number in range(5):
        with FLAVOURS["threads"].open(server.url) as locks, ThreadPoolExecutor(16) as pool:
            start = Barrier(16)

            def cycle(each: str, locks: Any = locks, start: Barrier = start) -> None:
                start.wait()
                with locks.lock(each, timeout=20):
                    pass

            list(pool.map(cycle, [f"{name}:{number}:{thread}" for thread in range(16)]))


def test_connecting_leaves_the_loggers_of_the_program_alone(server: Server, name: str) -> None:
    level = logging.getLogger("kazoo").level
    with FLAVOURS["threads"].open(server.url) as locks, locks.lock(name):
        assert logging.getLogger("kazoo").level == level


BAD = ["{}://", "{}://host:x", "{}://host/path", "{}://host?a=1", "{}://host:0"]


@pytest.mark.parametrize("url", BAD)
@pytest.mark.parametrize("scheme", SERVERS)
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_bad_urls(flavour: str, scheme: str, url: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{scheme}://user:password@host1:2"):
        FLAVOURS[flavour].open(url.format(scheme))


@pytest.mark.parametrize("scheme", SERVERS)
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_no_password_is_shown(flavour: str, scheme: str) -> None:
    locks = FLAVOURS[flavour].open(f"{scheme}://user:s3cret@host1,host2:2380")
    assert "s3cret" not in repr(locks)
    assert "host1,host2:2380" in repr(locks)
