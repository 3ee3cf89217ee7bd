"""Error replies: each has a defined meaning, and nothing is left behind."""

from collections.abc import Iterator
from contextlib import suppress

import pytest

from lockfast import State, StoreProtocolError, StoreUnavailable
from tests.conftest import require
from tests.support.resp import ReplyError
from tests.support.servers import KINDS, Server
from tests.support.waiting import until
from tests.support.wire import WireClient
from tests.traps.flavours import FLAVOURS, Flavour
from tests.traps.observation import (
    Stopwatch,
    await_queue,
    companions,
    normal_clients,
    pubsub_clients,
    queue_length,
    traces,
)

pytestmark = pytest.mark.timing


@pytest.fixture(params=FLAVOURS)
def flavour(request: pytest.FixtureRequest) -> Iterator[Flavour]:
    with FLAVOURS[request.param]() as flavour:
        yield flavour


class TestOutOfMemory:
    """Nothing new is granted; leases are still renewed, released and handed off."""

    @pytest.fixture(params=KINDS)
    def server(self, request: pytest.FixtureRequest) -> Iterator[Server]:
        require(request.param)
        with Server(request.param) as server:
            yield server

    def test_leases_are_renewed_and_handed_off(self, server: Server, flavour: Flavour) -> None:
        client, waiter = flavour.connect(server.url).warm_up(), flavour.connect(server.url).warm_up_inbox()
        lease, short = client.acquire("report"), client.acquire("short", ttl=3)
        waiting = waiter.acquiring("report")
        await_queue(server, "report", 1)
        server.raw("CONFIG", "SET", "maxmemory", "1")
        with pytest.raises(StoreUnavailable, match="out of memory"):
            client.try_acquire("other")
        with pytest.raises(StoreUnavailable, match="out of memory"):
            client.acquire("other", timeout=0.3)
        client.renew(lease)
        until(lambda: server.raw("PTTL", "short") < 2250, "the renewal to be due")
        until(lambda: server.raw("PTTL", "short") > 2250, "the keepalive to renew")
        assert client.release(lease) is True
        handed_off = waiting.result(20)
        assert server.raw("GET", "report") == handed_off.holder
        assert handed_off.fence > lease.fence
        assert waiter.release(handed_off) is True
        assert client.release(short) is True
        assert traces(server, "report") == []
        assert traces(server, "other") == []

    def test_shared_leases_are_renewed_and_handed_off(self, server: Server, flavour: Flavour) -> None:
        client, waiter = flavour.connect(server.url).warm_up(), flavour.connect(server.url).warm_up_inbox()
        leases = [client.do(client.locks.semaphore("gpu", 4, permits=2, ttl=20).acquire) for _ in range(2)]
        writer = client.do(client.locks.rwlock("config", ttl=20).writer.acquire)
        waiting = waiter.start(lambda: waiter.locks.semaphore("gpu", 4, permits=3).acquire())
        reading = waiter.start(waiter.locks.rwlock("config").reader.acquire)
        await_queue(server, "gpu", 1)
        await_queue(server, "config", 1)
        server.raw("CONFIG", "SET", "maxmemory", "1")
        client.renew(leases[0], 60)
        client.do(writer.downgrade)
        reader = reading.result(20)
        client.renew(writer, 60)
        assert [client.release(lease) for lease in leases] == [True, True]
        permit = waiting.result(20)
        assert permit.slots == (0, 1, 2)
        assert [waiter.release(permit), waiter.release(reader), client.release(writer)] == [True, True, True]
        assert traces(server, "gpu") == traces(server, "config") == []

    def test_acquire_waits_for_memory_until_its_timeout(self, server: Server, flavour: Flavour) -> None:
        client = flavour.connect(server.url).warm_up()
        server.raw("CONFIG", "SET", "maxmemory", "1")
        acquiring = client.acquiring("report", timeout=20)
        until(lambda: refusals(server) > 0, "the server to refuse")
        server.raw("CONFIG", "SET", "maxmemory", "0")
        assert client.release(acquiring.result(20)) is True


def refusals(server: Server) -> int:
    """Calls that the server has rejected or failed since its start."""
    counts: str = server.raw("INFO", "stats")
    line = next(line for line in counts.splitlines() if line.startswith("total_error_replies"))
    return int(line.partition(":")[2])


class TestWrongType:
    @pytest.fixture(params=["set", "hash", "list", "zset", "stream"])
    def kind(self, request: pytest.FixtureRequest) -> str:
        kind: str = request.param
        return kind

    def fill(self, server: Server, key: str, kind: str) -> None:
        commands = {
            "set": ("SADD", key, "member"),
            "hash": ("HSET", key, "field", "value"),
            "list": ("RPUSH", key, "item"),
            "zset": ("ZADD", key, 1, "member"),
            "stream": ("XADD", key, "*", "field", "value"),
        }
        server.raw(*commands[kind])

    def test_other_data_under_the_name_raises_at_once(self, flavour: Flavour, valkey: Server, kind: str) -> None:
        client = flavour.connect(valkey.url).warm_up_inbox()
        self.fill(valkey, "report", kind)
        before = valkey.raw("DUMP", "report")
        for options in ({"blocking": False}, {"timeout": 5}, {}):
            watch = Stopwatch()
            with pytest.raises(StoreProtocolError, match="report"):
                client.acquire("report", **options)
            assert watch.seconds < watch.most(0.2)
        with pytest.raises(StoreProtocolError, match="report"):
            client.inspect("report")
        assert valkey.raw("DUMP", "report") == before
        assert traces(valkey, "report") == ["report"]

    @pytest.mark.parametrize("companion", ["q", "w", "m"])
    def test_other_data_in_auxiliary_keys_never_admits_two_holders(
        self, flavour: Flavour, valkey: Server, companion: str
    ) -> None:
        client, other = flavour.connect(valkey.url), flavour.connect(valkey.url)
        lease = client.acquire("report")
        valkey.raw("DEL", companions("report")[companion])
        self.fill(valkey, companions("report")[companion], "list")
        watch = Stopwatch()
        for options in ({"blocking": False}, {"timeout": 0.2}):
            with suppress(StoreProtocolError):
                assert other.acquire("report", **options) is None
        assert watch.seconds < watch.most(0.6)
        assert valkey.raw("GET", "report") == lease.holder
        client.renew(lease)
        try:
            assert client.release(lease) is True
        except StoreProtocolError:
            assert valkey.raw("EXISTS", "report") == 0

    def test_other_data_in_the_waiters_key_does_not_block_the_release(self, flavour: Flavour, valkey: Server) -> None:
        client, waiter = flavour.connect(valkey.url), flavour.connect(valkey.url)
        lease = client.acquire("report")
        waiting = waiter.acquiring("report", timeout=30)
        await_queue(valkey, "report", 1)
        valkey.raw("DEL", companions("report")["w"])
        self.fill(valkey, companions("report")["w"], "list")
        with pytest.raises(StoreProtocolError):
            client.release(lease)
        assert valkey.raw("GET", "report") != lease.holder
        valkey.raw("DEL", companions("report")["w"])
        with suppress(StoreProtocolError):  # it may have sent a request meanwhile
            assert waiting.result(20) is not None

    def test_a_name_that_becomes_other_data_ends_the_lease_and_the_wait(self, flavour: Flavour, valkey: Server) -> None:
        client, waiter = flavour.connect(valkey.url), flavour.connect(valkey.url)
        lease = client.acquire("report", ttl=0.6)
        waiting = waiter.acquiring("report")
        await_queue(valkey, "report", 1)
        valkey.raw("DEL", "report")
        self.fill(valkey, "report", "hash")
        with pytest.raises(StoreProtocolError):
            waiting.result(20)
        assert client.do(lambda: lease.lost.wait(20)) is True
        assert valkey.raw("TYPE", "report") == "hash"


class TestConnectionsAtTheirLimit:
    def test_a_client_without_a_connection_raises_and_recovers(self, fresh_server: Server, flavour: Flavour) -> None:
        fresh_server.raw("PING")
        fresh_server.raw("CONFIG", "SET", "maxclients", 1)
        client = flavour.connect(fresh_server.url)
        with pytest.raises(StoreUnavailable, match=r"(?i)max number of clients|maxclients"):
            client.acquire("report", timeout=0.2)
        acquiring = client.acquiring("report", timeout=20)
        fresh_server.raw("CONFIG", "SET", "maxclients", 100)
        assert client.release(acquiring.result(20)) is True

    def test_a_client_without_an_inbox_can_hold_but_not_wait(
        self, fresh_server: Server, flavour: Flavour, caplog: pytest.LogCaptureFixture
    ) -> None:
        fresh_server.raw("SET", "taken", "a stranger's")
        client = flavour.connect(fresh_server.url).warm_up()
        assert normal_clients(fresh_server) == 1
        fresh_server.raw("CONFIG", "SET", "maxclients", 2)
        lease = client.acquire("report")
        watch = Stopwatch()
        assert client.acquire("taken", timeout=0.5) is None  # the store's last answer was: taken
        assert "waiting for it failed" in caplog.text
        assert watch.seconds < watch.most(0.65)
        client.renew(lease)
        assert client.release(lease) is True
        assert queue_length(fresh_server, "taken") == 0
        waiting = client.acquiring("taken", timeout=20)
        fresh_server.raw("CONFIG", "SET", "maxclients", 100)
        until(lambda: pubsub_clients(fresh_server) == 1, "the inbox to be connected")
        await_queue(fresh_server, "taken", 1)
        fresh_server.raw("DEL", "taken")
        assert client.release(waiting.result(20)) is True


class TestBusyScript:
    def test_is_waited_for_until_the_timeout(self, fresh_server: Server, flavour: Flavour) -> None:
        client = flavour.connect(fresh_server.url).warm_up()
        waiter = flavour.connect(fresh_server.url)
        lease = client.acquire("report", ttl=4)
        waiting = waiter.acquiring("report")
        await_queue(fresh_server, "report", 1)
        fresh_server.raw("CONFIG", "SET", "busy-reply-threshold", 10)
        with WireClient(fresh_server.port) as busy, WireClient(fresh_server.port) as killer:
            busy.send("EVAL", "while true do end", 0)
            until(lambda: self.is_busy(fresh_server), "the server to be busy")
            with pytest.raises(StoreUnavailable, match="busy"):
                client.acquire("other", timeout=0.2)
            with pytest.raises(StoreUnavailable, match="busy"):
                client.try_acquire("other")
            until(lambda: client.state(lease) is State.AT_RISK, "a renewal to fail")
            releasing = client.start(lease.release)
            killer.call("SCRIPT", "KILL")
            assert isinstance(busy.receive(), ReplyError)
        assert releasing.result(20) is True
        assert waiter.release(waiting.result(20)) is True
        assert traces(fresh_server, "other") == []

    def is_busy(self, server: Server) -> bool:
        try:
            server.raw("PING")
        except ReplyError as error:
            return str(error).startswith("BUSY")
        return False


class TestLoading:
    """A server that is reading its data from disk answers every command with LOADING."""

    @pytest.fixture
    def slow(self) -> Iterator[Server]:
        require("valkey9")
        # Loading takes 2 s, and the server serves its connections every few milliseconds.
        args = ["--key-load-delay", "500", "--loading-process-events-interval-bytes", "1024", "--rdbcompression", "no"]
        with Server(args=args) as server:
            server.raw("EVAL", "for n = 1, 3500 do redis.call('SET', 'data:' .. n, string.rep('x', 100)) end", 0)
            yield server

    def test_is_waited_for_until_the_timeout(self, slow: Server, flavour: Flavour) -> None:
        client = flavour.connect(slow.url)
        lease = client.acquire("report", ttl=20)
        slow.raw("SAVE")
        slow.kill()
        slow.start(until_loaded=False)
        with pytest.raises(StoreUnavailable, match="loading"):
            client.acquire("other", timeout=0.3)
        assert client.acquire("other", timeout=20) is not None
        assert client.release(lease) is True
