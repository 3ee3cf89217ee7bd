"""The store contract: checks that every implementation of `ports.Store` must pass, including your own.

    def make_store():               # each call returns a new client of the same engine
        return MyStore(address, runtime)

    await check_store(make_store, runtime)          # async
    run(check_store(make_store, runtime))           # sync: `run` is in lockfast.runtime.base

Each entry of `CHECKS` is one coroutine; its docstring states the rule. A store that breaks a rule raises
`ContractBroken` with the rule, the expected value and the actual one. To see every failure instead of the first, pass
the checks to your test runner one by one (`run_check`). Checks of shared claims are left out for a store whose
capabilities do not include them.

Not covered: timeouts and lost connections (these need a network to break), forks, load.
"""

from __future__ import annotations

from lockfast.facts import Topology
from lockfast.ports import Runtime
from lockfast.testing.bench import JOINS, LONG, Bench, Check, ContractBroken, MakeStore, as_a, equal, more
from lockfast.testing.shared_contract import NEEDS
from lockfast.values import Enqueue, FirstNotification, Granted, LockInfo, Owner, Queued, Renewal, Taken

__all__ = ["CHECKS", "Bench", "Check", "ContractBroken", "MakeStore", "check_store", "run_check"]


async def repeated_acquire(bench: Bench) -> None:
    """A claim repeated after a lost reply returns the same grant, with the full ttl from now."""
    store, claim = bench.store(), bench.claim("a", ttl=1)
    fence = await bench.acquire(store, claim)
    repeated = await bench.answer(Granted, "a repeated claim is granted", store, claim._replace(ttl=LONG))
    equal(repeated.fence, fence, "a repeated claim keeps its fence")
    more((await bench.inspect(store)).ttl_left or 0, LONG / 2, "a repeated claim renews the full ttl")


async def denied_without_queueing(bench: Bench) -> None:
    """A claim without an inbox is denied while the lock is held, and leaves no ticket."""
    store, other = bench.store(), bench.store()
    await bench.acquire(store, bench.claim("a"))
    answer = await bench.answer(Taken, "a held lock is denied", other, bench.claim("b"))
    more(answer.ttl_left or 0, LONG / 2, "the denial reports the holder's remaining ttl")
    equal((await bench.inspect(other)).waiting, 0, "a denied claim leaves no ticket")


async def hand_off(bench: Bench) -> None:
    """A release grants the lock to the first waiter; the notification names the waiter's last attempt."""
    store, other, first, second = bench.store(), bench.store(), bench.claim("a"), bench.claim("b")
    fence = await bench.acquire(store, first)
    box, _ = await bench.enqueue(other, second)
    await bench.answer(Queued, "a repeated claim stays queued", other, second, Enqueue(box.address, 2, None))
    equal(await store.release(bench.name, first.holder, bench.until()), True, "the holder's release frees the lock")
    notification = await bench.next_grant(box)
    equal(notification.attempt, 2, "a grant notification names the last attempt")
    more(notification.fence, fence, "fences grow")
    rule, enqueue = "a request confirms a notified grant", Enqueue(box.address, 3, None)
    confirmed = await bench.answer(Granted, rule, other, second, enqueue)
    equal(confirmed.fence, notification.fence, "the confirmation has the fence of the notification")


async def tickets(bench: Bench) -> None:
    """A repeated claim keeps its position, and an earlier ticket restores it."""
    store, claims = bench.store(), [bench.claim(label) for label in "abc"]
    await bench.acquire(store, claims[0])
    (box, first), (_, second) = [await bench.enqueue(store, claim) for claim in claims[1:]]
    equal((first.position, second.position), (0, 1), "a position counts the waiters ahead")
    more(second.ticket, first.ticket, "tickets grow")
    repeat = await store.acquire(claims[1], Enqueue(box.address, 2, first.ticket), bench.until())
    equal(as_a(Queued, repeat, "a repeated claim stays queued")[:2], first[:2], "a repeated claim keeps its position")
    equal(await store.release(bench.name, claims[1].holder, bench.until()), False, "a ticket is not a grant")
    equal((await bench.inspect(store)).waiting, 1, "a waiter's release removes its ticket")
    late = await store.acquire(claims[1], Enqueue(box.address, 1, None), bench.until())
    equal(as_a(Queued, late, "a claim without a ticket is queued").position, 1, "a claim without a ticket is last")
    _, restored = await bench.enqueue(store, claims[1], attempt=3, ticket=first.ticket)
    equal(restored[:2], first[:2], "an earlier ticket restores the position, even after a later one was issued")


async def queue_order(bench: Bench) -> None:
    """Waiters are served first come, first served, with growing fences; a newcomer does not overtake them."""
    stores = bench.store(), bench.store()
    holder = bench.claim("first")
    fence = await bench.acquire(stores[0], holder)
    claims = [bench.claim(label) for label in "abcde"]
    boxes = [(await bench.enqueue(stores[at % 2], claim))[0] for at, claim in enumerate(claims)]
    for claim, box in zip(claims, boxes, strict=True):
        await stores[0].release(bench.name, holder.holder, bench.until())
        await bench.answer(Taken, "a lock that was handed off is denied to a newcomer", stores[1], bench.claim("new"))
        notification = await bench.next_grant(box)
        more(notification.fence, fence, "fences grow from holder to holder")
        holder, fence = claim, notification.fence
    equal(await stores[0].release(bench.name, holder.holder, bench.until()), True, "the last waiter releases")
    equal((await bench.inspect(stores[0])).locked, False, "the lock is free after the last release")


async def first_notification(bench: Bench) -> None:
    """A waiter that becomes first in the queue is notified, with the holder's remaining ttl."""
    store, other = bench.store(), bench.store()
    claims = [bench.claim("a"), bench.claim("b", ttl=LONG / 3), bench.claim("c"), bench.claim("d")]
    await bench.acquire(store, claims[0])
    await bench.enqueue(other, claims[1])
    await bench.enqueue(other, claims[2], attempt=4)
    box, _ = await bench.enqueue(other, claims[3], attempt=5)
    await store.release(bench.name, claims[2].holder, bench.until())
    await store.release(bench.name, claims[0].holder, bench.until())
    first = as_a(FirstNotification, await box.wait(bench.until()), "the first waiter is notified")
    equal(first.attempt, 5, "the notification names the last attempt")
    equal(0 < (first.ttl_left or 0) <= LONG / 3, True, "the notification has the new holder's remaining ttl")
    await store.release(bench.name, claims[1].holder, bench.until())
    equal((await bench.next_grant(box)).attempt, 5, "the first waiter is granted next")


async def release(bench: Bench) -> None:
    """Only the holder's release frees the lock, and only once."""
    store, claim, stranger = bench.store(), bench.claim("a"), bench.claim("b")
    fence = await bench.acquire(store, claim)
    equal(await store.release(bench.name, stranger.holder, bench.until()), False, "a stranger releases nothing")
    info = await bench.inspect(store)
    equal((info.holder, info.fence), (claim.holder, fence), "a stranger's release changes nothing")
    equal(await store.release(bench.name, claim.holder, bench.until()), True, "the holder's release frees the lock")
    equal(await store.release(bench.name, claim.holder, bench.until()), False, "a repeated release finds no grant")
    more(await bench.acquire(store, stranger), fence, "fences grow even if the lock was free in between")


async def renewal(bench: Bench) -> None:
    """A renewal extends the holder's own grant and nothing else."""
    store, claim, stranger = bench.store(), bench.claim("a", ttl=5), bench.claim("b")
    await bench.acquire(store, claim)
    own = Renewal(bench.name, claim.holder, LONG)
    batch = [own, own._replace(holder=stranger.holder, ttl=2 * LONG), own._replace(name=bench.name + ":free")]
    equal(await store.renew(batch, bench.until()), [True, False, False], "each renewal of a batch has its own answer")
    left = (await bench.inspect(store)).ttl_left or 0
    more(left, LONG / 2, "a renewal sets the ttl that it names")
    more(LONG + 0.001, left, "a stranger's renewal changes nothing")
    equal(await store.renew([own._replace(ttl=1.0)], bench.until()), [True], "a renewal with a shorter ttl is valid")
    await bench.answer(Granted, "a repeated claim is granted", store, claim)
    more((await bench.inspect(store)).ttl_left or 0, LONG / 2, "neither of them shortens a grant")
    free = await store.inspect(bench.name + ":free", bench.until())
    equal(free.locked, False, "a renewal never acquires a free lock")


async def final_renewal(bench: Bench) -> None:
    """The holder's final renewal sets the expiry, earlier or later than before; nobody else can."""
    store, claim, stranger = bench.store(), bench.claim("a", ttl=LONG), bench.claim("b")
    await bench.acquire(store, claim)
    own = Renewal(bench.name, claim.holder, LONG / 4, final=True)
    batch = [own, own._replace(holder=stranger.holder, ttl=1)]
    equal(await store.renew(batch, bench.until()), [True, False], "each renewal of a batch has its own answer")
    left = (await bench.inspect(store)).ttl_left or 0
    more(LONG / 4 + 0.001, left, "a final renewal may shorten a grant")
    more(left, LONG / 8, "a stranger's final renewal changes nothing")
    equal(await store.renew([own._replace(ttl=LONG)], bench.until()), [True], "a final renewal may be repeated")
    more((await bench.inspect(store)).ttl_left or 0, LONG / 2, "a final renewal may extend a grant")
    equal(
        await store.renew([own._replace(ttl=bench.brief)], bench.until()), [True], "a final renewal may shorten again"
    )
    await bench.acquire_expired(store, stranger, "the grant expires after its final renewal")


async def adoption(bench: Bench) -> None:
    """A grant moves to a new holder once, with a new fence; a repeat returns the same answer."""
    store, other = bench.store(), bench.store()
    old, new, late = bench.claim("old"), bench.claim("new"), bench.claim("late")
    fence = await bench.acquire(store, old)
    granted = as_a(Granted, await other.adopt(new, old.holder, bench.until()), "a grant can be adopted")
    more(granted.fence, fence, "an adopted grant has a new fence")
    equal(await other.adopt(new, old.holder, bench.until()), granted, "a repeated adoption keeps its fence")
    equal(await other.adopt(late, old.holder, bench.until()), None, "a grant is adopted once")
    equal(await store.release(bench.name, old.holder, bench.until()), False, "the old holder releases nothing")
    stale = [Renewal(bench.name, old.holder, LONG)]
    equal(await store.renew(stale, bench.until()), [False], "the old holder renews nothing")
    info = await bench.inspect(store)
    equal((info.holder, info.fence), (new.holder, granted.fence), "the adopter is the holder")


async def expiry(bench: Bench) -> None:
    """An expired grant cannot be renewed, released or adopted, and the lock is free."""
    store, claim, successor = bench.store(), bench.claim("a", ttl=bench.brief), bench.claim("b")
    fence = await bench.acquire(store, claim)

    async def freed() -> bool | None:
        return None if (await bench.inspect(store)).locked else True

    await bench.poll(freed, "a grant expires with its ttl")
    equal(await store.renew([Renewal(*claim[:3])], bench.until()), [False], "an expired grant cannot be renewed")
    granted = await bench.acquire_expired(store, successor, "an expired lock is free")
    more(granted.fence, fence, "fences grow across an expiry")
    equal(await store.renew([Renewal(*claim[:3])], bench.until()), [False], "a lost grant cannot be renewed")
    equal(await store.release(bench.name, claim.holder, bench.until()), False, "an expired grant cannot be released")
    equal(await store.adopt(bench.claim("c"), claim.holder, bench.until()), None, "an expired grant cannot be adopted")
    equal((await bench.inspect(store)).holder, successor.holder, "the new holder keeps the lock")


async def expiry_hand_off(bench: Bench) -> None:
    """A request that finds the lock expired grants it to the first waiter, not to itself."""
    store, other = bench.store(), bench.store()
    claim, first = bench.claim("a", ttl=4 * bench.brief), bench.claim("b")
    box = await bench.mailbox(other, first.holder)  # connecting may take longer than the brief ttl
    await bench.inspect(other)
    await bench.acquire(store, claim)
    await bench.answer(Queued, JOINS, other, first, Enqueue(box.address, 1, None))

    async def handed_off() -> bool | None:
        await bench.answer(Taken, "a newcomer does not overtake a waiter", store, bench.claim("c"))
        return (await bench.inspect(store)).holder == first.holder or None

    await bench.poll(handed_off, "an expired lock is granted to the first waiter")
    equal((await bench.next_grant(box)).attempt, 1, "the waiter is notified of the grant")


async def unreachable_waiter(bench: Bench) -> None:
    """A release skips a waiter whose client is closed."""
    store, gone, other = bench.store(), bench.store(), bench.store()
    claim, lost, following = bench.claim("a"), bench.claim("gone"), bench.claim("b")
    await bench.acquire(store, claim)
    box, _ = await bench.enqueue(gone, lost)
    next_box, _ = await bench.enqueue(other, following)
    box.close()
    await gone.close()
    await store.release(bench.name, claim.holder, bench.until())
    await bench.next_grant(next_box)
    equal((await bench.inspect(store)).holder, following.holder, "an unreachable waiter is skipped")


async def expired_ticket(bench: Bench) -> None:
    """A ticket expires with its ttl if the waiter does not repeat its claim."""
    store, silent, other = bench.store(), bench.claim("silent", ttl=bench.brief), bench.claim("b")
    await bench.acquire(store, bench.claim("a", ttl=12 * bench.brief))
    await bench.enqueue(store, silent)

    async def freed() -> Granted | None:
        answer = await store.acquire(other, None, bench.until())
        equal((await bench.inspect(store)).holder != silent.holder, True, "an expired ticket is never granted")
        return answer if isinstance(answer, Granted) else None

    await bench.poll(freed, "a lock whose queue has expired is free")


async def mailbox_timeout(bench: Bench) -> None:
    """A wait for a notification ends at its deadline, not earlier."""
    store, claim, waiter = bench.store(), bench.claim("a"), bench.claim("b")
    await bench.acquire(store, claim)
    box, _ = await bench.enqueue(store, waiter)
    until = bench.runtime.now() + 2 * bench.brief
    equal(await box.wait(until), None, "no notification arrives while the lock is held")
    more(bench.runtime.now(), until - bench.brief, "a wait lasts until its deadline")


async def inspection(bench: Bench) -> None:
    """`inspect` reports holder, fence, times and waiters in order, and changes nothing."""
    store, claims = bench.store(), [bench.claim(label) for label in ("a", "b", "c")]
    free = await bench.inspect(store)
    equal(free, LockInfo(bench.name), "an unused lock has no holder, fence or waiters")
    fence = await bench.acquire(store, claims[0])
    for claim in claims[1:]:
        await bench.enqueue(store, claim)
    info = await bench.inspect(store)
    equal((info.name, info.holder, info.fence), (bench.name, claims[0].holder, fence), "the holder is reported")
    equal(info.owner, Owner("host", 1, "a"), "the owner is reported")
    equal([one.holder for one in info.waiters], [claim.holder for claim in claims[1:]], "waiters are listed in order")
    equal([one.owner and one.owner.label for one in info.waiters], ["b", "c"], "waiters have their owners")
    equal(info.waiting, 2, "waiters are counted")
    times = (info.held_for, info.ttl_left, *(one.waiting_for for one in info.waiters))
    for time in times:
        equal(time is not None and 0 <= time <= LONG, True, f"times are seconds from 0 to {LONG:g}: {times}")


async def listing(bench: Bench) -> None:
    """`listing` returns every lock that matches, page by page, with its holder and number of waiters."""
    store, count = bench.store(), 20
    claims = [bench.claim(str(number))._replace(name=f"{bench.name}:{number}") for number in range(count)]
    fences = [await bench.acquire(store, claim) for claim in claims]
    waiter = claims[3]._replace(holder=bench.runtime.new_holder_id())
    box = await bench.mailbox(store, waiter.holder)
    await store.acquire(waiter, Enqueue(box.address, 1, None), bench.until())
    await store.release(claims[5].name, claims[5].holder, bench.until())
    found = await bench.listing(store, f"{bench.name}:*")
    equal(sorted(found), sorted(claim.name for claim in claims), "every matching lock is listed, and no other")
    holders = [None if at == 5 else claim.holder for at, claim in enumerate(claims)]
    equal([found[claim.name].holder for claim in claims], holders, "holders are listed")
    listed = [found[claim.name].fence or 0 for claim in claims]
    if (await store.facts(bench.until())).topology is Topology.QUORUM:  # one server may be ahead of a majority
        listed = list(map(min, listed, fences))
    equal(listed, fences, "fences are listed, also of free locks")
    waiting = [found[claim.name].waiting for claim in claims]
    equal(waiting, [int(at == 3) for at in range(count)], "waiters are counted")
    equal(found[claims[2].name].owner, Owner("host", 1, "2"), "owners are listed")


async def force_release(bench: Bench) -> None:
    """`force_release` ends the named holder's grant; the first waiter gets the lock with a new fence."""
    store, other, first, second = bench.store(), bench.store(), bench.claim("a"), bench.claim("b")
    fence = await bench.acquire(store, first)
    box, _ = await bench.enqueue(other, second)
    equal(await other.force_release(bench.name, second.holder, bench.until()), False, "a waiter has no grant to lose")
    equal((await bench.inspect(store)).waiting, 1, "a waiter keeps its ticket")
    equal(await other.force_release(bench.name, first.holder, bench.until()), True, "the holder loses its grant")
    notification = await bench.next_grant(box)
    more(notification.fence, fence, "the first waiter gets the lock with a new fence")
    equal(await other.force_release(bench.name, first.holder, bench.until()), False, "a grant ends once")
    equal((await bench.inspect(store)).holder, second.holder, "the new holder keeps the lock")
    equal(await store.renew([Renewal(*first[:3])], bench.until()), [False], "the old holder cannot renew")
    equal(await other.force_release(bench.name, second.holder, bench.until()), True, "no waiter is needed")
    info = await bench.inspect(store)
    equal(info.locked, False, "without waiters the lock is free")
    more(info.fence or 0, notification.fence, "the fence grows even without a waiter")
    fresh = first._replace(holder=bench.runtime.new_holder_id())
    more(await bench.acquire(store, fresh), info.fence or 0, "fences grow")


CHECKS: tuple[Check, ...] = (
    repeated_acquire,
    denied_without_queueing,
    hand_off,
    tickets,
    queue_order,
    first_notification,
    release,
    renewal,
    final_renewal,
    adoption,
    expiry,
    expiry_hand_off,
    unreachable_waiter,
    expired_ticket,
    mailbox_timeout,
    inspection,
    listing,
    force_release,
    *NEEDS,
)


async def check_store(make_store: MakeStore, runtime: Runtime) -> None:
    """Run every check, each on a lock of its own. Raises `ContractBroken` at the first broken rule."""
    for check in CHECKS:
        await run_check(check, make_store, runtime)


async def run_check(check: Check, make_store: MakeStore, runtime: Runtime) -> bool:
    """Run one of `CHECKS`. False if it needs a capability that the store does not have."""
    bench = Bench(make_store, runtime)
    try:
        if check in NEEDS:
            store = bench.store()
            await bench.inspect(store)  # some capabilities are known only once it is connected
            if not NEEDS[check](store.capabilities):
                return False
        await check(bench)
    except ContractBroken as broken:
        raise ContractBroken(f"{check.__name__}: {check.__doc__ or ''} Broken: {broken}.") from None
    finally:
        await bench.close()
    return True
