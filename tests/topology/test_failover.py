"""A master is killed or paused under load, with sentinels and in a cluster."""

import time
from collections.abc import Callable

import pytest

from tests.contract.driver import Driver, done
from tests.support.servers import Server
from tests.support.topologies import Cluster, Replicated
from tests.topology.conftest import driver
from tests.topology.load import Workload

HARM: dict[str, Callable[[Server], None]] = {"kill": Server.kill, "pause": Server.pause}
BUSY = [f"busy:{number}" for number in range(4)]
KEPT = [f"kept:{number}" for number in range(6)]
SHORT = {("sentinel", "threads", "kill"), ("sentinel", "asyncio", "pause")} | {
    ("cluster", "asyncio", "kill"),
    ("cluster", "threads", "pause"),
}
CASES = [
    pytest.param(*case, id="-".join(case), marks=() if case in SHORT else pytest.mark.faults)
    for kind in ("sentinel", "cluster")
    for flavour in ("threads", "asyncio")
    for case in [(kind, flavour, "kill"), (kind, flavour, "pause")]
]


async def under_load(d: Driver, harm: Callable[[], None], rounds: int = 1) -> None:
    """Throughput resumes, no client hangs, every loss is reported, and fences grow."""
    load = Workload(d)
    await load.keep(KEPT)
    await load.contend(BUSY)
    await load.until_busy()
    for _ in range(rounds):
        harm()
        await load.until_busy(20, since=time.monotonic() + 0.2)
    held, lost = await load.check_kept()
    assert held + lost == len(KEPT)
    await load.finish()


def victim(group: Replicated | Cluster) -> Server:
    """A master that serves contended locks."""
    return group.owner(BUSY[0]) if isinstance(group, Cluster) else group.master()


@pytest.mark.parametrize(("kind", "flavour", "how"), CASES)
def test_master_failure_under_load(request: pytest.FixtureRequest, kind: str, flavour: str, how: str) -> None:
    group: Replicated | Cluster = request.getfixturevalue(kind)
    d = driver(flavour, group)
    d.run(under_load(d, lambda: HARM[how](victim(group))))


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", HARM)
@pytest.mark.parametrize("kind", ["sentinel", "cluster"])
def test_repeated_master_failures_under_load(request: pytest.FixtureRequest, kind: str, flavour: str, how: str) -> None:
    group: Replicated | Cluster = request.getfixturevalue(kind)
    d = driver(flavour, group)

    def harm() -> None:
        group.heal(clear=False)
        HARM[how](victim(group))

    d.run(under_load(d, harm, rounds=4))


def test_waiter_survives_a_failover(sentinel: Replicated, flavour: str) -> None:
    """A waiter from the old master's queue gets the lock from the new master after the release."""
    d = driver(flavour, sentinel)

    async def play() -> None:
        lease = await done(d.lock(ttl=20).acquire())
        waiter = d.start(_take, d)
        await d.queue_length(d.lock(), 1)
        old = sentinel.master()
        sentinel.steady()
        old.kill()
        sentinel.fail_over(old)
        await d.queue_length(d.lock(), 1)
        assert not waiter.ended
        assert await done(lease.release())
        assert await waiter.result() > lease.fence

    d.run(play())


@pytest.mark.parametrize("kind", ["sentinel", "cluster"])
def test_fences_are_not_older_than_their_leases(request: pytest.FixtureRequest, kind: str, flavour: str) -> None:
    """During a failover two masters may grant, and only time orders their fences.

    So each fence is as new as its lease, even between threads or tasks of one client."""
    d = driver(flavour, request.getfixturevalue(kind))
    ends: list[tuple[int, int]] = []

    async def hold() -> None:
        for _ in range(10):
            lease = await done(d.lock(ttl=20).acquire(timeout=20))
            await d.pause()
            ends.append((lease.fence, int(time.time() * 1e6)))
            await done(lease.release())

    async def play() -> None:
        for contender in [d.start(hold) for _ in range(4)]:
            await contender.result()
        assert all(fence >= before for (fence, _), (_, before) in zip(ends[1:], ends, strict=False)), ends

    d.run(play())


async def _take(d: Driver) -> int:
    lease = await done(d.lock().acquire(timeout=20))
    fence: int = lease.fence
    await done(lease.release())
    return fence
