"""LocalQueues a lock on among threads, under every schedule with a switch at any line of it.

Rules checked: one holds at a time, and fences rise; no wake-up is lost, so nobody waits for its patience to end; what
is not passed on goes back to the store, and nothing is left in the room.
"""

from collections.abc import Callable
from typing import Any

import pytest

from lockfast.client import lease as leases
from lockfast.client.locks import Locks
from lockfast.core import local_handoff as passing
from lockfast.core.lease_state import State
from lockfast.errors import LockError
from lockfast.runtime.runner import run
from lockfast.stores.memory import Hub, MemoryStore
from lockfast.values import Claim, Owner
from tests.shells.test_thread_schedules import SWITCHES, Patch, Stage, patched, search
from verify.mutation import python

__all__ = ["patched"]

pytestmark = pytest.mark.timeout(1800)  # a busy machine may take its time
FILES = (passing.__file__,)
AT_ONCE = (0.0, True)
"""Nobody sleeps, so no time goes by."""
LIMIT, HELD_FOR = 0.02, 0.05
"""Seconds; less than anybody's patience in a seat."""


class Household:
    """One connection, and what its threads see of one lock."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self._hub = Hub()
        store = MemoryStore(self._hub, stage.runtime)
        self.locks = Locks(store, stage.runtime, owner=Owner("home", 1), store_timeout=10.0, address="memory://")
        self.local_queue = self.locks.session.local_queues.queue("door")
        self.fences: list[int] = []
        self._inside = 0

    def held_elsewhere(self) -> None:
        """Another connection takes the lock before all of them."""
        other = MemoryStore(self._hub, self.stage.runtime)
        run(other.acquire(Claim("door", "other", 3.0, ""), None, 0.0))

        def give_back() -> bool:
            self.stage.turns.wait(lambda: False, 100.0 + HELD_FOR)
            return run(other.release("door", "other", 0.0))

        self.stage.thread("other", give_back)

    def use(self, timeout: float | None = None, ttl: float = 3.0) -> bool:
        """Hold the lock once, if it can be had; whether all was well."""
        lease = self.locks.lock("door", ttl=ttl, renew=False).acquire(timeout=timeout)
        if lease is None:
            return timeout is not None
        self._inside += 1
        well = self._inside == 1 and all(fence < lease.fence for fence in self.fences)
        self.fences.append(lease.fence)
        self.stage.turns.point()
        well = well and self._inside == 1
        self._inside -= 1
        return lease.release() and well and lease.state is State.RELEASED

    def left(self) -> bool:
        """Whether nothing is left of all this."""
        local_queue = self.local_queue
        info = run(MemoryStore(self._hub, self.stage.runtime).inspect("door", 0.0))
        shared_grant = (
            None if local_queue.closed else local_queue._shared
        )  # a room that is closed may keep what was given back for it
        return not (
            local_queue._waiters
            or local_queue._shared_claims
            or shared_grant
            or local_queue.claiming
            or info.locked
            or info.waiting
        )


def together(*members: Callable[[Household], Any]) -> Callable[[Stage], None]:
    """One thread for each; the last of them to end looks at what is left."""

    def prepare(stage: Stage) -> None:
        home = Household(stage)
        if limited in members:
            home.held_elsewhere()
        ended: list[bool] = []

        def live(member: Callable[[Household], Any]) -> bool:
            well = member(home)
            ended.append(well)
            return well and (len(ended) < len(members) or home.left())

        for number, member in enumerate(members):
            stage.thread(f"member {number}", lambda member=member: live(member))  # type: ignore[misc]

    return prepare


def once(home: Household) -> bool:
    return home.use()


def twice(home: Household) -> bool:
    return home.use() and home.use()


def longer(home: Household) -> bool:
    """With another ttl, so that it can't be passed what the others have."""
    return home.use(ttl=5.0)


def limited(home: Household) -> bool:
    return home.use(timeout=LIMIT)


def given_back_by_two(home: Household) -> bool:
    """Two threads give back the same lease: one of them does."""
    lease = home.locks.lock("door", ttl=3.0, renew=False).acquire()
    assert lease is not None
    home.stage.thread("helper", lambda: lease.release() in (True, False))
    return lease.release() in (True, False)


def closing(home: Household) -> bool:
    home.locks.close()
    return True


def while_it_is_open(home: Household) -> bool:
    """Who comes too late, or waits as the connection is closed, is told so; what is held then is given back by that."""
    try:
        return home.use() or home.locks.session.closed
    except LockError:
        return home.locks.session.closed


TOGETHER: dict[str, tuple[Callable[[Household], Any], ...]] = {
    "two, twice each": (twice, twice),
    "three": (once, once, once),
    "one lease is given back by two": (once, given_back_by_two),
    "one of three has another ttl": (once, once, longer),
    "one of three has a limit": (limited, once, once),
    "it is closed meanwhile": (while_it_is_open, while_it_is_open, closing),
}
LATER = (HELD_FOR, True)
ENDS = {
    "one lease is given back by two": {"member 0": AT_ONCE, "member 1": AT_ONCE, "helper": AT_ONCE},
    "one of three has a limit": {"member 0": (LIMIT, True), "member 1": LATER, "member 2": LATER, "other": LATER},
}


def ends(name: str) -> dict[str, Any]:
    return ENDS.get(name) or {f"member {number}": AT_ONCE for number, _ in enumerate(TOGETHER[name])}


@pytest.mark.parametrize("name", TOGETHER)
def test_local_handoff_under_every_schedule(name: str, patched: Patch) -> None:
    switches = SWITCHES - 1 if limited in TOGETHER[name] else SWITCHES  # a wait adds many choices by itself
    files = (leases.__file__,) if given_back_by_two in TOGETHER[name] else FILES
    assert search(together(*TOGETHER[name]), ends(name), patched, files, switches) > 50


WRONG = {
    "who leads and gives up wakes nobody": (
        "shared_claim_failed",
        "if head is not None:",
        "if False:",
        "one of three has a limit",
    ),
    "a tenancy that ends wakes nobody": (
        "end_shared",
        "if head is not None:",
        "if False:",
        "one of three has another ttl",
    ),
    "the lock is passed on without a call": ("hand_off", "waiter.waker.wake()", "pass", "two, twice each"),
    "what is passed on stays alive": (
        "hand_off",
        "if not lease.release(handed_off=True):",
        "if False:",
        "two, twice each",
    ),
    "who is passed it stays in its seat": ("hand_off", "waiters.popleft()", "waiters[0]", "three"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_planted_error_is_found(name: str, patched: Patch) -> None:
    *change, scene = WRONG[name]
    watched = (f"<mutant of {change[0]}>", *FILES)
    with python(passing.LocalQueue, *change), pytest.raises(AssertionError, match="schedule"):
        search(together(*TOGETHER[scene]), ends(scene), patched, watched, 1)
