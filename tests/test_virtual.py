"""The virtual server replies like real ones: the same seeded operations on each give equal replies."""

import random
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha1
from typing import Any

import pytest

from lockfast.ports import Mailbox
from lockfast.runtime.base import run
from lockfast.stores.redis.protocol.error_replies import code_of
from lockfast.stores.redis.protocol.resp import Reader, ReplyError, pack
from lockfast.stores.redis.store import RedisStore
from lockfast.values import Claim, Enqueue, Granted, LockInfo, Queued, Renewal, Taken
from tests.conftest import require
from tests.support.servers import KINDS, Server
from tests.support.waiting import until
from verify.virtual_server import Replica, VirtualRedis

NAMES = ("door", "gate{1}")
HOLDERS = ("ann", "bob", "cy")
MORE = ("force_release", "listing", "reassert", "downgrade", "acquire_all", "renew_shared")
SHAPES_OF_CLAIMS = ((0, 0), (0, 0), (1, 0), (1, 2), (2, 3), (9, 12))  # weight and limit
Exchange = Callable[[bytes], Any]


class SocketServer:
    """A real server behind a raw socket; each holder subscribes on its own connection."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._connection, self._reader = self._connect()
        self._inboxes: dict[str, tuple[socket.socket, Reader]] = {}

    def _connect(self) -> tuple[socket.socket, Reader]:
        return socket.create_connection((self._server.host, self._server.port), timeout=5), Reader()

    def execute(self, request: bytes) -> Any:
        self._connection.sendall(request)
        return _read(self._connection, self._reader)

    def subscribe(self, who: str) -> None:
        if who not in self._inboxes:
            self._inboxes[who] = connection, reader = self._connect()
            connection.sendall(pack(b"SUBSCRIBE", f"inbox:{who}".encode()))
            _read(connection, reader)

    def unsubscribe(self, who: str) -> None:
        connection, reader = self._inboxes.pop(who, (None, None))
        if connection is not None and reader is not None:
            connection.sendall(pack(b"UNSUBSCRIBE"))
            while _read(connection, reader)[0] != b"unsubscribe":
                pass  # notifications that arrived earlier
            connection.close()

    def advance(self, seconds: float) -> None:
        time.sleep(seconds)

    def close(self) -> None:
        self._connection.close()
        for connection, _ in self._inboxes.values():
            connection.close()


def _read(connection: socket.socket, reader: Reader) -> Any:
    while True:
        replies = reader.feed(connection.recv(65536))
        if replies:
            return replies[-1]


class Virtual:
    def __init__(self) -> None:
        self._server = VirtualRedis()
        self.advance = self._server.advance

    def execute(self, request: bytes) -> Any:
        self._server.advance(0.000_137)  # as on a real server, every request has its own time
        return self._server.execute(request)

    def subscribe(self, who: str) -> None:
        self._server.subscribe(who, f"inbox:{who}".encode())

    def unsubscribe(self, who: str) -> None:
        self._server.unsubscribe(who)


class DirectWire:
    """A `Wire` that executes each request at once."""

    grace = 1.0
    pushes = False
    connected = True
    on_push: Callable[[Any], None] | None = None

    def __init__(self, execute: Exchange) -> None:
        self._execute = execute

    async def request(self, request: bytes, until: float, before: Sequence[bytes] = ()) -> Any:
        return self._execute(request)

    def poll_events(self) -> None: ...

    def watch_connection(self) -> Any:
        raise NotImplementedError

    def drop(self) -> None: ...

    async def close(self) -> None: ...

    def reset(self, *, forked: bool) -> None: ...


class NoInbox:
    """An `Inbox` for operations that open no mailbox."""

    connected = True

    def mailbox(self, holder: str) -> Mailbox:
        raise NotImplementedError

    def drop(self) -> None: ...

    async def close(self) -> None: ...

    def reset(self, *, forked: bool) -> None: ...


class Normal:
    """Makes replies comparable: microseconds become their order of appearance; seconds are only checked for None."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}

    def moment(self, value: int | None) -> int | None:
        return None if value is None else self._seen.setdefault(value, len(self._seen))

    def answer(self, value: Any) -> Any:
        if isinstance(value, Queued):
            return "queued", self.moment(value.ticket), value.position, value.ttl_left is None
        if isinstance(value, Taken):
            return "taken", value.ttl_left is None
        if isinstance(value, list):
            return [self.answer(one) for one in value]
        if isinstance(value, LockInfo):
            waiters = tuple((one.holder, one.owner, one.mode, one.permits) for one in value.waiters)
            holders = tuple(
                (one.holder, one.owner, self.moment(one.fence), one.ttl_left is None, one.mode, one.slots)
                for one in value.holders
            )
            return value.name, holders, self.moment(value.fence), waiters, value.waiting
        if isinstance(value, Granted):
            return "granted", self.moment(value.fence), value.slots
        if isinstance(value, Exception):
            return type(value).__name__
        return value


def operations(seed: int, length: int = 60, ttls: tuple[float, ...] = (20.0, 50.0)) -> list[tuple[Any, ...]]:
    """Random operations on few names and holders, so that they often conflict."""
    randomness = random.Random(seed)
    found: list[tuple[Any, ...]] = []
    for _ in range(length):
        name, holder, ttl = randomness.choice(NAMES), randomness.choice(HOLDERS), randomness.choice(ttls)
        kind = randomness.choices(
            (
                "try",
                "queue",
                "release",
                "renew",
                "adopt",
                "inspect",
                "expire",
                "listen",
                "deaf",
                "spoil",
                "flush",
                *MORE,
            ),
            (3, 8, 6, 2, 1, 2, 2, 3, 1, 0.3, 0.3, 2, 1, 2, 2, 2, 3),
        )[0]
        other, shape = randomness.choice(HOLDERS), randomness.choice(SHAPES_OF_CLAIMS)
        found.append((kind, name, holder, ttl, other, randomness.randrange(1, 5), shape))
    return found


def play(server: Any, todo: list[tuple[Any, ...]]) -> Iterator[Any]:
    """Run `todo`; yield comparable replies."""
    store = RedisStore(DirectWire(server.execute), NoInbox())
    normal = Normal()
    tickets: dict[tuple[str, str], int] = {}
    for kind, name, holder, ttl, other, attempt, shape in todo:
        claim = Claim(name, holder, ttl, f"host:7:{holder}", weight=shape[0], limit=shape[1])
        try:
            reply = _one(server, store, tickets, kind, claim, other, attempt)
        except Exception as error:
            reply = error
        if isinstance(reply, Queued):
            tickets[name, holder] = reply.ticket
        yield kind, name, holder, normal.answer(reply)


def _one(
    server: Any,
    store: RedisStore,
    tickets: dict[tuple[str, str], int],
    kind: str,
    claim: Claim,
    other: str,
    attempt: int,
) -> Any:
    name, holder, ttl = claim.name, claim.holder, claim.ttl
    if kind == "try":
        return run(store.acquire(claim, None, 0.0))
    if kind == "queue":
        ticket = tickets.get((name, holder)) if attempt > 2 else None
        return run(store.acquire(claim, Enqueue(f"inbox:{holder}", attempt, ticket), 0.0))
    if kind == "release":
        return run(store.release(name, holder, 0.0))
    if kind == "renew":
        return run(store.renew([Renewal(one, holder, ttl) for one in NAMES], 0.0))
    if kind == "renew_shared":
        return run(store.renew([Renewal(one, holder, ttl, attempt == 1, shared=True) for one in NAMES], 0.0))
    if kind == "downgrade":
        return run(store.downgrade(claim, 0.0))
    if kind == "acquire_all":
        return run(store.acquire_all([claim._replace(name=one) for one in NAMES], 0.0))
    if kind == "adopt":
        return run(store.adopt(claim, other, 0.0))
    if kind == "reassert":
        return run(store.reassert(claim, attempt * 10**12 if attempt < 4 else 2**52, 0.0))
    if kind == "force_release":
        return run(store.force_release(name, holder, 0.0))
    if kind == "listing":
        return sorted(run(store.listing("*", "", 0.0)).infos)
    if kind == "inspect":
        return run(store.inspect(name, 0.0))
    if kind == "expire":
        return server.execute(pack(b"DEL", name.encode()))
    if kind == "spoil":
        return server.execute(pack(b"HSET", name.encode(), b"field", b"value"))
    if kind == "flush":
        server.execute(pack(b"FLUSHALL"))
        return server.execute(pack(b"SCRIPT", b"FLUSH"))
    if kind == "sleep":
        return server.advance(ttl)
    return server.subscribe(holder) if kind == "listen" else server.unsubscribe(holder)


@pytest.fixture(params=KINDS)
def real(request: pytest.FixtureRequest, shared_server: Callable[[str], Server]) -> Iterator[SocketServer]:
    require(request.param)
    server = SocketServer(shared_server(request.param))
    yield server
    server.close()


def test_lock_operations_give_equal_replies(real: SocketServer) -> None:
    for seed in range(60):
        todo = operations(seed)
        real.execute(pack(b"FLUSHALL"))
        for who in HOLDERS:
            real.unsubscribe(who)
        assert list(play(real, todo)) == list(play(Virtual(), todo)), f"seed {seed}"


def test_expired_keys_are_gone_on_both(real: SocketServer) -> None:
    """Short ttls and real sleeps: leases, tickets and dead waiters expire."""
    todo: list[tuple[Any, ...]] = [
        ("listen", "door", "bob", 0, "", 0, (0, 0)),
        ("listen", "door", "cy", 0, "", 0, (0, 0)),
        ("try", "door", "ann", 0.04, "", 1, (0, 0)),
        ("queue", "door", "bob", 0.04, "", 1, (0, 0)),
        ("queue", "door", "cy", 5.0, "", 1, (0, 0)),
        ("sleep", "door", "", 0.06, "", 0, (0, 0)),
        ("inspect", "door", "ann", 1.0, "", 0, (0, 0)),
        ("release", "door", "ann", 0.04, "", 0, (0, 0)),
        ("inspect", "door", "ann", 1.0, "", 0, (0, 0)),
        ("queue", "door", "bob", 0.04, "", 3, (0, 0)),
        ("release", "door", "cy", 1.0, "", 0, (0, 0)),
        ("inspect", "door", "ann", 1.0, "", 0, (0, 0)),
        ("sleep", "door", "", 0.06, "", 0, (0, 0)),
        ("try", "door", "ann", 0.04, "", 1, (0, 0)),
        ("sleep", "door", "", 0.06, "", 0, (0, 0)),
        ("renew", "door", "ann", 1.0, "", 0, (0, 0)),
        ("adopt", "door", "bob", 1.0, "ann", 0, (0, 0)),
        ("queue", "door", "cy", 0.04, "", 2, (0, 0)),
        ("queue", "door", "ann", 0.04, "", 2, (0, 0)),
        ("sleep", "door", "", 0.06, "", 0, (0, 0)),
        ("inspect", "door", "ann", 1.0, "", 0, (0, 0)),
        ("listen", "door", "bob", 0, "", 0, (0, 0)),
        ("try", "door", "ann", 0.04, "", 1, (2, 3)),
        ("try", "door", "dan", 0.2, "", 1, (1, 3)),
        ("queue", "door", "bob", 5.0, "", 1, (2, 3)),
        ("sleep", "door", "", 0.06, "", 0, (0, 0)),
        ("inspect", "door", "ann", 1.0, "", 0, (0, 0)),
        ("release", "door", "ann", 1.0, "", 0, (0, 0)),
        ("inspect", "door", "ann", 1.0, "", 0, (0, 0)),
        ("renew_shared", "door", "bob", 0.01, "", 1, (0, 0)),
        ("sleep", "door", "", 0.2, "", 0, (0, 0)),
        ("inspect", "door", "ann", 1.0, "", 0, (0, 0)),
    ]
    assert list(play(real, todo)) == list(play(Virtual(), todo))


WORDS = (b"a", b"b", b"7", b"-1", b"2.5")
SHAPES = {
    b"GET": "k",
    b"SET": "kw",
    b"SETNX": "kw",
    b"INCR": "k",
    b"DEL": "kk",
    b"EXISTS": "kk",
    b"TYPE": "k",
    b"PTTL": "k",
    b"PERSIST": "k",
    b"ZADD": "knw",
    b"ZSCORE": "kw",
    b"ZREM": "kww",
    b"ZRANK": "kw",
    b"ZCARD": "k",
    b"ZPOPMIN": "k",
    b"HSET": "kww",
    b"HGET": "kw",
    b"HDEL": "kww",
}


def commands(seed: int, length: int = 150) -> list[list[bytes]]:
    randomness = random.Random(seed)
    found: list[list[bytes]] = []
    pick = {"k": (b"x", b"y", b"z"), "w": WORDS, "n": (b"1", b"2", b"2.5", b"1700000000000001", b"oops")}
    for _ in range(length):
        name = randomness.choice(list(SHAPES))
        words = [name, *(randomness.choice(pick[kind]) for kind in SHAPES[name])]
        if name == b"SET":
            words += randomness.choice(
                ([], [b"NX"], [b"XX"], [b"GET"], [b"KEEPTTL"], [b"NX", b"PX", b"90000"], [b"PX"])
            )
        if name == b"ZADD":
            found.append([b"ZRANGE", words[1], b"0", b"-1", b"WITHSCORES"])
            found.append([b"ZREVRANGE", words[1], b"0", b"0", b"WITHSCORES"])
        found.append(words)
    return found


def plain(reply: Any) -> Any:
    if isinstance(reply, ReplyError):
        return code_of(str(reply))
    return 90_000 if isinstance(reply, int) and 80_000 < reply <= 90_000 else reply


def test_plain_commands_give_equal_replies(real: SocketServer) -> None:
    for seed in range(30):
        real.execute(pack(b"FLUSHALL"))
        virtual = Virtual()
        for words in commands(seed):
            request = pack(*words)
            assert plain(real.execute(request)) == plain(virtual.execute(request)), (seed, words)


SCRIPTS = (
    "return {1, 2.9, -2.9, 'text', false, true, nil, 4}",
    "return redis.call('SET', KEYS[1], 'v', 'PX', 90000)",
    "return redis.call('SET', KEYS[1], 12345678901234)",
    "return {redis.call('GET', KEYS[1]), redis.call('GET', 'nothing') == false}",
    "return redis.pcall('HGET', KEYS[1], 'f')",
    "return redis.call('HGET', KEYS[1], 'f')",
    "return type(redis.call('SET', KEYS[1], 'v')['ok'])",
    "return {ok = 'fine'}",
    "return {err = 'MINE and no other'}",
    "return redis.error_reply('MINE again')",
    "return #redis.call('ZRANGE', KEYS[2], 0, -1)",
    "redis.call('ZADD', KEYS[2], 1700000000000001, 'm') return redis.call('ZSCORE', KEYS[2], 'm')",
    "redis.call('SET', KEYS[1], 'kept') redis.call('INCR', KEYS[1]) return 'never'",
    "return redis.call('GET', KEYS[1])",
    "return ARGV[1] + 1",
    "return tostring(ARGV[1] * 1000000 + 0.25)",
    "return redis.call('TIME')[1] == redis.call('TIME')[1]",
    "return redis.call('PTTL', 'nothing')",
    "return {}",
    "return",
    "x = 1",
)


def test_scripts_convert_values_like_a_real_server(real: SocketServer) -> None:
    real.execute(pack(b"FLUSHALL"))
    virtual = Virtual()
    for text in SCRIPTS:
        request = pack(b"EVAL", text.encode(), b"2", b"one", b"two", b"41", b"x")
        ours, theirs = virtual.execute(request), real.execute(request)
        if isinstance(theirs, ReplyError) and code_of(str(theirs)) == "ERR":
            assert isinstance(ours, ReplyError), text
        else:
            assert plain(ours) == plain(theirs), text


def test_restarted_server_has_no_data() -> None:
    server = VirtualRedis()
    server.subscribe("ann", b"inbox")
    server.call("SET", "door", "ann")
    digest = server.call("SCRIPT", "LOAD", "return 1")
    before = server.snapshot()
    server.restart()
    assert server.call("GET", "door") is None
    assert code_of(str(server.call("EVALSHA", digest, 0))) == "NOSCRIPT"
    assert server.call("PUBLISH", "inbox", "hello") == 0
    server.restore(before)
    assert (server.call("GET", "door"), server.call("PUBLISH", "inbox", "hello")) == (b"ann", 1)
    assert [message.subscriber for message in server.messages] == ["ann"]


def test_equal_states_compare_equal_in_any_order_of_writes() -> None:
    one, other = VirtualRedis(), VirtualRedis()
    for server, order in ((one, "ab"), (other, "ba")):
        for key in order:
            server.call("SET", key, key, "PX", 10 if key == "b" else 100)
    assert one.snapshot() == other.snapshot()
    assert hash(one.snapshot()) == hash(other.snapshot())
    one.advance(0.010)
    assert one.call("PTTL", "b") == 0  # a key exists during its last millisecond
    one.advance(0.001)
    assert one.snapshot() != other.snapshot()


def test_replica_takes_over_with_replicated_data_like_a_real_one() -> None:
    """Two keys are replicated and one later write is not; then the replica becomes the master."""
    require("valkey9")
    script = "return redis.call('GET', KEYS[1])"
    todo = [
        (b"GET", b"door"),
        (b"GET", b"gate"),
        (b"GET", b"late"),
        (b"PTTL", b"door"),
        (b"EVALSHA", sha1(script.encode()).hexdigest().encode(), b"1", b"door"),
        (b"PUBLISH", b"inbox", b"hello"),
    ]
    before = [
        (b"SET", b"door", b"ann", b"PX", b"90000"),
        (b"SET", b"gate", b"bob"),
        (b"SCRIPT", b"LOAD", script.encode()),
    ]
    master = VirtualRedis()
    replica = Replica(master)
    for words in before:
        master.run(list(words))
    master.subscribe("ann", b"inbox")
    replica.catch_up()
    assert not replica.lags
    master.run([b"SET", b"late", b"cy"])
    assert replica.lags
    replica.take_over()
    assert [plain(master.run(list(words))) for words in todo] == _on_a_real_replica(before, todo)


def _on_a_real_replica(before: list[tuple[bytes, ...]], todo: list[tuple[bytes, ...]]) -> list[Any]:
    with Server("valkey9") as first, Server("valkey9") as second:
        master, copy = SocketServer(first), SocketServer(second)
        copy.execute(pack(b"REPLICAOF", first.host.encode(), b"%d" % first.port))
        link_up = b"master_link_status:up"
        until(lambda: link_up in copy.execute(pack(b"INFO", b"replication")), "the replica", timeout=30)
        for words in before:
            master.execute(pack(*words))
        master.subscribe("ann")
        assert master.execute(pack(b"WAIT", b"1", b"5000")) == 1
        copy.execute(pack(b"REPLICAOF", b"NO", b"ONE"))  # the next write does not reach it
        master.execute(pack(b"SET", b"late", b"cy"))
        answers = [plain(copy.execute(pack(*words))) for words in todo]
        master.close()
        copy.close()
    return answers
