"""Many who want the same lock: one at a time, fences in order, split votes that end, and nothing left behind."""

import random
from functools import partial
from typing import Any

import pytest

import lockfast
from tests.contract.driver import FLAVOURS, Driver, done, scenario
from tests.quorum.cycling import cycles
from tests.support.servers import Server

ENOUGH = 60.0


class Watch:
    """What must not be seen twice at a time; each entry notes its fence."""

    def __init__(self) -> None:
        self.inside = 0
        self.fences: list[int] = []

    def enter(self, fence: int) -> None:
        self.inside += 1
        assert self.inside == 1, "two hold the lock at the same time"
        self.fences.append(fence)

    def leave(self) -> None:
        self.inside -= 1


async def attempt(lock: Any) -> Any:
    """One try; servers that are too busy to answer one within its moment count as a refusal."""
    try:
        return await done(lock.acquire(timeout=0))
    except lockfast.StoreUnavailable:
        return None


async def contend(d: Driver, rounds: int, rivals: int, *, tries: bool) -> Watch:
    """So many rounds by each of so many rivals, who wait for the lock or try until they get it."""
    watch = Watch()

    async def rival(number: int) -> None:
        lock = d.connect().lock("thing", ttl=10)
        for _ in range(rounds):
            lease = None
            while lease is None:
                lease = await (attempt(lock) if tries else done(lock.acquire(timeout=ENOUGH)))
                if lease is None:
                    await d.pause()
            watch.enter(lease.fence)
            if random.random() < 0.2:
                await d.pause()
            watch.leave()
            assert await done(lease.release()) is True

    contenders = [d.start(rival, number) for number in range(rivals)]
    for contender in contenders:
        await d.until(partial(getattr, contender, "ended"), "a rival to be done", ENOUGH)
        await contender.result()
    return watch


def left_behind(servers: list[Server]) -> list[Any]:
    """Keys of the lock and its queue; what remembers the last fence stays, on purpose."""
    found = [key for server in servers for key in server.raw("KEYS", "*")]
    return [key for key in found if not key.endswith(":m")]


@pytest.mark.parametrize("tries", [False, True], ids=["waiting", "trying"])
@scenario
async def test_rivals_take_turns_and_leave_nothing_behind(d: Driver, five: list[Server], tries: bool) -> None:
    watch = await contend(d, rounds=12, rivals=4, tries=tries)
    assert watch.fences == sorted(set(watch.fences))
    assert len(watch.fences) == 48
    await d.until(lambda: left_behind(five) == [], "nothing to be left behind")


@pytest.mark.faults
@pytest.mark.parametrize("tries", [False, True], ids=["waiting", "trying"])
@scenario
async def test_a_thousand_contended_rounds(d: Driver, five: list[Server], tries: bool) -> None:
    watch = await contend(d, rounds=200, rivals=5, tries=tries)
    assert watch.fences == sorted(set(watch.fences))
    assert len(watch.fences) == 1000
    await d.until(lambda: left_behind(five) == [], "nothing to be left behind")


@pytest.mark.faults
@scenario
async def test_rivals_while_nodes_come_and_go(d: Driver, fragile: list[Server]) -> None:
    """At any time at most two of five are away: fences go on rising, and nobody meets another."""
    victims = FLAVOURS[d.flavour]("quorum", [server.url for server in fragile])  # type: ignore[arg-type]
    d.url = victims.url

    async def disturb() -> None:
        for number in range(12):
            server = fragile[number % 5]
            server.pause()
            for _ in range(100):
                await d.pause()
            server.resume()

    disturbing = d.start(disturb)
    watch = await contend(d, rounds=60, rivals=3, tries=False)
    await d.until(lambda: disturbing.ended, "the disturbance to end", ENOUGH)
    assert watch.fences == sorted(set(watch.fences))
    await d.until(lambda: left_behind(fragile) == [], "nothing to be left behind", ENOUGH)


@scenario
async def test_a_rival_that_hammers_does_not_lock_a_waiter_out(d: Driver, five: list[Server]) -> None:
    over = d.gate()
    done_with: list[int] = []

    async def hammer() -> int:
        lock, count = d.connect().lock("thing"), 0
        while not done_with:
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
    done_with.append(1)
    over.open()
    assert await hammering.result() >= 0
    await d.until(lambda: left_behind(five) == [], "nothing to be left behind")


@scenario
async def test_a_split_vote_is_not_waited_out(d: Driver, five: list[Server]) -> None:
    """Each of three holds some nodes and waits for the rest; they hold them for a minute."""
    await cycles(d.lock("warm"), 1)
    for number, server in enumerate(five[:4]):
        server.raw("SET", "thing", f"gone-{number % 2}", "PX", "300")  # two and two, of holders that are dead

    async def waiter(number: int) -> int:
        lease = await done(d.connect().lock("thing", ttl=60).acquire(timeout=9))
        fence: int = lease.fence
        await done(lease.release())
        return fence

    contenders = [d.start(waiter, number) for number in range(3)]
    fences = [await contender.result() for contender in contenders]
    assert len(set(fences)) == 3


@scenario
async def test_an_abandoned_wait_leaves_no_vote_and_no_place(d: Driver, five: list[Server]) -> None:
    lease = await done(d.lock().acquire())
    for server in five[:2]:  # so that the waiter gets votes at once, and keeps them while it waits
        server.raw("DEL", "thing")
    assert await done(d.connect().lock("thing").acquire(timeout=0.3)) is None
    await d.until(lambda: left_behind(five[:2]) == [], "the votes to be given back")
    assert await done(lease.release()) is True
    await d.until(lambda: left_behind(five) == [], "nothing to be left behind")


@scenario
async def test_who_holds_and_who_waits_can_be_seen(d: Driver) -> None:
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


# Troubles of other libraries, by name


@scenario
async def test_one_of_three_servers_down_does_not_leave_the_majority_locked(d: Driver, fragile: list[Server]) -> None:
    fragile[2].kill()
    locks = d.open([server.url for server in fragile[:3]])
    lease = await done(locks.lock("thing").acquire(timeout=5))
    assert [server.raw("GET", "thing") for server in fragile[:2]] == [lease.holder] * 2
    assert await done(lease.release()) is True
    assert left_behind(fragile[:2]) == []
    await done(locks.close())


@scenario
async def test_a_second_failed_acquire_on_a_shared_lock_object_does_not_touch_the_first(d: Driver) -> None:
    lock = d.lock()
    lease = await done(lock.acquire(timeout=5))

    async def second() -> Any:
        return await done(lock.acquire(timeout=0))

    assert await d.start(second).result() is None
    assert (await done(lock.inspect())).holder == lease.holder
    lease.ensure_held()
    assert await done(lock.release()) is True


@scenario
async def test_who_did_not_get_it_is_told_so_and_no_error_is_raised(d: Driver) -> None:
    await done(d.lock(renew=False).acquire())
    assert await done(d.lock().acquire(timeout=0)) is None
    with pytest.raises(lockfast.NotHeld):
        await done(d.lock().release())
