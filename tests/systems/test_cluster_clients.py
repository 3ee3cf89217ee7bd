"""The plain functions, `Lock` and the redis-py compatible lock on a cluster client."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import redis
import redis.asyncio

import lockfast
import lockfast.aio
import lockfast.simple
import lockfast.simple.aio
from lockfast.compat import redis_py
from tests.support.topologies import Group
from tests.systems import kit

NAMES = ("lock", "{tag}:lock", "other")
HOWS: Any = kit.HOWS


@pytest.mark.system("A1")
@pytest.mark.system("B1")
@pytest.mark.parametrize("decode", [False, True])
def test_locks_on_a_sync_cluster_client(shared_group: Callable[[str], Group], decode: bool) -> None:
    server = shared_group("cluster").masters()[0]
    client: Any = redis.RedisCluster(host=server.host, port=server.port, decode_responses=decode)
    for name in NAMES:
        for how in HOWS:
            assert lockfast.simple.acquire(client, name, 10, "moto", how=how)
            assert not lockfast.simple.acquire(client, name, 10, "nokia", how=how)
            assert not lockfast.simple.release(client, name, "nokia", how=how)
            assert lockfast.simple.release(client, name, "moto", how=how)
        with lockfast.Lock(client, name):
            assert not lockfast.simple.acquire(client, name, 10, "moto")
        lock: Any = client.lock(name, timeout=10, lock_class=redis_py.Lock)
        assert lock.acquire(blocking=False)
        assert lock.owned()
        assert lock.extend(5)
        assert not client.lock(name).acquire(blocking=False)
        lock.release()
        assert lock.acquire(blocking=False, token="mine")
        lock.release()
    client.close()


@pytest.mark.system("A1")
@pytest.mark.system("B1")
@pytest.mark.parametrize("decode", [False, True])
def test_locks_on_an_async_cluster_client(shared_group: Callable[[str], Group], decode: bool) -> None:
    server = shared_group("cluster").masters()[0]

    async def main() -> None:
        client: Any = redis.asyncio.RedisCluster(host=server.host, port=server.port, decode_responses=decode)
        await client.initialize()
        for name in NAMES:
            for how in HOWS:
                assert await lockfast.simple.aio.acquire(client, name, 10, "moto", how=how)
                assert not await lockfast.simple.aio.acquire(client, name, 10, "nokia", how=how)
                assert await lockfast.simple.aio.release(client, name, "moto", how=how)
            async with lockfast.aio.Lock(client, name):
                assert not await lockfast.simple.aio.acquire(client, name, 10, "moto")
            lock: Any = client.lock(name, timeout=10, lock_class=redis_py.AsyncLock)
            assert await lock.acquire(blocking=False)
            assert await lock.owned()
            assert await lock.extend(5)
            await lock.release()
        await client.aclose()

    asyncio.run(main())
