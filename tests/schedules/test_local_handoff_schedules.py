"""Local hand-off between threads, under every schedule with a switch at any line of it.

Rules: one holder at a time, and fences grow; no wake-up is lost, so no waiter waits until its patience ends; a grant
that is not handed off is released to the store, and nothing stays in the local queue.
"""

from collections.abc import Callable
from typing import Any

import pytest

from lockfast.client import lease as leases
from lockfast.client.locks import Locks
from lockfast.core import local_handoff
from lockfast.core.lease_state import State
from lockfast.errors import LockError
from lockfast.runtime.base import run
from lockfast.stores.memory import Hub, MemoryStore
from lockfast.values import Claim, Owner
from tests.schedules.test_thread_schedules import SWITCHES, Patch, Trial, patched, search
from verify.mutation import python

__all__ = ["patched"]

pytestmark = pytest.mark.timeout(1800)  # a busy machine is slow
FILES = (local_handoff.__file__,)
IMMEDIATELY = (0.0, True)
"""No thread sleeps, so no time passes."""
TIMEOUT, HELD_FOR = 0.02, 0.05
"""Seconds; less than the patience of a local waiter."""


class Connection:
    """One connection, and the leases of its threads on one lock."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self._hub = Hub()
        store = MemoryStore(self._hub, trial.runtime)
        self.locks = Locks(store, trial.runtime, owner=Owner("host", 1), store_timeout=10.0, address="memory://")
        self.local_queue = self.locks.session.local_queues.queue("door")
        self.fences: list[int] = []
        self._inside = 0

    def held_elsewhere(self) -> None:
        """Another connection holds the lock first."""
        other = MemoryStore(self._hub, self.trial.runtime)
        run(other.acquire(Claim("door", "other", 3.0, ""), None, 0.0))

        def release() -> bool:
            self.trial.scheduler.wait(lambda: False, 100.0 + HELD_FOR)
            return run(other.release("door", "other", 0.0))

        self.trial.thread("other", release)

    def use(self, timeout: float | None = None, ttl: float = 3.0) -> bool:
        """Hold the lock once, unless the wait times out. Return whether all was correct."""
        lease = self.locks.lock("door", ttl=ttl, renew=False).acquire(timeout=timeout)
        if lease is None:
            return timeout is not None
        self._inside += 1
        correct = self._inside == 1 and all(fence < lease.fence for fence in self.fences)
        self.fences.append(lease.fence)
        self.trial.scheduler.point()
        correct = correct and self._inside == 1
        self._inside -= 1
        return lease.release() and correct and lease.state is State.RELEASED

    def is_clean(self) -> bool:
        """Whether neither the local queue nor the store holds anything."""
        local_queue = self.local_queue
        info = run(MemoryStore(self._hub, self.trial.runtime).inspect("door", 0.0))
        pooled_grant = None if local_queue.closed else local_queue._pooled  # a closed queue may keep its released grant
        return not (
            local_queue._waiters
            or local_queue._pooled_claims
            or pooled_grant
            or local_queue.claiming
            or info.locked
            or info.waiting
        )


def together(*members: Callable[[Connection], Any]) -> Callable[[Trial], None]:
    """One thread per member; the last to end checks that nothing stayed behind."""

    def prepare(trial: Trial) -> None:
        connection = Connection(trial)
        if with_timeout in members:
            connection.held_elsewhere()
        ended: list[bool] = []

        def body(member: Callable[[Connection], Any]) -> bool:
            correct = member(connection)
            ended.append(correct)
            return correct and (len(ended) < len(members) or connection.is_clean())

        for number, member in enumerate(members):
            trial.thread(f"member {number}", lambda member=member: body(member))  # type: ignore[misc]

    return prepare


def once(connection: Connection) -> bool:
    return connection.use()


def twice(connection: Connection) -> bool:
    return connection.use() and connection.use()


def with_another_ttl(connection: Connection) -> bool:
    """With another ttl, so that it cannot be handed the grant of the others."""
    return connection.use(ttl=5.0)


def with_timeout(connection: Connection) -> bool:
    return connection.use(timeout=TIMEOUT)


def released_by_two(connection: Connection) -> bool:
    """Two threads release the same lease."""
    lease = connection.locks.lock("door", ttl=3.0, renew=False).acquire()
    assert lease is not None
    connection.trial.thread("helper", lambda: lease.release() in (True, False))
    return lease.release() in (True, False)


def closing(connection: Connection) -> bool:
    connection.locks.close()
    return True


def until_closed(connection: Connection) -> bool:
    """After `close()`, an acquisition raises, and `close()` releases the leases that are held then."""
    try:
        return connection.use() or connection.locks.session.closed
    except LockError:
        return connection.locks.session.closed


MEMBERS: dict[str, tuple[Callable[[Connection], Any], ...]] = {
    "two, twice each": (twice, twice),
    "three": (once, once, once),
    "two threads release one lease": (once, released_by_two),
    "one of three has another ttl": (once, once, with_another_ttl),
    "one of three has a timeout": (with_timeout, once, once),
    "the connection is closed meanwhile": (until_closed, until_closed, closing),
}
LATER = (HELD_FOR, True)


class Soon(tuple[float, bool]):
    """Equal to the end of a thread that waits a little: `close()` lets the acquisitions under way end first."""

    __slots__ = ()
    __hash__ = tuple.__hash__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, tuple) and other[0] <= self[0] and other[1] is self[1]


ENDS = {
    "the connection is closed meanwhile": {
        "member 0": IMMEDIATELY,
        "member 1": IMMEDIATELY,
        "member 2": Soon((0.01, True)),
    },
    "two threads release one lease": {"member 0": IMMEDIATELY, "member 1": IMMEDIATELY, "helper": IMMEDIATELY},
    "one of three has a timeout": {"member 0": (TIMEOUT, True), "member 1": LATER, "member 2": LATER, "other": LATER},
}


def ends(name: str) -> dict[str, Any]:
    return ENDS.get(name) or {f"member {number}": IMMEDIATELY for number, _ in enumerate(MEMBERS[name])}


@pytest.mark.parametrize("name", MEMBERS)
def test_local_handoff_under_every_schedule(name: str, patched: Patch) -> None:
    switches = SWITCHES - 1 if with_timeout in MEMBERS[name] else SWITCHES  # a wait adds many choices
    files = (leases.__file__,) if released_by_two in MEMBERS[name] else FILES
    assert search(together(*MEMBERS[name]), ends(name), patched, files, switches) > 50


ERRORS = {
    "a failed pooled claim wakes no waiter": (
        "pooled_claim_failed",
        "if head is not None:",
        "if False:",
        "one of three has a timeout",
    ),
    "the end of a pooled grant wakes no waiter": (
        "end_pooled",
        "if head is not None:",
        "if False:",
        "one of three has another ttl",
    ),
    "a hand-off wakes no waiter": ("hand_off", "waiter.waker.wake()", "pass", "two, twice each"),
    "a handed-off lease stays held": (
        "hand_off",
        "if not lease.release(handed_off=True):",
        "if False:",
        "two, twice each",
    ),
    "a waiter that was handed the lock stays in the queue": ("hand_off", "waiters.popleft()", "waiters[0]", "three"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_a_planted_error_is_found(name: str, patched: Patch) -> None:
    *change, members = ERRORS[name]
    watched = (f"<mutant of {change[0]}>", *FILES)
    with python(local_handoff.LocalQueue, *change), pytest.raises(AssertionError, match="schedule"):
        search(together(*MEMBERS[members]), ends(members), patched, watched, 1)
