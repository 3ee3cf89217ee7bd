"""A master dies, or stands still, under load: with sentinels, and in a cluster."""

import time
from collections.abc import Callable

import pytest

from tests.contract.driver import Driver, done
from tests.support.servers import Server
from tests.support.topologies import Cluster, Replicated
from tests.topology.conftest import driver
from tests.topology.load import Crowd

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
    """Throughput resumes, nobody hangs, every loss is told, and fences rise throughout."""
    crowd = Crowd(d)
    await crowd.keep(KEPT)
    await crowd.contend(BUSY)
    await crowd.until_busy()
    for _ in range(rounds):
        harm()
        await crowd.until_busy(20, since=time.monotonic() + 0.2)
    held, lost = await crowd.check_kept()
    assert held + lost == len(KEPT)
    await crowd.finish()


def victim(group: Replicated | Cluster) -> Server:
    """The master that has most of the locks at stake."""
    return group.owner(BUSY[0]) if isinstance(group, Cluster) else group.master()


@pytest.mark.parametrize(("kind", "flavour", "how"), CASES)
def test_a_master_fails_under_load(request: pytest.FixtureRequest, kind: str, flavour: str, how: str) -> None:
    group: Replicated | Cluster = request.getfixturevalue(kind)
    d = driver(flavour, group)
    d.run(under_load(d, lambda: HARM[how](victim(group))))


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", HARM)
@pytest.mark.parametrize("kind", ["sentinel", "cluster"])
def test_one_master_after_another_fails(request: pytest.FixtureRequest, kind: str, flavour: str, how: str) -> None:
    group: Replicated | Cluster = request.getfixturevalue(kind)
    d = driver(flavour, group)

    def harm() -> None:
        group.heal(clear=False)
        HARM[how](victim(group))

    d.run(under_load(d, harm, rounds=4))


def test_a_waiter_waits_through_a_failover(sentinel: Replicated, flavour: str) -> None:
    """Who queued at the old master gets the lock from the new one, when its holder gives it back."""
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
def test_fences_follow_time(request: pytest.FixtureRequest, kind: str, flavour: str) -> None:
    """Two masters may grant for a moment, and nothing but time orders what they grant: each fence is as new as its
    lease, also when threads or tasks of one connection follow one another."""
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
