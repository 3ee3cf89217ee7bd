"""Acknowledgement by replicas: counted, required for a grant, and shared between concurrent callers."""

import time
from typing import Any

import pytest

from lockfast import ConfigurationError, State, StoreRefused, StoreUnavailable
from tests.contract.driver import FLAVOURS, done
from tests.support.servers import Server
from tests.support.topologies import Replicated
from tests.topology.conftest import driver


@pytest.fixture
def paused_replicas(replicated: Replicated) -> Replicated:
    """A group whose replicas are connected but do not respond."""
    for replica in replicated.replicas():
        replica.pause()
    return replicated


def test_lease_has_the_number_of_acknowledgements(replicated: Replicated, flavour: str) -> None:
    d = driver(flavour, replicated)

    async def play() -> None:
        lease = await done(d.connect(replicas=2).lock("thing").acquire(timeout=5))
        assert lease.acknowledged == 2
        assert all(server.raw("GET", "thing") == lease.holder for server in replicated.data)
        assert (await done(d.lock("other").acquire())).acknowledged is None

    d.run(play())


def test_grant_is_released_if_there_are_too_few_replicas(replicated: Replicated, flavour: str) -> None:
    d = driver(flavour, replicated)

    async def play() -> None:
        locks = d.connect(replicas=3, replica_timeout=0.2)
        with pytest.raises(StoreUnavailable, match="was released again: 2 of the 3 required replicas"):
            await done(locks.lock("thing").acquire(timeout=0))
        assert not await done(d.lock("thing").locked())

    d.run(play())


def test_acquire_retries_until_replicas_respond(paused_replicas: Replicated, flavour: str) -> None:
    """Within the caller's time, the grant is released and claimed again."""
    d = driver(flavour, paused_replicas)

    async def play() -> None:
        locks = d.connect(replicas=2, replica_timeout=0.1)
        taker = d.start(_acquire, locks.lock("thing"))
        await d.until(lambda: paused_replicas.master().commands_processed().get("wait", 0) >= 2, "two attempts")
        for replica in paused_replicas.replicas():
            replica.resume()
        assert (await taker.result()).acknowledged == 2

    d.run(play())


async def _acquire(lock: Any, timeout: float = 10.0) -> Any:
    return await done(lock.acquire(timeout=timeout))


def test_handed_off_grant_needs_acknowledgement_too(paused_replicas: Replicated, flavour: str) -> None:
    """A notification arrives, but the grant counts only after a replica has it."""
    d = driver(flavour, paused_replicas)

    async def play() -> None:
        holder = await done(d.lock("thing").acquire())
        waiter = d.start(_acquire, d.connect(replicas=1, replica_timeout=0.1).lock("thing"))
        await d.queue_length(d.lock("thing"), 1)
        waits = paused_replicas.master().commands_processed().get("wait", 0)
        await done(holder.release())
        await d.until(lambda: paused_replicas.master().commands_processed().get("wait", 0) > waits, "a WAIT")
        assert not waiter.ended
        paused_replicas.replicas()[0].resume()
        assert (await waiter.result()).acknowledged >= 1

    d.run(play())


def test_unacknowledged_renewal_does_not_count(replicated: Replicated, flavour: str) -> None:
    d = driver(flavour, replicated)

    async def play() -> None:
        locks = d.connect(replicas=1, replica_timeout=0.1)
        risky: list[State] = []
        lease = await done(locks.lock("thing", ttl=1.5, on_risk=lambda one: risky.append(one.state)).acquire(timeout=5))
        for replica in replicated.replicas():
            replica.pause()
        await d.until(lambda: lease.state is State.LOST, "the loss", 10)
        assert risky

    d.run(play())


def test_concurrent_callers_share_one_wait(paused_replicas: Replicated, flavour: str) -> None:
    """Forty concurrent callers take hardly longer than one, even if no replica responds."""
    d = driver(flavour, paused_replicas)

    async def play() -> None:
        locks = d.connect(replicas=1, replica_timeout=0.5)
        await done(locks.lock("warm").locked())
        started = time.monotonic()
        takers = [d.start(_fails, locks.lock(f"thing:{number}")) for number in range(40)]
        for taker in takers:
            await taker.result()
        assert time.monotonic() - started < 10  # one after the other they would take 20 s

    d.run(play())


async def _fails(lock: Any) -> None:
    with pytest.raises(StoreUnavailable):
        await done(lock.acquire(timeout=0))


def test_adopted_lease_is_acknowledged(replicated: Replicated, flavour: str) -> None:
    d = driver(flavour, replicated)

    async def play() -> None:
        locks = d.connect(replicas=2)
        text = (await done(locks.lock("thing").acquire(timeout=5))).export()
        assert (await done(locks.adopt(text))).acknowledged == 2

    d.run(play())


def test_aof_requires_the_grant_on_disk(flavour: str) -> None:
    """Without an append-only file the server refuses, and no grant remains."""
    with Server(args=("--appendonly", "yes", "--appendfsync", "always")) as server:
        d = FLAVOURS[flavour]("one", server.url)

        async def play() -> None:
            lease = await done(d.connect(aof=True).lock("thing").acquire(timeout=5))
            assert lease.acknowledged == 0
            server.raw("CONFIG", "SET", "appendonly", "no")
            with pytest.raises(StoreRefused, match="appendonly yes"):
                await done(d.connect(aof=True).lock("other").acquire(timeout=5))
            assert server.raw("EXISTS", "other") == 0

        d.run(play())


def test_guarantees_show_acknowledgements_and_replicas(replicated: Replicated, flavour: str) -> None:
    d = driver(flavour, replicated)

    async def play() -> None:
        facts = (await done(d.connect(replicas=1).guarantees())).facts
        assert (facts.acknowledged, facts.replicas) == (1, 2)

    d.run(play())


SAYS: dict[str, dict[str, Any]] = {
    "replicas must be a whole number": {"replicas": True},
    "from 0 to 100": {"replicas": 101},
    "replica_timeout must be": {"replicas": 1, "replica_timeout": 0},
    "no effect without replicas": {"replica_timeout": 1},
    "aof must be": {"aof": 1},
    "reassert must be": {"reassert": "yes"},
    "service belongs to a Sentinel object": {"service": "main"},
}


@pytest.mark.parametrize(("says", "options"), SAYS.items(), ids=SAYS)
def test_invalid_options_are_rejected(flavour: str, says: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=says):
        FLAVOURS[flavour].open("redis://localhost", **options)


def test_other_stores_reject_replica_options(flavour: str) -> None:
    with pytest.raises(ConfigurationError, match="memory:// has no replicas"):
        FLAVOURS[flavour].open("memory://", replicas=1)


class TestTemporaryErrors:
    """Acquire retries READONLY, MASTERDOWN, LOADING and NOREPLICAS within the caller's time."""

    @staticmethod
    def check_retry(flavour: str, server: Server, heal: Any, code: str) -> None:
        d = FLAVOURS[flavour]("one", server.url)

        async def play() -> None:
            with pytest.raises(StoreUnavailable, match=code):
                await done(d.lock("thing").acquire(timeout=0))
            taker = d.start(_acquire, d.lock("thing"))
            await d.pause()
            assert not taker.ended
            heal()
            assert (await taker.result()) is not None

        d.run(play())

    def test_readonly(self, replicated: Replicated, flavour: str) -> None:
        replica = replicated.replicas()[0]
        self.check_retry(flavour, replica, lambda: replica.raw("REPLICAOF", "NO", "ONE"), "READONLY")

    def test_masterdown(self, replicated: Replicated, flavour: str) -> None:
        replica = replicated.replicas()[0]
        replica.raw("CONFIG", "SET", "replica-serve-stale-data", "no")
        replica.raw("REPLICAOF", "127.0.0.1", "1")

        def heal() -> None:
            replica.raw("CONFIG", "SET", "replica-serve-stale-data", "yes")
            replica.raw("REPLICAOF", "NO", "ONE")

        self.check_retry(flavour, replica, heal, "MASTERDOWN")

    def test_noreplicas(self, replicated: Replicated, flavour: str) -> None:
        master = replicated.master()
        master.raw("CONFIG", "SET", "min-replicas-to-write", "5")
        self.check_retry(
            flavour, master, lambda: master.raw("CONFIG", "SET", "min-replicas-to-write", "0"), "NOREPLICAS"
        )

    def test_loading(self, flavour: str) -> None:
        with Server(args=("--key-load-delay", "20000")) as server:
            for number in range(100):
                server.raw("SET", f"filler:{number}", "x")
            server.raw("SAVE")
            server.kill()
            server.start(until_loaded=False)
            d = FLAVOURS[flavour]("one", server.url)

            async def play() -> None:
                lease = await done(d.lock("thing").acquire(timeout=20))
                assert lease is not None

            d.run(play())
