"""Failures between the claim and the grant."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

import lockfast.aio
from lockfast.client.locks import AsyncLocks
from tests.support.proxy import FaultProxy
from tests.support.servers import Server
from tests.support.waiting import until
from tests.traps.flavours import Client, Flavour
from tests.traps.observation import (
    Sampler,
    Stopwatch,
    await_nothing_left,
    await_queue,
    nth,
    on,
    queue_length,
    stored_fence,
    traces,
)

pytestmark = pytest.mark.timing

TIMES = 20
CANCEL_SECONDS = 0.2
"""A cancellation takes effect within 0.1 s; a busy machine gets as much again."""


class TestLostReply:
    @pytest.mark.parametrize("then", ["close", "reset"])
    def test_retry_finds_its_own_grant(self, proxy: FaultProxy, flavour: Flavour, valkey: Server, then: Any) -> None:
        client = flavour.connect(proxy.url).warm_up()
        lost = proxy.drop_reply(nth(1, on("report")), then=then)
        repeated = proxy.hold_requests(nth(2, on("report")))
        acquiring = client.acquiring("report", timeout=20)
        lost.wait()
        repeated.wait()
        first_fence = stored_fence(valkey, "report")
        repeated.release()
        lease = acquiring.result(20)
        assert valkey.raw("GET", "report") == lease.holder
        assert lease.fence == first_fence
        assert 20_000 < valkey.raw("PTTL", "report") <= 30_000
        assert client.release(lease) is True
        assert traces(valkey, "report") == []

    def test_non_blocking_acquire_is_retried_too(self, proxy: FaultProxy, flavour: Flavour, valkey: Server) -> None:
        client = flavour.connect(proxy.url).warm_up()
        lost = proxy.drop_reply(on("report"))
        lease = client.try_acquire("report")
        assert lost.hits == 1
        assert valkey.raw("GET", "report") == lease.holder
        client.release(lease)

    @pytest.mark.parametrize("limit", [None, 60.0])  # with a limit the first request enqueues, also on threads
    def test_retry_finds_its_own_ticket(
        self, proxy: FaultProxy, flavour: Flavour, us: Client, valkey: Server, limit: float | None
    ) -> None:
        lease = us.acquire("report")
        first = flavour.connect(proxy.url).warm_up_inbox()
        lost = proxy.drop_reply(on("report"))
        waiting = first.acquiring("report", timeout=limit)
        lost.wait()
        proxy.wait_for(on("report"), 2)
        await_queue(valkey, "report", 1)
        second = us.acquiring("report")
        await_queue(valkey, "report", 2)
        us.release(lease)
        lease = waiting.result(20)
        assert not second.done()
        first.release(lease)
        us.release(second.result(20))


class TestCancelled:
    """Twenty acquisitions, all cancelled at the same point, leave nothing behind."""

    NAMES = tuple(f"report:{number}" for number in range(TIMES))

    @pytest.fixture
    async def locks(self, proxy: FaultProxy) -> AsyncIterator[AsyncLocks]:
        async with lockfast.aio.connect(proxy.url) as locks:
            lease = await locks.lock("warm-up").acquire()
            assert lease is not None
            await lease.release()
            yield locks

    @pytest.fixture
    async def holders(self, valkey: Server) -> AsyncIterator[AsyncLocks]:
        async with lockfast.aio.connect(valkey.url) as locks:
            for name in self.NAMES:
                await locks.lock(name).acquire()
            yield locks

    async def cancel_at(self, locks: AsyncLocks, point: Callable[[], Awaitable[None]]) -> None:
        tasks = [asyncio.create_task(locks.lock(name).acquire()) for name in self.NAMES]
        await point()
        watch = Stopwatch()
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert watch.seconds < watch.most(CANCEL_SECONDS)
        assert [type(result) for result in results] == [asyncio.CancelledError] * TIMES

    def check_free(self, valkey: Server) -> None:
        for name in self.NAMES:
            await_nothing_left(valkey, name)

    async def test_before_the_request_reached_the_server(
        self, locks: AsyncLocks, valkey: Server, proxy: FaultProxy
    ) -> None:
        rule = proxy.hold_requests(on(self.NAMES[0]))  # later requests on the connection wait too
        await self.cancel_at(locks, lambda: asyncio.to_thread(proxy.wait_for, b"report:", TIMES))
        assert valkey.raw("EXISTS", *self.NAMES) == 0
        rule.release()
        proxy.wait_for(b"report:", 2 * TIMES)
        self.check_free(valkey)

    async def test_after_the_server_granted_it(self, locks: AsyncLocks, valkey: Server, proxy: FaultProxy) -> None:
        async def granted() -> None:
            await asyncio.to_thread(
                until, lambda: valkey.raw("EXISTS", *self.NAMES) == TIMES, "all locks to be granted"
            )

        rule = proxy.hold_replies(on(self.NAMES[0]))
        await self.cancel_at(locks, granted)
        rule.release()
        self.check_free(valkey)

    async def test_while_queued(self, locks: AsyncLocks, holders: AsyncLocks, valkey: Server) -> None:
        async def queued() -> None:
            for name in self.NAMES:
                await asyncio.to_thread(await_queue, valkey, name, 1)

        await self.cancel_at(locks, queued)
        for name in self.NAMES:
            assert queue_length(valkey, name) == 0
        assert valkey.raw("EXISTS", *self.NAMES) == TIMES

    async def test_while_subscribing(
        self, locks: AsyncLocks, holders: AsyncLocks, valkey: Server, proxy: FaultProxy
    ) -> None:
        rule = proxy.hold_replies(b"SUBSCRIBE")
        await self.cancel_at(locks, lambda: asyncio.to_thread(rule.wait))
        rule.release()
        await holders.close()
        self.check_free(valkey)

    async def test_while_connecting(self, valkey: Server, proxy: FaultProxy) -> None:
        proxy.stall()
        async with lockfast.aio.connect(proxy.url) as locks:
            await self.cancel_at(locks, lambda: asyncio.to_thread(proxy.wait_stalled))
            proxy.unstall()
            self.check_free(valkey)
            lease = await locks.lock(self.NAMES[0]).acquire(timeout=20)
            assert lease is not None

    async def test_while_the_grant_notification_is_in_flight(
        self, locks: AsyncLocks, holders: AsyncLocks, valkey: Server, proxy: FaultProxy
    ) -> None:
        """The server granted the lock, and the notification has not arrived."""
        rule = proxy.hold_pushes(b"inbox")

        async def granted() -> None:
            for name in self.NAMES:
                await asyncio.to_thread(await_queue, valkey, name, 1)
            await holders.close()
            await asyncio.to_thread(rule.wait)

        await self.cancel_at(locks, granted)
        self.check_free(valkey)
        rule.release()
        for name in self.NAMES:
            assert await locks.lock(name).acquire(timeout=0) is not None


class TestTimes:
    def test_timeout_below_a_second_is_kept(self, us: Client, them: Client) -> None:
        us.acquire("report")
        them.warm_up_inbox()
        watch = Stopwatch()
        assert them.acquire("report", timeout=0.3) is None
        assert 0.3 <= watch.seconds < watch.most(0.45)

    @pytest.mark.parametrize("timeout", [0.423, 0.95])
    def test_timeout_is_used_in_full(self, us: Client, them: Client, timeout: float) -> None:
        us.acquire("report")
        them.warm_up_inbox()
        watch = Stopwatch()
        assert them.acquire("report", timeout=timeout) is None
        assert timeout <= watch.seconds < watch.most(timeout + 0.15)

    def test_non_blocking_acquire_tries_once(self, us: Client, them: Client, valkey: Server) -> None:
        us.acquire("report")
        them.warm_up_inbox()
        for options in ({"blocking": False}, {"timeout": 0}):
            watch = Stopwatch()
            assert them.acquire("report", **options) is None
            assert watch.seconds < watch.most(0.1)
        assert queue_length(valkey, "report") == 0

    def test_waiter_that_timed_out_has_left_the_queue(self, us: Client, them: Client, valkey: Server) -> None:
        lease = us.acquire("report")
        assert them.acquire("report", timeout=0.3) is None
        us.release(lease)
        assert traces(valkey, "report") == []


def test_key_always_has_a_ttl(us: Client, them: Client, valkey: Server) -> None:
    with Sampler(lambda: valkey.raw("PTTL", "report")) as sampler:
        for _ in range(50):
            lease = us.acquire("report", ttl=5)
            us.renew(lease)
            waiting = them.acquiring("report", ttl=5)
            await_queue(valkey, "report", 1)
            us.release(lease)
            lease = waiting.result(20)
            us.release(us.adopt(them.do(lease.export)))
    assert -1 not in sampler.seen
    assert any(isinstance(seen, int) and seen > 0 for seen in sampler.seen)
