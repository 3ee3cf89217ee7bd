"""Small situations in which the quorum store must decide correctly, each on virtual servers.

`test_scenarios.py` runs all of them on the shipped code, and again with errors planted that they must detect.
"""

import asyncio

import pytest

from lockfast.core.lease_state import valid_until
from lockfast.core.quorum import members, rules
from lockfast.core.quorum.store import QuorumMailbox, QuorumStore
from lockfast.errors import ConfigurationError, QuorumNotReached
from lockfast.values import Enqueue, Granted, GrantNotification, Queued, Renewal, Taken
from tests.quorum.virtual import LATENCY, NAME, World, claim, view


async def warm_up(world: World, *stores: QuorumStore) -> None:
    """Connect all members."""
    for store in stores:
        await store.inspect(NAME, world.soon())


async def acquire(world: World, store: QuorumStore, holder: str, ttl: float = 30.0) -> int:
    answer = await store.acquire(claim(holder, ttl), None, world.soon())
    assert isinstance(answer, Granted), answer
    return answer.fence


async def a_grant_that_took_too_long_is_not_used(world: World) -> None:
    """The votes arrive late, and the servers count their ttls from before."""
    store = world.client()
    await warm_up(world, store)
    for server in world.servers:
        server.delay_replies(0.2)
    answer = await store.acquire(claim("slow", ttl=0.22), None, world.soon())
    assert not isinstance(answer, Granted), f"{valid_until(0.0, 0.22) - 0.2:.3f} s of validity are not enough"


async def a_grant_whose_fence_took_too_long_to_raise_is_not_used(world: World) -> None:
    """The votes are quick, but the fences differ, and raising them uses up the ttl."""
    store = world.client()
    await warm_up(world, store)
    ahead, behind, away = world.servers
    ahead.raise_fence(7)
    away.stop()
    behind.after["acquire", 2] = lambda: behind.delay_replies(0.2)
    ttl, sent_at = 0.22, world.now
    answer = await store.acquire(claim("slow", ttl), None, sent_at + 0.24)
    assert behind.view.fence == 8, "the fence had to be raised"
    assert not isinstance(answer, Granted), f"granted with {valid_until(sent_at, ttl) - world.now:.3f} s left"


async def a_fence_is_not_used_before_a_majority_has_it(world: World) -> None:
    """The server with the lower fence becomes silent before it can be raised."""
    store = world.client()
    await warm_up(world, store)
    ahead, behind, away = world.servers
    ahead.raise_fence(7)
    away.stop()
    behind.after["acquire", 1] = lambda: behind.delay_requests(5.0)
    with pytest.raises(QuorumNotReached):
        await store.acquire(claim("early"), None, world.now + 0.5)


async def fences_grow_across_majorities(world: World) -> None:
    """The second majority shares one server with the first, and that one had the lower fence."""
    first, second = world.client(), world.client()
    await warm_up(world, first, second)
    world.servers[0].raise_fence(7)
    world.servers[2].stop()
    fence = await acquire(world, first, "first")
    assert fence == 8
    await first.release(NAME, "first", world.soon())
    world.servers[0].stop()
    world.servers[2].start()
    assert await acquire(world, second, "second") > fence


async def a_repeated_claim_has_the_same_fence(world: World) -> None:
    """One server granted a higher fence, which arrived after the majority; in the repeat it replies first."""
    store = world.client()
    await warm_up(world, store)
    _, slow, ahead = world.servers
    ahead.raise_fence(9)
    ahead.delay_replies(0.1)
    fence = await acquire(world, store, "repeats")
    await asyncio.sleep(0.2)
    assert ahead.view.fence == 10
    ahead.delay_replies(LATENCY)
    slow.delay_replies(0.1)
    assert await acquire(world, store, "repeats") == fence == 1


async def a_repeated_claim_has_a_greater_fence_after_another_holder(world: World) -> None:
    store, other = world.client(), world.client()
    await warm_up(world, other)
    first = await acquire(world, store, "repeats", ttl=1.0)
    await asyncio.sleep(1.1)
    between = await acquire(world, other, "between")
    await other.release(NAME, "between", world.soon())
    assert first < between < await acquire(world, store, "repeats", ttl=1.0)


async def half_of_the_servers_grant_nothing(world: World) -> None:
    four = World(world.loop, count=4)
    store = four.client()
    await warm_up(four, store)
    for server in four.servers[:2]:
        server.hub.space.acquire(claim("rival"), None, four.now)
    assert isinstance(await store.acquire(claim("half"), None, four.soon()), Taken)


async def a_denied_try_leaves_nothing_behind(world: World) -> None:
    store = world.client()
    await warm_up(world, store)
    for server in world.servers[:2]:
        server.hub.space.acquire(claim("rival"), None, world.now)
    assert isinstance(await store.acquire(claim("denied"), None, world.soon()), Taken)
    assert world.holders() == ["rival", "rival", None]


async def a_vote_on_a_server_that_went_down_is_released_when_it_is_back(world: World) -> None:
    store = world.client()
    await acquire(world, store, "owner")
    await asyncio.sleep(0.1)
    away = world.servers[2]
    away.stop()
    assert await store.release(NAME, "owner", world.soon()) is True
    away.start()
    store.members.available()
    await asyncio.sleep(1.0)
    assert world.holders() == [None] * 3
    assert "release" in away.executed


async def a_release_without_enough_replies_is_unknown(world: World) -> None:
    """One server had lost the grant, one is silent: whether a majority was released depends on the silent one."""
    store = world.client()
    await acquire(world, store, "owner")
    await asyncio.sleep(0.1)
    world.servers[0].hub.space.drop(NAME)
    world.servers[2].delay_requests(5.0)
    with pytest.raises(QuorumNotReached):
        await store.release(NAME, "owner", world.soon())


async def a_renewal_needs_a_majority(world: World) -> None:
    store = world.client()
    await acquire(world, store, "owner")
    await asyncio.sleep(0.1)
    for server in world.servers[:2]:
        server.restart()
    await warm_up(world, store)
    assert await store.renew([Renewal(NAME, "owner", 30.0)], world.soon()) == [False]


async def a_renewal_with_missing_replies_is_unknown(world: World) -> None:
    five = World(world.loop, count=5)
    store = five.client()
    await acquire(five, store, "owner")
    await asyncio.sleep(0.1)
    for server in five.servers[:2]:
        server.hub.space.drop(NAME)
    five.servers[4].delay_requests(5.0)
    assert await store.renew([Renewal(NAME, "owner", 30.0)], five.soon()) == [None]


async def a_renewed_lease_is_restored_where_it_is_missing(world: World) -> None:
    store = world.client()
    await acquire(world, store, "owner")
    await asyncio.sleep(0.1)
    world.servers[1].restart()
    await warm_up(world, store)
    await asyncio.sleep(0.1)
    assert await store.renew([Renewal(NAME, "owner", 30.0)], world.soon()) == [True]
    await asyncio.sleep(0.1)
    assert world.holders() == ["owner"] * 3


async def a_release_wins_over_a_restore(world: World) -> None:
    store = world.client()
    await acquire(world, store, "owner")
    await asyncio.sleep(0.1)
    world.servers[1].restart()
    await warm_up(world, store)
    await asyncio.sleep(0.1)
    assert await store.renew([Renewal(NAME, "owner", 30.0)], world.soon()) == [True]
    world.servers[1].preemption = 0.1
    await asyncio.sleep(0.01)  # the restore is under way
    await store.release(NAME, "owner", world.soon())
    await asyncio.sleep(1.0)
    assert "reassert" in world.servers[1].executed
    assert world.holders() == [None] * 3


async def a_lease_is_gone_only_if_a_majority_says_so(world: World) -> None:
    """The adopter reaches a majority, but one of it does not reply: it may be the one that has the lease."""
    store = world.client()
    await acquire(world, store, "owner")
    await asyncio.sleep(0.1)
    world.servers[0].restart()
    await warm_up(world, store)
    await asyncio.sleep(0.1)
    world.servers[1].delay_requests(5.0)
    world.servers[2].delay_requests(5.0)
    with pytest.raises(QuorumNotReached):
        await store.adopt(claim("heir"), "owner", world.now + 0.2)


async def a_restarted_server_sits_out(world: World) -> None:
    store, rival = world.client(sits_out=30.0), world.client(sits_out=30.0)
    await warm_up(world, rival)
    await acquire(world, store, "owner")
    for server in world.servers[:2]:
        server.restart()
    for _ in range(10):
        with pytest.raises(QuorumNotReached):
            await rival.acquire(claim("rival"), None, world.now + 0.3)
        await asyncio.sleep(2.0)
    await asyncio.sleep(15.0)
    await acquire(world, rival, "rival")


async def a_server_listed_twice_is_refused(world: World) -> None:
    first, second, _ = world.servers
    store = world.client([first, second, first])
    with pytest.raises(ConfigurationError, match="one and the same server"):
        await store.acquire(claim("twin"), None, world.soon())


async def a_silent_server_delays_nobody(world: World) -> None:
    store = world.client()
    await acquire(world, store, "warm")
    await store.release(NAME, "warm", world.soon())
    world.servers[2].delay_requests(100.0)
    await acquire(world, store, "first")
    await asyncio.sleep(members.REPLY_TIMEOUT)
    sent = len(world.servers[2].executed)
    began = world.now
    await store.release(NAME, "first", world.soon())
    await store.inspect(NAME, world.soon())
    assert world.now - began < 0.05
    assert len(world.servers[2].executed) == sent


async def _wait_in_queue(world: World, store: QuorumStore, holder: str) -> QuorumMailbox:
    mailbox = store.mailbox(holder)
    assert isinstance(mailbox, QuorumMailbox)
    await mailbox.open(world.soon())
    answer = await store.acquire(claim(holder), Enqueue(mailbox.address, 1, None), world.soon())
    assert isinstance(answer, Queued), answer
    return mailbox


async def a_waiter_is_granted_by_a_majority_of_notifications(world: World) -> None:
    store, other = world.client(), world.client()
    fence = await acquire(world, other, "owner")
    await asyncio.sleep(0.1)
    mailbox = await _wait_in_queue(world, store, "waiter")
    await other.release(NAME, "owner", world.soon())
    granted = await mailbox.wait(world.soon())
    assert isinstance(granted, GrantNotification)
    assert granted.fence > fence
    mailbox.close()


async def a_vote_for_an_earlier_attempt_does_not_count(world: World) -> None:
    store, other = world.client(), world.client()
    await acquire(world, other, "owner")
    await asyncio.sleep(0.1)
    mailbox = await _wait_in_queue(world, store, "waiter")
    for server in world.servers[:2]:
        server.hub.boxes["waiter"].deliver(GrantNotification(0, 99))
    assert await mailbox.wait(world.now + 0.5) is None
    mailbox.close()


async def one_notification_is_not_a_majority(world: World) -> None:
    store, other = world.client(), world.client()
    await acquire(world, other, "owner")
    await asyncio.sleep(0.1)
    mailbox = await _wait_in_queue(world, store, "waiter")
    world.servers[0].hub.space.release(NAME, "owner", world.now)
    assert await mailbox.wait(world.now + 0.5) is None
    assert world.holders()[1:] == ["owner", "owner"]
    mailbox.close()


async def exactly_one_contender_stays_in_a_split_vote(world: World) -> None:
    del world
    standings = [rules.standing([view("a"), view("b"), view(), view()], claim(me), 4) for me in "ab"]
    assert standings.count(rules.Standing.AHEAD) == 1
    assert standings.count(rules.Standing.BEHIND) == 1


async def only_the_holder_of_a_majority_is_shown(world: World) -> None:
    store = world.client()
    world.servers[0].hub.space.acquire(claim("one vote"), None, world.now)
    info = await store.inspect(NAME, world.soon())
    assert info.holder is None
    await acquire(world, store, "owner")
    assert (await store.inspect(NAME, world.soon())).holder == "owner"
