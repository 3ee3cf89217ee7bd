"""A slow or silent network: late replies, unknown outcomes, and clients that close."""

from collections.abc import Iterator

import pytest

from lockfast import State, StoreUnavailable
from tests.support.proxy import FaultProxy
from tests.support.servers import Server
from tests.support.waiting import until
from tests.traps.flavours import FLAVOURS, Flavour
from tests.traps.observation import (
    Stopwatch,
    await_nothing_left,
    await_queue,
    nth,
    on,
    queue_length,
    side_by_side,
)

pytestmark = pytest.mark.timing


@pytest.fixture(params=FLAVOURS)
def flavour(request: pytest.FixtureRequest) -> Iterator[Flavour]:
    with FLAVOURS[request.param]() as flavour:
        yield flavour


class TestLateReplies:
    """The validity of a grant or a renewal starts when its request is sent, however late the reply arrives."""

    def test_of_an_acquire(self, proxy: FaultProxy, flavour: Flavour) -> None:
        client = flavour.connect(proxy.url).warm_up()
        rule = proxy.hold_replies(on("report"))
        acquiring = client.acquiring("report", ttl=10, renew=False)
        rule.wait()
        watch = Stopwatch()
        until(lambda: watch.seconds > 0.3, "some of the ttl to pass")
        rule.release()
        lease = acquiring.result(20)
        late = watch.seconds
        assert client.do(lambda: lease.remaining) <= 10 - late
        client.release(lease)

    def test_of_a_renewal(self, proxy: FaultProxy, flavour: Flavour) -> None:
        client = flavour.connect(proxy.url).warm_up()
        lease = client.acquire("report", ttl=10, renew=False)
        rule = proxy.hold_replies(on("report"))
        renewing = client.start(lease.renew)
        rule.wait()
        watch = Stopwatch()
        until(lambda: watch.seconds > 0.3, "some of the ttl to pass")
        rule.release()
        renewing.result(20)
        late = watch.seconds
        assert client.do(lambda: lease.remaining) <= 10 - late
        client.release(lease)

    def test_after_the_ttl_grant_nothing(self, proxy: FaultProxy, flavour: Flavour, valkey: Server) -> None:
        """Another client may have the lock by then: an acquire repeats its request, and a lease is lost."""
        client, other = flavour.connect(proxy.url).warm_up(), flavour.connect(valkey.url)
        rule = proxy.hold_replies(nth(1, on("report")))
        acquiring = client.acquiring("report", ttl=0.2, renew=False)
        rule.wait()
        taken = other.acquire("report", timeout=20)
        rule.release()
        until(
            lambda: acquiring.done() or queue_length(valkey, "report") == 1, "the late client to enqueue or to return"
        )
        if acquiring.done():
            assert client.state(acquiring.result()) is State.LOST
        assert other.state(taken) is State.HELD
        other.release(taken)
        lease = acquiring.result(20)
        client.do(lease.release)


class TestCleanUp:
    def test_after_an_unknown_outcome_continues_in_the_background(
        self, proxy: FaultProxy, flavour: Flavour, valkey: Server
    ) -> None:
        """The lock was granted, but the reply was lost; the caller gets an error with an unknown outcome."""
        client = flavour.connect(proxy.url).warm_up()
        proxy.stall("to_client")
        with pytest.raises(StoreUnavailable) as error:
            client.acquire("report", timeout=0.5)
        assert error.value.outcome.value == "unknown"
        proxy.unstall()
        await_nothing_left(valkey, "report")

    def test_removes_the_waiter_from_the_queue(self, proxy: FaultProxy, flavour: Flavour, valkey: Server) -> None:
        client = flavour.connect(proxy.url).warm_up_inbox()
        valkey.raw("SET", "report", "a stranger's")
        waiting = client.acquiring("report", timeout=2)
        await_queue(valkey, "report", 1)
        proxy.refuse()
        proxy.reset_connections()
        with pytest.raises(StoreUnavailable):
            waiting.result(20)
        assert queue_length(valkey, "report") == 1
        proxy.accept()
        until(lambda: queue_length(valkey, "report") == 0, "the ticket to be removed")

    def test_a_request_that_arrives_late_is_undone(self, proxy: FaultProxy, flavour: Flavour, valkey: Server) -> None:
        """It was delayed until its caller had timed out. The clean-up, sent after it, undoes it."""
        client = flavour.connect(proxy.url).warm_up()
        delayed = proxy.hold_requests(nth(1, on("report")))
        with pytest.raises(StoreUnavailable):
            client.acquire("report", timeout=0.5)
        proxy.wait_for(on("report"), 2)
        delayed.release()
        lease = client.acquire("report", timeout=20)
        assert valkey.raw("GET", "report") == lease.holder
        client.release(lease)
        await_nothing_left(valkey, "report")


class TestClosing:
    def test_ends_the_waits_of_other_callers(self, proxy: FaultProxy, flavour: Flavour, valkey: Server) -> None:
        valkey.raw("SET", "report", "a stranger's")
        client = flavour.connect(proxy.url).warm_up_inbox()
        waiting = [client.acquiring("report") for _ in range(3)]
        await_queue(valkey, "report", 3)
        watch = Stopwatch()
        client.close()
        for future in waiting:
            with pytest.raises(ValueError, match="closed"):
                future.result(20)
        assert watch.seconds < watch.most(2.2)
        proxy.wait_connections(0)

    def test_while_connecting_leaves_no_connection(self, proxy: FaultProxy, flavour: Flavour, valkey: Server) -> None:
        valkey.raw("SET", "report", "a stranger's")
        client = flavour.connect(proxy.url).warm_up()
        rule = proxy.hold_replies(b"SUBSCRIBE")
        waiting = client.acquiring("report", timeout=20)
        rule.wait()
        client.close()
        with pytest.raises((ValueError, StoreUnavailable)):
            waiting.result(20)
        rule.release()
        proxy.wait_connections(0)

    def test_during_a_stall_takes_at_most_two_seconds(self, proxy: FaultProxy) -> None:
        with FLAVOURS["threads"]() as threads, FLAVOURS["asyncio"]() as tasks:
            clients = [flavour.connect(proxy.url) for flavour in (threads, tasks)]
            for number, client in enumerate(clients):
                client.acquire(f"report:{number}")
                client.acquire(f"other:{number}")
            proxy.stall()
            watch = Stopwatch()
            side_by_side(*(client.close for client in clients))
            assert watch.seconds < watch.most(2.2)


class TestStoreTimeout:
    """A wait without a timeout tolerates a silent store for `store_timeout`, and no longer."""

    def test_with_a_stall(self, proxy: FaultProxy, flavour: Flavour) -> None:
        client = flavour.connect(proxy.url, store_timeout=0.5).warm_up()
        proxy.stall()
        watch = Stopwatch()
        with pytest.raises(StoreUnavailable):
            client.acquire("report")
        assert 0.4 < watch.seconds < watch.most(0.5 + 0.5)
        proxy.unstall()

    def test_with_an_unanswered_subscription(
        self, proxy: FaultProxy, flavour: Flavour, valkey: Server, caplog: pytest.LogCaptureFixture
    ) -> None:
        valkey.raw("SET", "report", "a stranger's")
        client = flavour.connect(proxy.url, store_timeout=0.5).warm_up()
        rule = proxy.hold_replies(b"SUBSCRIBE")
        watch = Stopwatch()
        assert client.acquire("report", timeout=0.3) is None  # the store's last answer was: taken
        assert "waiting for it failed" in caplog.text
        assert watch.seconds < watch.most(0.3 + 0.15)
        watch = Stopwatch()
        with pytest.raises(StoreUnavailable):
            client.acquire("report")
        assert 0.4 < watch.seconds < watch.most(0.5 + 0.5)
        assert queue_length(valkey, "report") == 0
        rule.release()
        assert client.acquire("report", timeout=0.3) is None
        proxy.wait_connections(2)
