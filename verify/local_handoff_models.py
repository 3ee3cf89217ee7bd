"""Models in which one process has several tasks on one lock, so that it is passed on inside the process.

Each household is one client with one connection; its members are tasks. The rules are the same as for all models (at
most one lease is believed in at any instant, in whatever task); and on top of them a household checks that the fences
of its own leases rise in the order in which they are held.
"""

from __future__ import annotations

from lockfast.client.lease import AsyncLease
from lockfast.client.lock import AsyncLock
from verify.models import LOCK, TTL, give_back, user
from verify.process import Process, Program
from verify.world import ALL_RULES, Client, Model


def household(*limits: float | None, renew: bool = False, rounds: int = 1) -> Program:
    """As many tasks as there are limits, each of which takes the lock, works, and gives it back."""

    async def program(me: Process) -> None:
        lock = me.locks().lock(LOCK, ttl=TTL, renew=renew)
        held: list[int] = []
        for number, limit in enumerate(limits[1:], 2):
            me.spawn(lambda limit=limit: member(me, lock, held, limit, rounds), f"member {number}")  # type: ignore[misc]
        await member(me, lock, held, limits[0], rounds)

    return program


async def member(me: Process, lock: AsyncLock, held: list[int], limit: float | None, rounds: int) -> None:
    for _ in range(rounds):
        sent_at = me.now()
        lease = await lock.acquire(timeout=limit)
        if limit is not None:
            me.waited(sent_at, limit)
        if lease is not None:
            me.holds(lease)
            _compare(me, lease, held)
            await me.work()
            await give_back(me, lease)


def _compare(me: Process, lease: AsyncLease, held: list[int]) -> None:
    if held and lease.fence <= held[-1]:
        me.problem("FT", f"fence {lease.fence} is held after {held[-1]}")
    held.append(lease.fence)


def _model(name: str, about: str, clients: list[Client], seconds: float, **faults: int) -> Model:
    return Model(f"household: {name}", clients, faults, seconds, about=about)


def overrun() -> Model:
    return _model("overrun", "nobody need give back in time", [Client("A", household(None, None, None))], 3.3)


def forgotten() -> Model:
    # Who gives back to a server that has forgotten is rightly told that there was nothing, so `RL` is silent.
    clients = [Client("A", household(None, None)), Client("B", user())]
    about = "the server loses all, and fences go on from its clock"
    return Model("household: forgotten", clients, {"restart": 1}, 0.3, about=about, rules=ALL_RULES - {"RL"})


def quick() -> list[Model]:
    """For every run of the tests."""
    three = household(None, None, None)
    return [
        _model("alone", "three tasks of one process", [Client("A", three)], 1.1),
        _model("killed", "and a crash anywhere", [Client("A", three)], 1.1, crash=1),
        _model("cancelled", "one task is cancelled anywhere", [Client("A", three, cancellable=True)], 0.12, cancel=1),
        _model("limits", "two of three tasks have limits", [Client("A", household(None, 0.02, 0.3))], 1.1),
        _model("company", "and another process", [Client("A", three), Client("B", user())], 0.03),
    ]


def full() -> list[Model]:
    """With more time and more faults."""
    three, two = household(None, None, None), household(None, None)
    cancellable = [Client("A", three, cancellable=True)]
    renewing = household(None, None, renew=True)
    pair = [Client("A", two), Client("B", user())]
    return [
        *quick(),
        overrun(),
        _model("cancelled, for longer", "one task is cancelled anywhere", cancellable, 1.1, cancel=1),
        _model("stopped", "a stop anywhere", [Client("A", renewing)], 3.2, pause=1),
        _model("rounds", "two rounds each", [Client("A", household(None, None, rounds=2))], 1.1, slow=1),
        _model("lost", "a request and a reply lost", [Client("A", two)], 3.2, lose_request=1, lose_reply=1),
        _model("lost request", "of one of three tasks", [Client("A", three)], 1.1, lose_request=1),
        _model("lost reply", "to one of three tasks", [Client("A", three)], 1.1, lose_reply=1),
        _model("lost push", "and another process", pair, 1.1, lose_push=1),
        forgotten(),
        _model("company and a crash", "and another process", pair, 3.2, crash=1),
        _model("company and a stop", "and another process", pair, 3.2, pause=1),
        _model("two households", "of two, and a crash", [Client("A", two), Client("B", two)], 0.3, crash=1),
    ]
