"""Failures while a lock is held, and at its release."""

import asyncio
import gc
import logging
import threading
import weakref
from collections.abc import Callable
from functools import partial
from threading import Barrier, Event
from typing import Any

import pytest

import lockfast
import lockfast.aio
from lockfast import Lease, LeaseLost, Lock, NotHeld, State, StoreUnavailable
from tests.support.proxy import FaultProxy
from tests.support.servers import Server
from tests.support.waiting import until
from tests.traps.flavours import FLAVOURS, Client, Flavour
from tests.traps.observation import Stopwatch, await_nothing_left, nth, on, side_by_side, traces

pytestmark = pytest.mark.timing


class TestRelease:
    def test_can_be_retried_after_a_connection_error(self, valkey: Server, proxy: FaultProxy) -> None:
        """Through the lease in both flavours and through the lock; concurrently, as each fails after two seconds."""
        ready, cut, restored = Barrier(4), Event(), Event()

        def through_the_lease(flavour_name: str, name: str) -> None:
            with FLAVOURS[flavour_name]() as flavour:
                client = flavour.connect(proxy.url)
                lease = client.acquire(name)
                fail_and_repeat(lambda: client.release(lease))

        def through_the_lock() -> None:
            with lockfast.connect(proxy.url) as locks:
                lock = locks.lock("report:lock")
                lock.acquire()
                fail_and_repeat(lock.release)
                with pytest.raises(NotHeld):
                    lock.release()

        def fail_and_repeat(release: Callable[[], bool]) -> None:
            ready.wait(20)
            cut.wait(20)
            watch = Stopwatch()
            with pytest.raises(StoreUnavailable):
                release()
            assert watch.seconds < watch.most(2.2)
            ready.wait(20)
            restored.wait(20)
            assert release() is True

        def network() -> None:
            ready.wait(20)
            proxy.refuse()
            proxy.reset_connections()
            cut.set()
            ready.wait(20)
            assert valkey.raw("EXISTS", "report:threads", "report:asyncio", "report:lock") == 3
            proxy.accept()
            restored.set()

        leases = [partial(through_the_lease, flavour_name, f"report:{flavour_name}") for flavour_name in FLAVOURS]
        side_by_side(network, through_the_lock, *leases)
        assert valkey.raw("EXISTS", "report:threads", "report:asyncio", "report:lock") == 0

    def test_lost_reply_is_not_an_error(self, proxy: FaultProxy, flavour: Flavour, valkey: Server) -> None:
        """The server released the lock, and another client acquired it before the retry."""
        client, other = flavour.connect(proxy.url).warm_up(), flavour.connect(valkey.url)
        lease = client.acquire("report")
        lost = proxy.drop_reply(nth(1, on("report")))
        repeated = proxy.hold_requests(nth(2, on("report")))
        releasing = client.start(lease.release)
        lost.wait()
        repeated.wait()
        successor = other.try_acquire("report")
        repeated.release()
        assert releasing.result(20) is True
        assert valkey.raw("GET", "report") == successor.holder

    def test_of_an_expired_lease_does_not_affect_its_successor(
        self, us: Client, valkey: Server, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Two callers share one Lock object; the first exceeds its ttl, and the second acquires the lock."""
        lock = us.locks.lock("report", ttl=0.1, renew=False)
        first = us.do(lock.acquire)
        second = us.do(lambda: lock.acquire(timeout=20))
        with caplog.at_level(logging.WARNING, "lockfast"):
            assert us.release(first) is False
        assert any("had already ended on release" in record.message for record in caplog.records)
        assert second.fence > first.fence
        assert valkey.raw("GET", "report") == second.holder
        assert us.release(second) is True

    def test_by_one_of_two_threads_on_one_lock_object(self, valkey: Server) -> None:
        with lockfast.connect(valkey.url) as locks:
            lock = locks.lock("report", ttl=0.1, renew=False)
            lock.acquire()
            other: list[Any] = []
            thread = threading.Thread(target=lambda: other.append(lock.acquire(timeout=20)))
            thread.start()
            thread.join()
            assert lock.release() is False
            assert valkey.raw("GET", "report") == other[0].holder

    async def test_by_one_of_two_tasks_on_one_lock_object(self, valkey: Server) -> None:
        async with lockfast.aio.connect(valkey.url) as locks:
            lock = locks.lock("report", ttl=0.1, renew=False)
            await lock.acquire()
            other = await asyncio.create_task(lock.acquire(timeout=20))
            assert other is not None
            assert await lock.release() is False
            assert valkey.raw("GET", "report") == other.holder

    @pytest.mark.parametrize("by", ["lease", "lock", "export"])
    def test_inside_the_block_is_not_an_error(self, valkey: Server, by: str) -> None:
        def release(lock: Lock, lease: Lease) -> None:
            if by == "lease":
                lease.release()
            elif by == "lock":
                lock.release()
            else:
                locks.adopt(lease.export()).release()

        with lockfast.connect(valkey.url) as locks:
            lock = locks.lock("report")
            with lock as lease:
                release(lock, lease)
            with pytest.raises(ZeroDivisionError), lock as lease:  # noqa: PT012
                release(lock, lease)
                _ = 1 / 0
        assert traces(valkey, "report") == []

    def test_through_the_lease_leaves_nothing_in_the_lock_object(self, us: Client) -> None:
        """A long-lived Lock object must not collect its leases."""
        lock = us.locks.lock("report")

        def use() -> weakref.ref[Any]:
            lease = us.do(lock.acquire)
            us.release(lease)
            return weakref.ref(lease)

        leases = [use() for _ in range(20)]
        gc.collect()
        assert sum(lease() is not None for lease in leases) <= 2  # a frame may still refer to the last one


class TestFromAnotherCaller:
    """A lease is not bound to the thread or task that acquired it."""

    def test_another_thread_or_task_can_use_the_lease(self, us: Client, valkey: Server) -> None:
        lease = us.start(lambda: us.locks.lock("report").acquire()).result(20)
        us.start(lease.ensure_held).result(20)
        us.start(lease.renew).result(20)
        assert us.start(lambda: lease.state).result(20) is State.HELD
        assert us.start(lease.release).result(20) is True
        assert traces(valkey, "report") == []


class TestShorterTtl:
    def test_granted_time_is_not_shortened(self, us: Client, them: Client, valkey: Server) -> None:
        """A renewal with a shorter ttl may arrive after a longer one on which the holder already relies."""
        lease = us.acquire("report", ttl=30, renew=False)
        us.renew(lease, 0.2)
        assert us.do(lambda: lease.ttl) == 0.2
        assert us.do(lambda: lease.remaining) > 20
        assert valkey.raw("PTTL", "report") > 20_000
        assert them.try_acquire("report") is None
        us.release(lease)

    def test_shorter_ttl_applies_after_the_longer_one(self, us: Client, valkey: Server) -> None:
        lease = us.acquire("report", ttl=0.3)
        us.renew(lease, 0.1)
        until(lambda: 0 < valkey.raw("PTTL", "report") <= 100, "renewals with the shorter ttl")
        assert us.state(lease) is State.HELD
        us.release(lease)


class TestRenewalFails:
    def test_risk_and_loss_are_reported(self, proxy: FaultProxy, flavour: Flavour, valkey: Server) -> None:
        calls: list[str] = []
        client = flavour.connect(proxy.url).warm_up()
        watch = Stopwatch()
        lease = client.acquire(
            "report", ttl=1.8, on_risk=lambda _: calls.append("risk"), on_lost=lambda _: calls.append("lost")
        )
        proxy.refuse()
        proxy.reset_connections()
        until(lambda: client.state(lease) is State.AT_RISK, "the lease to be at risk")
        client.do(lease.ensure_held)  # at risk is still held
        assert client.do(lambda: lease.lost.wait(20)) is True
        assert watch.seconds < watch.most(1.8 + 0.05 + 0.1)
        until(lambda: calls == ["risk", "lost"], "the callbacks to be called")
        with pytest.raises(LeaseLost, match="ran out"):
            client.do(lease.ensure_held)
        proxy.accept()
        await_nothing_left(valkey, "report")
        assert client.release(lease) is False

    def test_late_renewal_saves_the_lease(self, proxy: FaultProxy, flavour: Flavour, valkey: Server) -> None:
        calls: list[str] = []
        client = flavour.connect(proxy.url).warm_up()
        lease = client.acquire(
            "report", ttl=6, on_risk=lambda _: calls.append("risk"), on_lost=lambda _: calls.append("lost")
        )
        proxy.refuse()
        proxy.reset_connections()
        until(lambda: client.state(lease) is State.AT_RISK, "the lease to be at risk")
        proxy.accept()
        until(lambda: client.state(lease) is State.HELD, "the lease to be held again")
        until(lambda: calls == ["risk"], "the callback to be called")
        assert valkey.raw("GET", "report") == lease.holder
        assert client.release(lease) is True

    def test_sync_block_raises_at_its_end(self, valkey: Server) -> None:
        with lockfast.connect(valkey.url) as locks:
            lock = locks.lock("report", ttl=0.3)
            with pytest.raises(LeaseLost) as lost, lock as lease:  # noqa: PT012
                valkey.raw("DEL", "report")
                assert lease.lost.wait(20)
            assert lost.value.fence == lease.fence

    async def test_async_block_is_cancelled(self, valkey: Server) -> None:
        reached: list[str] = []
        async with lockfast.aio.connect(valkey.url) as locks:
            with pytest.raises(LeaseLost):  # noqa: PT012
                async with locks.lock("report", ttl=0.3):
                    valkey.raw("DEL", "report")
                    await asyncio.sleep(30)
                    reached.append("the end of the block")
            assert not reached
            task = asyncio.current_task()
            assert task is not None
            assert task.cancelling() == 0

    def test_other_holder_under_the_name_is_not_affected(self, us: Client, valkey: Server) -> None:
        """After an external change the lease neither renews nor releases the grant of the other holder."""
        lease = us.acquire("report", ttl=0.3)
        valkey.raw("SET", "report", "another", "PX", "60000")
        assert us.do(lambda: lease.lost.wait(20)) is True
        assert us.release(lease) is False
        assert valkey.raw("GET", "report") == "another"
        assert valkey.raw("PTTL", "report") > 50_000
