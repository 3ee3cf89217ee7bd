"""redis-py's own Lock on the same name: a fleet that migrates service by service must stay locked."""

import pytest
import redis

from tests.support.servers import Server
from tests.traps.flavours import Client, Colour
from tests.traps.watching import Stopwatch, await_queue

pytestmark = pytest.mark.timing


@pytest.fixture
def theirs(valkey: Server) -> redis.client.Redis:
    return redis.Redis.from_url(valkey.url)


def test_it_keeps_us_out_and_we_keep_it_out(us: Client, theirs: redis.client.Redis) -> None:
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


def test_we_get_the_lock_soon_after_it_was_released(us: Client, theirs: redis.client.Redis, valkey: Server) -> None:
    """It tells nobody, so we look for ourselves."""
    with theirs:
        lock = theirs.lock("report", timeout=30)
        assert lock.acquire()
        waiting = us.acquiring("report")
        await_queue(valkey, "report", 1)
        watch = Stopwatch()
        lock.release()
        waiting.result(20)
        assert watch.seconds < watch.most(1.3)


def test_it_gets_the_lock_after_us(us: Client, theirs: redis.client.Redis) -> None:
    with theirs:
        lease = us.acquire("report")
        lock = theirs.lock("report", timeout=30, sleep=0.01)
        assert not lock.acquire(blocking_timeout=0.05)
        us.release(lease)
        assert lock.acquire(blocking_timeout=20)
        lock.release()


def test_neither_can_release_the_others(us: Client, theirs: redis.client.Redis, valkey: Server) -> None:
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


def test_a_lock_without_a_ttl_is_waited_for(flavour: Colour, us: Client, valkey: Server) -> None:
    """redis-py's default: such a lock has no end of its own, so only its removal can free it."""
    valkey.raw("SET", "report", "a stranger's")
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
