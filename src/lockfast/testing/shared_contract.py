"""The part of the store contract for shared claims: readers, permits, and several locks in one request.

`contract.CHECKS` includes these checks. A store that does not offer what a check needs (`NEEDS`) is excused from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lockfast.errors import ConfigurationError
from lockfast.ports import Capabilities, Store
from lockfast.testing.bench import LONG, Bench, Check, ContractBroken, as_a, equal, more
from lockfast.values import Claim, Enqueue, FirstNotification, Granted, LockInfo, Mode, Queued, Renewal, Taken

GRANTED = "an admitted claim is granted"
LIMIT = 8  # of the checks that run in every shared mode


def holders(info: LockInfo) -> list[str]:
    return [one.holder for one in info.holders]


def waiters(info: LockInfo) -> list[str]:
    return [one.holder for one in info.waiters]


def ids(*claims: Claim) -> list[str]:
    return [claim.holder for claim in claims]


def ttl_left(info: LockInfo, claim: Claim) -> float:
    return next((one.ttl_left or 0.0 for one in info.holders if one.holder == claim.holder), 0.0)


def shared_modes(bench: Bench, store: Store) -> Iterator[int]:
    """Yield the limit of a claim in each shared mode that the store grants, each time with a new lock."""
    for limit, granted in ((0, store.capabilities.readers), (LIMIT, store.capabilities.permits)):
        if granted:
            bench.rename()
            yield limit


async def readers_together(bench: Bench) -> None:
    """Readers hold the lock together, each with its own fence. They keep writers out, and a writer keeps them out."""
    store, other = bench.store(), bench.store()
    readers, writer = [bench.claim(label, weight=1) for label in "abc"], bench.claim("writer")
    answers = [
        await bench.answer(Granted, GRANTED, at, claim)
        for at, claim in zip((store, other, store), readers, strict=True)
    ]
    fences = [answer.fence for answer in answers]
    equal(fences, sorted(set(fences)), "every reader has its own fence, and fences grow")
    equal([answer.slots for answer in answers], [()] * 3, "readers have no slots")
    for reader in readers:
        await bench.answer(Taken, "a writer is denied while somebody reads", other, writer)
        equal(await store.release(bench.name, reader.holder, bench.until()), True, "a reader releases its own grant")
    more(await bench.acquire(other, writer), fences[-1], "fences grow from mode to mode")
    await bench.answer(Taken, "a reader is denied while somebody writes", store, readers[0])
    equal(holders(await bench.inspect(store)), ids(writer), "a denied reader changes nothing")


async def readers_in_one_batch(bench: Bench) -> None:
    """After a writer, all readers ahead of the next writer are granted at once; those behind it wait."""
    store, other, writer = bench.store(), bench.store(), bench.claim("writer")
    first, second, late = (bench.claim(label, weight=1) for label in ("first", "second", "late"))
    next_writer = bench.claim("next writer")
    fence = await bench.acquire(store, writer)
    boxes = [(await bench.enqueue(other, claim))[0] for claim in (first, second, next_writer, late)]
    await store.release(bench.name, writer.holder, bench.until())
    info = await bench.inspect(store)
    equal(holders(info), ids(first, second), "one release lets in all readers at the head of the queue")
    equal(waiters(info), ids(next_writer, late), "a writer and the reader behind it stay in the queue")
    for box in boxes[:2]:
        more((await bench.next_grant(box)).fence, fence, "each reader is notified of its own fence")
    for reader in (first, second):
        equal(holders(await bench.inspect(store))[-1], second.holder, "the writer waits for the last reader")
        await other.release(bench.name, reader.holder, bench.until())
    await bench.next_grant(boxes[2])
    equal(holders(await bench.inspect(store)), ids(next_writer), "the next writer is alone")
    await other.release(bench.name, next_writer.holder, bench.until())
    await bench.next_grant(boxes[3])


async def waiting_writer_stops_readers(bench: Bench) -> None:
    """A reader that arrives after a waiting writer waits behind it. The head is notified when it becomes first."""
    store, other = bench.store(), bench.store()
    reader, newcomer, writer = bench.claim("a", weight=1), bench.claim("b", weight=1), bench.claim("writer")
    await bench.answer(Granted, GRANTED, store, reader)
    box, _ = await bench.enqueue(other, writer)
    await bench.answer(Taken, "nobody overtakes a waiting writer", store, newcomer)
    next_box, queued = await bench.enqueue(store, newcomer, attempt=3)
    equal(queued.position, 1, "a position counts the waiters ahead")
    await store.release(bench.name, reader.holder, bench.until())
    await bench.next_grant(box)
    equal(waiters(await bench.inspect(store)), ids(newcomer), "the reader waits until the writer ends")
    first = as_a(FirstNotification, await next_box.wait(bench.until()), "the waiter that becomes first is notified")
    equal(first.attempt, 3, "the notification names the last attempt")
    await other.release(bench.name, writer.holder, bench.until())
    equal((await bench.next_grant(next_box)).attempt, 3, "the reader is granted after the writer")


async def permits_and_slots(bench: Bench) -> None:
    """Permits are granted up to the limit, with the lowest slots that are free. They exclude a lock of that name."""
    store, other = bench.store(), bench.store()
    one, two, three = (bench.claim(label, weight=int(label), limit=3) for label in "123")
    equal((await bench.answer(Granted, GRANTED, store, one)).slots, (0,), "the lowest slot comes first")
    equal((await bench.answer(Granted, GRANTED, other, two)).slots, (1, 2), "each permit has its own slot")
    again = bench.claim("again", weight=1, limit=3)
    await bench.answer(Taken, "no permit is granted above the limit", other, again)
    await bench.answer(Taken, "an exclusive claim is denied while permits are taken", other, bench.claim("lock"))
    equal(await store.release(bench.name, one.holder, bench.until()), True, "permits are released by their holder")
    equal((await bench.answer(Granted, GRANTED, other, again)).slots, (0,), "a free slot is used again")
    await store.release(bench.name, two.holder, bench.until())
    await bench.answer(Taken, "a claim for more permits than are free is denied", store, three)
    equal((await bench.inspect(store)).permits, 1, "a denied claim takes no permit")
    await store.release(bench.name, again.holder, bench.until())
    equal((await bench.answer(Granted, GRANTED, store, three)).slots, (0, 1, 2), "one claim may take all permits")
    await store.release(bench.name, three.holder, bench.until())
    lock = bench.claim("lock")
    await bench.acquire(store, lock)
    await bench.answer(Taken, "a permit is denied while the lock is held", other, one)


async def limit_of_the_claim(bench: Bench) -> None:
    """Each claim is admitted by its own limit, so that a limit can change while permits are taken."""
    store = bench.store()
    first = bench.claim("a", weight=2, limit=2)
    await bench.answer(Granted, GRANTED, store, first)
    await bench.answer(Taken, "the limit is reached", store, bench.claim("b", weight=1, limit=2))
    raised = await bench.answer(Granted, "a raised limit admits more", store, bench.claim("c", weight=1, limit=3))
    equal(raised.slots, (2,), "the new permit has a slot of its own")
    await store.release(bench.name, first.holder, bench.until())
    await bench.answer(Taken, "a lowered limit counts all permits", store, bench.claim("d", weight=1, limit=1))
    lowered = await bench.answer(Granted, GRANTED, store, bench.claim("e", weight=1, limit=2))
    equal(lowered.slots, (0,), "the lowest free slot is used")


async def weights_in_order(bench: Bench) -> None:
    """Nobody overtakes a claim for many permits, even if a permit is free. A grant notification has the slots."""
    store, other = bench.store(), bench.store()
    holder, heavy, light = (
        bench.claim(label, weight=weight, limit=3) for label, weight in zip("abc", (1, 3, 1), strict=True)
    )
    await bench.answer(Granted, GRANTED, store, holder)
    box, queued = await bench.enqueue(other, heavy)
    equal(0 < (queued.ttl_left or 0) <= LONG, True, "the answer says when permits may be free")
    await bench.answer(Taken, "a claim for one permit does not overtake", store, light)
    next_box, _ = await bench.enqueue(store, light)
    await store.release(bench.name, holder.holder, bench.until())
    equal((await bench.next_grant(box)).slots, (0, 1, 2), "the notification has the slots")
    equal(waiters(await bench.inspect(store)), ids(light), "the claim behind waits for a permit")
    await other.release(bench.name, heavy.holder, bench.until())
    equal((await bench.next_grant(next_box)).slots, (0,), "the next claim is granted")


async def repeated_shared_claim(bench: Bench) -> None:
    """A repeated shared claim returns the same fence and slots, with the full ttl from now."""
    store = bench.store()
    for limit in shared_modes(bench, store):
        claim, other = (bench.claim(label, ttl=1, weight=1, limit=limit) for label in "ab")
        granted = await bench.answer(Granted, GRANTED, store, claim)
        await bench.answer(Granted, GRANTED, store, other)
        again = await bench.answer(Granted, "a repeated claim is granted", store, claim._replace(ttl=LONG))
        equal(again[::2], granted[::2], "a repeated claim keeps its fence and slots")
        info = await bench.inspect(store)
        equal(holders(info), ids(claim, other), "a repeated claim is no second grant")
        more(ttl_left(info, claim), LONG / 2, "a repeated claim extends its grant")
        more(1.001, ttl_left(info, other), "a repeated claim extends no other grant")


async def shared_expiry(bench: Bench) -> None:
    """Each shared grant expires by its own ttl: it neither shortens nor extends another."""
    store = bench.store()
    for limit in shared_modes(bench, store):
        steady, brief, lock = (
            bench.claim("a", weight=1, limit=limit),
            bench.claim("b", ttl=bench.brief),
            bench.claim("c"),
        )
        brief = brief._replace(weight=1, limit=limit)
        await bench.answer(Granted, GRANTED, store, steady)
        slots = (await bench.answer(Granted, GRANTED, store, brief)).slots

        async def expired(steady: Claim = steady) -> bool | None:
            return holders(await bench.inspect(store)) == ids(steady) or None

        await bench.poll(expired, "a shared grant expires with its own ttl")
        more(ttl_left(await bench.inspect(store), steady), LONG / 2, "the other grant keeps its ttl")
        renewals = [Renewal(*one[:3], shared=True) for one in (brief, steady)]
        equal(await store.renew(renewals, bench.until()), [False, True], "only the expired grant is lost")
        equal(await store.release(bench.name, brief.holder, bench.until()), False, "an expired grant is gone")
        await bench.answer(Taken, "the lock is held while one grant lives", store, lock)
        successor = await bench.answer(Granted, GRANTED, store, bench.claim("d", weight=1, limit=limit))
        equal(successor.slots, slots, "the slots of an expired grant are free")


async def shared_renewal(bench: Bench) -> None:
    """A renewal extends one shared grant among many; a final renewal sets its end."""
    store = bench.store()
    for limit in shared_modes(bench, store):
        claims = [bench.claim(label, ttl=5, weight=1, limit=limit) for label in "abc"]
        for claim in claims[:2]:
            await bench.answer(Granted, GRANTED, store, claim)
        batch = [Renewal(bench.name, claim.holder, LONG, shared=True) for claim in claims[1:]]
        equal(await store.renew(batch, bench.until()), [True, False], "each renewal of a batch has its own answer")
        info = await bench.inspect(store)
        equal(holders(info), ids(*claims[:2]), "a renewal grants nothing")
        more(5.001, ttl_left(info, claims[0]), "a renewal extends no other grant")
        more(ttl_left(info, claims[1]), LONG / 2, "a renewal sets the ttl that it names")
        shorter = [one._replace(ttl=1.0) for one in batch[:1]]
        equal(await store.renew(shorter, bench.until()), [True], "a renewal with a shorter ttl is valid")
        more(ttl_left(await bench.inspect(store), claims[1]), LONG / 2, "it does not shorten the grant")
        final = [batch[0]._replace(ttl=LONG / 4, final=True), batch[1]._replace(ttl=1.0, final=True)]
        equal(await store.renew(final, bench.until()), [True, False], "the holder sets its own end")
        left = ttl_left(await bench.inspect(store), claims[1])
        equal(LONG / 8 < left <= LONG / 4 + 0.001, True, f"a final renewal may shorten a grant, here to {left:g} s")
        equal(holders(await bench.inspect(store)), ids(*claims[:2]), "a final renewal ends no other grant")


async def shared_release(bench: Bench) -> None:
    """A release ends only the holder's own shared grant, and only once."""
    store, other = bench.store(), bench.store()
    for limit in shared_modes(bench, store):
        first, second, stranger = (bench.claim(label, weight=1, limit=limit) for label in "abc")
        await bench.answer(Granted, GRANTED, store, first)
        await bench.answer(Granted, GRANTED, other, second)
        equal(await store.release(bench.name, stranger.holder, bench.until()), False, "a stranger releases nothing")
        equal(holders(await bench.inspect(store)), ids(first, second), "a stranger's release changes nothing")
        equal(await store.release(bench.name, first.holder, bench.until()), True, "a holder releases its own grant")
        equal(await store.release(bench.name, first.holder, bench.until()), False, "a repeated release finds no grant")
        equal(holders(await bench.inspect(store)), ids(second), "the other grant stays")
        equal(await other.release(bench.name, second.holder, bench.until()), True, "the last holder releases")
        equal((await bench.inspect(store)).locked, False, "then the lock is free")


async def shared_force_release(bench: Bench) -> None:
    """`force_release` ends the named shared grant; the others stay, and the lock is free after the last."""
    store, other = bench.store(), bench.store()
    for limit in shared_modes(bench, store):
        first, second = (bench.claim(label, weight=1, limit=limit) for label in "ab")
        await bench.answer(Granted, GRANTED, store, first)
        fence = (await bench.answer(Granted, GRANTED, store, second)).fence
        equal(await other.force_release(bench.name, first.holder, bench.until()), True, "the named grant ends")
        equal(await other.force_release(bench.name, first.holder, bench.until()), False, "a grant ends once")
        lost, kept = (Renewal(*one[:3], shared=True) for one in (first, second))
        equal(await store.renew([lost, kept], bench.until()), [False, True], "only the named holder lost its grant")
        equal(holders(await bench.inspect(store)), ids(second), "the other grant stays")
        equal(await other.force_release(bench.name, second.holder, bench.until()), True, "the last grant can end too")
        more(await bench.acquire(store, bench.claim("lock")), fence, "then the lock is free")


async def shared_adoption(bench: Bench) -> None:
    """One shared grant among many moves to a new holder, once: with a new fence, the same mode and the same slots."""
    store, other = bench.store(), bench.store()
    for limit in shared_modes(bench, store):
        old, second, new, late = (bench.claim(label, weight=1, limit=limit) for label in "abcd")
        granted = await bench.answer(Granted, GRANTED, store, old)
        fence = (await bench.answer(Granted, GRANTED, store, second)).fence
        adopted = as_a(Granted, await other.adopt(new, old.holder, bench.until()), "a shared grant can be adopted")
        more(adopted.fence, fence, "an adopted grant has a new fence")
        equal(adopted.slots, granted.slots, "an adopted grant keeps its slots")
        equal(await other.adopt(new, old.holder, bench.until()), adopted, "a repeated adoption changes nothing")
        equal(await other.adopt(late, old.holder, bench.until()), None, "a grant is adopted once")
        stale, fresh = (Renewal(*one[:3], shared=True) for one in (old, new))
        equal(await store.renew([stale, fresh], bench.until()), [False, True], "only the new holder can renew")
        info = await bench.inspect(store)
        equal(holders(info), ids(second, new), "the adopter takes the place of the old holder")
        equal({one.mode for one in info.holders}, {new.mode}, "an adopted grant keeps its mode")


async def downgrade(bench: Bench) -> None:
    """A writer becomes a reader in one step, with the same fence; a repeat changes nothing."""
    store, other = bench.store(), bench.store()
    writer, reader = bench.claim("writer", ttl=5), bench.claim("reader", weight=1)
    fence = await bench.acquire(store, writer)
    under_way = Renewal(bench.name, writer.holder, 5.0, shared=True)
    equal(await store.renew([under_way], bench.until()), [True], "a shared renewal finds a grant not yet downgraded")
    await bench.answer(Taken, "that renewal does not downgrade it", other, reader)
    now_reading = writer._replace(ttl=LONG, weight=1)
    for _ in range(2):
        equal(await store.downgrade(now_reading, bench.until()), True, "the writer becomes a reader, also by a repeat")
        info = await bench.inspect(store)
        equal([one[:3:2] for one in info.holders], [(writer.holder, fence)], "the grant keeps its fence")
        equal(info.mode, Mode.READ, "the grant is a reader's")
        more(info.ttl_left or 0, LONG / 2, "the grant is extended")
    more((await bench.answer(Granted, "other readers may enter", other, reader)).fence, fence, "fences grow")
    equal(await store.renew([under_way], bench.until()), [True], "the reader can renew")
    equal(await store.downgrade(reader._replace(holder="nobody"), bench.until()), False, "a stranger has nothing")
    equal(await store.release(bench.name, writer.holder, bench.until()), True, "the reader releases its grant")
    equal(await store.downgrade(now_reading, bench.until()), False, "a downgrade grants nothing")
    equal(holders(await bench.inspect(store)), ids(reader), "the other reader stays")


async def downgrade_serves_the_queue(bench: Bench) -> None:
    """A downgrade lets in the readers at the head of the queue, and no writer."""
    store, other = bench.store(), bench.store()
    writer, reader, next_writer = bench.claim("a"), bench.claim("b", weight=1), bench.claim("c")
    await bench.acquire(store, writer)
    box, _ = await bench.enqueue(other, reader)
    next_box, _ = await bench.enqueue(other, next_writer)
    equal(await store.downgrade(writer._replace(weight=1), bench.until()), True, "the writer becomes a reader")
    await bench.next_grant(box)
    info = await bench.inspect(store)
    equal(holders(info), ids(writer, reader), "the reader at the head of the queue enters")
    equal(waiters(info), ids(next_writer), "a queued writer stays out")
    equal(await store.downgrade(writer._replace(weight=1), bench.until()), True, "a downgrade may be repeated")
    await bench.answer(Taken, "a newcomer does not overtake", store, bench.claim("d", weight=1))
    for claim in (writer, reader):
        await store.release(bench.name, claim.holder, bench.until())
    await bench.next_grant(next_box)
    equal(holders(await bench.inspect(store)), ids(next_writer), "the writer enters after the last reader")


async def departed_head(bench: Bench) -> None:
    """If the head of the queue gives up, the store grants the waiters behind it that are admitted."""
    store, other = bench.store(), bench.store()
    for limit in shared_modes(bench, store):
        holder, first, second = (bench.claim(label, weight=1, limit=limit) for label in "abc")
        head = bench.claim("head")  # an exclusive claim
        await bench.answer(Granted, GRANTED, store, holder)
        boxes = [(await bench.enqueue(other, claim))[0] for claim in (head, first, second)]
        equal(await other.release(bench.name, head.holder, bench.until()), False, "a ticket is not a grant")
        for box in boxes[1:]:
            await bench.next_grant(box)
        equal(holders(await bench.inspect(store)), ids(holder, first, second), "all admitted waiters are granted")


async def unreachable_head(bench: Bench) -> None:
    """A claim that only the queue keeps out finds that the client of the head is closed, and is granted."""
    store, gone = bench.store(), bench.store()
    for limit in shared_modes(bench, store):
        holder, newcomer = (bench.claim(label, weight=1, limit=limit) for label in "ab")
        await bench.answer(Granted, GRANTED, store, holder)
        box, _ = await bench.enqueue(gone, bench.claim("gone"))
        box.close()
        await gone.close()
        await bench.acquire_expired(store, newcomer, "an unreachable head keeps nobody out")  # long before its ttl
        equal((await bench.inspect(store)).waiting, 0, "an unreachable waiter is removed")
        gone = bench.store()


async def expired_head(bench: Bench) -> None:
    """The ticket of a silent head expires, and then keeps nobody out."""
    store = bench.store()
    for limit in shared_modes(bench, store):
        holder, newcomer = (bench.claim(label, weight=1, limit=limit) for label in "ab")
        await bench.answer(Granted, GRANTED, store, holder)
        await bench.enqueue(store, bench.claim("silent", ttl=bench.brief))
        await bench.acquire_expired(store, newcomer, "a claim behind an expired ticket is granted")
        equal(holders(await bench.inspect(store)), ids(holder, newcomer), "the earlier grant stays")


async def other_mode_refused(bench: Bench) -> None:
    """A reader that finds permits, or a claim for permits that finds readers, is refused. Nothing changes."""
    store, other = bench.store(), bench.store()
    for limit in shared_modes(bench, store):
        holder = bench.claim("a", weight=1, limit=limit)
        stranger = bench.claim("b", weight=1, limit=0 if limit else LIMIT)
        await bench.answer(Granted, GRANTED, store, holder)
        before = await bench.inspect(store)
        try:
            answer = await other.acquire(stranger, None, bench.until())
        except ConfigurationError:
            after = await bench.inspect(store)
            equal((holders(after), after.fence, after.waiting), (ids(holder), before.fence, 0), "nothing changes")
        else:
            raise ContractBroken(f"a claim of the other mode raises ConfigurationError, but got {answer!r}")
        await store.release(bench.name, holder.holder, bench.until())
        await bench.answer(Granted, "a free lock takes either mode", other, stranger)


async def other_mode_queued(bench: Bench) -> None:
    """Readers and permits that wait for the same exclusive grant are granted in turn, and never together."""
    store, other = bench.store(), bench.store()
    lock, reader, permit = bench.claim("a"), bench.claim("b", weight=1), bench.claim("c", weight=1, limit=LIMIT)
    await bench.acquire(store, lock)
    boxes = [(await bench.enqueue(other, claim))[0] for claim in (reader, permit)]
    await store.release(bench.name, lock.holder, bench.until())
    await bench.next_grant(boxes[0])
    equal(holders(await bench.inspect(store)), ids(reader), "permits wait for the reader")
    repeated = Enqueue(boxes[1].address, 2, None)
    await bench.answer(Queued, "a claim that is queued already is not refused", other, permit, repeated)
    await other.release(bench.name, reader.holder, bench.until())
    equal((await bench.next_grant(boxes[1])).slots, (0,), "then the permits are granted")


async def several_at_once(bench: Bench) -> None:
    """`acquire_all` grants all claims or none; a repeat returns the same fences and extends the grants."""
    store, other = bench.store(), bench.store()
    claims = [bench.claim(label, ttl=5)._replace(name=f"{{{bench.name}}}:{label}") for label in "abc"]
    if store.capabilities.readers:
        claims[1] = claims[1]._replace(weight=1)
    if store.capabilities.permits:
        claims[2] = claims[2]._replace(weight=2, limit=4)
    rival = claims[2]._replace(holder=bench.runtime.new_holder_id(), weight=0, limit=0)
    fence = await bench.acquire(other, rival)
    equal(await store.acquire_all(claims, bench.until()), None, "if one lock is taken, nothing is granted")
    for claim in claims[:2]:
        equal((await store.inspect(claim.name, bench.until())).locked, False, "the other locks stay free")
    await other.release(rival.name, rival.holder, bench.until())
    granted = await store.acquire_all(claims, bench.until()) or []
    equal([len(one.slots) for one in granted], [0, 0, claims[2].weight], "all are granted at once, with their slots")
    more(granted[2].fence, fence, "fences grow")
    again = await store.acquire_all([claim._replace(ttl=LONG) for claim in claims], bench.until()) or []
    equal([one[::2] for one in again], [one[::2] for one in granted], "a repeat returns the same fences and slots")
    for claim, one in zip(claims, granted, strict=True):
        info = await other.inspect(claim.name, bench.until())
        equal((holders(info), info.mode, info.fence), (ids(claim), claim.mode, one.fence), "each lock has its grant")
        more(info.ttl_left or 0, LONG / 2, "a repeat extends the grants")


async def several_behind_a_queue(bench: Bench) -> None:
    """`acquire_all` overtakes no waiter."""
    store, other = bench.store(), bench.store()
    bench.name = f"{{{bench.name}}}:a"
    reader, writer, newcomer = bench.claim("a", weight=1), bench.claim("b"), bench.claim("c", weight=1)
    await bench.answer(Granted, GRANTED, store, reader)
    await bench.enqueue(other, writer)
    claims = [newcomer._replace(name=bench.name + ":free"), newcomer]
    equal(await store.acquire_all(claims, bench.until()), None, "nothing is granted if a waiter comes first")
    info = await bench.inspect(store)
    equal((holders(info), waiters(info)), (ids(reader), ids(writer)), "nothing changes")
    free = await store.inspect(claims[0].name, bench.until())
    equal((free.locked, free.waiting), (False, 0), "the other lock stays free")


async def shared_inspection(bench: Bench) -> None:
    """`inspect` and `listing` report every holder in the order of the fences, and waiters, each with its mode."""
    store = bench.store()
    for limit in shared_modes(bench, store):
        claims = [bench.claim(label, weight=2 if limit else 1, limit=limit) for label in "ab"]
        granted = [await bench.answer(Granted, GRANTED, store, claim) for claim in claims]
        lock, waiter = bench.claim("lock"), bench.claim("c", weight=3 if limit else 1, limit=limit)
        for claim in (lock, waiter):
            await bench.enqueue(store, claim)
        info, mode = await bench.inspect(store), waiter.mode
        shown = [(one.holder, one.fence, one.mode, one.slots) for one in info.holders]
        expected = [(claim.holder, one.fence, mode, one.slots) for claim, one in zip(claims, granted, strict=True)]
        equal(shown, expected, "every holder is reported with its fence, mode and slots")
        equal([one.owner and one.owner.label for one in info.holders], ["a", "b"], "holders have their owners")
        for one in info.holders:
            equal(0 <= (one.held_for or 0) <= (one.ttl_left or 0) <= LONG, True, f"times are in seconds: {one}")
        equal(info.fence, granted[-1].fence, "the last fence is reported")
        wanted = [(lock.holder, Mode.EXCLUSIVE, 0), (waiter.holder, mode, 3 if limit else 0)]
        equal([(one.holder, one.mode, one.permits) for one in info.waiters], wanted, "waiters have mode and permits")
        listed = (await bench.listing(store, bench.name)).get(bench.name, LockInfo(bench.name))
        shown = [(one.holder, one.fence, one.mode, one.slots) for one in listed.holders]
        equal((shown, listed.waiting), (expected, 2), "a listing has every holder and counts the waiters")


def any_mode(store: Capabilities) -> bool:
    return store.readers or store.permits


NEEDS: dict[Check, Callable[[Capabilities], bool]] = {
    readers_together: lambda store: store.readers,
    readers_in_one_batch: lambda store: store.readers,
    waiting_writer_stops_readers: lambda store: store.readers,
    permits_and_slots: lambda store: store.permits,
    limit_of_the_claim: lambda store: store.permits,
    weights_in_order: lambda store: store.permits,
    repeated_shared_claim: any_mode,
    shared_expiry: any_mode,
    shared_renewal: any_mode,
    shared_release: any_mode,
    shared_force_release: any_mode,
    shared_adoption: any_mode,
    downgrade: lambda store: store.readers,
    downgrade_serves_the_queue: lambda store: store.readers,
    departed_head: any_mode,
    unreachable_head: any_mode,
    expired_head: any_mode,
    other_mode_refused: lambda store: store.readers and store.permits,
    other_mode_queued: lambda store: store.readers and store.permits,
    several_at_once: lambda store: store.batches,
    several_behind_a_queue: lambda store: store.batches and store.readers,
    shared_inspection: any_mode,
}
"""The checks, each with what it needs of a store."""
