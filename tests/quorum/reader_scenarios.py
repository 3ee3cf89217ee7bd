"""Situations with readers, writers and downgrades in which the quorum store must decide correctly.

Like `scenarios.py`: on virtual servers, run by `test_scenarios.py`, also with planted errors.
"""

import asyncio

import pytest

from lockfast.core.quorum import rules
from lockfast.core.quorum.store import QuorumMailbox, QuorumStore
from lockfast.errors import ConfigurationError, QuorumNotReached
from lockfast.values import (
    Claim,
    Enqueue,
    Granted,
    GrantNotification,
    HolderInfo,
    LockInfo,
    Mode,
    Queued,
    Renewal,
    Taken,
)
from tests.quorum.scenarios import acquire, warm_up
from tests.quorum.virtual import LATENCY, NAME, Server, World, claim, reading, view


async def read(world: World, store: QuorumStore, holder: str, ttl: float = 30.0) -> int:
    answer = await store.acquire(reading(holder, ttl), None, world.soon())
    assert isinstance(answer, Granted), answer
    return answer.fence


async def renew(world: World, store: QuorumStore, holder: str, *, shared: bool = True) -> bool | None:
    (renewed,) = await store.renew([Renewal(NAME, holder, 30.0, shared=shared)], world.soon())
    return renewed


async def everywhere() -> None:
    """Wait for the replies that no majority needed, and for repairs."""
    await asyncio.sleep(0.1)


async def enqueue(world: World, store: QuorumStore, wanted: Claim) -> QuorumMailbox:
    mailbox = store.mailbox(wanted.holder)
    assert isinstance(mailbox, QuorumMailbox)
    await mailbox.open(world.soon())
    answer = await store.acquire(wanted, Enqueue(mailbox.address, 1, None), world.soon())
    assert isinstance(answer, Queued), answer
    return mailbox


async def readers_hold_together_and_keep_a_writer_out(world: World) -> None:
    first, second, writer = world.client(), world.client(), world.client()
    fence = await read(world, first, "first")
    await everywhere()
    assert await read(world, second, "second") > fence
    await everywhere()
    assert isinstance(await writer.acquire(claim("writer"), None, world.soon()), Taken)
    await first.release(NAME, "first", world.soon())
    assert isinstance(await writer.acquire(claim("writer"), None, world.soon()), Taken)
    await second.release(NAME, "second", world.soon())
    await acquire(world, writer, "writer")


async def a_reader_on_half_of_the_servers_does_not_hold(world: World) -> None:
    four = World(world.loop, count=4)
    store = four.client()
    await warm_up(four, store)
    for server in four.servers[:2]:
        server.hub.space.acquire(claim("writer"), None, four.now)
    assert isinstance(await store.acquire(reading("half"), None, four.soon()), Taken)
    assert four.holders() == ["writer", "writer", None, None]


async def the_fence_of_a_reader_is_raised_before_it_is_used(world: World) -> None:
    """The next majority, a writer's, shares one server with the reader's, and that one had the lower fence."""
    reader, writer = world.client(), world.client()
    await warm_up(world, reader, writer)
    world.servers[0].raise_fence(7)
    world.servers[2].stop()
    fence = await read(world, reader, "reader")
    assert fence == 8
    await reader.release(NAME, "reader", world.soon())
    world.servers[0].stop()
    world.servers[2].start()
    assert await acquire(world, writer, "writer") > fence


async def fences_of_simultaneous_readers_are_between_those_of_writers(world: World) -> None:
    """They reach two servers in different order, so each server grants the higher fence to another of them.

    Then both of them use it. That is allowed, because readers do not exclude each other.
    """
    stores, writer = (world.client(), world.client()), world.client()
    await warm_up(world, *stores, writer)
    world.servers[2].stop()
    before = await acquire(world, writer, "before")
    await writer.release(NAME, "before", world.soon())
    near, far = world.servers[:2]
    near.delay_requests(0.01)
    first = asyncio.ensure_future(read(world, stores[0], "first"))
    await asyncio.sleep(LATENCY / 2)  # its requests are sent
    near.delay_requests(LATENCY)
    far.delay_requests(0.02)
    second = asyncio.ensure_future(read(world, stores[1], "second"))
    fences = await first, await second
    assert fences[0] == fences[1] > before
    for store, holder in zip(stores, ("first", "second"), strict=True):
        await store.release(NAME, holder, world.soon())
    assert await acquire(world, writer, "after") > max(fences)


async def the_fence_of_a_reader_is_not_used_before_a_majority_has_it(world: World) -> None:
    store = world.client()
    await warm_up(world, store)
    ahead, behind, away = world.servers
    ahead.raise_fence(7)
    away.stop()
    behind.after["acquire", 1] = lambda: behind.delay_requests(5.0)
    with pytest.raises(QuorumNotReached):
        await store.acquire(reading("early"), None, world.now + 0.5)


async def a_vote_for_an_earlier_attempt_of_a_reader_does_not_count(world: World) -> None:
    """Both votes are real, but they expired and the servers granted the lock to a writer since."""
    store, other = world.client(), world.client()
    await acquire(world, other, "writer")
    await everywhere()
    mailbox = await enqueue(world, store, reading("reader"))
    for server in world.servers[:2]:
        server.hub.boxes["reader"].deliver(GrantNotification(0, 99))
    assert await mailbox.wait(world.now + 0.5) is None
    mailbox.close()


async def readers_enter_together_when_a_writer_releases(world: World) -> None:
    writer, stores = world.client(), [world.client() for _ in range(3)]
    fence = await acquire(world, writer, "writer")
    await everywhere()
    boxes = [await enqueue(world, store, reading(f"reader {n}")) for n, store in enumerate(stores)]
    await writer.release(NAME, "writer", world.soon())
    for box in boxes:
        granted = await box.wait(world.soon())
        assert isinstance(granted, GrantNotification)
        assert granted.fence > fence
        box.close()
    assert [len(server.view.holders) for server in world.servers] == [3, 3, 3]


async def readers_that_are_behind_yield_together(world: World) -> None:
    """Two readers share a server for which a writer waits. One of them alone could not free it."""
    stores = world.client(), world.client()
    await warm_up(world, *stores)
    shared, *others = world.servers
    for number, server in enumerate(others):
        server.hub.space.acquire(claim(f"writer {number}"), None, world.now)
    boxes = [await enqueue(world, store, reading(f"reader {n}")) for n, store in enumerate(stores)]
    assert len(shared.view.holders) == 2
    _enqueue_at(shared, "writer 1")
    waits = [asyncio.ensure_future(box.wait(world.now + 0.5)) for box in boxes]
    await asyncio.wait(waits)
    assert world.holders() == ["writer 1", "writer 0", "writer 1"]
    for box in boxes:
        box.close()


class _Sink:
    """The mailbox of a client that only receives."""

    def deliver(self, notification: object) -> None:
        return


def _enqueue_at(server: Server, holder: str) -> None:
    server.hub.boxes[holder] = _Sink()  # type: ignore[assignment]
    server.hub.space.acquire(claim(holder), Enqueue(holder, 1, ticket=99), server.loop.time())


async def a_writer_yields_to_readers_that_wait_for_one_another(world: World) -> None:
    """Each reader has one server and waits behind the writer on the next; the writer has the third."""
    views = [view("first", mode=Mode.READ), view("second", mode=Mode.READ), view("writer")]
    del world
    assert rules.standing(views, claim("writer"), 3) is rules.Standing.BEHIND
    assert rules.standing(views, reading("first"), 3) is rules.Standing.AHEAD
    assert rules.standing(views, reading("second"), 3) is rules.Standing.AHEAD


async def a_reader_does_not_wait_for_the_majority_of_another(world: World) -> None:
    del world
    views = [view("first", "second", mode=Mode.READ), view("first", mode=Mode.READ), view("writer")]
    assert rules.standing(views, reading("second"), 3) is rules.Standing.AHEAD
    assert rules.standing(views, claim("writer"), 3) is rules.Standing.TAKEN


async def a_renewal_of_a_reader_needs_a_majority(world: World) -> None:
    store = world.client()
    await read(world, store, "reader")
    await everywhere()
    for server in world.servers[:2]:
        server.restart()
    await warm_up(world, store)
    assert await renew(world, store, "reader") is False
    await everywhere()
    assert world.holders() == [None] * 3


async def a_renewed_reader_is_restored_where_it_is_missing(world: World) -> None:
    store = world.client()
    await read(world, store, "reader")
    await everywhere()
    world.servers[1].restart()
    await warm_up(world, store)
    await everywhere()
    assert await renew(world, store, "reader") is True
    await everywhere()
    assert world.holders() == ["reader"] * 3
    assert world.modes() == [Mode.READ] * 3


async def a_reader_is_not_restored_beside_a_writer(world: World) -> None:
    store = world.client()
    await read(world, store, "reader")
    await everywhere()
    world.servers[1].restart()
    world.servers[1].hub.space.acquire(claim("writer"), None, world.now)
    await warm_up(world, store)
    await everywhere()
    assert await renew(world, store, "reader") is True
    await everywhere()
    assert world.holders() == ["reader", "writer", "reader"]


async def a_released_reader_is_not_restored(world: World) -> None:
    store = world.client()
    await read(world, store, "reader")
    await everywhere()
    world.servers[1].restart()
    await warm_up(world, store)
    await everywhere()
    assert await renew(world, store, "reader") is True
    world.servers[1].preemption = 0.1
    await asyncio.sleep(0.01)  # the restore is under way
    await store.release(NAME, "reader", world.soon())
    await asyncio.sleep(1.0)
    assert world.holders() == [None] * 3


async def a_downgraded_writer_admits_readers_and_no_writer(world: World) -> None:
    store, reader, writer = world.client(), world.client(), world.client()
    fence = await acquire(world, store, "owner")
    assert await store.downgrade(reading("owner"), world.soon()) is True
    await everywhere()
    assert world.modes() == [Mode.READ] * 3
    assert await read(world, reader, "reader") > fence
    assert isinstance(await writer.acquire(claim("writer"), None, world.soon()), Taken)
    info = await store.inspect(NAME, world.soon())
    assert [one.holder for one in info.holders] == ["owner", "reader"]
    assert info.holders[0].fence == fence


async def a_downgrade_needs_a_majority_that_had_the_lease(world: World) -> None:
    """Two servers forgot the lease, so a writer may hold their majority by now."""
    store, writer = world.client(), world.client()
    await acquire(world, store, "owner")
    await everywhere()
    for server in world.servers[:2]:
        server.restart()
    await acquire(world, writer, "writer")
    await warm_up(world, store)
    assert await store.downgrade(reading("owner"), world.soon()) is False
    await everywhere()
    assert "owner" not in world.holders()


async def a_downgrade_with_missing_replies_is_unknown(world: World) -> None:
    """One server forgot the lease, one is silent: whether a majority was downgraded depends on the silent one."""
    store = world.client()
    await acquire(world, store, "owner")
    await everywhere()
    world.servers[0].hub.space.drop(NAME)
    world.servers[2].delay_requests(5.0)
    with pytest.raises(QuorumNotReached):
        await store.downgrade(reading("owner"), world.soon())


async def a_renewal_finishes_a_downgrade(world: World) -> None:
    """A server that was down stays exclusive, which is safe. The next renewal after its return changes that."""
    store = world.client()
    await acquire(world, store, "owner")
    await everywhere()
    away = world.servers[2]
    away.stop()
    assert await store.downgrade(reading("owner"), world.soon()) is True
    away.start()
    store.members.available()
    await asyncio.sleep(1.0)
    assert away.view.mode is Mode.EXCLUSIVE
    assert await renew(world, store, "owner") is True
    await everywhere()
    assert world.modes() == [Mode.READ] * 3
    assert world.holders() == ["owner"] * 3


async def a_release_ends_a_downgrade_that_is_not_finished(world: World) -> None:
    store = world.client()
    await acquire(world, store, "owner")
    await everywhere()
    away = world.servers[2]
    away.stop()
    assert await store.downgrade(reading("owner"), world.soon()) is True
    assert await store.release(NAME, "owner", world.soon()) is True
    away.start()
    store.members.available()
    await asyncio.sleep(1.0)
    assert world.holders() == [None] * 3


async def a_renewal_from_before_a_downgrade_does_not_end_the_lease(world: World) -> None:
    """It was built while the lease was exclusive, and finds no exclusive grant any more."""
    store = world.client()
    await acquire(world, store, "owner")
    assert await store.downgrade(reading("owner"), world.soon()) is True
    await everywhere()
    await renew(world, store, "owner", shared=False)
    await everywhere()
    assert world.holders() == ["owner"] * 3
    assert await renew(world, store, "owner") is True


async def a_downgraded_lease_is_restored_as_a_reader(world: World) -> None:
    store = world.client()
    await acquire(world, store, "owner")
    assert await store.downgrade(reading("owner"), world.soon()) is True
    await everywhere()
    world.servers[1].restart()
    await warm_up(world, store)
    await everywhere()
    assert await renew(world, store, "owner") is True
    await everywhere()
    assert world.modes() == [Mode.READ] * 3


async def a_server_with_a_semaphore_refuses_a_reader_everywhere(world: World) -> None:
    store = world.client()
    await warm_up(world, store)
    permit = Claim(NAME, "permit", 30.0, "host:1:", weight=1, limit=2)
    world.servers[2].hub.space.acquire(permit, None, world.now)
    world.servers[1].delay_replies(0.05)  # so that no majority is reached before the refusal
    with pytest.raises(ConfigurationError, match="is in use as a semaphore"):
        await store.acquire(reading("reader"), None, world.soon())
    assert world.holders() == [None, None, "permit"]


async def only_readers_of_a_majority_are_shown(world: World) -> None:
    store, other = world.client(), world.client()
    world.servers[0].hub.space.acquire(reading("one vote"), None, world.now)
    await read(world, store, "first")
    await everywhere()
    await read(world, other, "second")
    await everywhere()
    info = await store.inspect(NAME, world.soon())
    assert [one.holder for one in info.holders] == ["first", "second"]
    assert info.mode is Mode.READ


async def a_holder_is_shown_as_exclusive_while_a_majority_is(world: World) -> None:
    del world
    exclusive, shared = HolderInfo("a", fence=7), HolderInfo("a", fence=7, mode=Mode.READ)
    for grants, mode in (
        ((exclusive, exclusive, shared), Mode.EXCLUSIVE),
        ((shared, exclusive, shared), Mode.READ),
        ((exclusive, shared), Mode.READ),
    ):
        views = [LockInfo(NAME, (grant,)) for grant in grants]
        assert rules.merge_views(NAME, views, rules.majority(3)).mode is mode


async def an_adopted_reader_stays_a_reader(world: World) -> None:
    store, heir, other = world.client(), world.client(), world.client()
    fence = await read(world, store, "reader")
    await everywhere()
    await read(world, other, "other")
    granted = await heir.adopt(reading("heir"), "reader", world.soon())
    await everywhere()
    assert granted is not None
    assert granted.fence > fence
    assert {one.holder for one in world.servers[0].view.holders} == {"heir", "other"}
    assert world.modes() == [Mode.READ] * 3
