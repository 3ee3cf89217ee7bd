"""Sentinels: by URL and by the client libraries' own objects; what they say decides where requests go."""

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
    """A set-up that is not to be harmed."""
    group = shared_group("sentinel")
    assert isinstance(group, Replicated)
    return group


async def works(d: Driver, locks: Any) -> None:
    """A lock is taken, handed over and given back."""
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
def test_objects_of_the_libraries(shared: Replicated, flavour: str, library: str, how: str) -> None:
    d = driver(flavour, shared)

    async def play() -> None:
        sentinel: Any = LIBRARIES[library][flavour]([("127.0.0.1", one.port) for one in shared.sentinels])
        target = sentinel.master_for(SERVICE) if how == "client" else sentinel
        await works(d, d.open(target, **({} if how == "client" else {"service": SERVICE})))

    d.run(play())


def test_some_sentinels_are_down(shared: Replicated, flavour: str) -> None:
    """Those that refuse and those that say nothing cost their time once, and then are asked last. Three that say
    nothing take longer than one dial may."""
    with Sentinel(shared.master()) as one, Sentinel(shared.master()) as two, Sentinel(shared.master()) as three:
        silent = (one, two, three)
        for stopped in silent:
            stopped.pause()
        ports = (1, *(each.port for each in silent), shared.sentinels[0].port)
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        d = FLAVOURS[flavour]("sentinel", f"valkey+sentinel://{hosts}/{SERVICE}")

        async def play() -> None:
            await works(d, d.connect())

        d.run(play())
        for stopped in silent:
            stopped.resume()


def test_an_unknown_service(shared: Replicated, flavour: str) -> None:
    d = FLAVOURS[flavour]("sentinel", shared.url + "x")

    async def play() -> None:
        with pytest.raises(StoreUnavailable, match="is the name wrong"):
            await done(d.lock("thing").acquire(timeout=0))

    d.run(play())


def test_credentials_of_both_kinds(flavour: str) -> None:
    """The sentinels' password is not the servers'."""
    with Replicated(1, 1) as group:
        (watcher,) = group.sentinels
        for server in group.data:
            server.raw("CONFIG", "SET", "masterauth", "of-the-servers", "requirepass", "of-the-servers")
        watcher.raw("SENTINEL", "SET", SERVICE, "auth-pass", "of-the-servers")
        watcher.raw("ACL", "SETUSER", "default", "resetpass", ">of-the-sentinels")
        address = f"redis+sentinel://:of-the-servers@127.0.0.1:{watcher.port}/{SERVICE}/0"
        d = FLAVOURS[flavour]("sentinel", f"{address}?sentinel_password=of-the-sentinels")

        async def play() -> None:
            await works(d, d.connect())
            with pytest.raises(StoreError) as caught:
                await done(d.open(address).lock("thing").acquire(timeout=0))
            assert "of-the" not in str(caught.value)

        d.run(play())


def test_what_is_said_about_it(shared: Replicated, flavour: str) -> None:
    d = driver(flavour, shared)

    async def play() -> None:
        facts = (await done(d.locks.guarantees())).facts
        assert (facts.topology.value, facts.role, facts.replicas) == ("one master, watched by sentinels", "master", 2)

    d.run(play())


class TestWhatIsNotReasserted:
    """A server that knew the lease and does not have it any more was told so by somebody."""

    def test_a_lock_that_was_deleted(self, shared: Replicated, flavour: str) -> None:
        d = driver(flavour, shared)

        async def play() -> None:
            lease = await done(d.lock("thing", ttl=3).acquire())
            shared.master().raw("DEL", "thing")
            await d.until(lambda: lease.state is State.LOST, "the loss")
            assert lease.reasserted == 0

        d.run(play())

    def test_on_one_server_unless_asked_for(self, valkey: Any, flavour: str) -> None:
        """A server that restarted empty looks like a failover; but nobody said that there is one."""
        d = FLAVOURS[flavour]("one", valkey.url)

        async def play() -> None:
            lost = await done(d.lock("lost", ttl=3).acquire())
            kept = await done(d.connect(reassert=True).lock("kept", ttl=3).acquire())
            valkey.raw("FLUSHALL")
            await d.until(lambda: lost.state is State.LOST, "the loss")
            await d.until(lambda: kept.reasserted == 1, "the lease to be taken back in")
            assert kept.state is State.HELD
            assert valkey.raw("GET", "kept") == kept.holder

        d.run(play())
