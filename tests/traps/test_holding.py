"""What may go wrong while a lock is held, and when it is given back."""

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
from tests.traps.flavours import FLAVOURS, Client, Colour
from tests.traps.watching import Stopwatch, await_nothing_left, nth, on, side_by_side, traces

pytestmark = pytest.mark.timing


class TestRelease:
    def test_after_a_connection_error_it_may_be_called_again(self, valkey: Server, proxy: FaultProxy) -> None:
        """On the lease in both colours, and on the lock; all at once, since each fails after two seconds."""
        ready, cut, mended = Barrier(4), Event(), Event()

        def by_the_lease(colour_name: str, name: str) -> None:
            with FLAVOURS[colour_name]() as flavour:
                client = flavour.connect(proxy.url)
                lease = client.acquire(name)
                fail_and_repeat(lambda: client.release(lease))

        def by_the_lock() -> None:
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
            mended.wait(20)
            assert release() is True

        def network() -> None:
            ready.wait(20)
            proxy.refuse()
            proxy.reset_connections()
            cut.set()
            ready.wait(20)
            assert valkey.raw("EXISTS", "report:threads", "report:asyncio", "report:lock") == 3
            proxy.accept()
            mended.set()

        leases = [partial(by_the_lease, colour_name, f"report:{colour_name}") for colour_name in FLAVOURS]
        side_by_side(network, by_the_lock, *leases)
        assert valkey.raw("EXISTS", "report:threads", "report:asyncio", "report:lock") == 0

    def test_a_lost_reply_is_no_failure(self, proxy: FaultProxy, flavour: Colour, valkey: Server) -> None:
        """The server freed the lock, another took it, and the repeat finds neither us nor harm to do."""
        client, other = flavour.connect(proxy.url).warm_up(), flavour.connect(valkey.url)
        lease = client.acquire("report")
        lost = proxy.drop_reply(nth(1, on("report")))
        repeated = proxy.hold_requests(nth(2, on("report")))
        releasing = client.start(lease.release)
        lost.wait()
        repeated.wait()
        taken = other.try_acquire("report")
        repeated.release()
        assert releasing.result(20) is True
        assert valkey.raw("GET", "report") == taken.holder

    def test_of_a_lease_that_expired_leaves_the_next_holder_alone(
        self, us: Client, valkey: Server, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Two share one Lock object; the first overruns its ttl, and the second gets the lock."""
        lock = us.locks.lock("report", ttl=0.1, renew=False)
        first = us.do(lock.acquire)
        second = us.do(lambda: lock.acquire(timeout=20))
        with caplog.at_level(logging.WARNING, "lockfast"):
            assert us.release(first) is False
        assert any("gone" in record.message or "lost" in record.message for record in caplog.records)
        assert second.fence > first.fence
        assert valkey.raw("GET", "report") == second.holder
        assert us.release(second) is True

    def test_of_two_who_share_a_lock_object_frees_ones_own(self, valkey: Server) -> None:
        with lockfast.connect(valkey.url) as locks:
            lock = locks.lock("report", ttl=0.1, renew=False)
            lock.acquire()
            other: list[Any] = []
            taker = threading.Thread(target=lambda: other.append(lock.acquire(timeout=20)))
            taker.start()
            taker.join()
            assert lock.release() is False
            assert valkey.raw("GET", "report") == other[0].holder

    async def test_of_two_tasks_that_share_a_lock_object_frees_ones_own(self, valkey: Server) -> None:
        async with lockfast.aio.connect(valkey.url) as locks:
            lock = locks.lock("report", ttl=0.1, renew=False)
            await lock.acquire()
            other = await asyncio.create_task(lock.acquire(timeout=20))
            assert other is not None
            assert await lock.release() is False
            assert valkey.raw("GET", "report") == other.holder

    @pytest.mark.parametrize("by", ["lease", "lock", "export"])
    def test_within_the_block_ends_it_quietly(self, valkey: Server, by: str) -> None:
        def give_back(lock: Lock, lease: Lease) -> None:
            if by == "lease":
                lease.release()
            elif by == "lock":
                lock.release()
            else:
                locks.adopt(lease.export()).release()

        with lockfast.connect(valkey.url) as locks:
            lock = locks.lock("report")
            with lock as lease:
                give_back(lock, lease)
            with pytest.raises(ZeroDivisionError), lock as lease:  # noqa: PT012
                give_back(lock, lease)
                _ = 1 / 0
        assert traces(valkey, "report") == []

    def test_by_the_lease_leaves_nothing_in_the_lock_object(self, us: Client) -> None:
        """A long-lived Lock object must not collect what it handed out."""
        lock = us.locks.lock("report")

        def use() -> weakref.ref[Any]:
            lease = us.do(lock.acquire)
            us.release(lease)
            return weakref.ref(lease)

        leases = [use() for _ in range(20)]
        gc.collect()
        assert sum(lease() is not None for lease in leases) <= 2  # the last may still stand in a frame


class TestFromElsewhere:
    """A lease belongs to whoever has it, not to the thread or task that got it."""

    def test_another_thread_or_task_may_use_the_lease(self, us: Client, valkey: Server) -> None:
        lease = us.start(lambda: us.locks.lock("report").acquire()).result(20)
        us.start(lease.ensure_held).result(20)
        us.start(lease.renew).result(20)
        assert us.start(lambda: lease.state).result(20) is State.HELD
        assert us.start(lease.release).result(20) is True
        assert traces(valkey, "report") == []


class TestShorterTtl:
    def test_what_was_granted_is_not_taken_back(self, us: Client, them: Client, valkey: Server) -> None:
        """A renewal with a shorter ttl may arrive late, after a longer one whose answer the holder relies on."""
        lease = us.acquire("report", ttl=30, renew=False)
        us.renew(lease, 0.2)
        assert us.do(lambda: lease.ttl) == 0.2
        assert us.do(lambda: lease.remaining) > 20
        assert valkey.raw("PTTL", "report") > 20_000
        assert them.try_acquire("report") is None
        us.release(lease)

    def test_the_shorter_one_counts_once_the_longer_has_run_out(self, us: Client, valkey: Server) -> None:
        lease = us.acquire("report", ttl=0.3)
        us.renew(lease, 0.1)
        until(lambda: 0 < valkey.raw("PTTL", "report") <= 100, "renewals by the shorter ttl")
        assert us.state(lease) is State.HELD
        us.release(lease)


class TestRenewalFails:
    def test_the_holder_learns_of_the_risk_and_of_the_loss(
        self, proxy: FaultProxy, flavour: Colour, valkey: Server
    ) -> None:
        told: list[str] = []
        client = flavour.connect(proxy.url).warm_up()
        watch = Stopwatch()
        lease = client.acquire(
            "report", ttl=1.8, on_risk=lambda _: told.append("risk"), on_lost=lambda _: told.append("lost")
        )
        proxy.refuse()
        proxy.reset_connections()
        until(lambda: client.state(lease) is State.AT_RISK, "the lease to be at risk")
        client.do(lease.ensure_held)  # at risk is still held
        assert client.do(lambda: lease.lost.wait(20)) is True
        assert watch.seconds < watch.most(1.8 + 0.05 + 0.1)
        until(lambda: told == ["risk", "lost"], "the callbacks to be called")
        with pytest.raises(LeaseLost, match="ran out"):
            client.do(lease.ensure_held)
        proxy.accept()
        await_nothing_left(valkey, "report")
        assert client.release(lease) is False

    def test_a_renewal_that_gets_through_in_the_end_saves_the_lease(
        self, proxy: FaultProxy, flavour: Colour, valkey: Server
    ) -> None:
        told: list[str] = []
        client = flavour.connect(proxy.url).warm_up()
        lease = client.acquire(
            "report", ttl=6, on_risk=lambda _: told.append("risk"), on_lost=lambda _: told.append("lost")
        )
        proxy.refuse()
        proxy.reset_connections()
        until(lambda: client.state(lease) is State.AT_RISK, "the lease to be at risk")
        proxy.accept()
        until(lambda: client.state(lease) is State.HELD, "the lease to be held again")
        until(lambda: told == ["risk"], "the callback to be called")
        assert valkey.raw("GET", "report") == lease.holder
        assert client.release(lease) is True

    def test_threads_hear_of_it_at_the_end_of_the_block(self, valkey: Server) -> None:
        with lockfast.connect(valkey.url) as locks:
            lock = locks.lock("report", ttl=0.3)
            with pytest.raises(LeaseLost) as lost, lock as lease:  # noqa: PT012
                valkey.raw("DEL", "report")
                assert lease.lost.wait(20)
            assert lost.value.fence == lease.fence

    async def test_asyncio_cancels_the_block(self, valkey: Server) -> None:
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

    def test_another_holder_in_our_place_is_left_alone(self, us: Client, valkey: Server) -> None:
        """An operator freed the lock and another took it: we neither renew nor free the other's."""
        lease = us.acquire("report", ttl=0.3)
        valkey.raw("SET", "report", "another", "PX", "60000")
        assert us.do(lambda: lease.lost.wait(20)) is True
        assert us.release(lease) is False
        assert valkey.raw("GET", "report") == "another"
        assert valkey.raw("PTTL", "report") > 50_000
