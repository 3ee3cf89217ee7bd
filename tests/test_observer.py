"""The observer: which lifecycle events it receives, with which times and fences, and that it cannot harm a lock."""

import itertools
import logging
import sys
import time
import uuid
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import pytest

import lockfast
from lockfast import LeaseLost, State, StoreUnavailable
from lockfast.core import local_handoff
from lockfast.events import Event, EventKind
from tests.contract.driver import BOUND, FLAVOURS, Driver, done, held, scenario
from tests.support.servers import Server

CLAIM_SENT, QUEUED, GRANTED, TIMED_OUT, UNAVAILABLE = itertools.islice(EventKind, 5)
RENEWED, AT_RISK, LOST, RELEASED, HANDED_OFF, FORCE_RELEASED = itertools.islice(EventKind, 6, None)
WAIT = 0.2
"""Seconds of a wait or a hold whose time an event must report."""
CALLS_PER_CYCLE = 58
"""Most calls of Python functions in `with locks.lock(name)` on memory:// without an observer."""


class Recorder:
    """Records every event."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def observe(self, event: Event) -> None:
        self.events.append(event)

    @property
    def kinds(self) -> list[EventKind]:
        return [event.kind for event in self.events]

    def one(self, kind: EventKind) -> Event:
        """The only event of that kind."""
        (found,) = [event for event in self.events if event.kind is kind]
        return found

    def last(self, kind: EventKind) -> Event:
        return [event for event in self.events if event.kind is kind][-1]

    def clear(self) -> None:
        self.events.clear()


class Broken:
    """An observer that fails on every event."""

    def __init__(self) -> None:
        self.calls = 0

    def observe(self, event: Event) -> None:
        self.calls += 1
        raise RuntimeError("the observer is broken")


class Observed(NamedTuple):
    """A client with a recorder, and another client of the same store without one."""

    recorder: Recorder
    locks: Any
    others: Any


STORES = [
    pytest.param((store, flavour), id=f"{store}-{flavour}") for store in ("memory", "valkey") for flavour in FLAVOURS
]


@pytest.fixture(params=STORES)
def d(request: pytest.FixtureRequest) -> Driver:
    store, flavour = request.param
    if store == "memory":
        return FLAVOURS[flavour](store, f"memory://{uuid.uuid4()}")
    server: Server = request.getfixturevalue("valkey")
    return FLAVOURS[flavour](store, server.url, server)


def observed(d: Driver) -> Observed:
    recorder = Recorder()
    return Observed(recorder, d.connect(observer=recorder), d.connect())


async def pause(d: Driver, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        await d.pause()


# Acquire and release


@scenario
async def test_an_uncontended_block(d: Driver) -> None:
    recorder, locks, _ = observed(d)
    async with held(locks.lock("thing")) as lease:
        assert recorder.kinds == [CLAIM_SENT, GRANTED]
        await pause(d, WAIT)
    assert recorder.kinds == [CLAIM_SENT, GRANTED, RELEASED]
    sent, granted, released = recorder.events
    assert {event.name for event in recorder.events} == {"thing"}
    assert sent.fence is None
    assert granted.fence == released.fence == lease.fence
    assert 0 <= sent.seconds <= granted.seconds < WAIT
    assert WAIT <= released.seconds < BOUND


@scenario
async def test_a_lock_without_a_wait(d: Driver) -> None:
    recorder, locks, others = observed(d)
    other = await done(others.lock("thing").acquire())
    assert await done(locks.lock("thing").acquire(blocking=False)) is None
    assert recorder.kinds == [CLAIM_SENT, TIMED_OUT]
    await done(other.release())


@scenario
async def test_a_wait_in_the_queue_of_the_store(d: Driver) -> None:
    recorder, locks, others = observed(d)
    other = await done(others.lock("thing").acquire())
    waiter = d.start(hold, locks.lock("thing"))
    await d.until(lambda: QUEUED in recorder.kinds, "the event")
    await pause(d, WAIT)
    await done(other.release())
    fence = await waiter.result()
    assert recorder.kinds == [CLAIM_SENT, QUEUED, GRANTED, RELEASED]
    _, queued, granted, released = recorder.events
    assert queued.fence is None
    assert granted.fence == released.fence == fence
    assert queued.seconds < WAIT <= granted.seconds
    assert released.seconds < WAIT, "the hold time contains the wait"


async def hold(lock: Any) -> int:
    async with held(lock) as lease:
        fence: int = lease.fence
        return fence


@scenario
async def test_a_wait_that_times_out(d: Driver) -> None:
    recorder, locks, others = observed(d)
    other = await done(others.lock("thing").acquire())
    assert await done(locks.lock("thing").acquire(timeout=WAIT)) is None
    assert recorder.kinds == [CLAIM_SENT, QUEUED, TIMED_OUT]
    timed_out = recorder.last(TIMED_OUT)
    assert timed_out.fence is None
    assert WAIT <= timed_out.seconds < BOUND
    await done(other.release())


@scenario
async def test_each_level_of_a_reentrant_lock_is_not_an_event(d: Driver) -> None:
    recorder, locks, _ = observed(d)
    lock = locks.rlock("thing")
    async with held(lock), held(lock):
        pass
    assert recorder.kinds == [CLAIM_SENT, GRANTED, RELEASED]


@scenario
async def test_an_adopted_lease(d: Driver) -> None:
    recorder, locks, others = observed(d)
    text = (await done(others.lock("thing").acquire())).export()
    lease = await done(locks.adopt(text))
    await done(lease.release())
    assert recorder.kinds == [GRANTED, RELEASED]
    assert recorder.one(GRANTED).fence == lease.fence


@scenario
async def test_close_releases(d: Driver) -> None:
    recorder, locks, _ = observed(d)
    lease = await done(locks.lock("thing").acquire())
    await done(locks.close())
    assert recorder.kinds == [CLAIM_SENT, GRANTED, RELEASED]
    assert recorder.one(RELEASED).fence == lease.fence


# Local hand-off


@pytest.fixture
def unlimited_local_handoff(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even on a slow machine, no time limit ends local hand-off."""
    for name in ("SPAN", "PATIENCE", "LONG_PATIENCE"):
        monkeypatch.setattr(local_handoff, name, 60.0)
    monkeypatch.setattr(local_handoff, "EXTRA", 61.0)


@pytest.mark.usefixtures("unlimited_local_handoff")
@scenario
async def test_a_local_hand_off(d: Driver) -> None:
    """The first holder has a lease of its own, the second a pooled grant, and the third is handed that."""
    recorder, locks, _ = observed(d)
    gates = [d.gate() for _ in range(2)]
    fences: list[int] = []

    async def member(number: int) -> None:
        async with held(locks.lock("thing")) as lease:
            fences.append(lease.fence)
            await gates[number].passed()

    first = await done(locks.lock("thing").acquire())
    contenders = [d.start(member, 0)]
    await d.until(lambda: QUEUED in recorder.kinds, "the pooled claim")
    contenders.append(d.start(member, 1))
    queue = locks.session.local_queues.queue("thing")
    await d.until(lambda: queue._waiters, "a local waiter")
    await pause(d, WAIT)
    await done(first.release())
    await d.until(lambda: fences, "the pooled grant")
    recorder.clear()
    gates[0].open()
    await d.until(lambda: len(fences) == 2, "the hand-off")
    gates[1].open()
    for contender in contenders:
        await contender.result()
    assert sorted(kind.value for kind in recorder.kinds) == ["granted", "handed off locally", "released"]
    assert recorder.one(HANDED_OFF).fence == fences[0]
    assert recorder.one(GRANTED).fence == recorder.one(RELEASED).fence == fences[1]
    assert recorder.one(GRANTED).seconds >= WAIT
    assert recorder.one(HANDED_OFF).seconds < WAIT


@pytest.mark.usefixtures("unlimited_local_handoff")
@scenario
async def test_a_pooled_grant_reports_the_fence_of_its_lease(d: Driver) -> None:
    recorder, locks, _ = observed(d)
    first = await done(locks.lock("thing").acquire())
    waiter = d.start(hold, locks.lock("thing"))
    await d.until(lambda: QUEUED in recorder.kinds, "the pooled claim")
    recorder.clear()
    await done(first.release())
    fence = await waiter.result()
    assert recorder.one(GRANTED).fence == fence


@pytest.mark.usefixtures("unlimited_local_handoff")
@scenario
async def test_a_local_wait_that_times_out(d: Driver) -> None:
    recorder, locks, others = observed(d)
    other = await done(others.lock("thing").acquire())
    waiter = d.start(hold, locks.lock("thing"))
    await d.until(lambda: QUEUED in recorder.kinds, "the claim of the first")
    shared = d.start(hold, locks.lock("thing"))
    await d.until(lambda: recorder.kinds.count(QUEUED) == 2, "the pooled claim")
    recorder.clear()
    assert await done(locks.lock("thing").acquire(timeout=WAIT)) is None
    assert recorder.kinds == [TIMED_OUT]
    assert WAIT <= recorder.one(TIMED_OUT).seconds < BOUND
    await done(other.release())
    await waiter.result()
    await shared.result()


# Renewal and loss


@scenario
async def test_renewals(d: Driver) -> None:
    recorder, locks, _ = observed(d)
    async with held(locks.lock("thing", ttl=0.6)) as lease:
        await d.until(lambda: recorder.kinds.count(RENEWED) >= 2, "two renewals")
        count = recorder.kinds.count(RENEWED)
        await done(lease.renew())
        assert recorder.kinds.count(RENEWED) > count
    renewals = [event for event in recorder.events if event.kind is RENEWED]
    assert {event.fence for event in renewals} == {lease.fence}
    assert renewals[0].seconds < renewals[-1].seconds


@scenario
async def test_a_lease_that_expires(d: Driver) -> None:
    recorder, locks, _ = observed(d)
    lease = await done(locks.lock("thing", ttl=WAIT, renew=False).acquire())
    await d.until(lambda: LOST in recorder.kinds, "the loss")
    assert recorder.kinds == [CLAIM_SENT, GRANTED, LOST]
    lost = recorder.one(LOST)
    assert lost.fence == lease.fence
    assert WAIT / 2 < lost.seconds < BOUND
    assert "not renewed" in lost.detail
    await done(lease.release())
    assert recorder.kinds == [CLAIM_SENT, GRANTED, LOST], "a lost lease is not released"


@scenario
async def test_a_force_release(d: Driver) -> None:
    """The operator's observer gets FORCE_RELEASED, the holder's gets LOST."""
    recorder, locks, _ = observed(d)
    operator = Recorder()
    lease = await done(locks.lock("thing", ttl=0.6).acquire())
    await pause(d, WAIT)
    assert await done(d.connect(observer=operator).lock("thing").force_release()) is not None
    assert operator.kinds == [FORCE_RELEASED]
    forced = operator.one(FORCE_RELEASED)
    assert (forced.name, forced.fence) == ("thing", lease.fence)
    assert WAIT / 2 < forced.seconds < BOUND
    await d.until(lambda: LOST in recorder.kinds, "the loss")
    assert recorder.one(LOST).fence == lease.fence
    assert RELEASED not in recorder.kinds


@scenario
async def test_nothing_to_force_release(d: Driver) -> None:
    recorder, locks, _ = observed(d)
    assert await done(locks.lock("thing").force_release()) is None
    assert recorder.kinds == []


# A server that fails


@pytest.fixture(params=FLAVOURS)
def on_fresh_server(request: pytest.FixtureRequest, fresh_server: Server) -> Driver:
    flavour: str = request.param
    return FLAVOURS[flavour]("valkey", fresh_server.url, fresh_server)


def on_server(body: Callable[[Driver, Server], Any]) -> Callable[[Driver], None]:
    """A test with a server of its own."""

    def test(on_fresh_server: Driver) -> None:
        assert on_fresh_server.server is not None
        on_fresh_server.run(body(on_fresh_server, on_fresh_server.server))

    test.__name__ = body.__name__
    return test


@on_server
async def test_a_server_that_is_stopped(d: Driver, server: Server) -> None:
    recorder, locks, _ = observed(d)
    async with held(locks.lock("thing")):
        pass
    recorder.clear()
    server.kill()
    with pytest.raises(StoreUnavailable):
        await done(locks.lock("thing").acquire(timeout=WAIT))
    assert recorder.kinds == [CLAIM_SENT, UNAVAILABLE]
    unavailable = recorder.one(UNAVAILABLE)
    assert unavailable.fence is None
    assert unavailable.detail
    assert unavailable.seconds < BOUND


@on_server
async def test_a_lease_at_risk(d: Driver, server: Server) -> None:
    recorder, locks, _ = observed(d)
    lease = await done(locks.lock("thing", ttl=3).acquire())
    server.pause()
    await d.until(lambda: AT_RISK in recorder.kinds, "the risk")
    server.resume()
    await d.until(lambda: RENEWED in recorder.kinds[recorder.kinds.index(AT_RISK) :], "a renewal")
    assert lease.state is State.HELD
    risk = recorder.one(AT_RISK)
    assert risk.fence == lease.fence
    assert "no answer" in risk.detail
    assert await done(lease.release())
    assert LOST not in recorder.kinds


@on_server
async def test_a_lease_that_is_lost_with_its_server(d: Driver, server: Server) -> None:
    recorder, locks, _ = observed(d)
    await done(locks.lock("thing", ttl=1).acquire())
    server.kill()
    await d.until(lambda: LOST in recorder.kinds, "the loss")
    kinds = [kind for kind in recorder.kinds if kind is not RENEWED]
    assert kinds == [CLAIM_SENT, GRANTED, AT_RISK, LOST]


# Safety


@scenario
async def test_no_event_contains_a_holder_id(d: Driver) -> None:
    recorder, locks, others = observed(d)
    ids = []
    for _ in range(2):
        async with held(locks.lock("thing", ttl=0.6)) as lease:
            ids.append(lease.holder)
            await done(lease.renew())
    forced = await done(locks.lock("thing").acquire())
    ids.append(forced.holder)
    await done(locks.lock("thing").force_release())
    other = await done(others.lock("thing").acquire())
    ids.append(other.holder)
    assert await done(locks.lock("thing").acquire(timeout=0.01)) is None
    await done(other.release())
    text = repr(recorder.events)
    assert len(set(ids)) == 4
    assert not [one for one in ids if one in text]


@scenario
async def test_an_observer_that_fails_does_not_harm_a_lock(d: Driver, caplog: pytest.LogCaptureFixture) -> None:
    broken = Broken()
    locks, others = d.connect(observer=broken), d.connect()
    lost: list[Any] = []
    with caplog.at_level(logging.ERROR, logger="lockfast"):
        async with held(locks.lock("thing", ttl=0.6)) as lease:
            await done(lease.renew())
            lease.ensure_held()
            assert await done(others.lock("thing").acquire(blocking=False)) is None
        other = await done(others.lock("thing").acquire(blocking=False))
        assert other is not None, "the block released the lock"
        assert await done(locks.lock("thing").acquire(timeout=0.01)) is None
        await done(other.release())
        expiring = await done(locks.lock("thing", ttl=0.1, renew=False, on_lost=lost.append).acquire())
        await d.until(lambda: lost, "the callback")
        with pytest.raises(LeaseLost):
            expiring.ensure_held()
        await done(locks.close())
    assert broken.calls >= 8
    errors = [record for record in caplog.records if "observer failed" in record.getMessage()]
    assert len(errors) == broken.calls


def functions_called(cycle: Callable[[], None]) -> list[str]:
    """The Python functions that `cycle` calls in this thread, in order."""
    called: list[str] = []

    def record(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called.append(frame.f_code.co_qualname)

    sys.setprofile(record)
    try:
        cycle()
    finally:
        sys.setprofile(None)
    return called


@pytest.mark.parametrize("observer", [None, Recorder()], ids=["no observer", "observer"])
def test_without_an_observer_a_cycle_makes_no_call_for_it(observer: Recorder | None) -> None:
    with lockfast.connect("memory://observer-calls", observer=observer) as locks:

        def cycle() -> None:
            with locks.lock("thing"):
                pass

        cycle()
        called = functions_called(cycle)
    reports = [name for name in called if name.endswith(("._event", ".emit", ".observe"))]
    if observer is None:
        assert reports == []
        assert len(called) <= CALLS_PER_CYCLE
    else:
        assert reports.count("Recorder.observe") == 3
