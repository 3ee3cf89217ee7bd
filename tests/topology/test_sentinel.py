"""Connect through sentinels, by URL and with the client libraries' Sentinel objects."""

from collections.abc import Callable
from typing import Any

import pytest
import redis
import redis.asyncio
import valkey
import valkey.asyncio

from lockfast import State, StoreError, StoreUnavailable
from tests.contract.driver import FLAVOURS, Driver, done
from tests.support.topologies import SERVICE, Group, Replicated, Sentinel
from tests.topology.conftest import driver

LIBRARIES: dict[str, dict[str, Any]] = {
    "redis-py": {"threads": redis.Sentinel, "asyncio": redis.asyncio.Sentinel},
    "valkey-py": {"threads": valkey.Sentinel, "asyncio": valkey.asyncio.Sentinel},
}


@pytest.fixture
def shared(shared_group: Callable[[str], Group]) -> Replicated:
    """A group that tests must leave healthy."""
    group = shared_group("sentinel")
    assert isinstance(group, Replicated)
    return group


async def check_lock(d: Driver, locks: Any) -> None:
    """Acquire, hand off and release a lock."""
    lease = await done(locks.lock("thing").acquire(timeout=5))
    waiter = d.start(_acquire, locks.lock("thing"))
    await d.queue_length(locks.lock("thing"), 1)
    assert await done(lease.release())
    assert await done((await waiter.result()).release())
    await done(locks.close())


async def _acquire(lock: Any) -> Any:
    return await done(lock.acquire(timeout=10))


@pytest.mark.parametrize("how", ["client", "object"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_sentinel_objects_and_their_clients(shared: Replicated, flavour: str, library: str, how: str) -> None:
    d = driver(flavour, shared)

    async def play() -> None:
        sentinel: Any = LIBRARIES[library][flavour]([("127.0.0.1", one.port) for one in shared.sentinels])
        target = sentinel.master_for(SERVICE) if how == "client" else sentinel
        await check_lock(d, d.open(target, **({} if how == "client" else {"service": SERVICE})))

    d.run(play())


def test_dead_and_silent_sentinels_are_skipped(shared: Replicated, flavour: str) -> None:
    """Unreachable and silent sentinels cost time once, and are then asked last.

    Three silent ones take longer than one connection attempt may."""
    with Sentinel(shared.master()) as one, Sentinel(shared.master()) as two, Sentinel(shared.master()) as three:
        silent = (one, two, three)
        for stopped in silent:
            stopped.pause()
        ports = (1, *(each.port for each in silent), shared.sentinels[0].port)
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        d = FLAVOURS[flavour]("sentinel", f"valkey+sentinel://{hosts}/{SERVICE}")

        async def play() -> None:
            await check_lock(d, d.connect())

        d.run(play())
        for stopped in silent:
            stopped.resume()


def test_unknown_service_raises_store_unavailable(shared: Replicated, flavour: str) -> None:
    d = FLAVOURS[flavour]("sentinel", shared.url + "x")

    async def play() -> None:
        with pytest.raises(StoreUnavailable, match="Check the service name"):
            await done(d.lock("thing").acquire(timeout=0))

    d.run(play())


def test_sentinels_have_their_own_password(flavour: str) -> None:
    with Replicated(1, 1) as group:
        (watcher,) = group.sentinels
        for server in group.data:
            server.raw("CONFIG", "SET", "masterauth", "of-the-servers", "requirepass", "of-the-servers")
        watcher.raw("SENTINEL", "SET", SERVICE, "auth-pass", "of-the-servers")
        watcher.raw("ACL", "SETUSER", "default", "resetpass", ">of-the-sentinels")
        address = f"redis+sentinel://:of-the-servers@127.0.0.1:{watcher.port}/{SERVICE}/0"
        d = FLAVOURS[flavour]("sentinel", f"{address}?sentinel_password=of-the-sentinels")

        async def play() -> None:
            await check_lock(d, d.connect())
            with pytest.raises(StoreError) as caught:
                await done(d.open(address).lock("thing").acquire(timeout=0))
            assert "of-the" not in str(caught.value)

        d.run(play())


def test_guarantees_show_the_topology(shared: Replicated, flavour: str) -> None:
    d = driver(flavour, shared)

    async def play() -> None:
        facts = (await done(d.locks.guarantees())).facts
        assert (facts.topology.value, facts.role, facts.replicas) == ("one master, watched by sentinels", "master", 2)

    d.run(play())


class TestReassert:
    """A grant is restored only after a failover, never after an external change."""

    def test_deleted_lock_is_not_reasserted(self, shared: Replicated, flavour: str) -> None:
        d = driver(flavour, shared)

        async def play() -> None:
            lease = await done(d.lock("thing", ttl=3).acquire())
            shared.master().raw("DEL", "thing")
            await d.until(lambda: lease.state is State.LOST, "the loss")
            assert lease.reasserted == 0

        d.run(play())

    def test_single_server_reasserts_only_on_request(self, valkey: Any, flavour: str) -> None:
        """An empty server after a restart looks like a failover, but a single server has none."""
        d = FLAVOURS[flavour]("one", valkey.url)

        async def play() -> None:
            lost = await done(d.lock("lost", ttl=3).acquire())
            kept = await done(d.connect(reassert=True).lock("kept", ttl=3).acquire())
            valkey.raw("FLUSHALL")
            await d.until(lambda: lost.state is State.LOST, "the loss")
            await d.until(lambda: kept.reasserted == 1, "the lease to be reasserted")
            assert kept.state is State.HELD
            assert valkey.raw("GET", "kept") == kept.holder

        d.run(play())
