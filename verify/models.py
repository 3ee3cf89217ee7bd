"""The models of the shipped lock: small worlds, each around one thing that can go wrong.

The ttl is 3 s throughout, so that a waiter asks again every second, which is also how often the keeper renews and the
waiter in front looks for itself: few interesting instants, hence a search that ends.
"""

from __future__ import annotations

from lockfast.client.export import Exported
from lockfast.client.lease import AsyncLease
from lockfast.core.validity import DRIFT
from lockfast.errors import LeaseLost
from verify.process import Process, Program
from verify.world import ALL_RULES, Client, Model

LOCK = "door"
TTL = 3.0


def user(*, renew: bool = False, timeout: float | None = None, rounds: int = 1, reasserts: bool = False) -> Program:
    """Take the lock, work, give it back."""

    async def program(me: Process) -> None:
        lock = me.locks(reasserts=reasserts).lock(LOCK, ttl=TTL, renew=renew)
        for _ in range(rounds):
            sent_at = me.now()
            lease = await lock.acquire(timeout=timeout)
            me.holds(lease)
            if timeout is not None:
                me.waited(sent_at, timeout)
            if lease is not None:
                await me.work()
                await give_back(me, lease)

    return program


async def give_back(me: Process, lease: AsyncLease) -> None:
    """Release; and say so if the answer is no although the lease was good all the time."""
    good_until = me.now() + lease.remaining
    if not await lease.release() and me.now() < good_until:
        me.problem("RL", f"{lease.holder} gave back a lease that was good, and is told that it had gone")


async def giver(me: Process) -> None:
    """Take the lock, and hand the lease to whoever adopts it."""
    lease = await me.locks().lock(LOCK, ttl=TTL, renew=False).acquire()
    me.holds(lease)
    if lease is not None:
        await me.work()
        try:
            lease.export()
        except LeaseLost:
            return
        me.note(f"exports its lease: whoever knows {lease.holder} may adopt it")
        me.signal()


async def taker(me: Process) -> None:
    """Adopt the first lease of A."""
    await me.work()
    try:
        lease = await me.locks().adopt(Exported(LOCK, "A1", TTL).encode(), renew=False)
    except LeaseLost:
        me.note("is told that the exported lease is gone")
        return
    me.holds(lease)
    await me.work()
    await give_back(me, lease)


def _clients(names: str, program: Program | None = None) -> list[Client]:
    return [Client(name, program or user()) for name in names]


def _model(name: str, about: str, clients: list[Client], seconds: float, **faults: int) -> Model:
    return Model(name, clients, faults, seconds, about=about)


def full() -> list[Model]:
    """What `make explore` goes through."""
    renewing = [Client("A", user(renew=True)), Client("B", user())]
    edge = [Client("A", user(renew=True), rate=1 - DRIFT), Client("B", user(), rate=1 + DRIFT, offset=7.0)]
    return [
        _model("mutex", "three clients, each once", _clients("ABC"), 3.5),
        _model("killed and stopped", "a crash and a stop anywhere", _clients("AB"), 6.1, crash=1, pause=1),
        _model("queue with hand-off", "two rounds each, over the queue", _clients("AB", user(rounds=2)), 1.1, slow=1),
        _model("first steps", "nobody listens yet", [Client(x, user(), listening=False) for x in "AB"], 3.1, slow=1),
        _model("dead waiter at the head", "B may crash", _dead_head(), 3.1, crash=1),
        _model("renewal and a stop", "A renews, anyone may be stopped", renewing, 4.1, pause=1),
        _model("renewal on a slow net", "messages outlast an instant", renewing, 3.1, slow=1),
        _model("renewal and losses", "a request and a reply lost", renewing, 3.1, lose_request=1, lose_reply=1),
        _model("clocks at the limit", "rates apart by the drift, stops", edge, 3.1, pause=1),
        _restart(4.0),
        _reassert(2.1, user()),
        _failover(4.0),
        _model(
            "lost messages",
            "a request, a reply, a push",
            _clients("AB"),
            4.0,
            lose_request=1,
            lose_reply=1,
            lose_push=1,
        ),
        _model("silent losses", "nobody is told of the loss", _clients("AB"), 8.0, vanish=1, lose_push=1),
        _model("cut subscriptions", "and a push lost", _clients("AB"), 3.1, cut_inbox=1, lose_push=1),
        _model("late requests", "executed after they were given up", _clients("AB"), 3.1, late=1, slow=1),
        _adopt(slow=1, lose_reply=1),
        _model("timed-out waiters", "B and C have limits", _limited(), 3.1),
        _model("cancelled waiters", "B is cancelled anywhere", _cancelled("ABC"), 1.1, cancel=1),
        _model("cancelled and slow", "B is cancelled, messages are slow", _cancelled("AB"), 3.1, cancel=1, slow=1),
    ]


def quick() -> list[Model]:
    """A few seconds' worth of each kind, for every run of the tests."""
    renewing = [Client("A", user(renew=True)), Client("B", user())]
    edge = [Client("A", user(), rate=1 - DRIFT), Client("B", user(), rate=1 + DRIFT, offset=7.0)]
    return [
        _model("mutex", "three clients, each once", _clients("ABC"), 0.9),
        _model("killed", "a crash anywhere", _clients("AB"), 3.1, crash=1),
        _model("queue with hand-off", "two rounds each, over the queue", _clients("AB", user(rounds=2)), 1.1),
        _model("dead waiter at the head", "B may crash", _dead_head(), 0.9, crash=1),
        _model("renewal and a stop", "A renews, anyone may be stopped", renewing, 2.1, pause=1),
        _model("clocks at the limit", "rates apart by the drift, and a stop anywhere", edge, 3.1, pause=1),
        _restart(0.9),
        _reassert(1.1, user(timeout=0.0)),
        _failover(0.9),
        _model("lost messages", "a request, a reply or a push", _clients("AB"), 2.1, lose_reply=1, lose_push=1),
        _model("cut subscriptions", "and a push lost", _clients("AB"), 1.1, cut_inbox=1),
        _model("late requests", "executed after they were given up", _clients("AB"), 1.1, late=1),
        _adopt(lose_reply=1),
        _model("timed-out waiters", "B and C have limits", _limited(), 1.1),
        _model("cancelled waiters", "B is cancelled anywhere", _cancelled("AB"), 3.1, cancel=1),
    ]


def _restart(seconds: float) -> Model:
    # Who gives back to a server that has forgotten is rightly told that there was nothing, so `RL` is silent.
    about = "it loses keys, scripts and subscribers"
    return Model("restart that forgets", _clients("AB"), {"restart": 1}, seconds, about=about, rules=ALL_RULES - {"RL"})


def _reassert(seconds: float, other: Program, **faults: int) -> Model:
    clients = [Client("A", user(renew=True, reasserts=True)), Client("B", other)]
    about = "it loses all, and leases are taken back in"
    rules = ALL_RULES - {"RL"}
    return Model("forgotten and re-asserted", clients, {"restart": 1, **faults}, seconds, about=about, rules=rules)


def _failover(seconds: float) -> Model:
    about = "the master dies, and its replica has copied what it happens to have"
    rules = ALL_RULES - {"RL"}
    return Model("failover to a replica", _clients("AB"), {"failover": 1}, seconds, about=about, rules=rules)


def _dead_head() -> list[Client]:
    return [Client("A", user(), mortal=False), Client("B", user()), Client("C", user(), mortal=False)]


def _limited() -> list[Client]:
    return [Client("A", user()), Client("B", user(timeout=1.5)), Client("C", user(timeout=0.5))]


def _cancelled(names: str) -> list[Client]:
    return [Client(name, user(), cancellable=name == "B") for name in names]


def _adopt(**faults: int) -> Model:
    clients = [Client("A", giver), Client("B", taker, after="A"), Client("C", taker, after="A")]
    # Who exports is done and leaves the lock to its taker, so `CL` does not speak of it.
    return Model("adopt", clients, faults, 3.1, about="two takers of one lease", rules=ALL_RULES - {"CL"})
