"""Many clients compete for one lock: one holder at a time, growing fences, split votes that end, nothing left."""

import random
from functools import partial
from typing import Any

import pytest

import lockfast
from tests.contract.driver import FLAVOURS, Driver, done, scenario
from tests.quorum.cycles import cycles
from tests.support.servers import Server

ENOUGH = 60.0


class Section:
    """A critical section that checks that it has one holder, and records the fences."""

    def __init__(self) -> None:
        self.inside = 0
        self.fences: list[int] = []

    def enter(self, fence: int) -> None:
        self.inside += 1
        assert self.inside == 1, "two clients hold the lock at the same time"
        self.fences.append(fence)

    def leave(self) -> None:
        self.inside -= 1


async def attempt(lock: Any) -> Any:
    """Try once; servers that are too busy to reply in time count as a denial."""
    try:
        return await done(lock.acquire(timeout=0))
    except lockfast.StoreUnavailable:
        return None


async def contend(
    d: Driver, rounds: int, rivals: int, *, tries: bool, ttl: float = 10, may_be_lost: bool = False, **options: Any
) -> Section:
    """Let `rivals` clients acquire the lock `rounds` times each, by waiting or by repeated tries."""
    section = Section()

    async def rival(number: int) -> None:
        lock = d.connect(**options).lock("thing", ttl=ttl)
        for _ in range(rounds):
            lease = None
            while lease is None:
                lease = await (attempt(lock) if tries else done(lock.acquire(timeout=ENOUGH)))
                if lease is None:
                    await d.pause()
            section.enter(lease.fence)
            if random.random() < 0.2:
                await d.pause()
            section.leave()
            assert await done(lease.release()) is True or may_be_lost

    contenders = [d.start(rival, number) for number in range(rivals)]
    for contender in contenders:
        await d.until(partial(getattr, contender, "ended"), "a rival to finish", ENOUGH)
        await contender.result()
    return section


def left_behind(servers: list[Server]) -> list[Any]:
    """Return the keys of the lock and its queue, without the key of the last fence."""
    found = [key for server in servers for key in server.raw("KEYS", "*")]
    return [key for key in found if not key.endswith(":m")]


@pytest.mark.parametrize("tries", [False, True], ids=["waiting", "trying"])
@scenario
async def test_rivals_exclude_each_other_and_leave_nothing_behind(
    d: Driver, shared_servers: list[Server], tries: bool
) -> None:
    section = await contend(d, rounds=12, rivals=4, tries=tries)
    assert section.fences == sorted(set(section.fences))
    assert len(section.fences) == 48
    await d.until(lambda: left_behind(shared_servers) == [], "nothing to be left behind")


@pytest.mark.faults
@pytest.mark.parametrize("tries", [False, True], ids=["waiting", "trying"])
@scenario
async def test_a_thousand_contended_rounds(d: Driver, shared_servers: list[Server], tries: bool) -> None:
    section = await contend(d, rounds=200, rivals=5, tries=tries)
    assert section.fences == sorted(set(section.fences))
    assert len(section.fences) == 1000
    await d.until(lambda: left_behind(shared_servers) == [], "nothing to be left behind")


@pytest.mark.faults
@scenario
async def test_rivals_exclude_each_other_while_servers_pause(d: Driver, own_servers: list[Server]) -> None:
    """At most two of five servers are paused at any time."""
    own = FLAVOURS[d.flavour]("quorum", [server.url for server in own_servers])  # type: ignore[arg-type]
    d.url = own.url

    async def disturb() -> None:
        for number in range(12):
            server = own_servers[number % 5]
            server.pause()
            for _ in range(100):
                await d.pause()
            server.resume()

    disturbing = d.start(disturb)
    section = await contend(d, rounds=60, rivals=3, tries=False)
    await d.until(lambda: disturbing.ended, "the disturbance to end", ENOUGH)
    assert section.fences == sorted(set(section.fences))
    await d.until(lambda: left_behind(own_servers) == [], "nothing to be left behind", ENOUGH)


@scenario
async def test_a_rival_that_retries_constantly_does_not_starve_a_waiter(
    d: Driver, shared_servers: list[Server]
) -> None:
    over = d.gate()
    stopped: list[int] = []

    async def hammer() -> int:
        lock, count = d.connect().lock("thing"), 0
        while not stopped:
            lease = await attempt(lock)
            if lease is not None:
                count += 1
                await done(lease.release())
        return count

    hammering = d.start(hammer)
    lock = d.connect().lock("thing")
    for _ in range(5):
        lease = await done(lock.acquire(timeout=9))
        assert lease is not None
        await done(lease.release())
    stopped.append(1)
    over.open()
    assert await hammering.result() >= 0
    await d.until(lambda: left_behind(shared_servers) == [], "nothing to be left behind")


@scenario
async def test_a_split_vote_ends_before_the_ttl(d: Driver, shared_servers: list[Server]) -> None:
    """Three waiters with a ttl of a minute share the votes of two crashed holders."""
    await cycles(d.lock("warm"), 1)
    for number, server in enumerate(shared_servers[:4]):
        server.raw("SET", "thing", f"gone-{number % 2}", "PX", "300")  # two votes each of two crashed holders

    async def waiter(number: int) -> int:
        lease = await done(d.connect().lock("thing", ttl=60).acquire(timeout=9))
        fence: int = lease.fence
        await done(lease.release())
        return fence

    contenders = [d.start(waiter, number) for number in range(3)]
    fences = [await contender.result() for contender in contenders]
    assert len(set(fences)) == 3


@scenario
async def test_an_abandoned_wait_leaves_no_vote_and_no_ticket(d: Driver, shared_servers: list[Server]) -> None:
    lease = await done(d.lock().acquire())
    for server in shared_servers[:2]:  # the waiter gets these votes at once and keeps them
        server.raw("DEL", "thing")
    assert await done(d.connect().lock("thing").acquire(timeout=0.3)) is None
    await d.until(lambda: left_behind(shared_servers[:2]) == [], "the votes to be released")
    assert await done(lease.release()) is True
    await d.until(lambda: left_behind(shared_servers) == [], "nothing to be left behind")


@scenario
async def test_inspect_shows_the_holder_and_the_waiters(d: Driver) -> None:
    lease = await done(d.lock(ttl=20, label="first").acquire())

    async def waiter() -> Any:
        successor = await done(d.connect().lock("thing", label="second").acquire(timeout=9))
        return await done(successor.release())

    waiting = d.start(waiter)
    info = await d.queue_length(d.lock(), 1)
    assert (info.holder, info.fence, info.owner.label) == (lease.holder, lease.fence, "first")
    assert [one.owner.label for one in info.waiters] == ["second"]
    assert 0 < info.ttl_left <= 20
    await done(lease.release())
    assert await waiting.result() is True


# Known defects of other libraries


@scenario
async def test_a_release_with_one_of_three_servers_down_frees_the_majority(
    d: Driver, own_servers: list[Server]
) -> None:
    own_servers[2].kill()
    locks = d.open([server.url for server in own_servers[:3]])
    lease = await done(locks.lock("thing").acquire(timeout=5))
    assert [server.raw("GET", "thing") for server in own_servers[:2]] == [lease.holder] * 2
    assert await done(lease.release()) is True
    assert left_behind(own_servers[:2]) == []
    await done(locks.close())


@scenario
async def test_a_failed_acquire_on_a_shared_lock_object_keeps_the_first_lease(d: Driver) -> None:
    lock = d.lock()
    lease = await done(lock.acquire(timeout=5))

    async def second() -> Any:
        return await done(lock.acquire(timeout=0))

    assert await d.start(second).result() is None
    assert (await done(lock.inspect())).holder == lease.holder
    lease.ensure_held()
    assert await done(lock.release()) is True


@scenario
async def test_a_denied_try_returns_none_and_raises_nothing(d: Driver) -> None:
    await done(d.lock(renew=False).acquire())
    assert await done(d.lock().acquire(timeout=0)) is None
    with pytest.raises(lockfast.NotHeld):
        await done(d.lock().release())
