"""The sandbox: in-memory locks, a virtual clock and faults on demand, in both flavours. No test here sleeps."""

import asyncio
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockfast import LeaseLost, State, StoreUnavailable
from lockfast.testing import Sandbox, Stuck
from lockfast.testing.sandbox import VirtualLoop
from tests.test_docs import fences

pytest_plugins = ["pytester"]
DOCS = Path(__file__).parent.parent / "docs" / "testing.md"


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    with Sandbox() as sandbox:
        yield sandbox


# Time.


def test_lease_is_renewed_as_time_passes(sandbox: Sandbox) -> None:
    lease = sandbox.locks.lock("door", ttl=10).acquire()
    assert lease is not None
    sandbox.advance(3600)
    assert lease.state is State.HELD
    assert lease.remaining > 6
    assert lease.release()


def test_unrenewed_lease_expires_with_its_ttl(sandbox: Sandbox) -> None:
    lost: list[object] = []
    lease = sandbox.locks.lock("door", ttl=10, renew=False, on_lost=lost.append).acquire()
    sandbox.advance(9.9)
    assert lease is not None
    assert lease.state is State.HELD
    sandbox.advance(0.1)
    assert (lease.state, lost) == (State.LOST, [lease])


def test_max_hold_ends_a_lease(sandbox: Sandbox) -> None:
    lease = sandbox.locks.lock("door", ttl=10, max_hold=60).acquire()
    sandbox.advance(61)
    assert lease is not None
    assert lease.state is State.LOST


def test_wait_moves_the_clock_without_real_time(sandbox: Sandbox) -> None:
    sandbox.hold("door")
    before, began = sandbox.now(), time.monotonic()
    assert sandbox.locks.lock("door").acquire(timeout=300) is None
    assert 300 <= sandbox.now() - before < 300.2
    assert time.monotonic() - began < 60


def test_expired_lock_is_acquired_at_its_expiry(sandbox: Sandbox) -> None:
    sandbox.hold("door", seconds=60)
    before = sandbox.now()
    assert sandbox.locks.lock("door").acquire() is not None
    assert 60 <= sandbox.now() - before < 60.1


def test_endless_wait_raises_instead_of_hanging(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockfast.testing.sandbox.MOST_JUMPS", 500)
    sandbox.hold("door")
    with pytest.raises(Stuck, match="nothing can end the wait"):
        sandbox.locks.lock("door").acquire()
    with pytest.raises(Stuck):
        sandbox.run(sandbox.async_locks.lock("door").acquire())


# Other clients, and faults.


def test_release_of_another_holder_wakes_a_waiter(sandbox: Sandbox) -> None:
    other = sandbox.hold("door")
    acquired: list[bool] = []
    waiter = threading.Thread(target=lambda: acquired.append(sandbox.locks.lock("door").acquire() is not None))
    waiter.start()
    while not sandbox.locks.lock("door").inspect().waiters:
        time.sleep(0.001)  # until the thread waits
    assert other.release()
    waiter.join(10)
    assert acquired == [True]


def test_keepalive_detects_that_another_client_took_the_lock(sandbox: Sandbox) -> None:
    lease = sandbox.locks.lock("door", ttl=30).acquire()
    sandbox.hold("door")
    assert lease is not None
    sandbox.advance(15)
    assert lease.state is State.LOST


def test_lose_notifies_the_holder_at_once(sandbox: Sandbox) -> None:
    lost: list[object] = []
    lock = sandbox.locks.lock("door", on_lost=lost.append)
    lease = lock.__enter__()
    sandbox.lose(lease)
    assert lost == [lease]
    assert lease.lost.wait(timeout=0)
    with pytest.raises(LeaseLost, match="the test took it away"):
        lock.__exit__(None, None, None)


def test_callback_can_wait_for_locks(sandbox: Sandbox) -> None:
    """Callbacks run in threads of their own, scheduled together with the test."""
    acquired: list[object] = []
    sandbox.hold("other", seconds=5)
    lock = sandbox.locks.lock(
        "door", on_lost=lambda lease: acquired.append(sandbox.locks.lock("other").acquire(timeout=20))
    )
    lease = lock.acquire()
    assert lease is not None
    sandbox.lose(lease)
    assert acquired == []
    sandbox.advance(6)
    assert len(acquired) == 1
    assert acquired[0] is not None


def test_unreachable_store_puts_a_lease_at_risk_and_then_loses_it(sandbox: Sandbox) -> None:
    seen: list[str] = []
    lock = sandbox.locks.lock(
        "door", ttl=30, on_risk=lambda lease: seen.append("risk"), on_lost=lambda lease: seen.append("lost")
    )
    lease = lock.acquire()
    sandbox.unreachable()
    assert lease is not None
    sandbox.advance(20)
    assert (lease.state, seen) == (State.AT_RISK, ["risk"])
    with pytest.raises(StoreUnavailable):
        sandbox.locks.lock("other").acquire(timeout=5)
    sandbox.advance(20)
    assert (lease.state, seen) == (State.LOST, ["risk", "lost"])
    sandbox.reachable()
    assert lock.acquire(timeout=60) is not None


def test_store_reachable_in_time_saves_the_lease(sandbox: Sandbox) -> None:
    lease = sandbox.locks.lock("door", ttl=30).acquire()
    sandbox.unreachable()
    sandbox.advance(20)
    sandbox.reachable()
    sandbox.advance(5)
    assert lease is not None
    assert lease.state is State.HELD


def test_next_renewal_detects_a_reset_store(sandbox: Sandbox) -> None:
    lease = sandbox.locks.lock("door", ttl=30).acquire()
    sandbox.reset()
    assert lease is not None
    lease.ensure_held()
    sandbox.advance(11)
    assert lease.state is State.LOST


def test_fences_and_times_are_the_same_on_every_run() -> None:
    def one_run() -> list[float]:
        with Sandbox() as sandbox:
            first = sandbox.locks.lock("door").acquire()
            sandbox.advance(7.25)
            assert first is not None
            first.release()
            second = sandbox.locks.lock("door").acquire()
            assert second is not None
            return [first.fence, second.fence, sandbox.now()]

    assert one_run() == one_run()


# Async.


def test_asyncio_runs_in_virtual_time(sandbox: Sandbox) -> None:
    async def main() -> tuple[State, float]:
        async with sandbox.async_locks.lock("door", ttl=10) as lease:
            before = sandbox.now()
            await asyncio.sleep(3600)
            return lease.state, sandbox.now() - before

    state, took = sandbox.run(main())
    assert state is State.HELD
    assert took == pytest.approx(3600)


def test_lost_lease_cancels_an_async_body(sandbox: Sandbox) -> None:
    reached: list[str] = []

    async def main() -> None:
        async with sandbox.async_locks.lock("door") as lease:
            sandbox.lose(lease)
            reached.append("lost")
            await asyncio.sleep(3600)
            reached.append("never")

    with pytest.raises(LeaseLost):
        sandbox.run(main())
    assert reached == ["lost"]


def test_unreachable_store_in_asyncio(sandbox: Sandbox) -> None:
    async def main() -> State:
        lease = await sandbox.async_locks.lock("door", ttl=30).acquire()
        sandbox.unreachable()
        assert lease is not None
        assert await lease.lost.wait(timeout=60)
        return lease.state

    assert sandbox.run(main()) is State.LOST


def test_flavours_share_the_store_and_the_clock(sandbox: Sandbox) -> None:
    lease = sandbox.locks.lock("door", renew=False, ttl=60).acquire()
    assert lease is not None

    async def main() -> float:
        before = sandbox.now()
        assert await sandbox.async_locks.lock("door").acquire(timeout=90) is not None
        return sandbox.now() - before

    assert 59 < sandbox.run(main()) < 61


def test_tasks_hand_the_lock_off_in_order(sandbox: Sandbox) -> None:
    order: list[str] = []

    async def worker(name: str, seconds: float) -> None:
        async with sandbox.async_locks.lock("door"):
            order.append(name)
            await asyncio.sleep(seconds)

    async def main() -> None:
        await asyncio.gather(worker("first", 100), worker("second", 100), worker("third", 0))

    sandbox.run(main())
    assert order == ["first", "second", "third"]


def test_loop_without_timers_and_events_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockfast.testing.sandbox.REAL_PATIENCE", 0.01)
    sandbox = Sandbox()
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(sandbox.clock)) as runner, pytest.raises(Stuck):
        runner.run(asyncio.Event().wait())


# The plugin, and the page in the documentation.

TESTS = """
import lockfast, lockfast.aio

def test_the_sandbox(lockfast_sandbox, lockfast_locks, lockfast_async_locks):
    assert lockfast_locks is lockfast_sandbox.locks
    assert lockfast_async_locks is lockfast_sandbox.async_locks

def test_connecting(lockfast_connect):
    assert lockfast.connect("redis://nowhere") is lockfast_connect.locks
    assert lockfast.aio.connect() is lockfast_connect.async_locks

def test_afterwards():
    assert lockfast.connect("memory://").lock("door").acquire(timeout=0) is not None
"""


def test_fixtures(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TESTS)
    outcome = pytester.runpytest_subprocess("-p", "lockfast.testing.plugin", "-p", "no:asyncio", "-p", "no:valkey")
    outcome.assert_outcomes(passed=3)


def test_examples_of_the_page_pass(pytester: pytest.Pytester) -> None:
    parts = [fence.body for fence in fences(DOCS.read_text("utf-8"))]
    shown = sum(len(re.findall(r"^def test_", part, re.MULTILINE)) for part in parts)
    pytester.makepyfile("\n\n".join(parts))
    outcome = pytester.runpytest_subprocess("-p", "lockfast.testing.plugin", "-p", "no:asyncio", "-p", "no:valkey")
    outcome.assert_outcomes(passed=shown)
    assert shown >= 6


def test_plugin_is_an_entry_point() -> None:
    """Its name is the module's name, so `-p` or `pytest_plugins` do not load it twice."""
    text = (DOCS.parent.parent / "pyproject.toml").read_text("utf-8")
    assert '[project.entry-points.pytest11]\n"lockfast.testing.plugin" = "lockfast.testing.plugin"' in text
