"""`lockfast.Lock(client, name)` on a redis-py or valkey-py client."""

import asyncio
import gc
import logging
import subprocess
import sys
import threading
import weakref
from typing import Any

import pytest
import redis
import redis.asyncio
import valkey as valkey_py

import lockfast
import lockfast.aio
from lockfast import ConfigurationError, NotHeld
from tests.contract.driver import done, held
from tests.support.servers import Server
from tests.support.waiting import until
from tests.systems.conftest import on_all_servers
from tests.systems.kit import Kit, scenario


@pytest.mark.system("B1")
@on_all_servers
@pytest.mark.parametrize("decode", [False, True])
@scenario
async def test_second_acquire_and_second_release_fail(k: Kit, decode: bool) -> None:
    client = k.client(decode_responses=decode)
    lock = k.library.Lock(client, "counter")
    lease = await done(lock.acquire())
    assert lease is not None
    assert k.server.raw("GET", "counter") == lease.holder
    assert await done(k.library.Lock(client, "counter").acquire(timeout=0)) is None
    assert await done(lock.acquire(blocking=False)) is None
    assert await done(lock.release()) is True
    assert k.server.raw("EXISTS", "counter") == 0
    with pytest.raises(NotHeld):
        await done(lock.release())


@pytest.mark.system("B1")
@pytest.mark.parametrize("protocol", [2, 3])
@scenario
async def test_lock_on_a_client_equals_the_lock_of_a_session(k: Kit, protocol: int) -> None:
    client = k.client(protocol=protocol)
    lock = k.library.Lock(client, "counter", ttl=5, label="till")
    session = k.connect()
    assert type(lock) is type(session.lock("counter"))
    assert repr(lock) == repr(session.lock("counter", ttl=5))
    async with held(lock) as lease:
        info = await done(session.lock("counter").inspect())
        assert (info.holder, info.fence, info.owner.label) == (lease.holder, lease.fence, "till")
    with pytest.raises(ConfigurationError, match="no option"):
        k.library.Lock(client, "counter", sleep=1)


@pytest.mark.system("B1")
@scenario
async def test_waiters_on_one_client_share_two_connections(k: Kit) -> None:
    client = k.client()
    await done(client.ping())
    before = connections(k.server)
    lease = await done(k.library.Lock(client, "counter").acquire())

    async def wait(number: int) -> int:
        async with held(k.library.Lock(client, "counter")) as mine:
            return int(mine.fence)

    waiting = [k.start(wait, number) for number in range(5)]
    await k.until(lambda: k.server.raw("ZCARD", "lockfast:{counter}:q") == 5, "five waiters")
    assert connections(k.server) == before + 2
    await done(lease.release())
    assert len({await one.result() for one in waiting}) == 5


def connections(server: Server) -> int:
    return len(server.raw("CLIENT", "LIST").splitlines())


@pytest.mark.system("B1")
def test_lock_on_a_valkey_py_client(valkey: Server) -> None:
    with valkey_py.Valkey.from_url(valkey.url) as client, lockfast.Lock(client, "counter") as lease:
        assert valkey.raw("GET", "counter") == lease.holder
    assert valkey.raw("EXISTS", "counter") == 0


@pytest.mark.system("B1")
@pytest.mark.parametrize("client", [None, "redis://localhost", 7, object(), [1]], ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("library", [lockfast, lockfast.aio], ids=["threads", "asyncio"])
def test_object_that_is_no_client_is_rejected(library: Any, client: Any) -> None:
    with pytest.raises(ConfigurationError):
        library.Lock(client, "counter")


@pytest.mark.system("B1")
def test_client_or_session_of_the_other_flavour_is_rejected() -> None:
    with pytest.raises(ConfigurationError, match="asyncio"):
        lockfast.Lock(redis.asyncio.Redis(), "counter")
    with pytest.raises(ConfigurationError, match="threads"):
        lockfast.aio.Lock(redis.Redis(), "counter")
    with lockfast.connect("memory://") as locks, pytest.raises(ConfigurationError, match=r"lockfast\.Lock"):
        lockfast.aio.Lock(locks, "counter")
    with pytest.raises(ConfigurationError, match=r"lockfast\.aio\.Lock"):
        lockfast.Lock(lockfast.aio.connect("memory://"), "counter")


@pytest.mark.system("B1")
def test_lock_on_a_session_is_the_lock_of_that_session() -> None:
    with lockfast.connect("memory://") as locks, lockfast.Lock(locks, "counter", ttl=3) as lease:
        assert lease.ttl == 3
        assert locks.lock("counter").locked()


@pytest.mark.system("B1")
def test_connections_close_when_the_client_is_collected(fresh_server: Server) -> None:
    client = redis.Redis(port=fresh_server.port)
    lock = lockfast.Lock(client, "counter")
    lease = lock.acquire()
    assert lease is not None
    gone = weakref.ref(client)
    del client
    gc.collect()
    assert gone() is not None, "the lock keeps its client"
    del lock
    gc.collect()
    assert gone() is not None, "so does the lease"
    assert lease.release()
    del lease
    gc.collect()
    assert gone() is None
    until(lambda: connections(fresh_server) == 1, "our connections to be closed")


@pytest.mark.system("B1")
def test_end_of_the_event_loop_releases_and_disconnects(fresh_server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    client = redis.asyncio.Redis(port=fresh_server.port)
    lock = lockfast.aio.Lock(client, "counter", timeout=5)

    async def hold() -> None:
        await lock.acquire()
        await client.aclose()

    for _ in range(2):  # a second event loop reconnects
        asyncio.run(hold())
        until(lambda: not fresh_server.raw("EXISTS", "counter"), "the lock to be released")
        until(lambda: connections(fresh_server) == 1, "our connections to be closed")
    assert caplog.records == []


@pytest.mark.system("B1")
def test_concurrent_threads_share_one_session_per_client(valkey: Server) -> None:
    with redis.Redis.from_url(valkey.url) as client:
        start = threading.Barrier(8)
        found: list[Any] = []

        def make() -> None:
            start.wait(5)
            found.append(lockfast.Lock(client, "counter")._client)

        threads = [threading.Thread(target=make) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(5)
        assert len({id(one) for one in found}) == 1


@pytest.mark.system("B1")
def test_program_exit_releases_the_lock(valkey: Server) -> None:
    program = f"""
import lockfast, redis
client = redis.Redis(port={valkey.port})
lease = lockfast.Lock(client, "counter").acquire()
print(lease.holder == client.get("counter").decode())
"""
    ran = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.stderr, ran.returncode) == ("True\n", "", 0)
    assert valkey.raw("EXISTS", "counter") == 0
