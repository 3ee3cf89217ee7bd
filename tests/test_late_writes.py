"""A write that the server executes late, after the lock was granted again, must not change the new grant.

Nor may a lost reply make a client renew something else than its grant.
"""

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import lockfast
from lockfast import Locks, Outcome, StoreUnavailable
from lockfast.runtime.base import run
from lockfast.stores.zookeeper.nodes import lock_path
from lockfast.values import Claim, Granted, Renewal, Taken
from tests.support.other_servers import Etcd, ZooKeeper
from tests.support.waiting import until
from tests.support.zookeeper_proxy import ZooKeeperProxy

BRIEF, LONG = 0.5, 30.0
ETCD_BRIEF = 2.0
"""etcd rounds shorter ttls up to this one."""


def claim(name: str, holder: str, ttl: float) -> Claim:
    return Claim(name, holder, ttl, "host:1:")


class Client:
    """The store of one session, with blocking calls."""

    def __init__(self, locks: Locks) -> None:
        self.store = locks.session.store
        self.now = locks.session.runtime.now

    def acquire(self, wanted: Claim) -> Any:
        return run(self.store.acquire(wanted, None, self.now() + 20))

    def renew(self, name: str, holder: str, ttl: float) -> bool | None:
        return run(self.store.renew([Renewal(name, holder, ttl)], self.now() + 20))[0]

    def release(self, name: str, holder: str) -> bool:
        return run(self.store.release(name, holder, self.now() + 20))

    def holder(self, name: str) -> str | None:
        return run(self.store.inspect(name, self.now() + 20)).holder


class EtcdDelay:
    """Delays the next write of an etcd client, or loses the reply to it."""

    def __init__(self, client: Client) -> None:
        store: Any = client.store
        self._call = store._client.call
        store._client.call = self.call
        self._armed = False
        self.loses_reply = False
        self._open = threading.Event()
        self.held = threading.Event()

    def hold(self, path: str) -> None:
        self._armed = True

    def let_go(self) -> None:
        self._open.set()

    async def call(self, path: str, body: dict[str, Any], until: float, *about: str) -> Any:
        writes = [one for one in body.get("success", ()) if "request_range" not in one]
        if self._armed and writes:
            self._armed = False
            self.held.set()
            self._open.wait()
        reply = await self._call(path, body, until, *about)
        if self.loses_reply and writes:
            self.loses_reply = False
            raise StoreUnavailable("The reply was lost.", outcome=Outcome.UNKNOWN)
        return reply


@pytest.fixture(scope="module")
def server() -> Iterator[ZooKeeper]:
    ZooKeeper.require()
    with ZooKeeper() as server:
        yield server


@pytest.fixture
def proxy(server: ZooKeeper) -> Iterator[ZooKeeperProxy]:
    with ZooKeeperProxy(server.port) as proxy:
        yield proxy


@pytest.fixture
def slow(proxy: ZooKeeperProxy) -> Iterator[Client]:
    """The client whose write is delayed."""
    with lockfast.connect(proxy.url) as locks:
        yield Client(locks)


@pytest.fixture
def other(server: ZooKeeper) -> Iterator[Client]:
    with lockfast.connect(server.url) as locks:
        yield Client(locks)


@pytest.fixture
def name() -> str:
    return f"late:{uuid.uuid4()}"


def run_late(
    proxy: ZooKeeperProxy | EtcdDelay, path: str, operation: Callable[[], Any], meanwhile: Callable[[], Any]
) -> Any:
    """Delay the write of `operation` until `meanwhile` has returned; return the result of `operation`."""
    results: list[Any] = []
    proxy.hold(path)
    thread = threading.Thread(target=lambda: results.append(operation()))
    thread.start()
    try:
        assert proxy.held.wait(20)
        meanwhile()
    finally:
        proxy.let_go()
        thread.join()
    return results[0]


def granted_to_another(other: Client, name: str) -> None:
    until(lambda: isinstance(other.acquire(claim(name, "bob", LONG)), Granted), "the first grant to expire")


def assert_bob_holds(other: Client, name: str) -> None:
    assert other.holder(name) == "bob"
    assert isinstance(other.acquire(claim(name, "carol", LONG)), Taken)
    assert other.renew(name, "bob", LONG) is True


def test_late_renewal(proxy: ZooKeeperProxy, slow: Client, other: Client, name: str) -> None:
    assert isinstance(slow.acquire(claim(name, "ann", BRIEF)), Granted)
    renewed = run_late(
        proxy,
        lock_path(name),
        lambda: slow.renew(name, "ann", BRIEF),
        lambda: granted_to_another(other, name),
    )
    assert renewed is False
    assert_bob_holds(other, name)


def test_late_release(proxy: ZooKeeperProxy, slow: Client, other: Client, name: str) -> None:
    assert isinstance(slow.acquire(claim(name, "ann", BRIEF)), Granted)
    released = run_late(
        proxy, lock_path(name), lambda: slow.release(name, "ann"), lambda: granted_to_another(other, name)
    )
    assert released is False
    assert_bob_holds(other, name)


def test_late_claim_of_an_expired_grant(proxy: ZooKeeperProxy, slow: Client, other: Client, name: str) -> None:
    assert isinstance(other.acquire(claim(name, "ann", 0.01)), Granted)
    until(lambda: other.holder(name) is None, "the grant to expire")
    answer = run_late(
        proxy,
        lock_path(name),
        lambda: slow.acquire(claim(name, "dave", LONG)),
        lambda: granted_to_another(other, name),
    )
    assert isinstance(answer, Taken)
    assert_bob_holds(other, name)


def test_late_adoption(proxy: ZooKeeperProxy, slow: Client, other: Client, name: str) -> None:
    assert isinstance(slow.acquire(claim(name, "ann", BRIEF)), Granted)
    adopted = run_late(
        proxy,
        lock_path(name),
        lambda: run(slow.store.adopt(claim(name, "erin", LONG), "ann", slow.now() + 20)),
        lambda: granted_to_another(other, name),
    )
    assert adopted is None
    assert_bob_holds(other, name)


def test_grant_after_an_external_deletion(other: Client, name: str) -> None:
    """The nodes that an external deletion leaves do not keep the lock from being granted or cleaned up."""
    assert isinstance(other.acquire(claim(name, "ann", LONG)), Granted)
    store: Any = other.store
    request = store._session.request
    grant = run(store.read_grant(name, "ann", other.now() + 20))
    run(request(lambda client: client.delete_async(grant.path), other.now() + 20))
    assert isinstance(other.acquire(claim(name, "bob", LONG)), Granted)
    assert other.renew(name, "ann", LONG) is False
    assert other.release(name, "bob") is True
    assert run(request(lambda client: client.exists_async(lock_path(name)), other.now() + 20)) is None


@pytest.fixture(scope="module")
def etcd_server() -> Iterator[Etcd]:
    Etcd.require()
    with Etcd() as server:
        yield server


@pytest.fixture
def two_etcd_clients(etcd_server: Etcd) -> Iterator[tuple[Client, Client]]:
    with lockfast.connect(etcd_server.url) as first, lockfast.connect(etcd_server.url) as second:
        yield Client(first), Client(second)


def test_late_renewal_on_etcd(two_etcd_clients: tuple[Client, Client], name: str) -> None:
    slow, other = two_etcd_clients
    assert isinstance(slow.acquire(claim(name, "amy", ETCD_BRIEF)), Granted)
    renewed = run_late(
        EtcdDelay(slow),
        name,
        lambda: slow.renew(name, "amy", LONG),  # another ttl needs a transaction
        lambda: granted_to_another(other, name),
    )
    assert renewed is False
    assert_bob_holds(other, name)


def test_late_release_on_etcd(two_etcd_clients: tuple[Client, Client], name: str) -> None:
    slow, other = two_etcd_clients
    assert isinstance(slow.acquire(claim(name, "ava", ETCD_BRIEF)), Granted)
    released = run_late(
        EtcdDelay(slow), name, lambda: slow.release(name, "ava"), lambda: granted_to_another(other, name)
    )
    assert released is False
    assert_bob_holds(other, name)


def test_renewal_after_a_lost_reply_extends_the_grant_on_etcd(
    two_etcd_clients: tuple[Client, Client], name: str
) -> None:
    """A renewal with a longer ttl moves the grant to another etcd lease. The client must find out which one."""
    slow, other = two_etcd_clients
    assert isinstance(slow.acquire(claim(name, "ann", 3)), Granted)
    EtcdDelay(slow).loses_reply = True
    with pytest.raises(StoreUnavailable):
        slow.renew(name, "ann", 4)
    for _ in range(2):
        time.sleep(1.3)
        assert slow.renew(name, "ann", 3) is True
    left = run(other.store.inspect(name, other.now() + 20)).ttl_left
    assert left is not None
    assert left >= 3
