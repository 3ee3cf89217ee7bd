"""Row C7, other places for a lock: the same locks on a real etcd and a real ZooKeeper, in both colours.

Both keep the contract of `lockfast.testing.contract` but for what the stores' own `__init__.py` name. `make test-all`
runs the contract, and `make test` the rest of this file.
"""

import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from lockfast import ConfigurationError, LeaseLost, State, StoreUnavailable
from lockfast.stores.etcd.records import lock_key, packed
from lockfast.stores.zookeeper.nodes import holder_path
from lockfast.testing import contract
from lockfast.testing.contract import CHECKS, Bench, ContractBroken, run_check
from lockfast.values import Renewal
from tests.contract.driver import FLAVOURS, Driver, done, held, scenario
from tests.support import etcd, zookeeper
from tests.support.etcd import Etcd
from tests.support.zookeeper import ZooKeeper
from tests.traps.watching import Stopwatch

Check = Callable[[Bench], Coroutine[Any, Any, None]]
Enqueue = Etcd | ZooKeeper

PLACES: dict[str, tuple[Any, type[Enqueue]]] = {"etcd": (etcd, Etcd), "zookeeper": (zookeeper, ZooKeeper)}
IN_BOTH: dict[Check, str] = {
    contract.first_notification: "nobody is told that it is first now",
    contract.unreachable_waiter: "a dead waiter is not known to be dead before its ttl is over",
    contract.tickets: "an older ticket does not bring back a place",
    contract.listing: "a free lock has no fence to be remembered by",
    contract.force_release: "a free lock has no fence to be remembered by",
}
DIFFERENT: dict[str, dict[Check, str]] = {
    "etcd": {**IN_BOTH, contract.final_renewal: "a grant ends at a whole second"},
    "zookeeper": IN_BOTH,
}


@pytest.fixture(scope="module", params=PLACES)
def enqueue(request: pytest.FixtureRequest) -> Iterator[Enqueue]:
    module, kind = PLACES[request.param]
    if module.find() is None:
        pytest.skip(f"{request.param} is missing: it needs {module.NEEDS}")
    with kind() as enqueue:
        yield enqueue


@pytest.fixture(params=FLAVOURS)
def d(request: pytest.FixtureRequest, enqueue: Enqueue) -> Driver:
    return FLAVOURS[request.param](type(enqueue).__name__.lower(), enqueue.url)


@pytest.fixture
def name() -> str:
    return f"c7:{uuid.uuid4()}"


@pytest.mark.repeat
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@scenario
async def test_c7_the_contract_is_kept_but_for_named_differences(
    d: Driver, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    if d.store == "etcd" and check is contract.expired_ticket:
        monkeypatch.setattr(
            contract, "BRIEF", 0.5
        )  # two brief ttls must differ where they are rounded up to two seconds
    if check not in DIFFERENT[d.store]:
        await run_check(check, lambda: d.connect().store, d.locks.runtime)
        return
    monkeypatch.setattr(contract, "PATIENCE", 2.0)
    with pytest.raises(ContractBroken):
        await run_check(check, lambda: d.connect().store, d.locks.runtime)


async def taken_for_others(d: Driver, name: str) -> bool:
    """Whether another client is told so at once; it is connected first, which may take its time."""
    lock = d.connect().lock(name)
    await done(lock.locked())
    return await done(lock.acquire(timeout=0)) is None


@scenario
async def test_c7_one_holds_and_fences_grow(d: Driver, name: str) -> None:
    fences = []
    for _ in range(3):
        async with held(d.lock(name)) as lease:
            assert await taken_for_others(d, name)
            fences.append(lease.fence)
    assert fences == sorted(set(fences))
    assert not await done(d.lock(name).locked())


@scenario
async def test_c7_who_waits_is_handed_the_lock_in_order(d: Driver, name: str) -> None:
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
async def test_c7_a_lease_is_renewed_while_its_holder_lives(d: Driver, name: str) -> None:
    lease = await done(d.lock(name, ttl=2).acquire())
    ran_out_at = d.locks.runtime.now() + 3.2  # etcd may keep it for a second more than its ttl
    await d.until(lambda: d.locks.runtime.now() >= ran_out_at, "the ttl to pass")
    lease.ensure_held()  # at risk, perhaps: a server on a busy machine may be late with one answer
    assert await taken_for_others(d, name)
    assert await done(lease.release()) is True


@scenario
async def test_c7_a_longer_ttl_keeps_the_fence(d: Driver, name: str) -> None:
    lease = await done(d.lock(name, ttl=2, renew=False).acquire())
    await done(lease.renew(60))
    info = await done(d.lock(name).inspect())
    assert info.fence == lease.fence
    assert info.ttl_left > 50
    assert await done(lease.release()) is True
    assert not await done(d.lock(name).locked())


@scenario
async def test_c7_a_job_keeps_its_name_taken_for_a_while(d: Driver, name: str) -> None:
    """A holder's last word: the grant ends by itself, sooner than its ttl."""
    lease = await done(d.lock(name, ttl=60).acquire())
    word = Renewal(name, lease.holder, 2, final=True)
    assert list(await d.locks.store.renew([word], d.locks.runtime.now() + 20)) == [True]
    assert await taken_for_others(d, name)
    assert await done(d.connect().lock(name).acquire(timeout=20)) is not None


@scenario
async def test_c7_a_timed_out_wait_leaves_nothing(d: Driver, name: str) -> None:
    lease = await done(d.lock(name).acquire())
    assert await done(d.connect().lock(name).acquire(timeout=0.5)) is None
    await d.queue_length(d.lock(name), 0)  # a slow store is cleaned up in the background
    await done(lease.release())


@scenario
async def test_c7_theft_is_told_at_the_next_renewal(d: Driver, name: str) -> None:
    lease = await done(d.lock(name, ttl=2).acquire())
    store = d.connect().store
    until = d.locks.runtime.now() + 20
    if d.store == "etcd":
        await store._calls.call("/v3/kv/deleterange", {"key": packed(lock_key(name))}, until)
    else:
        await store._session.request(lambda client: client.delete_async(holder_path(name)), until)
    await d.until(lambda: lease.state is State.LOST, "the loss to be told")
    with pytest.raises(LeaseLost):
        lease.ensure_held()


@scenario
async def test_c7_an_operator_lists_and_breaks(d: Driver, name: str) -> None:
    store, until = d.locks.store, d.locks.runtime.now() + 20
    lease = await done(d.lock(name, label="nightly").acquire())
    page = await store.listing("c7:*", "", until)
    assert name in [info.name for info in page.infos]
    assert await store.force_release(name, lease.holder, until) is True
    after = await done(d.connect().lock(name).acquire(timeout=20))
    assert after.fence > lease.fence
    assert await done(lease.release()) is False
    await done(after.release())


def test_c7_a_killed_holder_frees_the_lock(enqueue: Enqueue, name: str) -> None:
    program = (
        "import lockfast, sys, time\n"
        "lease = lockfast.connect(sys.argv[1]).lock(sys.argv[2], ttl=2).acquire()\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, enqueue.url, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with child, FLAVOURS["threads"].open(enqueue.url) as locks:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        child.kill()
        watch = Stopwatch()
        assert locks.lock(name).acquire(timeout=20) is not None
        assert watch.seconds < watch.most(2 + 3)  # the ttl, and etcd's own seconds


@scenario
async def test_c7_a_server_that_stops_is_told(d: Driver, enqueue: Enqueue, name: str) -> None:
    await done(d.lock(name).locked())
    enqueue.signal(signal.SIGSTOP)
    try:
        with pytest.raises(StoreUnavailable):
            await done(d.connect().lock(name).acquire(timeout=0.3))
    finally:
        enqueue.signal(signal.SIGCONT)
    async with held(d.connect().lock(name, timeout=20)) as lease:
        assert lease.state is State.HELD


BAD = ["{}://", "{}://host:x", "{}://host/path", "{}://host?a=1", "{}://host:0"]


@pytest.mark.parametrize("url", BAD)
@pytest.mark.parametrize("scheme", PLACES)
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_c7_bad_urls(flavour: str, scheme: str, url: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{scheme}://user:password@host1:2"):
        FLAVOURS[flavour].open(url.format(scheme))


@pytest.mark.parametrize("scheme", PLACES)
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_c7_no_password_is_shown(flavour: str, scheme: str) -> None:
    locks = FLAVOURS[flavour].open(f"{scheme}://user:s3cret@host1,host2:2380")
    assert "s3cret" not in repr(locks)
    assert "host1,host2:2380" in repr(locks)
