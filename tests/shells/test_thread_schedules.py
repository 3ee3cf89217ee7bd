"""The thread shell's shared state under every schedule: who leads on a connection, and how the keeper starts and ends.

Rules checked: no wake-up is lost, so nobody returns later than what it waited for was there; no two keepers run; no
lease is forgotten.
"""

import os
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from greenlet import getcurrent

from lockfast.core import keepalive as keep
from lockfast.core.acquire import Grant
from lockfast.core.deadline import valid_until
from lockfast.core.keepalive import Keepalive
from lockfast.core.lease_state import ALIVE, LeaseState
from lockfast.errors import StoreUnavailable
from lockfast.ports import Ports
from lockfast.runtime.runner import run
from lockfast.stores.memory import Hub, MemoryStore
from lockfast.stores.redis.protocol.resp import Reader, pack
from lockfast.stores.redis.transport import thread_inbox, threads
from lockfast.stores.redis.transport.thread_inbox import ThreadInbox
from lockfast.stores.redis.transport.threads import SLICE, PendingReply, ThreadLink, ThreadWire
from lockfast.values import Claim, Granted, GrantNotification
from tests.shells.turns import Choice, TurnLock, TurnRuntime, Turns, every_schedule
from verify.mutation import python

pytestmark = pytest.mark.timeout(1800)  # a busy machine may take its time
WIRE_FILES = (threads.__file__, thread_inbox.__file__)
KEEPER_FILES = (keep.__file__,)
SWITCHES = int(os.environ.get("LOCKFAST_SWITCHES", "1"))
"""Switches at lines, besides those where a thread waits; `make explore` plays all schedules with two."""


class Socket:
    """The client's end of a connection. `told` is what the client has sent and the server not yet read."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self.arrived = b""
        self.told: list[Any] = []
        self.closed = False

    def setblocking(self, blocking: bool) -> None: ...

    def setsockopt(self, *option: object) -> None: ...

    def readable(self) -> bool:
        return bool(self.arrived) or self.closed

    def send(self, data: bytes) -> int:
        self.told += Reader().feed(data)
        return len(data)

    def recv(self, size: int) -> bytes:
        if not self.readable() and not self._turns.wait(self.readable, self._turns.now + SLICE):
            raise BlockingIOError
        data, self.arrived = self.arrived, b""
        return data

    def shutdown(self, how: int) -> None:
        self.closed = True


class Poll:
    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def register(self, socket: Socket, events: int) -> None:
        self._socket = socket

    def poll(self, milliseconds: float) -> bool:
        return self._turns.wait(self._socket.readable, self._turns.now + milliseconds / 1000)


class Stage:
    """One play: the turns, a connection, and what came of it."""

    def __init__(self, watched: Sequence[str], schedule: Sequence[int], switches: int = 0) -> None:
        self.turns = Turns(watched, schedule, switches)
        self.runtime = TurnRuntime(self.turns)
        self.socket = Socket(self.turns)
        self.ended: dict[str, tuple[float, Any]] = {}

    def dial(self, limit: float) -> Any:
        return SimpleNamespace(_sock=self.socket, protocol=2, connect=lambda: None, disconnect=lambda: None)

    def thread(self, name: str, work: Callable[[], Any]) -> None:
        def body() -> None:
            result = work()
            self.ended[name] = round(self.turns.now - 100.0, 6), result

        self.turns.add(body, name)


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Callable[[Turns], None]:
    """Locks and polls of the shipped modules become those of a play."""

    def patch(turns: Turns) -> None:
        locks = SimpleNamespace(Lock=lambda: TurnLock(turns))
        monkeypatch.setattr(thread_inbox, "threading", locks)
        monkeypatch.setattr(threads, "threading", locks)
        monkeypatch.setattr(threads, "select", SimpleNamespace(poll=lambda: Poll(turns), POLLIN=1, POLLOUT=4))

    return patch


Patch = Callable[[Turns], None]


def search(
    prepare: Callable[[Stage], None], ends: dict[str, Any], patch: Patch, files: Sequence[str], switches: int
) -> int:
    """Play every schedule; how many there are. `ends` says for each thread when it must have ended, and how."""

    def play(schedule: Sequence[int]) -> list[Choice]:
        stage = Stage(files, schedule, switches)
        patch(stage.turns)
        prepare(stage)
        errors = stage.turns.play()
        said = f"schedule {[choice.taken for choice in stage.turns.choices]}: {stage.ended} {errors}"
        assert not errors, said
        assert stage.ended == ends, said
        return stage.turns.choices

    played = 0
    for played in every_schedule(play, switches):
        assert played < 2_000_000
    return played


def request(wire: ThreadWire, word: bytes, until: float) -> Any:
    try:
        return run(wire.request(pack(word), 100.0 + until))
    except StoreUnavailable as error:
        return error.outcome.value


def connected(stage: Stage) -> ThreadWire:
    """A wire that has dialled, so that the plays are about the rest."""
    wire = ThreadWire(stage.dial, stage.runtime)
    wire._connect(110.0)
    return wire


def answers(stage: Stage, count: int, *, after: float = 0.0) -> None:
    """A server that reads one request after the other and echoes it."""
    for _ in range(count):
        stage.turns.wait(lambda: bool(stage.socket.told))
        if after:
            stage.turns.wait(lambda: False, 100.0 + after)
        (word,) = stage.socket.told.pop(0)
        stage.socket.arrived += b"$%d\r\n%s\r\n" % (len(word), word)
        stage.turns.point()


def two_ask(stage: Stage) -> None:
    wire = connected(stage)
    stage.thread("one", lambda: request(wire, b"one", 10))
    stage.thread("two", lambda: request(wire, b"two", 10))
    stage.thread("server", lambda: answers(stage, 2))


def the_leader_gives_up(stage: Stage) -> None:
    """The answers come after a second; one of the two who wait has time for half of it only."""
    wire = connected(stage)
    stage.thread("short", lambda: request(wire, b"short", 0.2))
    stage.thread("long", lambda: request(wire, b"long", 10))
    stage.thread("server", lambda: answers(stage, 2, after=0.3))


def one_listens(stage: Stage) -> None:
    """The keeper takes in what is there, while another waits for an answer."""
    wire = connected(stage)
    stage.thread("asker", lambda: request(wire, b"asker", 10))
    stage.thread("keeper", wire.poll_events)
    stage.thread("server", lambda: answers(stage, 1))


def the_connection_breaks(stage: Stage) -> None:
    wire = connected(stage)
    stage.thread("one", lambda: request(wire, b"one", 10))
    stage.thread("two", lambda: request(wire, b"two", 10))

    def server() -> None:
        stage.turns.wait(lambda: len(stage.socket.told) == 2)
        stage.socket.closed = True

    stage.thread("server", server)


def two_mailboxes(stage: Stage) -> None:
    inbox = ThreadInbox(stage.dial, stage.runtime)
    stage.socket.arrived = b"*3\r\n$9\r\nsubscribe\r\n$1\r\nx\r\n:1\r\n"
    inbox._connect(110.0)

    def wait(holder: str, until: float) -> Any:
        box = inbox.mailbox(holder)
        run(box.open(110.0))
        push = None
        while push is None and stage.turns.now < 100.0 + until:
            push = run(box.wait(100.0 + until))
        box.close()
        return push

    stage.thread("ann", lambda: wait("ann", 10))
    stage.thread("bob", lambda: wait("bob", 10))

    def server() -> None:
        stage.turns.wait(lambda: {"ann", "bob"} <= inbox.mailboxes.keys())
        for payload in (b"bob 1 7", b"ann 1 8"):
            stage.socket.arrived += b"*3\r\n$7\r\nmessage\r\n$1\r\nx\r\n$%d\r\n%s\r\n" % (len(payload), payload)
            stage.turns.point()

    stage.thread("server", server)


SERVED = (0.0, None)
WIRES: dict[str, tuple[Callable[[Stage], None], dict[str, Any]]] = {
    "two ask": (two_ask, {"one": (0.0, b"one"), "two": (0.0, b"two"), "server": SERVED}),
    "the leader gives up": (
        the_leader_gives_up,
        {"short": (0.2, "unknown"), "long": (0.3, b"long"), "server": (0.3, None)},
    ),
    "one listens": (one_listens, {"asker": (0.0, b"asker"), "keeper": SERVED, "server": SERVED}),
    "the connection breaks": (
        the_connection_breaks,
        {"one": (0.0, "unknown"), "two": (0.0, "unknown"), "server": SERVED},
    ),
    "two mailboxes": (
        two_mailboxes,
        {"ann": (0.0, GrantNotification(1, 8)), "bob": (0.0, GrantNotification(1, 7)), "server": SERVED},
    ),
}


@pytest.mark.parametrize("name", WIRES)
def test_no_wake_up_is_lost_on_a_connection(name: str, patched: Patch) -> None:
    prepare, ends = WIRES[name]
    assert search(prepare, ends, patched, WIRE_FILES, SWITCHES) > 400


SLEEPS = """\
if pending.waker is None:
                pending.waker = self._runtime.waker()
                self.sleepers[pending] = None
            elif not await pending.waker.wait(until):"""
LOST_CALLS = {
    "a reader that stops wakes nobody": ("read", "if self.sleepers:", "if False:"),
    "a thread sleeps without trying once more to read": (
        "wait_for",
        SLEEPS,
        "if not await self._sleep(pending, until):",
    ),
    "a thread that leaves while nobody reads wakes nobody": ("wait_for", "if not self.reading.locked():", "if False:"),
    "a failing connection wakes nobody": ("fail", "pending.wake()", "pass"),
    "a thread that has its reply reads anyway": ("read", "reads = True", "reads = True; self.read_once()"),
    "a reply wakes nobody": ("read_once", "if pending.waker is not None:", "if False:"),
}


async def _sleep(self: ThreadLink, pending: PendingReply, until: float) -> bool:
    """Register and sleep at once, as one might write it."""
    pending.waker = self._runtime.waker()
    self.sleepers[pending] = None
    return await pending.waker.wait(until)


@pytest.mark.parametrize("name", LOST_CALLS)
def test_a_planted_error_on_a_connection_is_found(name: str, patched: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ThreadLink, "_sleep", _sleep, raising=False)
    watched = (f"<mutant of {LOST_CALLS[name][0]}>", *WIRE_FILES, __file__)

    def all_of_them() -> None:
        for prepare, ends in WIRES.values():
            search(prepare, ends, patched, watched, 1)

    with python(ThreadLink, *LOST_CALLS[name]), pytest.raises(AssertionError, match="schedule"):
        all_of_them()


# The keeper

TTL = 0.9


class Counted(Keepalive):
    """Knows which of its actors are at work: those that have looked round and not retired since."""

    def __init__(self, store: MemoryStore, runtime: TurnRuntime) -> None:
        super().__init__(Ports(store, runtime))
        self.actors: set[object] = set()
        self.most = 0

    async def _round(self) -> float:
        self.actors.add(getcurrent())
        self.most = max(self.most, len(self.actors))
        return await super()._round()

    def _retire_after(self, idle_for: float) -> bool:
        retires = super()._retire_after(idle_for)
        if retires:
            self.actors.discard(getcurrent())
        return retires


def hold(stage: Stage, keepalive: Counted, store: MemoryStore, name: str, begins: float, lasts: float) -> bool:
    """Take a lock at that moment, have it kept for so long, and give it back; whether it was ours all the time, and
    one keeper looked after it."""
    stage.turns.wait(lambda: False, 100.0 + begins)
    sent_at = stage.turns.now
    claim = Claim(name, name, TTL, "")
    granted = run(store.acquire(claim, None, 0.0))
    assert isinstance(granted, Granted)
    grant = Grant(claim, granted.fence, sent_at, valid_until(sent_at, TTL))
    held = LeaseState(stage.runtime, renews=True, max_hold=None)
    held.begin(grant)
    keepalive.watch(held)
    stage.turns.wait(lambda: False, sent_at + lasts)
    kept = held.check(stage.turns.now) in ALIVE
    held.release()
    kept = run(store.release(name, name, 0.0)) and kept
    keepalive.unwatch(held)
    return kept and keepalive.most == 1


def keeping(second: float) -> Callable[[Stage], None]:
    """One lease at the beginning, and another at the given moment, when the keeper may be about to retire."""

    def prepare(stage: Stage) -> None:
        store = MemoryStore(Hub(), stage.runtime)
        keepalive = Counted(store, stage.runtime)
        stage.thread("first", lambda: hold(stage, keepalive, store, "first", 0.0, 0.1))
        stage.thread("second", lambda: hold(stage, keepalive, store, "second", second, 2.0))

    return prepare


def keeper_moments() -> list[float]:
    """When the keeper looks up, left to itself after one short lease: at these moments it may retire."""
    stage = Stage((), ())
    found: list[float] = []

    class Noting(Counted):
        async def _round(self) -> float:
            found.append(round(stage.turns.now - 100.0, 6))
            return await super()._round()

    store = MemoryStore(Hub(), stage.runtime)
    keepalive = Noting(store, stage.runtime)
    stage.thread("first", lambda: hold(stage, keepalive, store, "first", 0.0, 0.1))
    assert stage.turns.play() == []
    assert stage.ended == {"first": (0.1, True)}
    return sorted(set(found))


def kept(second: float) -> dict[str, Any]:
    return {"first": (0.1, True), "second": (round(second + 2.0, 6), True)}


@pytest.mark.parametrize("read_available", range(3))
def test_a_keeper_that_retires_forgets_nobody(read_available: int, patched: Patch) -> None:
    moments = keeper_moments()
    assert len(moments) == 3, moments
    second = moments[read_available]
    assert search(keeping(second), kept(second), patched, KEEPER_FILES, SWITCHES) > 50


DUE_EARLY = "if lease.valid_until < wakes_at or (lease.renews and lease.next_renewal < wakes_at):"
FORGETFUL = {
    "it retires whoever came meanwhile": ("_retire", "if self._held and not self._closed:", "if False:"),
    "it is not woken for a lease that is due early": ("watch", DUE_EARLY, "if False:"),
    "a second one is started": ("_start", "if self._active:", "if False:"),
    "none is started again": (
        "_retire",
        "return not self._active",
        "self._active, ends = True, not self._active; return ends",
    ),
    "it looks before it says that it ends": (
        "_retire",
        "self._active = False\n    if self._held and not self._closed:\n        self._active = True",
        "held = bool(self._held)\n    self._active = held and not self._closed",
    ),
    "who comes looks for an actor first": (
        "watch",
        "self._held[lease] = None",
        "if not self._active: self._start()\n    self._held[lease] = None; self._in_use = True; return",
    ),
}


@pytest.mark.parametrize("name", FORGETFUL)
def test_a_planted_error_of_the_keeper_is_found(name: str, patched: Patch) -> None:
    watched = (f"<mutant of {FORGETFUL[name][0]}>", *KEEPER_FILES)
    moments = keeper_moments()

    def all_of_them() -> None:
        for second in moments:
            search(keeping(second), kept(second), patched, watched, 1)

    with python(Keepalive, *FORGETFUL[name]), pytest.raises(AssertionError, match="schedule"):
        all_of_them()
