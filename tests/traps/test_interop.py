"""redis-py's Lock on the same name: both exclude each other, so a fleet can migrate one service at a time."""

import pytest
import redis

from tests.support.servers import Server
from tests.traps.flavours import Client, Flavour
from tests.traps.observation import Stopwatch, await_queue

pytestmark = pytest.mark.timing


@pytest.fixture
def theirs(valkey: Server) -> redis.client.Redis:
    return redis.Redis.from_url(valkey.url)


def test_both_exclude_each_other(us: Client, theirs: redis.client.Redis) -> None:
    with theirs:
        lock = theirs.lock("report", timeout=30)
        assert lock.acquire(blocking=False)
        assert us.try_acquire("report") is None
        info = us.inspect("report")
        assert info.locked
        assert info.owner is None
        lock.release()
        lease = us.try_acquire("report")
        assert lease is not None
        assert not lock.acquire(blocking=False)
        us.release(lease)
        assert lock.acquire(blocking=False)
        lock.release()


def test_waiter_is_granted_soon_after_redis_py_releases(us: Client, theirs: redis.client.Redis, valkey: Server) -> None:
    """redis-py sends no notification, so the waiter polls."""
    with theirs:
        lock = theirs.lock("report", timeout=30)
        assert lock.acquire()
        waiting = us.acquiring("report")
        await_queue(valkey, "report", 1)
        watch = Stopwatch()
        lock.release()
        waiting.result(20)
        assert watch.seconds < watch.most(1.3)


def test_redis_py_acquires_after_our_release(us: Client, theirs: redis.client.Redis) -> None:
    with theirs:
        lease = us.acquire("report")
        lock = theirs.lock("report", timeout=30, sleep=0.01)
        assert not lock.acquire(blocking_timeout=0.05)
        us.release(lease)
        assert lock.acquire(blocking_timeout=20)
        lock.release()


def test_neither_can_release_the_lock_of_the_other(us: Client, theirs: redis.client.Redis, valkey: Server) -> None:
    with theirs:
        lock = theirs.lock("report", timeout=30)
        assert lock.acquire()
        valkey.raw("DEL", "report")
        lease = us.acquire("report")
        with pytest.raises(redis.exceptions.LockNotOwnedError):
            lock.release()
        assert valkey.raw("GET", "report") == lease.holder
        valkey.raw("DEL", "report")
        assert lock.acquire()
        assert us.release(lease) is False
        assert lock.owned()
        lock.release()


def test_lock_without_a_ttl_blocks_until_it_is_deleted(flavour: Flavour, us: Client, valkey: Server) -> None:
    """The default of redis-py: such a lock never expires."""
    valkey.raw("SET", "report", "another holder")
    us.warm_up_inbox()
    assert us.inspect("report").ttl_left is None
    assert us.acquire("report", timeout=0.3) is None
    waiting = us.acquiring("report")
    await_queue(valkey, "report", 1)
    watch = Stopwatch()
    valkey.raw("DEL", "report")
    lease = waiting.result(20)
    assert watch.seconds < watch.most(1.3)
    assert 0 < valkey.raw("PTTL", "report") <= 30_000
    us.release(lease)
