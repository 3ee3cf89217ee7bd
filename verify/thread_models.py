"""Models of the sync client: programs written for threads, each thread a greenlet.

Code that blocks cannot be suspended like a coroutine. So it runs in a greenlet, which stands still where a thread
would block; to the driver of the process it looks like a coroutine. All rules apply. An interrupt (Ctrl-C) takes the
role that a cancellation has for tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from types import FrameType
from typing import Any

from lockfast.client.locks import Locks
from lockfast.client.session import sessions
from lockfast.values import Owner
from verify import process
from verify.models import DATA_LOSS_RULES, NOT_RELEASED, TTL
from verify.process import LOCK, Process, Program, Wait, WatchedStore, block_on
from verify.world import Client, Model


class GreenletThread(Coroutine[Wait, Any, None]):
    """Runs a function step by step; a step ends where the function blocks."""

    def __init__(self, body: Callable[[], None]) -> None:
        from greenlet import greenlet  # here, so that the other models do not need it

        self._greenlet = greenlet(body)
        self._driver: Any = None

    def send(self, value: Any) -> Wait:
        return self._step(self._greenlet.switch, *((value,) if self._greenlet else ()))  # the first switch takes none

    def throw(self, error: Any, *more: Any) -> Wait:
        return self._step(self._greenlet.throw, error)

    def close(self) -> None:
        if self._greenlet:
            try:
                self.throw(GeneratorExit())
            except (GeneratorExit, StopIteration):
                return
            raise RuntimeError("the function blocks although its thread is being closed")

    def __del__(self) -> None:
        self.close()

    def __await__(self) -> Generator[Any, Any, None]:
        raise TypeError("a GreenletThread is driven with send() and cannot be awaited")

    def _step(self, resume: Callable[..., Any], *values: Any) -> Wait:
        from greenlet import getcurrent

        self._greenlet.parent = self._driver = getcurrent()
        before, process.block = process.block, self._block
        try:
            wait = resume(*values)
        finally:
            process.block = before
        if self._greenlet.dead:
            raise StopIteration
        return wait  # type: ignore[no-any-return]

    def _block(self, wait: Wait) -> Any:
        return self._driver.switch(wait)

    def frames(self) -> list[FrameType]:
        """The stack, innermost frame first, for the fingerprint."""
        found, frame = [], self._greenlet.gr_frame
        while frame is not None:
            found.append(frame)
            frame = frame.f_back
        return found


def sync_locks(me: Process) -> Locks:
    """Return the shipped sync client, connected to this process."""
    locks = Locks(WatchedStore(me), me, owner=Owner(me.name, 1), store_timeout=10.0, address=f"virtual://{me.name}")
    sessions.discard(locks.session)  # closing it at exit would wait for replies that never come
    return locks


def sync_user(*, renew: bool = False, rounds: int = 1) -> Program:
    """Acquire the lock, work, release it."""

    def body(me: Process) -> None:
        lock = sync_locks(me).lock(LOCK, ttl=TTL, renew=renew)
        for _ in range(rounds):
            lease = lock.acquire()
            me.record_acquire(lease)
            if lease is None:
                return
            block_on(Wait("work", None, None))
            valid_until = me.now() + lease.remaining
            if not lease.release() and me.now() < valid_until:
                me.violate("RL", NOT_RELEASED.format(lease.holder))

    return lambda me: GreenletThread(lambda: body(me))


def _clients(names: str, program: Program | None = None, *, interruptible: str = "") -> list[Client]:
    return [Client(name, program or sync_user(), listening=False, cancellable=name in interruptible) for name in names]


def _model(name: str, about: str, clients: list[Client], seconds: float, **faults: int) -> Model:
    return Model(f"threads: {name}", clients, faults, seconds, about=about)


def quick() -> list[Model]:
    """Small versions, for every test run."""
    return [
        _model("mutex", "three clients, one round each", _clients("ABC"), 0.9),
        _model("rounds", "two rounds each", _clients("AB", sync_user(rounds=2)), 1.1),
        _model("crash", "a crash at any point", _clients("AB"), 3.1, crash=1),
        _model("pause", "a pause at any point", _clients("AB"), 3.1, pause=1),
        _model("lost reply", "to any request", _clients("AB"), 2.1, lose_reply=1),
        _model("interrupt", "B is interrupted at any point", _clients("AB", interruptible="B"), 1.1, cancel=1),
        _clean_up(),
    ]


def _clean_up() -> Model:
    """CF: nothing is left behind even if messages are lost."""
    clients, faults = _clients("AB", interruptible="AB"), {"cancel": 1, "lose_request": 1}
    about = "an interrupt and a lost request at any point"
    return Model("threads: clean-up", clients, faults, 2.1, about=about, rules=frozenset({"CF"}))


def full() -> list[Model]:
    """The models of `make explore`: longer, with more faults."""
    twice, renewing = sync_user(rounds=2), sync_user(renew=True)
    about = "the server loses keys, scripts and subscribers"
    return [
        *quick(),
        _model("crash and pause", "a crash and a pause at any point", _clients("AB"), 4.1, crash=1, pause=1),
        _model("lost messages", "a request and a reply", _clients("AB"), 4.0, lose_request=1, lose_reply=1),
        _model("rounds, lost reply", "two rounds each", _clients("AB", twice), 2.1, lose_reply=1),
        _model("silent losses", "no connection error", _clients("AB"), 8.0, lose_silently=1),
        _model("late requests", "executed after the client gave up", _clients("AB"), 3.1, execute_late=1, slow=1),
        _model("renewal and a pause", "both renew", _clients("AB", renewing), 3.1, pause=1),
        _model("interrupt, slow", "B is interrupted", _clients("AB", interruptible="B"), 3.1, cancel=1, slow=1),
        Model("threads: restart without data", _clients("AB"), {"restart": 1}, 4.0, about=about, rules=DATA_LOSS_RULES),
    ]
