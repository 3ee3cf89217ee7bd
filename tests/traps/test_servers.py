"""Servers that lose state: scripts flushed, restarted empty, demoted to a read-only replica."""

import socket
from collections.abc import Iterator

import pytest

from lockfast import LeaseLost, State, StoreUnavailable
from tests.support.proxy import FaultProxy
from tests.support.servers import Server
from tests.support.waiting import until
from tests.traps.flavours import Client, Flavour
from tests.traps.observation import Stopwatch, await_queue, traces

pytestmark = pytest.mark.timing


class TestScriptFlush:
    def evals(self, proxy: FaultProxy) -> int:
        return sum(args[0] == b"EVAL" for args in proxy.requests)

    def test_each_script_is_sent_again_once(self, proxy: FaultProxy, flavour: Flavour, valkey: Server) -> None:
        client = flavour.connect(proxy.url).warm_up()
        before = self.evals(proxy)
        for _ in range(3):
            client.release(client.acquire("report"))
        assert self.evals(proxy) == before
        valkey.raw("SCRIPT", "FLUSH")
        lease = client.acquire("report")
        assert self.evals(proxy) == before + 1
        valkey.raw("SCRIPT", "FLUSH")
        client.renew(lease)
        assert self.evals(proxy) == before + 2
        client.release(lease)
        assert self.evals(proxy) == before + 3
        for _ in range(3):
            client.release(client.acquire("report"))
        assert self.evals(proxy) == before + 4
        assert client.inspect("report").locked is False

    def test_while_waiting(self, proxy: FaultProxy, flavour: Flavour, us: Client, valkey: Server) -> None:
        lease = us.acquire("report")
        waiter = flavour.connect(proxy.url).warm_up_inbox()
        waiting = waiter.acquiring("report", ttl=0.3)  # refreshes its ticket every 0.1 s
        await_queue(valkey, "report", 1)
        before = self.evals(proxy)
        valkey.raw("SCRIPT", "FLUSH")
        until(lambda: self.evals(proxy) > before, "the script to be sent again")
        seen = len(proxy.requests)
        until(lambda: len(proxy.requests) > seen, "one more request")
        assert self.evals(proxy) == before + 1
        valkey.raw("SCRIPT", "FLUSH")
        us.release(lease)
        assert waiter.release(waiting.result(20)) is True
        assert traces(valkey, "report") == []


class TestRestart:
    """The server restarts empty on the same port."""

    def test_while_holding_the_lease_is_lost(self, fresh_server: Server, flavour: Flavour) -> None:
        client = flavour.connect(fresh_server.url)
        lease = client.acquire("report", ttl=0.6)
        fresh_server.restart()
        assert client.do(lambda: lease.lost.wait(20)) is True
        with pytest.raises(LeaseLost):
            client.do(lease.ensure_held)
        assert client.release(lease) is False
        later = client.acquire("report", timeout=20)
        assert later.fence > lease.fence

    def test_while_waiting_the_wait_continues(self, fresh_server: Server, flavour: Flavour) -> None:
        holder, waiter = flavour.connect(fresh_server.url), flavour.connect(fresh_server.url)
        lease = holder.acquire("report", renew=False)
        waiting = [waiter.acquiring("report") for _ in range(3)]
        await_queue(fresh_server, "report", 3)
        fresh_server.restart()
        watch = Stopwatch()
        for left in (2, 1, 0):
            until(lambda left=left: sum(not future.done() for future in waiting) == left, "the next waiter's grant")  # type: ignore[misc]
            newest = max((f.result() for f in waiting if f.done()), key=lambda granted: int(granted.fence))
            assert newest.fence > lease.fence
            assert waiter.release(newest) is True
        assert watch.seconds < watch.most(2)
        assert traces(fresh_server, "report") == []

    def test_acquire_waits_for_a_server_that_is_down(self, fresh_server: Server, flavour: Flavour) -> None:
        client = flavour.connect(fresh_server.url).warm_up()
        fresh_server.kill()
        acquiring = client.acquiring("report", timeout=20)
        trying = client.start(lambda: client.locks.lock("other").acquire(timeout=0.2))
        with pytest.raises(StoreUnavailable, match="running"):
            trying.result(20)
        fresh_server.start()
        assert client.release(acquiring.result(20)) is True

    def test_wait_without_limit_fails_after_store_timeout(self, fresh_server: Server, flavour: Flavour) -> None:
        client = flavour.connect(fresh_server.url, store_timeout=0.5).warm_up()
        fresh_server.kill()
        watch = Stopwatch()
        with pytest.raises(StoreUnavailable):
            client.acquire("report")
        assert 0.4 < watch.seconds < watch.most(1.2)  # including a pause between two attempts


class TestReadOnly:
    """After a failover the old master is a replica and refuses writes."""

    @pytest.fixture
    def dead_port(self) -> Iterator[int]:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            yield bound.getsockname()[1]

    def test_acquire_retries_until_its_timeout_and_names_the_cause(
        self, fresh_server: Server, dead_port: int, flavour: Flavour
    ) -> None:
        client = flavour.connect(fresh_server.url).warm_up()
        fresh_server.raw("REPLICAOF", "127.0.0.1", dead_port)
        watch = Stopwatch()
        with pytest.raises(StoreUnavailable, match="read-only"):
            client.acquire("report", timeout=0.4)
        assert watch.seconds > 0.35
        assert watch.seconds < watch.most(0.55)
        with pytest.raises(StoreUnavailable, match="read-only"):
            client.try_acquire("report")
        assert traces(fresh_server, "report") == []

    def test_operations_succeed_when_the_server_is_master_again(
        self, fresh_server: Server, dead_port: int, flavour: Flavour
    ) -> None:
        client, waiter = flavour.connect(fresh_server.url).warm_up(), flavour.connect(fresh_server.url)
        held = client.acquire("held", ttl=3)
        waiting = waiter.acquiring("held", ttl=3)
        await_queue(fresh_server, "held", 1)
        fresh_server.raw("REPLICAOF", "127.0.0.1", dead_port)
        acquiring = client.acquiring("report", timeout=20)
        until(lambda: client.state(held) is State.AT_RISK, "a renewal to fail")
        assert not acquiring.done()
        fresh_server.raw("REPLICAOF", "NO", "ONE")
        until(lambda: client.state(held) is State.HELD, "a renewal to succeed")
        client.release(acquiring.result(20))
        assert client.release(held) is True
        waiter.release(waiting.result(20))
        assert traces(fresh_server, "held") == []
