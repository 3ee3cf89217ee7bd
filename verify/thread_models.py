"""Models of the blocking colour: clients whose programs are written for threads, on the short way (`core/express.py`).

The rules are those of all models. An interrupt (Ctrl-C) is to a thread what a cancellation is to a task.
"""

from __future__ import annotations

from verify import waits
from verify.greenlets import blocking, locks_of
from verify.models import LOCK, TTL
from verify.process import Process, Program
from verify.waits import Wait
from verify.world import ALL_RULES, Client, Model


def threads_user(*, renew: bool = False, rounds: int = 1) -> Program:
    """Take the lock, work, give it back."""

    @blocking
    def program(me: Process) -> None:
        lock = locks_of(me).lock(LOCK, ttl=TTL, renew=renew)
        for _ in range(rounds):
            lease = lock.acquire()
            me.holds(lease)
            if lease is None:
                return
            waits.blocked(Wait("work", None, None))
            good_until = me.now() + lease.remaining
            if not lease.release() and me.now() < good_until:
                me.problem("RL", f"{lease.holder} gave back a lease that was good, and is told that it had gone")

    return program


def _clients(names: str, program: Program | None = None, *, interruptible: str = "") -> list[Client]:
    users = program or threads_user()
    return [Client(name, users, listening=False, cancellable=name in interruptible) for name in names]


def _model(name: str, about: str, clients: list[Client], seconds: float, **faults: int) -> Model:
    return Model(f"threads: {name}", clients, faults, seconds, about=about)


def quick() -> list[Model]:
    """For every run of the tests."""
    return [
        _model("mutex", "three clients, each once", _clients("ABC"), 0.9),
        _model("rounds", "two rounds each", _clients("AB", threads_user(rounds=2)), 1.1),
        _model("killed", "a crash anywhere", _clients("AB"), 3.1, crash=1),
        _model("stopped", "a stop anywhere", _clients("AB"), 3.1, pause=1),
        _model("lost reply", "to anything that was asked", _clients("AB"), 2.1, lose_reply=1),
        _model("interrupted", "B is interrupted anywhere", _clients("AB", interruptible="B"), 1.1, cancel=1),
        _left_behind(),
    ]


def _left_behind() -> Model:
    """That nothing is, whatever was lost: a rule that models with other faults can't have."""
    clients, faults = _clients("AB", interruptible="AB"), {"cancel": 1, "lose_request": 1}
    about = "an interrupt and a lost request anywhere"
    return Model("threads: left behind", clients, faults, 2.1, about=about, rules=frozenset({"CF"}))


def full() -> list[Model]:
    """With more time and more faults."""
    twice, renewing = threads_user(rounds=2), threads_user(renew=True)
    forgets = Model(
        "threads: restart that forgets",
        _clients("AB"),
        {"restart": 1},
        4.0,
        about="it loses keys, scripts and subscribers",
        rules=ALL_RULES - {"RL"},  # who gives back to it is rightly told that there was nothing
    )
    return [
        *quick(),
        _model("killed and stopped", "a crash and a stop anywhere", _clients("AB"), 4.1, crash=1, pause=1),
        _model("lost messages", "a request, a reply", _clients("AB"), 4.0, lose_request=1, lose_reply=1),
        _model("rounds and losses", "two rounds each, a reply lost", _clients("AB", twice), 2.1, lose_reply=1),
        _model("silent losses", "nobody is told of the loss", _clients("AB"), 8.0, vanish=1),
        _model("late requests", "executed after they were given up", _clients("AB"), 3.1, late=1, slow=1),
        _model("renewal and a stop", "both renew", _clients("AB", renewing), 3.1, pause=1),
        _model("interrupted and slow", "B is interrupted", _clients("AB", interruptible="B"), 3.1, cancel=1, slow=1),
        forgets,
    ]
