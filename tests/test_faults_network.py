"""Broken connections: killed by the server, reset by the network, cut in the middle of a reply."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import lockfast.aio
from lockfast import State
from lockfast.stores.redis.transport.tasks import TaskLink, connect_task_link
from tests.support.faults import Rule
from tests.support.proxy import FaultProxy
from tests.support.servers import Server
from tests.support.waiting import until
from tests.traps.flavours import FLAVOURS, Client, Flavour
from tests.traps.observation import (
    Stopwatch,
    await_nothing_left,
    await_queue,
    nth,
    on,
    pubsub_clients,
    traces,
)

pytestmark = pytest.mark.timing


@pytest.fixture(params=FLAVOURS)
def flavour(request: pytest.FixtureRequest) -> Iterator[Flavour]:
    with FLAVOURS[request.param]() as flavour:
        yield flavour


def queue_up(client: Client, server: Server, count: int, order: list[int], name: str = "report") -> list[Any]:
    """Start waiters one after another. Each records its grant in `order` and releases the lock."""

    def waiter(number: int) -> Any:
        future = client.acquiring(name)

        def granted(done: Any) -> None:
            order.append(number)
            client.start(done.result().release)

        future.add_done_callback(granted)
        await_queue(server, name, number + 1)
        return future

    return [waiter(number) for number in range(count)]


class TestKilledConnections:
    def test_a_holder_keeps_its_lease(self, flavour: Flavour, valkey: Server) -> None:
        client = flavour.connect(valkey.url).warm_up_inbox()
        lease = client.acquire("report", ttl=3)
        for kind in ("normal", "pubsub"):
            valkey.raw("CLIENT", "KILL", "TYPE", kind)
            client.renew(lease)
            valkey.raw("CLIENT", "KILL", "TYPE", kind)
            assert client.inspect("report").holder == lease.holder
            valkey.raw("CLIENT", "KILL", "TYPE", kind)
            assert client.try_acquire("report") is None
            valkey.raw("CLIENT", "KILL", "TYPE", kind)
            client.release(client.try_acquire("other"))
        valkey.raw("CLIENT", "KILL", "TYPE", "normal")
        until(lambda: valkey.raw("PTTL", "report") < 2100, "the renewal to be due")
        until(lambda: valkey.raw("PTTL", "report") > 2100, "the keepalive to renew over a new connection")
        assert client.state(lease) is State.HELD
        valkey.raw("CLIENT", "KILL", "TYPE", "normal")
        assert client.release(lease) is True

    def test_waiters_keep_their_tickets_when_the_inbox_is_killed(self, flavour: Flavour, valkey: Server) -> None:
        """Two clients: the first to reconnect must not overtake the other."""
        holder = flavour.connect(valkey.url)
        lease = holder.acquire("report")
        one, other = flavour.connect(valkey.url), flavour.connect(valkey.url)
        waiting = []
        for number, client in enumerate((one, other, one, other)):
            waiting.append(client.acquiring("report"))
            await_queue(valkey, "report", number + 1)
        order = valkey.raw("ZRANGE", "lockfast:{report}:q", 0, -1)
        addresses = self.addresses(valkey)
        valkey.raw("CLIENT", "KILL", "TYPE", "pubsub")
        until(lambda: pubsub_clients(valkey) == 2, "both to subscribe again")
        until(
            lambda: len(self.addresses(valkey)) == 4 and not self.addresses(valkey) & addresses,
            "all waiters to repeat their requests with their new addresses",
        )
        assert valkey.raw("ZRANGE", "lockfast:{report}:q", 0, -1) == order
        holder.release(lease)
        for number, client in enumerate((one, other, one, other)):
            lease = waiting[number].result(20)
            assert not any(later.done() for later in waiting[number + 1 :])
            client.release(lease)

    def addresses(self, server: Server) -> set[str]:
        entries = server.raw("HVALS", "lockfast:{report}:w")
        return {f"{position} {entry.split()[3]}" for position, entry in enumerate(entries)}

    def test_a_release_while_the_inbox_is_down_is_noticed(self, flavour: Flavour, valkey: Server) -> None:
        """No waiter received the grant, so none has the lock. They reconnect, repeat their requests and get it."""
        holder, client = flavour.connect(valkey.url), flavour.connect(valkey.url)
        lease = holder.acquire("report")
        order: list[int] = []
        waiting = queue_up(client, valkey, 3, order)
        valkey.raw("MULTI")
        valkey.raw("CLIENT", "KILL", "TYPE", "pubsub")
        valkey.raw("DEL", "report")
        valkey.raw("EXEC")
        watch = Stopwatch()
        for future in waiting:
            future.result(20)
        assert watch.seconds < watch.most(1.3)
        assert sorted(order) == [0, 1, 2]  # a waiter that has not reconnected in time is skipped
        assert holder.release(lease) is False
        await_nothing_left(valkey, "report")

    def test_everything_killed_while_many_wait(self, flavour: Flavour, valkey: Server) -> None:
        holder, client = flavour.connect(valkey.url), flavour.connect(valkey.url)
        lease = holder.acquire("report")
        order: list[int] = []
        waiting = queue_up(client, valkey, 10, order)
        for _ in range(5):
            valkey.raw("CLIENT", "KILL", "TYPE", "pubsub")
            valkey.raw("CLIENT", "KILL", "TYPE", "normal")
            until(lambda: pubsub_clients(valkey) >= 1, "the inbox to be connected again")
        assert holder.release(lease) is True
        watch = Stopwatch()
        for future in waiting:
            future.result(20)
        assert watch.seconds < watch.most(2)
        assert sorted(order) == list(range(10))
        await_nothing_left(valkey, "report")


class TestMidRequest:
    def test_a_lost_acquire_request_is_repeated(self, proxy: FaultProxy, flavour: Flavour, valkey: Server) -> None:
        client = flavour.connect(proxy.url).warm_up()
        lost = proxy.drop_request(on("report"))
        lease = client.acquire("report", timeout=20)
        assert lost.hits == 1
        assert valkey.raw("GET", "report") == lease.holder
        client.release(lease)

    def test_half_a_reply_is_no_reply(self, proxy: FaultProxy, flavour: Flavour, valkey: Server) -> None:
        client = flavour.connect(proxy.url).warm_up()
        cut = proxy.half_reply(on("report"), times=1)
        lease = client.acquire("report", timeout=20)
        assert cut.hits == 1
        assert valkey.raw("GET", "report") == lease.holder
        cut = proxy.half_reply(on("report"), times=1)
        client.renew(lease)
        assert cut.hits == 1
        cut = proxy.half_reply(on("report"), times=1)
        assert client.inspect("report").holder == lease.holder
        assert cut.hits == 1
        cut = proxy.half_reply(on("report"), times=1)
        assert client.release(lease) is True
        assert cut.hits == 1
        assert traces(valkey, "report") == []

    def test_a_notification_lost_with_its_connection_is_recovered(
        self, proxy: FaultProxy, flavour: Flavour, valkey: Server
    ) -> None:
        holder, client = flavour.connect(valkey.url), flavour.connect(proxy.url).warm_up_inbox()
        lease = holder.acquire("report")
        waiting = client.acquiring("report")
        await_queue(valkey, "report", 1)
        rule = proxy.hold_pushes(b"inbox")
        holder.release(lease)
        rule.wait()
        proxy.reset_connections()
        rule.release()
        assert valkey.raw("GET", "report") == waiting.result(20).holder

    @pytest.mark.parametrize("then", ["close", "reset"])
    def test_every_call_over_a_broken_connection_is_repeated(
        self, proxy: FaultProxy, flavour: Flavour, valkey: Server, then: Any
    ) -> None:
        client = flavour.connect(proxy.url).warm_up()
        broken = proxy.drop_reply(nth(10, b"report:"), then=then)
        acquiring = [client.acquiring(f"report:{number}", timeout=20) for number in range(20)]
        leases = [future.result(20) for future in acquiring]
        broken.wait()
        assert all(leases)
        assert [valkey.raw("GET", lease.name) for lease in leases] == [lease.holder for lease in leases]
        for lease in leases:
            assert client.release(lease) is True

    def test_a_reset_at_any_step_only_delays_a_call(self, proxy: FaultProxy, flavour: Flavour, valkey: Server) -> None:
        """Reset before a request, with it, with its reply, and while reconnecting.

        The resets depend on the data sent, not on a clock: resets faster than a client can connect would block it.
        """
        client = flavour.connect(proxy.url).warm_up()
        fences = []
        for reset in (
            self.before_the_request,
            self.with_the_request,
            self.with_the_reply,
            self.while_connecting,
            self.twice,
        ):
            lost = reset(proxy)
            lease = client.acquire("report", timeout=20)
            fences.append(lease.fence)
            lost += reset(proxy)
            client.renew(lease)
            lost += reset(proxy)
            assert client.inspect("report").holder == lease.holder
            lost += reset(proxy)
            assert client.release(lease) is True
            assert [rule.hits for rule in lost] == [1] * len(lost)
        assert fences == sorted(set(fences))
        assert traces(valkey, "report") == []

    def before_the_request(self, proxy: FaultProxy) -> list[Rule]:
        proxy.reset_connections()
        return []

    def with_the_request(self, proxy: FaultProxy) -> list[Rule]:
        return [proxy.drop_request(on("report"), then="reset")]

    def with_the_reply(self, proxy: FaultProxy) -> list[Rule]:
        return [proxy.drop_reply(on("report"), then="reset")]

    def while_connecting(self, proxy: FaultProxy) -> list[Rule]:
        proxy.reset_connections()
        return [proxy.drop_request(b"HELLO", then="reset"), proxy.drop_reply(b"HELLO", then="reset")]

    def twice(self, proxy: FaultProxy) -> list[Rule]:
        return [*self.with_the_reply(proxy), *self.with_the_request(proxy)]

    async def test_a_connection_that_breaks_before_its_caller_wakes_is_not_used(
        self, valkey: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A reset can arrive between the end of connecting and the task that waits for it."""
        links: list[TaskLink] = []

        async def connect(*args: Any) -> TaskLink:
            link = await connect_task_link(*args)
            if len(links) < 2:
                asyncio.get_running_loop().call_soon(link.fail, "it was reset")
            links.append(link)
            return link

        monkeypatch.setattr("lockfast.stores.redis.transport.tasks.connect_task_link", connect)
        async with lockfast.aio.connect(valkey.url) as locks:
            lease = await locks.lock("report").acquire(timeout=10)
            assert lease is not None
            assert await lease.release()
        assert len(links) == 3
