"""A network that is slow or silent: replies that come late, calls whose outcome nobody knows, clients that close."""

from collections.abc import Iterator

import pytest

from lockfast import State, StoreUnavailable
from tests.support.proxy import FaultProxy
from tests.support.servers import Server
from tests.support.waiting import until
from tests.traps.flavours import FLAVOURS, Colour
from tests.traps.watching import (
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
def flavour(request: pytest.FixtureRequest) -> Iterator[Colour]:
    with FLAVOURS[request.param]() as flavour:
        yield flavour


class TestLateReplies:
    """A grant and a renewal count from when they were asked for, however long the answer takes."""

    def test_of_an_acquire(self, proxy: FaultProxy, flavour: Colour) -> None:
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

    def test_of_a_renewal(self, proxy: FaultProxy, flavour: Colour) -> None:
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

    def test_that_come_when_the_ttl_is_over_are_worth_nothing(
        self, proxy: FaultProxy, flavour: Colour, valkey: Server
    ) -> None:
        """By then another may have the lock; an acquire asks again, and a lease is lost."""
        client, other = flavour.connect(proxy.url).warm_up(), flavour.connect(valkey.url)
        rule = proxy.hold_replies(nth(1, on("report")))
        acquiring = client.acquiring("report", ttl=0.2, renew=False)
        rule.wait()
        taken = other.acquire("report", timeout=20)
        rule.release()
        until(lambda: acquiring.done() or queue_length(valkey, "report") == 1, "the late one to wait, or to be told")
        if acquiring.done():
            assert client.state(acquiring.result()) is State.LOST
        assert other.state(taken) is State.HELD
        other.release(taken)
        lease = acquiring.result(20)
        client.do(lease.release)


class TestCleanUp:
    def test_after_an_unknown_outcome_goes_on_in_the_background(
        self, proxy: FaultProxy, flavour: Colour, valkey: Server
    ) -> None:
        """The lock was granted, nobody heard of it, and the caller was told that nothing is known."""
        client = flavour.connect(proxy.url).warm_up()
        proxy.stall("to_client")
        with pytest.raises(StoreUnavailable) as error:
            client.acquire("report", timeout=0.5)
        assert error.value.outcome.value == "unknown"
        proxy.unstall()
        await_nothing_left(valkey, "report")

    def test_leaves_the_queue_of_a_lock_that_was_waited_for(
        self, proxy: FaultProxy, flavour: Colour, valkey: Server
    ) -> None:
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
        until(lambda: queue_length(valkey, "report") == 0, "the place to be given up")

    def test_a_request_that_arrives_late_is_undone(self, proxy: FaultProxy, flavour: Colour, valkey: Server) -> None:
        """It was held up on the way while its caller gave up: what the caller sent next undoes it."""
        client = flavour.connect(proxy.url).warm_up()
        held_up = proxy.hold_requests(nth(1, on("report")))
        with pytest.raises(StoreUnavailable):
            client.acquire("report", timeout=0.5)
        proxy.wait_for(on("report"), 2)
        held_up.release()
        lease = client.acquire("report", timeout=20)
        assert valkey.raw("GET", "report") == lease.holder
        client.release(lease)
        await_nothing_left(valkey, "report")


class TestClosing:
    def test_ends_the_waits_of_others(self, proxy: FaultProxy, flavour: Colour, valkey: Server) -> None:
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

    def test_while_connecting_leaves_no_connection(self, proxy: FaultProxy, flavour: Colour, valkey: Server) -> None:
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

    def test_under_a_stall_takes_two_seconds_at_most(self, proxy: FaultProxy) -> None:
        with FLAVOURS["threads"]() as threads, FLAVOURS["asyncio"]() as tasks:
            clients = [flavour.connect(proxy.url) for flavour in (threads, tasks)]
            for number, client in enumerate(clients):
                client.acquire(f"report:{number}")
                client.acquire(f"other:{number}")
            proxy.stall()
            watch = Stopwatch()
            side_by_side(*(client.close for client in clients))
            assert watch.seconds < watch.most(2.2)


class TestPatience:
    """A wait without limit bears a store that does not answer for `store_timeout`, and no longer."""

    def test_with_a_stall(self, proxy: FaultProxy, flavour: Colour) -> None:
        client = flavour.connect(proxy.url, store_timeout=0.5).warm_up()
        proxy.stall()
        watch = Stopwatch()
        with pytest.raises(StoreUnavailable):
            client.acquire("report")
        assert 0.4 < watch.seconds < watch.most(0.5 + 0.5)
        proxy.unstall()

    def test_with_a_subscription_that_is_not_answered(
        self, proxy: FaultProxy, flavour: Colour, valkey: Server, caplog: pytest.LogCaptureFixture
    ) -> None:
        valkey.raw("SET", "report", "a stranger's")
        client = flavour.connect(proxy.url, store_timeout=0.5).warm_up()
        rule = proxy.hold_replies(b"SUBSCRIBE")
        watch = Stopwatch()
        assert client.acquire("report", timeout=0.3) is None  # the store's last word was: taken
        assert "could not be waited for" in caplog.text
        assert watch.seconds < watch.most(0.3 + 0.15)
        watch = Stopwatch()
        with pytest.raises(StoreUnavailable):
            client.acquire("report")
        assert 0.4 < watch.seconds < watch.most(0.5 + 0.5)
        assert queue_length(valkey, "report") == 0
        rule.release()
        assert client.acquire("report", timeout=0.3) is None
        proxy.wait_connections(2)
