"""The contract of a store, as checks that run on any of them: those shipped here, and one of your own.

    def make_store():               # each call a client of its own, all on one and the same engine
        return MyStore(address, runtime)

    await check_store(make_store, runtime)          # asyncio
    run(check_store(make_store, runtime))           # threads: `run` is in lockfast.runtime.runner

Each check is one coroutine in `CHECKS`, with the rule that it checks as its docstring; `ContractBroken` names the rule
and what was seen instead. Give them to your test runner one by one to see all that fail.

What is not checked here: time limits and lost connections (they need a network to break), forks, and load.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from lockfast.facts import Topology
from lockfast.ports import Runtime
from lockfast.testing.contract_kit import BRIEF, LONG, Bench, ContractBroken, MakeStore, as_a, equal, more
from lockfast.values import Enqueue, FirstNotification, Granted, LockInfo, Owner, Queued, Renewal, Taken


async def repeated_acquire(bench: Bench) -> None:
    """A request repeated after a lost reply gives the same grant, with the full ttl anew."""
    store, claim = bench.store(), bench.claim("a", ttl=1)
    fence = await bench.take(store, claim)
    again = await store.acquire(claim._replace(ttl=LONG), None, bench.until())
    repeated = as_a(Granted, again, "a repeated request is granted again")
    equal(repeated.fence, fence, "a repeated request is granted again, with the same fence")
    more((await bench.inspect(store)).ttl_left or 0, LONG / 2, "a repeat sets the full ttl anew")


async def taken(bench: Bench) -> None:
    """A taken lock is refused to who asks for no place, and nothing is left behind."""
    store, other = bench.store(), bench.store()
    await bench.take(store, bench.claim("a"))
    answer = as_a(Taken, await other.acquire(bench.claim("b"), None, bench.until()), "a taken lock is refused")
    more(answer.ttl_left or 0, LONG / 2, "the refusal tells how long the holder's ttl still lasts")
    equal((await bench.inspect(other)).waiting, 0, "who asked for no place has none")


async def handed_over(bench: Bench) -> None:
    """A release hands the lock to the first in the queue, by a push that names its last turn."""
    store, other, first, second = bench.store(), bench.store(), bench.claim("a"), bench.claim("b")
    fence = await bench.take(store, first)
    box, _ = await bench.queue(other, second)
    again = await other.acquire(second, Enqueue(box.address, 2, None), bench.until())
    as_a(Queued, again, "who asks again goes on waiting")
    equal(await store.release(bench.name, first.holder, bench.until()), True, "a holder's release frees the lock")
    push = await bench.next_push(box)
    equal(push.attempt, 2, "a push names the turn of the last request")
    more(push.fence, fence, "fences rise")
    confirmed = await other.acquire(second, Enqueue(box.address, 3, None), bench.until())
    sure = as_a(Granted, confirmed, "a pushed grant can be confirmed by a request")
    equal(sure.fence, push.fence, "a pushed grant can be confirmed by a request, with the same fence")


async def places(bench: Bench) -> None:
    """A place is kept by asking again, and a ticket from before leads back to it."""
    store, asks = bench.store(), [bench.claim(label) for label in "abc"]
    await bench.take(store, asks[0])
    (box, first), (_, second) = [await bench.queue(store, claim) for claim in asks[1:]]
    equal((first.position, second.position), (0, 1), "positions count those in front")
    more(second.ticket, first.ticket, "tickets rise")
    again = await store.acquire(asks[1], Enqueue(box.address, 2, first.ticket), bench.until())
    equal(as_a(Queued, again, "who asks again goes on waiting")[:2], first[:2], "asking again keeps the place")
    equal(await store.release(bench.name, asks[1].holder, bench.until()), False, "a place is no grant")
    equal((await bench.inspect(store)).waiting, 1, "a release gives up the place")
    late = await store.acquire(asks[1], Enqueue(box.address, 1, None), bench.until())
    equal(as_a(Queued, late, "a request without a ticket gets a place").position, 1, "that place is the last")
    _, back = await bench.queue(store, asks[1], attempt=3, ticket=first.ticket)
    equal(back[:2], first[:2], "a ticket from before leads back to its place, even if a later one was given meanwhile")


async def order(bench: Bench) -> None:
    """Who waits is served first come, first served, with rising fences; who comes new does not overtake."""
    stores = bench.store(), bench.store()
    held = bench.claim("first")
    fence = await bench.take(stores[0], held)
    waiting = [
        (claim, (await bench.queue(stores[at % 2], claim))[0]) for at, claim in enumerate(map(bench.claim, "abcde"))
    ]
    for claim, box in waiting:
        await stores[0].release(bench.name, held.holder, bench.until())
        tried = await stores[1].acquire(bench.claim("new"), None, bench.until())
        as_a(Taken, tried, "a lock that was handed over is taken")
        push = await bench.next_push(box)
        more(push.fence, fence, "fences rise from holder to holder")
        held, fence = claim, push.fence
    equal(await stores[0].release(bench.name, held.holder, bench.until()), True, "the last one gives it back")
    equal((await bench.inspect(stores[0])).locked, False, "and then it is free")


async def told_first(bench: Bench) -> None:
    """Whoever becomes the first in the queue is told so, and how long the holder's ttl lasts."""
    store, other = bench.store(), bench.store()
    asks = [bench.claim("a"), bench.claim("b", ttl=LONG / 3), bench.claim("c"), bench.claim("d")]
    await bench.take(store, asks[0])
    await bench.queue(other, asks[1])
    await bench.queue(other, asks[2], attempt=4)
    box, _ = await bench.queue(other, asks[3], attempt=5)
    await store.release(bench.name, asks[2].holder, bench.until())
    await store.release(bench.name, asks[0].holder, bench.until())
    news = as_a(FirstNotification, await box.wait(bench.until()), "who becomes the first is told")
    equal(news.attempt, 5, "the news name the turn of the last request")
    equal(0 < (news.ttl_left or 0) <= LONG / 3, True, "and the ttl of the new holder")
    await store.release(bench.name, asks[1].holder, bench.until())
    equal((await bench.next_push(box)).attempt, 5, "and then it is granted")


async def released(bench: Bench) -> None:
    """Only the holder's release frees the lock, and a repeat finds nothing."""
    store, claim, stranger = bench.store(), bench.claim("a"), bench.claim("b")
    fence = await bench.take(store, claim)
    equal(await store.release(bench.name, stranger.holder, bench.until()), False, "a stranger releases nothing")
    info = await bench.inspect(store)
    equal((info.holder, info.fence), (claim.holder, fence), "a stranger's release changes nothing")
    equal(await store.release(bench.name, claim.holder, bench.until()), True, "a holder's release frees the lock")
    equal(await store.release(bench.name, claim.holder, bench.until()), False, "a repeated release finds nothing")
    more(await bench.take(store, stranger), fence, "fences rise also when the lock was free in between")


async def renewed(bench: Bench) -> None:
    """A renewal prolongs what is the holder's own, and nothing else."""
    store, claim, stranger = bench.store(), bench.claim("a", ttl=5), bench.claim("b")
    await bench.take(store, claim)
    batch = [Renewal(bench.name, claim.holder, LONG), Renewal(bench.name, stranger.holder, 2 * LONG)]
    batch.append(Renewal(bench.name + ":free", claim.holder, LONG))
    answers = await store.renew(batch, bench.until())
    equal(answers, [True, False, False], "each line of a batch is answered for itself")
    left = (await bench.inspect(store)).ttl_left or 0
    more(left, LONG / 2, "a renewal sets the ttl that it names")
    more(LONG + 0.001, left, "a stranger's renewal changes nothing")
    free = await store.inspect(bench.name + ":free", bench.until())
    equal(free.locked, False, "a renewal never takes a free lock")


async def last_word(bench: Bench) -> None:
    """A holder's last word sets when its grant ends, sooner or later than before, and is nobody else's to say."""
    store, claim, stranger = bench.store(), bench.claim("a", ttl=LONG), bench.claim("b")
    await bench.take(store, claim)
    words = [
        Renewal(bench.name, claim.holder, LONG / 4, final=True),
        Renewal(bench.name, stranger.holder, 1, final=True),
    ]
    equal(await store.renew(words, bench.until()), [True, False], "each line of a batch is answered for itself")
    left = (await bench.inspect(store)).ttl_left or 0
    more(LONG / 4 + 0.001, left, "a last word may end a grant sooner")
    more(left, LONG / 8, "a stranger's changes nothing")
    equal(await store.renew([words[0]._replace(ttl=LONG)], bench.until()), [True], "a last word may be repeated")
    more((await bench.inspect(store)).ttl_left or 0, LONG / 2, "a last word may end a grant later")
    equal(await store.renew([words[0]._replace(ttl=BRIEF)], bench.until()), [True], "and sooner again")

    async def freed() -> Granted | None:
        answer = await store.acquire(stranger, None, bench.until())
        return answer if isinstance(answer, Granted) else None

    await bench.poll(freed, "after its last word a grant ends by itself")


async def adopted(bench: Bench) -> None:
    """A grant moves from one holder to another once, with a new fence; a repeat gives the same answer."""
    store, other = bench.store(), bench.store()
    old, new, late = bench.claim("old"), bench.claim("new"), bench.claim("late")
    fence = await bench.take(store, old)
    granted = as_a(Granted, await other.adopt(new, old.holder, bench.until()), "a grant can be adopted")
    more(granted.fence, fence, "an adopted grant has a new fence")
    equal(await other.adopt(new, old.holder, bench.until()), granted, "a repeated adoption gives the same fence")
    equal(await other.adopt(late, old.holder, bench.until()), None, "a grant is adopted once")
    equal(await store.release(bench.name, old.holder, bench.until()), False, "the old holder holds nothing")
    stale = [Renewal(bench.name, old.holder, LONG)]
    equal(await store.renew(stale, bench.until()), [False], "the old holder prolongs nothing")
    info = await bench.inspect(store)
    equal((info.holder, info.fence), (new.holder, granted.fence), "the new holder is the holder")


async def expired(bench: Bench) -> None:
    """A grant ends with its ttl: then it can be neither renewed, released nor adopted, and the lock is free."""
    store, claim, successor = bench.store(), bench.claim("a", ttl=BRIEF), bench.claim("b")
    fence = await bench.take(store, claim)

    async def freed() -> Granted | None:
        answer = await store.acquire(successor, None, bench.until())
        return answer if isinstance(answer, Granted) else None

    granted = await bench.poll(freed, "a grant ends with its ttl")
    more(granted.fence, fence, "fences rise also across an expiry")
    equal(await store.renew([Renewal(*claim[:3])], bench.until()), [False], "an expired grant cannot be renewed")
    equal(await store.release(bench.name, claim.holder, bench.until()), False, "nor released")
    equal(await store.adopt(bench.claim("c"), claim.holder, bench.until()), None, "nor adopted")
    equal((await bench.inspect(store)).holder, successor.holder, "and its successor keeps the lock")


async def inherited(bench: Bench) -> None:
    """Whoever finds the lock expired hands it to the first in the queue, not to itself."""
    store, other = bench.store(), bench.store()
    claim, first = bench.claim("a", ttl=4 * BRIEF), bench.claim("b")
    box = await bench.mailbox(other, first.holder)  # connecting may take longer than the brief ttl
    await bench.inspect(other)
    await bench.take(store, claim)
    answer = await other.acquire(first, Enqueue(box.address, 1, None), bench.until())
    as_a(Queued, answer, "who asks for a place in the queue of a taken lock gets one")

    async def handed_on() -> bool | None:
        answer = await store.acquire(bench.claim("c"), None, bench.until())
        as_a(Taken, answer, "who comes new does not overtake who waits")
        return (await bench.inspect(store)).holder == first.holder or None

    await bench.poll(handed_on, "an expired lock goes to the first in the queue")
    equal((await bench.next_push(box)).attempt, 1, "it is told by a push")


async def passed_over(bench: Bench) -> None:
    """A waiter whose client is gone is passed over at once."""
    store, gone, other = bench.store(), bench.store(), bench.store()
    claim, lost, next_one = bench.claim("a"), bench.claim("gone"), bench.claim("b")
    await bench.take(store, claim)
    box, _ = await bench.queue(gone, lost)
    next_box, _ = await bench.queue(other, next_one)
    box.close()
    await gone.close()
    await store.release(bench.name, claim.holder, bench.until())
    await bench.next_push(next_box)
    equal((await bench.inspect(store)).holder, next_one.holder, "a waiter that is gone is passed over")


async def forgotten(bench: Bench) -> None:
    """A place ends with its ttl, if its waiter does not ask again."""
    store, silent, other = bench.store(), bench.claim("silent", ttl=BRIEF), bench.claim("b")
    await bench.take(store, bench.claim("a", ttl=12 * BRIEF))
    await bench.queue(store, silent)

    async def freed() -> Granted | None:
        answer = await store.acquire(other, None, bench.until())
        equal((await bench.inspect(store)).holder != silent.holder, True, "a place ends with its ttl")
        return answer if isinstance(answer, Granted) else None

    await bench.poll(freed, "a lock with nobody alive in its queue is free")


async def patience(bench: Bench) -> None:
    """A mailbox without a push is waited at for as long as was asked."""
    store, claim, waiting = bench.store(), bench.claim("a"), bench.claim("b")
    await bench.take(store, claim)
    box, _ = await bench.queue(store, waiting)
    until = bench.runtime.now() + 2 * BRIEF
    equal(await box.wait(until), None, "nothing is pushed while the lock is held")
    more(bench.runtime.now(), until - BRIEF, "a mailbox is waited at until the moment that was given")


async def inspected(bench: Bench) -> None:
    """`inspect` tells the holder, the fence, the times, and who waits, in order; it changes nothing."""
    store, asks = bench.store(), [bench.claim(label) for label in ("a", "b", "c")]
    free = await bench.inspect(store)
    equal(free, LockInfo(bench.name), "nothing is known of a lock that was never taken")
    fence = await bench.take(store, asks[0])
    for claim in asks[1:]:
        await bench.queue(store, claim)
    info = await bench.inspect(store)
    equal((info.name, info.holder, info.fence), (bench.name, asks[0].holder, fence), "the holder is told")
    equal(info.owner, Owner("host", 1, "a"), "the owner is told")
    equal([one.holder for one in info.waiters], [claim.holder for claim in asks[1:]], "who waits is told in order")
    equal([one.owner and one.owner.label for one in info.waiters], ["b", "c"], "with their owners")
    equal(info.waiting, 2, "and counted")
    times = (info.held_for, info.ttl_left, *(one.waiting_for for one in info.waiters))
    for time in times:
        equal(time is not None and 0 <= time <= LONG, True, f"times are seconds, and {times} are not")


async def surveyed(bench: Bench) -> None:
    """`survey` finds every lock that fits a pattern, part by part, with its holder and how many wait."""
    store, count = bench.store(), 20
    asks = [bench.claim(str(number))._replace(name=f"{bench.name}:{number}") for number in range(count)]
    fences = [await bench.take(store, claim) for claim in asks]
    waiter = asks[3]._replace(holder=bench.runtime.new_holder_id())
    box = await bench.mailbox(store, waiter.holder)
    await store.acquire(waiter, Enqueue(box.address, 1, None), bench.until())
    await store.release(asks[5].name, asks[5].holder, bench.until())
    found: dict[str, LockInfo] = {}
    cursor, parts = "", 0
    while cursor or not parts:
        page = await store.listing(f"{bench.name}:*", cursor, bench.until())
        for info in page.infos:  # in two parts, it is the one that knows more that counts
            found[info.name] = max(info, found.get(info.name, info), key=lambda info: info.fence or 0)
        cursor, parts = page.cursor, parts + 1
    equal(sorted(found), sorted(claim.name for claim in asks), "every lock that fits is found, and no other")
    holders = [None if at == 5 else claim.holder for at, claim in enumerate(asks)]
    equal([found[claim.name].holder for claim in asks], holders, "holders are told")
    told = [found[claim.name].fence or 0 for claim in asks]
    if (await store.facts(bench.until())).topology is Topology.QUORUM:  # a node alone may be ahead of a majority
        told = list(map(min, told, fences))
    equal(told, fences, "fences are told, also of free locks")
    equal([found[claim.name].waiting for claim in asks], [int(at == 3) for at in range(count)], "who waits is counted")
    equal(found[asks[2].name].owner, Owner("host", 1, "2"), "owners are told")


async def taken_away(bench: Bench) -> None:
    """A lock can be taken away from the holder that is named, and goes to the first in the queue with a new fence."""
    store, other, first, second = bench.store(), bench.store(), bench.claim("a"), bench.claim("b")
    fence = await bench.take(store, first)
    box, _ = await bench.queue(other, second)
    equal(await other.force_release(bench.name, second.holder, bench.until()), False, "a waiter has nothing to lose")
    equal((await bench.inspect(store)).waiting, 1, "and keeps its place")
    equal(await other.force_release(bench.name, first.holder, bench.until()), True, "a holder loses the lock")
    push = await bench.next_push(box)
    more(push.fence, fence, "the next one gets it with a new fence")
    equal(await other.force_release(bench.name, first.holder, bench.until()), False, "it is taken away once")
    equal((await bench.inspect(store)).holder, second.holder, "and nobody else is hit")
    equal(await store.renew([Renewal(*first[:3])], bench.until()), [False], "the old holder is refused a renewal")
    equal(await other.force_release(bench.name, second.holder, bench.until()), True, "also when nobody waits")
    info = await bench.inspect(store)
    equal(info.locked, False, "then the lock is free")
    more(info.fence or 0, push.fence, "and its fence has moved on")
    more(await bench.take(store, first._replace(holder=bench.runtime.new_holder_id())), info.fence or 0, "fences rise")


CHECKS: tuple[Callable[[Bench], Coroutine[Any, Any, None]], ...] = (
    repeated_acquire,
    taken,
    handed_over,
    places,
    order,
    told_first,
    released,
    renewed,
    last_word,
    adopted,
    expired,
    inherited,
    passed_over,
    forgotten,
    patience,
    inspected,
    surveyed,
    taken_away,
)


async def check_store(make_store: MakeStore, runtime: Runtime) -> None:
    """Run every check, each on a lock of its own; the first rule that is broken raises `ContractBroken`."""
    for check in CHECKS:
        await run_check(check, make_store, runtime)


async def run_check(
    check: Callable[[Bench], Coroutine[Any, Any, None]], make_store: MakeStore, runtime: Runtime
) -> None:
    """Run one of `CHECKS`."""
    bench = Bench(make_store, runtime)
    try:
        await check(bench)
    except ContractBroken as broken:
        raise ContractBroken(f"{check.__name__}: {check.__doc__ or ''} Broken: {broken}.") from None
    finally:
        await bench.close()
