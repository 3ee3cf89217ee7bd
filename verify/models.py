"""Models of the shipped lock: small worlds, each around one kind of fault.

The ttl is always 3 s: waiters refresh their tickets, the keepalive renews and the first waiter polls once a second.
So few instants matter, and the search terminates.
"""

from __future__ import annotations

from lockfast.client.all_of import AsyncLeaseSet
from lockfast.client.lease import AsyncLease
from lockfast.client.lease import ExportedLease as Exported
from lockfast.core.lease_state import DRIFT
from lockfast.errors import LeaseLost
from verify.process import LOCK, Process, Program
from verify.world import ALL_RULES, Client, Model

TTL = 3.0
DATA_LOSS_RULES = ALL_RULES - {"RL"}
"""RL does not apply to a server that lost its data: there, the release of a valid lease returns False."""
NOT_RELEASED = "{} released a valid lease, and the release returned False"


def user(*, renew: bool = False, timeout: float | None = None, rounds: int = 1, reasserts: bool = False) -> Program:
    """Acquire the lock, work, release it."""

    async def program(me: Process) -> None:
        lock = me.locks(reasserts=reasserts).lock(LOCK, ttl=TTL, renew=renew)
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


async def release(me: Process, lease: AsyncLease | AsyncLeaseSet) -> None:
    """Release the lease, and check that the release of a valid lease returns True."""
    valid_until = me.now() + lease.remaining
    if not await lease.release() and me.now() < valid_until:
        me.violate("RL", NOT_RELEASED.format(me.name))


async def exporter(me: Process) -> None:
    """Acquire the lock and export the lease."""
    lease = await me.locks().lock(LOCK, ttl=TTL, renew=False).acquire()
    me.record_acquire(lease)
    if lease is not None:
        await me.work()
        try:
            lease.export()
        except LeaseLost:
            return
        me.note(f"exports its lease: a client that knows {lease.holder} may adopt it")
        me.signal()


async def adopter(me: Process) -> None:
    """Adopt the first lease of A."""
    await me.work()
    try:
        lease = await me.locks().adopt(Exported(LOCK, "A1", TTL).encode(), renew=False)
    except LeaseLost:
        me.note("cannot adopt: the exported lease is lost")
        return
    me.record_acquire(lease)
    await me.work()
    await release(me, lease)


def _clients(names: str, program: Program | None = None) -> list[Client]:
    return [Client(name, program or user()) for name in names]


def _model(name: str, about: str, clients: list[Client], seconds: float, **faults: int) -> Model:
    return Model(name, clients, faults, seconds, about=about)


def full() -> list[Model]:
    """The models of `make explore`."""
    renewing = [Client("A", user(renew=True)), Client("B", user())]
    edge = [Client("A", user(renew=True), rate=1 - DRIFT), Client("B", user(), rate=1 + DRIFT, offset=7.0)]
    return [
        _model("mutex", "three clients, one round each", _clients("ABC"), 3.5),
        _model("crash and pause", "a crash and a pause at any point", _clients("AB"), 6.1, crash=1, pause=1),
        _model(
            "queue with hand-off", "two rounds each, through the queue", _clients("AB", user(rounds=2)), 1.1, slow=1
        ),
        _model(
            "no inbox yet", "no client has subscribed", [Client(x, user(), listening=False) for x in "AB"], 3.1, slow=1
        ),
        _model("dead waiter at the head", "B may crash", _dead_head(), 3.1, crash=1),
        _model("renewal and a pause", "A renews, either may be paused", renewing, 4.1, pause=1),
        _model("renewal, slow network", "messages outlast a timer", renewing, 3.1, slow=1),
        _model(
            "renewal, lost messages", "a lost request and a lost reply", renewing, 3.1, lose_request=1, lose_reply=1
        ),
        _model("maximum clock drift", "clock rates differ by the maximum drift; a pause", edge, 3.1, pause=1),
        _restart(4.0),
        _reassert(2.1, user()),
        _failover(4.0),
        _model(
            "lost messages",
            "a lost request, reply and notification",
            _clients("AB"),
            4.0,
            lose_request=1,
            lose_reply=1,
            lose_notification=1,
        ),
        _model("silent losses", "no connection error", _clients("AB"), 8.0, lose_silently=1, lose_notification=1),
        _model("cut subscriptions", "and a lost notification", _clients("AB"), 3.1, cut_inbox=1, lose_notification=1),
        _model("late requests", "executed after the client gave up", _clients("AB"), 3.1, execute_late=1, slow=1),
        _adopt(slow=1, lose_reply=1),
        _model("timed-out waiters", "B and C have timeouts", _with_timeouts(), 3.1),
        _model("cancelled waiters", "B is cancelled at any point", _cancelled("ABC"), 1.1, cancel=1),
        _model("cancelled, slow network", "B is cancelled at any point", _cancelled("AB"), 3.1, cancel=1, slow=1),
    ]


def quick() -> list[Model]:
    """Small versions, for every test run."""
    renewing = [Client("A", user(renew=True)), Client("B", user())]
    edge = [Client("A", user(), rate=1 - DRIFT), Client("B", user(), rate=1 + DRIFT, offset=7.0)]
    return [
        _model("mutex", "three clients, one round each", _clients("ABC"), 0.9),
        _model("crash", "a crash at any point", _clients("AB"), 3.1, crash=1),
        _model("queue with hand-off", "two rounds each, through the queue", _clients("AB", user(rounds=2)), 1.1),
        _model("dead waiter at the head", "B may crash", _dead_head(), 0.9, crash=1),
        _model("renewal and a pause", "A renews, either may be paused", renewing, 2.1, pause=1),
        _model("maximum clock drift", "clock rates differ by the maximum drift; a pause", edge, 3.1, pause=1),
        _restart(0.9),
        _reassert(1.1, user(timeout=0.0)),
        _failover(0.9),
        _model(
            "lost messages", "a lost reply and notification", _clients("AB"), 2.1, lose_reply=1, lose_notification=1
        ),
        _model("cut subscriptions", "an inbox is disconnected", _clients("AB"), 1.1, cut_inbox=1),
        _model("late requests", "executed after the client gave up", _clients("AB"), 1.1, execute_late=1),
        _adopt(lose_reply=1),
        _model("timed-out waiters", "B and C have timeouts", _with_timeouts(), 1.1),
        _model("cancelled waiters", "B is cancelled at any point", _cancelled("AB"), 3.1, cancel=1),
    ]


def _restart(seconds: float) -> Model:
    about = "the server loses keys, scripts and subscribers"
    return Model("restart without data", _clients("AB"), {"restart": 1}, seconds, about=about, rules=DATA_LOSS_RULES)


def _reassert(seconds: float, other: Program, **faults: int) -> Model:
    clients = [Client("A", user(renew=True, reasserts=True)), Client("B", other)]
    about = "the server loses everything, and leases are re-asserted"
    faults = {"restart": 1, **faults}
    return Model("lost and re-asserted", clients, faults, seconds, about=about, rules=DATA_LOSS_RULES)


def _failover(seconds: float) -> Model:
    about = "the master fails, and its replica lags by any number of writes"
    return Model("failover to a replica", _clients("AB"), {"failover": 1}, seconds, about=about, rules=DATA_LOSS_RULES)


def _dead_head() -> list[Client]:
    return [Client("A", user(), mortal=False), Client("B", user()), Client("C", user(), mortal=False)]


def _with_timeouts() -> list[Client]:
    return [Client("A", user()), Client("B", user(timeout=1.5)), Client("C", user(timeout=0.5))]


def _cancelled(names: str) -> list[Client]:
    return [Client(name, user(), cancellable=name == "B") for name in names]


def _adopt(**faults: int) -> Model:
    clients = [Client("A", exporter), Client("B", adopter, after="A"), Client("C", adopter, after="A")]
    # CL does not apply: the exporter finishes and leaves the lock to its adopter.
    return Model("adopt", clients, faults, 3.1, about="two clients adopt one lease", rules=ALL_RULES - {"CL"})
