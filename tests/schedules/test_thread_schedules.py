"""The shared state of the sync flavour under every schedule: the reader of a connection, and the keepalive.

Rules: no wake-up is lost, so every thread returns as soon as its reply arrived; at most one keepalive runs; every lease
is renewed.
"""

import os
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from greenlet import getcurrent

from lockfast.core import keepalive as keepalive_module
from lockfast.core.acquire import Grant
from lockfast.core.keepalive import Keepalive
from lockfast.core.lease_state import ALIVE, LeaseState, valid_until
from lockfast.errors import StoreUnavailable
from lockfast.ports import Ports
from lockfast.runtime.base import run
from lockfast.stores.memory import Hub, MemoryStore
from lockfast.stores.redis.protocol.resp import Reader, pack
from lockfast.stores.redis.transport import connect, threads
from lockfast.stores.redis.transport.connect import PendingReply
from lockfast.stores.redis.transport.threads import SLICE, ThreadInbox, ThreadLink, ThreadWire
from lockfast.values import Claim, Granted, GrantNotification
from tests.schedules.scheduler import Choice, ScheduledLock, ScheduledRuntime, Scheduler, every_schedule
from verify.mutation import python

pytestmark = pytest.mark.timeout(1800)  # a busy machine is slow
CONNECTION_FILES = (threads.__file__, connect.__file__)
KEEPALIVE_FILES = (keepalive_module.__file__,)
SWITCHES = int(os.environ.get("LOCKFAST_SWITCHES", "1"))
"""Switches at lines, besides those where a thread waits; `make explore` runs all schedules with two."""


class Socket:
    """The client's end of a connection. `sent` holds the requests that the server has not read yet."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.arrived = b""
        self.sent: list[Any] = []
        self.closed = False

    def setblocking(self, blocking: bool) -> None: ...

    def setsockopt(self, *option: object) -> None: ...

    def readable(self) -> bool:
        return bool(self.arrived) or self.closed

    def send(self, data: bytes) -> int:
        self.sent += Reader().feed(data)
        return len(data)

    def recv(self, size: int) -> bytes:
        if not self.readable() and not self._scheduler.wait(self.readable, self._scheduler.now + SLICE):
            raise BlockingIOError
        data, self.arrived = self.arrived, b""
        return data

    def shutdown(self, how: int) -> None:
        self.closed = True


class Poll:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def register(self, socket: Socket, events: int) -> None:
        self._socket = socket

    def poll(self, milliseconds: float) -> bool:
        return self._scheduler.wait(self._socket.readable, self._scheduler.now + milliseconds / 1000)


class Trial:
    """One run of one schedule: the scheduler, a connection, and when and how each thread ended."""

    def __init__(self, watched: Sequence[str], schedule: Sequence[int], switches: int = 0) -> None:
        self.scheduler = Scheduler(watched, schedule, switches)
        self.runtime = ScheduledRuntime(self.scheduler)
        self.socket = Socket(self.scheduler)
        self.ended: dict[str, tuple[float, Any]] = {}

    def dial(self, limit: float) -> Any:
        return SimpleNamespace(_sock=self.socket, protocol=2, connect=lambda: None, disconnect=lambda: None)

    def thread(self, name: str, work: Callable[[], Any]) -> None:
        def body() -> None:
            result = work()
            self.ended[name] = round(self.scheduler.now - 100.0, 6), result

        self.scheduler.add(body, name)


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Callable[[Scheduler], None]:
    """Return a function that replaces the locks and polls of the shipped modules by those of a scheduler."""

    def patch(scheduler: Scheduler) -> None:
        locks = SimpleNamespace(Lock=lambda: ScheduledLock(scheduler))
        monkeypatch.setattr(threads, "threading", locks)
        monkeypatch.setattr(threads, "select", SimpleNamespace(poll=lambda: Poll(scheduler), POLLIN=1, POLLOUT=4))

    return patch


Patch = Callable[[Scheduler], None]


def search(
    prepare: Callable[[Trial], None], ends: dict[str, Any], patch: Patch, files: Sequence[str], switches: int
) -> int:
    """Trial every schedule, and return how many there are. `ends` is when and how each thread must end."""

    def run_schedule(schedule: Sequence[int]) -> list[Choice]:
        trial = Trial(files, schedule, switches)
        patch(trial.scheduler)
        prepare(trial)
        errors = trial.scheduler.run()
        message = f"schedule {[choice.chosen for choice in trial.scheduler.choices]}: {trial.ended} {errors}"
        assert not errors, message
        assert trial.ended == ends, message
        return trial.scheduler.choices

    count = 0
    for count in every_schedule(run_schedule, switches):
        assert count < 2_000_000
    return count


def request(wire: ThreadWire, word: bytes, until: float) -> Any:
    try:
        return run(wire.request(pack(word), 100.0 + until))
    except StoreUnavailable as error:
        return error.outcome.value


def connected(trial: Trial) -> ThreadWire:
    """Return a connected wire, so that the schedules do not contain the connecting."""
    wire = ThreadWire(trial.dial, trial.runtime)
    wire._connect(110.0)
    return wire


def answer(trial: Trial, count: int, *, after: float = 0.0) -> None:
    """A server that echoes one request after another."""
    for _ in range(count):
        trial.scheduler.wait(lambda: bool(trial.socket.sent))
        if after:
            trial.scheduler.wait(lambda: False, 100.0 + after)
        (word,) = trial.socket.sent.pop(0)
        trial.socket.arrived += b"$%d\r\n%s\r\n" % (len(word), word)
        trial.scheduler.point()


def two_requests(trial: Trial) -> None:
    wire = connected(trial)
    trial.thread("one", lambda: request(wire, b"one", 10))
    trial.thread("two", lambda: request(wire, b"two", 10))
    trial.thread("server", lambda: answer(trial, 2))


def the_reader_times_out(trial: Trial) -> None:
    """The replies arrive after 0.3 s; one of the two threads waits only 0.2 s."""
    wire = connected(trial)
    trial.thread("short", lambda: request(wire, b"short", 0.2))
    trial.thread("long", lambda: request(wire, b"long", 10))
    trial.thread("server", lambda: answer(trial, 2, after=0.3))


def one_polls_events(trial: Trial) -> None:
    """The keepalive processes messages while another thread waits for a reply."""
    wire = connected(trial)
    trial.thread("requester", lambda: request(wire, b"requester", 10))
    trial.thread("keepalive", wire.poll_events)
    trial.thread("server", lambda: answer(trial, 1))


def the_connection_breaks(trial: Trial) -> None:
    wire = connected(trial)
    trial.thread("one", lambda: request(wire, b"one", 10))
    trial.thread("two", lambda: request(wire, b"two", 10))

    def server() -> None:
        trial.scheduler.wait(lambda: len(trial.socket.sent) == 2)
        trial.socket.closed = True

    trial.thread("server", server)


def two_mailboxes(trial: Trial) -> None:
    inbox = ThreadInbox(trial.dial, trial.runtime)
    trial.socket.arrived = b"*3\r\n$9\r\nsubscribe\r\n$1\r\nx\r\n:1\r\n"
    inbox._connect(110.0)

    def wait(holder: str, until: float) -> Any:
        mailbox = inbox.mailbox(holder)
        run(mailbox.open(110.0))
        notification = None
        while notification is None and trial.scheduler.now < 100.0 + until:
            notification = run(mailbox.wait(100.0 + until))
        mailbox.close()
        return notification

    trial.thread("ann", lambda: wait("ann", 10))
    trial.thread("bob", lambda: wait("bob", 10))

    def server() -> None:
        trial.scheduler.wait(lambda: {"ann", "bob"} <= inbox.mailboxes.keys())
        for payload in (b"bob 1 7", b"ann 1 8"):
            trial.socket.arrived += b"*3\r\n$7\r\nmessage\r\n$1\r\nx\r\n$%d\r\n%s\r\n" % (len(payload), payload)
            trial.scheduler.point()

    trial.thread("server", server)


SERVED = (0.0, None)
CONNECTIONS: dict[str, tuple[Callable[[Trial], None], dict[str, Any]]] = {
    "two requests": (two_requests, {"one": (0.0, b"one"), "two": (0.0, b"two"), "server": SERVED}),
    "the reader times out": (
        the_reader_times_out,
        {"short": (0.2, "unknown"), "long": (0.3, b"long"), "server": (0.3, None)},
    ),
    "one polls events": (one_polls_events, {"requester": (0.0, b"requester"), "keepalive": SERVED, "server": SERVED}),
    "the connection breaks": (
        the_connection_breaks,
        {"one": (0.0, "unknown"), "two": (0.0, "unknown"), "server": SERVED},
    ),
    "two mailboxes": (
        two_mailboxes,
        {"ann": (0.0, GrantNotification(1, 8)), "bob": (0.0, GrantNotification(1, 7)), "server": SERVED},
    ),
}


@pytest.mark.parametrize("name", CONNECTIONS)
def test_no_wake_up_is_lost_on_a_connection(name: str, patched: Patch) -> None:
    prepare, ends = CONNECTIONS[name]
    assert search(prepare, ends, patched, CONNECTION_FILES, SWITCHES) > 400


SLEEPS = """\
if pending.waker is None:
                pending.waker = self.runtime.waker()
                self.sleepers[pending] = None
            elif not await pending.waker.wait(until):"""
LOST_WAKE_UPS = {
    "a reader that stops wakes no thread": ("read", "if self.sleepers:", "if False:"),
    "a thread sleeps without trying once more to read": (
        "wait_for",
        SLEEPS,
        "if not await self._sleep(pending, until):",
    ),
    "a thread that leaves while none reads wakes none": (
        "remove_sleeper",
        "if not self.reading.locked():",
        "if False:",
    ),
    "a failing connection wakes no thread": ("fail", "pending.wake()", "pass"),
    "a thread that has its reply reads anyway": ("read", "reads = True", "reads = True; self.read_once()"),
    "a reply wakes no thread": ("read_once", "if pending.waker is not None:", "if False:"),
}


async def _sleep(self: ThreadLink, pending: PendingReply, until: float) -> bool:
    """Register and sleep in one step, a plausible mistake."""
    pending.waker = self.runtime.waker()
    self.sleepers[pending] = None
    return await pending.waker.wait(until)


@pytest.mark.parametrize("name", LOST_WAKE_UPS)
def test_a_planted_error_on_a_connection_is_found(name: str, patched: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ThreadLink, "_sleep", _sleep, raising=False)
    watched = (f"<mutant of {LOST_WAKE_UPS[name][0]}>", *CONNECTION_FILES, __file__)

    def search_all() -> None:
        for prepare, ends in CONNECTIONS.values():
            search(prepare, ends, patched, watched, 1)

    with python(ThreadLink, *LOST_WAKE_UPS[name]), pytest.raises(AssertionError, match="schedule"):
        search_all()


# The keepalive

TTL = 0.9


class CountedKeepalive(Keepalive):
    """Knows its running actors: those that began a round and have not retired since."""

    def __init__(self, store: MemoryStore, runtime: ScheduledRuntime) -> None:
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


def hold(trial: Trial, keepalive: CountedKeepalive, store: MemoryStore, name: str, begins: float, lasts: float) -> bool:
    """Acquire a lock at `begins` and release it after `lasts` seconds.

    Return whether it was held all the time, by one keepalive.
    """
    trial.scheduler.wait(lambda: False, 100.0 + begins)
    sent_at = trial.scheduler.now
    claim = Claim(name, name, TTL, "")
    granted = run(store.acquire(claim, None, 0.0))
    assert isinstance(granted, Granted)
    grant = Grant(claim, granted.fence, sent_at, valid_until(sent_at, TTL))
    held = LeaseState(trial.runtime, renews=True, max_hold=None)
    held.begin(grant)
    keepalive.watch(held)
    trial.scheduler.wait(lambda: False, sent_at + lasts)
    expected = held.check(trial.scheduler.now) in ALIVE
    held.release()
    expected = run(store.release(name, name, 0.0)) and expected
    keepalive.unwatch(held)
    return expected and keepalive.most == 1


def two_leases(second: float) -> Callable[[Trial], None]:
    """One lease at the beginning, and another at `second`, when the keepalive may be about to retire."""

    def prepare(trial: Trial) -> None:
        store = MemoryStore(Hub(), trial.runtime)
        keepalive = CountedKeepalive(store, trial.runtime)
        trial.thread("first", lambda: hold(trial, keepalive, store, "first", 0.0, 0.1))
        trial.thread("second", lambda: hold(trial, keepalive, store, "second", second, 2.0))

    return prepare


def retirement_times() -> list[float]:
    """When the keepalive runs a round after one short lease: at these moments it may retire."""
    trial = Trial((), ())
    found: list[float] = []

    class Recording(CountedKeepalive):
        async def _round(self) -> float:
            found.append(round(trial.scheduler.now - 100.0, 6))
            return await super()._round()

    store = MemoryStore(Hub(), trial.runtime)
    keepalive = Recording(store, trial.runtime)
    trial.thread("first", lambda: hold(trial, keepalive, store, "first", 0.0, 0.1))
    assert trial.scheduler.run() == []
    assert trial.ended == {"first": (0.1, True)}
    return sorted(set(found))


def expected(second: float) -> dict[str, Any]:
    return {"first": (0.1, True), "second": (round(second + 2.0, 6), True)}


@pytest.mark.parametrize("number", range(3))
def test_a_keepalive_that_retires_drops_no_lease(number: int, patched: Patch) -> None:
    moments = retirement_times()
    assert len(moments) == 3, moments
    second = moments[number]
    assert search(two_leases(second), expected(second), patched, KEEPALIVE_FILES, SWITCHES) > 50


DUE_EARLY = "if lease.valid_until < wakes_at or (lease.renews and lease.next_renewal < wakes_at):"
KEEPALIVE_ERRORS = {
    "it retires with a new lease": ("_retire", "if self._held and not self._closed:", "if False:"),
    "a lease that is due early does not wake it": ("watch", DUE_EARLY, "if False:"),
    "a second one starts": ("_start", "if self._active:", "if False:"),
    "none starts again": (
        "_retire",
        "return not self._active",
        "self._active, ends = True, not self._active; return ends",
    ),
    "it reads the leases before it clears the flag": (
        "_retire",
        "self._active = False\n    if self._held and not self._closed:\n        self._active = True",
        "held = bool(self._held)\n    self._active = held and not self._closed",
    ),
    "a new lease reads the flag before it is added": (
        "watch",
        "self._held[lease] = None",
        "if not self._active: self._start()\n    self._held[lease] = None; self._in_use = True; return",
    ),
}


@pytest.mark.parametrize("name", KEEPALIVE_ERRORS)
def test_a_planted_error_of_the_keepalive_is_found(name: str, patched: Patch) -> None:
    watched = (f"<mutant of {KEEPALIVE_ERRORS[name][0]}>", *KEEPALIVE_FILES)
    moments = retirement_times()

    def search_all() -> None:
        for second in moments:
            search(two_leases(second), expected(second), patched, watched, 1)

    with python(Keepalive, *KEEPALIVE_ERRORS[name]), pytest.raises(AssertionError, match="schedule"):
        search_all()
