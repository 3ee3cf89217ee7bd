"""Models in which several tasks of one process want one lock, so that it is handed off inside the process.

The general rules apply to every task: at most one lease is believed at any instant. In addition, each process checks
that the fences of its leases grow in the order in which it acquires them.
"""

from __future__ import annotations

from lockfast.client.lease import AsyncLease
from lockfast.client.lock import AsyncLock
from verify.models import DATA_LOSS_RULES, TTL, release, user
from verify.process import LOCK, Process, Program
from verify.world import Client, Model


def tasks(*timeouts: float | None, renew: bool = False, rounds: int = 1) -> Program:
    """One task per timeout; each acquires the lock, works and releases it."""

    async def program(me: Process) -> None:
        lock = me.locks().lock(LOCK, ttl=TTL, renew=renew)
        fences: list[int] = []
        for number, timeout in enumerate(timeouts[1:], 2):
            me.spawn(lambda timeout=timeout: one_task(me, lock, fences, timeout, rounds), f"task {number}")  # type: ignore[misc]
        await one_task(me, lock, fences, timeouts[0], rounds)

    return program


async def one_task(me: Process, lock: AsyncLock, fences: list[int], timeout: float | None, rounds: int) -> None:
    for _ in range(rounds):
        sent_at = me.now()
        lease = await lock.acquire(timeout=timeout)
        if timeout is not None:
            me.record_wait(sent_at, timeout)
        if lease is not None:
            me.record_acquire(lease)
            _check_fence(me, lease, fences)
            await me.work()
            await release(me, lease)


def _check_fence(me: Process, lease: AsyncLease, fences: list[int]) -> None:
    if fences and lease.fence <= fences[-1]:
        me.violate("FT", f"fence {lease.fence} follows fence {fences[-1]}")
    fences.append(lease.fence)


def _model(name: str, about: str, clients: list[Client], seconds: float, **faults: int) -> Model:
    return Model(f"local hand-off: {name}", clients, faults, seconds, about=about)


def overrun() -> Model:
    return _model("overrun", "no task has to release in time", [Client("A", tasks(None, None, None))], 3.3)


def restart(*, first_wait: bool = False) -> Model:
    """`first_wait`: no client has waited before, so the first requests do not enqueue."""
    clients = [Client("A", tasks(None, None), listening=not first_wait), Client("B", user(), listening=not first_wait)]
    name = "local hand-off: restart, first wait" if first_wait else "local hand-off: restart"
    about = "the server loses everything; its fences continue from its clock"
    return Model(name, clients, {"restart": 1}, 0.3, about=about, rules=DATA_LOSS_RULES)


def quick() -> list[Model]:
    """Small versions, for every test run."""
    three = tasks(None, None, None)
    cancellable = [Client("A", three, cancellable=True)]
    return [
        _model("three tasks", "one process", [Client("A", three)], 1.1),
        _model("crash", "a crash at any point", [Client("A", three)], 1.1, crash=1),
        _model("cancelled", "one task is cancelled at any point", cancellable, 0.12, cancel=1),
        _model("timeouts", "two of three tasks have timeouts", [Client("A", tasks(None, 0.02, 0.3))], 1.1),
        _model("two processes", "three tasks and another process", [Client("A", three), Client("B", user())], 0.03),
    ]


def full() -> list[Model]:
    """The models of `make explore`: longer, with more faults."""
    three, two = tasks(None, None, None), tasks(None, None)
    cancellable = [Client("A", three, cancellable=True)]
    renewing = tasks(None, None, renew=True)
    pair = [Client("A", two), Client("B", user())]
    return [
        *quick(),
        overrun(),
        _model("cancelled later", "one task is cancelled at any point", cancellable, 1.1, cancel=1),
        _model("pause", "a pause at any point", [Client("A", renewing)], 3.2, pause=1),
        _model("rounds", "two rounds each", [Client("A", tasks(None, None, rounds=2))], 1.1, slow=1),
        _model("lost messages", "a request and a reply", [Client("A", two)], 3.2, lose_request=1, lose_reply=1),
        _model("lost request", "of one of three tasks", [Client("A", three)], 1.1, lose_request=1),
        _model("lost reply", "to one of three tasks", [Client("A", three)], 1.1, lose_reply=1),
        _model("lost notification", "two tasks and another process", pair, 1.1, lose_notification=1),
        restart(),
        restart(first_wait=True),
        _model("two processes, crash", "two tasks and another process", pair, 3.2, crash=1),
        _model("two processes, pause", "two tasks and another process", pair, 3.2, pause=1),
        _model("two by two", "two processes of two tasks", [Client("A", two), Client("B", two)], 0.3, crash=1),
    ]
