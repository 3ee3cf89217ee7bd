"""Models of shared claims: readers and writers, permits, and several locks at once.

The ttl is always 3 s, as in `models.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from lockfast.client.lease import AsyncLease
from lockfast.client.lease import ExportedLease as Exported
from lockfast.client.lock import AsyncLock
from lockfast.client.locks import AsyncLocks
from lockfast.errors import LeaseLost
from verify.models import DATA_LOSS_RULES, TTL, release, user
from verify.process import LOCK, Process, Program
from verify.world import ALL_RULES, Client, Model

GATE = "gate"
"""The second lock of the models with two."""
writer = user


def using(choose: Callable[[AsyncLocks], AsyncLock], timeout: float | None = None, rounds: int = 1) -> Program:
    """Acquire the chosen lock, work, release it."""

    async def program(me: Process) -> None:
        lock = choose(me.locks(names=(LOCK, GATE)))
        for _ in range(rounds):
            sent_at = me.now()
            lease = await lock.acquire(timeout=timeout)
            me.record_acquire(lease)
            if timeout is not None:
                me.record_wait(sent_at, timeout)
            if lease is not None:
                await me.work()
                await release(me, lease)

    return program


def reader(*, renew: bool = False, timeout: float | None = None, rounds: int = 1, ttl: float = TTL) -> Program:
    return using(lambda locks: locks.rwlock(LOCK, ttl=ttl, renew=renew).reader, timeout, rounds)


def permits(number: int, limit: int, *, renew: bool = False, timeout: float | None = None, rounds: int = 1) -> Program:
    """Take that many permits of a semaphore with that limit."""
    return using(lambda locks: locks.semaphore(LOCK, limit, permits=number, ttl=TTL, renew=renew), timeout, rounds)


def downgrader(*, renew: bool = False) -> Program:
    """Write, then read under the same lease."""

    async def program(me: Process) -> None:
        lease = await me.locks().lock(LOCK, ttl=TTL, renew=renew).acquire()
        me.record_acquire(lease)
        if lease is None:
            return
        await me.work()
        try:
            await lease.downgrade()
            me.note("is a reader now")
        except LeaseLost:
            me.note("lost its lease before it was a reader")
        await me.work()
        await release(me, lease)

    return program


def reads_and_writes() -> Program:
    """One task reads and another one writes. A read lease must not be older than a write lease of its process: the
    store has lost it, and the process could know."""

    async def write(me: Process, lock: AsyncLock, fences: list[int]) -> None:
        await me.work()
        lease = await lock.acquire(timeout=0.0)
        me.record_acquire(lease)
        if lease is not None:
            fences.append(lease.fence)
            await me.work()
            await release(me, lease)

    async def program(me: Process) -> None:
        config, fences = me.locks().rwlock(LOCK, ttl=TTL, renew=False), [0]
        me.spawn(lambda: write(me, config.writer, fences), "writer")
        lease = await config.reader.acquire()
        me.record_acquire(lease)
        if lease is not None:
            if lease.fence < fences[-1]:
                me.violate("FT", f"the reader gets fence {lease.fence}, after the writer got {fences[-1]}")
            await me.work()
            await release(me, lease)

    return program


def all_of(*names: str, timeout: float | None = None, renew: bool = False) -> Program:
    """Acquire several locks, work, release them. `name:read` is a reader, `name:2/3` two of three permits."""

    async def program(me: Process) -> None:
        locks = me.locks(names=(LOCK, GATE))
        every = locks.all_of(*[_named(locks, name, renew) for name in names])
        known, sent_at = len(me.holder_ids), me.now()
        leases = await every.acquire(timeout=timeout)
        me.record_acquire_all(leases, known)
        if timeout is not None:
            me.record_wait(sent_at, timeout)
        if leases is not None:
            await me.work()
            await release(me, leases)

    return program


def _named(locks: AsyncLocks, name: str, renew: bool) -> AsyncLock:
    name, _, mode = name.partition(":")
    if mode == "read":
        return locks.rwlock(name, ttl=TTL, renew=renew).reader
    if mode:
        number, limit = map(int, mode.split("/"))
        return locks.semaphore(name, limit, permits=number, ttl=TTL, renew=renew)
    return locks.lock(name, ttl=TTL, renew=renew)


def lock_user(name: str) -> Program:
    """Acquire the lock of that name, work, release it."""
    return using(lambda locks: locks.lock(name, ttl=TTL, renew=False))


def later(seconds: float, program: Program) -> Program:
    """Run the program after a pause: fewer interleavings than from the start."""

    async def delayed(me: Process) -> None:
        await me.sleep(seconds)
        await program(me)

    return delayed


async def permit_exporter(me: Process) -> None:
    """Take two permits and export their lease."""
    lease = await me.locks().semaphore(LOCK, 3, permits=2, ttl=TTL, renew=False).acquire()
    me.record_acquire(lease)
    if lease is not None:
        await me.work()
        try:
            lease.export()
        except LeaseLost:
            return
        me.note(f"exports its lease: a client that knows {lease.holder} may adopt it")
        me.signal()


async def permit_adopter(me: Process) -> None:
    """Adopt the two permits of A."""
    await me.work()
    try:
        lease: AsyncLease = await me.locks().adopt(Exported(LOCK, "A1", TTL, 2, 3).encode(), renew=False)
    except LeaseLost:
        me.note("cannot adopt: the exported lease is lost")
        return
    me.record_acquire(lease)
    await me.work()
    await release(me, lease)


async def one_and_one(me: Process) -> None:
    """Take one of three permits, and another one if it is free."""
    semaphore = me.locks().semaphore(LOCK, 3, ttl=TTL, renew=False)
    for timeout in (None, 0.0):
        me.record_acquire(await semaphore.acquire(timeout=timeout))
    await me.work()
    for lease in list(me.leases):
        await lease._release()


def model(name: str, about: str, *programs: Program, seconds: float = 1.1, mortal: str = "ABC", **faults: int) -> Model:
    clients = [
        Client(one, program, mortal=one in mortal, cancellable=one == "A")
        for one, program in zip("ABC", programs, strict=False)
    ]
    rules = DATA_LOSS_RULES if "restart" in faults or "failover" in faults else ALL_RULES
    return Model(name, clients, faults, seconds, about=about, rules=rules, locks=(LOCK, GATE))


def _adopt(seconds: float, **faults: int) -> Model:
    clients = [
        Client("A", permit_exporter),
        Client("B", permit_adopter, after="A"),
        Client("C", one_and_one),
    ]
    # CL does not apply: the exporter finishes and leaves the permits to their adopter.
    about = "B adopts the permits of A, and C takes what is left"
    return Model("permits: adopt", clients, faults, seconds, about=about, rules=ALL_RULES - {"CL"})


def quick() -> list[Model]:
    """Small versions, for every test run."""
    both, reverse = all_of(LOCK, GATE), all_of(GATE, LOCK)
    return [
        model("readers: batch", "two readers enter together", writer(), reader(), reader(), seconds=0.9),
        model("readers: writer waits", "no later reader overtakes B", reader(), writer(), reader(), seconds=0.9),
        model("readers: crash", "A may crash", reader(), reader(), seconds=3.1, crash=1, mortal="A"),
        model("readers: downgrade", "B writes, C reads", downgrader(), writer(), reader(), seconds=0.9),
        model("readers: lost notification", "one of a batch", writer(), reader(), reader(), lose_notification=1),
        model("readers: restart", "the server loses everything", reader(), writer(), seconds=0.9, restart=1),
        model("readers: late requests", "executed late", reader(), writer(), execute_late=1),
        model("permits: crash", "B waits for A's permits", permits(2, 2), permits(1, 2), seconds=3.1, crash=1),
        model("permits: weights", "two weights compete", permits(2, 3), permits(2, 3), permits(1, 3), seconds=0.9),
        model("permits: limits", "claims disagree", permits(1, 1), permits(1, 2), permits(1, 1), seconds=0.9),
        model("all_of: opposite orders", "while C has one", both, reverse, lock_user(GATE), seconds=0.9),
        model("all_of: cancelled", "A is cancelled at any point", both, lock_user(GATE), cancel=1),
    ]


def full() -> list[Model]:
    """The models of `make explore`: longer, with more faults."""
    return [*_readers(), *_readers_and_lost_data(), *_permits(), *_all_of()]


def _readers() -> list[Model]:
    renewing, batch = reader(renew=True), (writer(), reader(), reader())
    alone = "readers: crash while another renews"
    return [
        model("readers: batch", "two readers enter together", *batch, seconds=3.5),
        model("readers: writer waits", "no later reader overtakes B", reader(), writer(), reader(), seconds=3.5),
        model(alone, "A may crash", reader(), renewing, later(0.5, writer()), seconds=3.1, crash=1, mortal="A"),
        model("readers: pause", "of the reader or the writer", renewing, writer(), seconds=4.1, pause=1),
        model("readers: dead writer", "B", reader(), writer(), later(0.5, reader()), seconds=2.1, crash=1, mortal="B"),
        model("readers: two rounds", "each", reader(rounds=2), writer(rounds=2), slow=1),
        model("readers: timeouts", "B and C", writer(), reader(timeout=0.5), reader(timeout=1.5), seconds=3.1),
        model("readers: impatient writer", "B", reader(), writer(timeout=0.5), reader(), seconds=2.1),
        model("readers: cancelled", "A", reader(), writer(), reader(), cancel=1),
        model("readers: downgrade", "B writes, C reads", downgrader(renew=True), writer(), reader(), seconds=2.1),
        model("readers: downgrade, pause", "of A", downgrader(), writer(), seconds=4.1, pause=1, mortal="A"),
    ]


def _readers_and_lost_data() -> list[Model]:
    renewing, batch = reader(renew=True), (writer(), reader(), reader())
    name = "readers: downgrade, lost messages"
    return [
        model(
            name, "a request and a reply", downgrader(renew=True), reader(), seconds=2.1, lose_request=1, lose_reply=1
        ),
        model("readers: lost notification", "one of a batch", *batch, seconds=2.1, lose_notification=1),
        model(
            "readers: lost messages",
            "a request and a reply",
            renewing,
            writer(),
            seconds=3.1,
            lose_request=1,
            lose_reply=1,
        ),
        model("readers: silent losses", "no connection error", reader(), writer(), seconds=8.0, lose_silently=1),
        model("readers: cut subscriptions", "of one client", *batch, cut_inbox=1),
        model("readers: restart", "no data", reader(), writer(), later(0.3, reader()), seconds=0.5, restart=1),
        model("readers: restart, two tasks", "of A", reads_and_writes(), writer(), seconds=0.01, restart=1),
        model("readers: failover", "to a lagging replica", reader(), writer(), seconds=3.1, failover=1),
        model("readers: late requests", "executed late", reader(), writer(), seconds=3.1, execute_late=1, slow=1),
    ]


def _permits() -> list[Model]:
    one, renewing, twice = permits(1, 2), permits(1, 2, renew=True), permits(1, 1, rounds=2)
    weights = permits(2, 3), permits(2, 3), permits(1, 3)
    impatient = permits(2, 3), permits(3, 3, timeout=0.5), permits(1, 3)
    only = permits(1, 1)
    return [
        model("permits: crash", "of A", permits(2, 2), one, later(0.5, one), seconds=3.1, crash=1, mortal="A"),
        model("permits: crash, B renews", "A", one, renewing, later(0.5, one), seconds=3.1, crash=1, mortal="A"),
        model("permits: pause", "of one client", permits(1, 1, renew=True), only, seconds=4.1, pause=1),
        model("permits: weights", "two weights compete", *weights, seconds=3.5),
        model("permits: weights, lost notification", "two weights compete", *weights, lose_notification=1),
        model("permits: limits", "claims disagree", only, permits(1, 2), only, seconds=3.5),
        model("permits: impatient", "B", *impatient, seconds=2.1),
        model("permits: two rounds", "each", twice, twice, slow=1),
        model("permits: restart", "the server loses everything", one, one, one, seconds=0.9, restart=1),
        model("permits: late requests", "executed late", only, only, seconds=3.1, execute_late=1, slow=1),
        model("permits: lock", "A holds the name exclusively", writer(), one, one, seconds=3.1),
        _adopt(3.1, lose_reply=1),
    ]


def _all_of() -> list[Model]:
    both, reverse, gate = all_of(LOCK, GATE), all_of(GATE, LOCK), lock_user(GATE)
    renewing, mixed = all_of(LOCK, GATE, renew=True), all_of("door:read", "gate:1/2")
    patient, hasty = all_of(LOCK, GATE, timeout=1.5), all_of(LOCK, GATE, timeout=0.5)
    return [
        model("all_of: opposite orders", "while C has one", both, reverse, gate, seconds=3.5),
        model("all_of: slow messages", "of two clients", both, reverse, seconds=3.5, slow=1),
        model("all_of: renewal", "A renews", renewing, gate, seconds=2.1, slow=1),
        model("all_of: crash", "of one client", both, reverse, gate, seconds=3.1, crash=1, mortal="A"),
        model("all_of: cancelled", "A", both, gate, lock_user(LOCK), cancel=1),
        model("all_of: lost messages", "two", both, gate, seconds=2.1, lose_request=1, lose_reply=1),
        model("all_of: late requests", "executed late", both, gate, seconds=2.1, execute_late=1),
        model("all_of: timeouts", "A and B", hasty, patient, gate, seconds=2.1),
        model("all_of: modes", "a reader and a permit", mixed, both, gate, cancel=1),
    ]
