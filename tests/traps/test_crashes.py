"""Processes killed while they hold, while they wait, and at the moment of the grant."""

from concurrent.futures import Future
from typing import Any

import pytest

from tests.support.servers import Server
from tests.support.waiting import until
from tests.traps.flavours import Client, Flavour
from tests.traps.observation import Stopwatch, await_queue, pubsub_clients, traces
from tests.traps.programs import Program

pytestmark = pytest.mark.timing


def test_crashed_holder_blocks_for_its_ttl_only(flavour: Flavour, us: Client, valkey: Server) -> None:
    us.warm_up_inbox()
    with Program("hold", flavour.name, valkey.url, "report", ttl=1) as holder:
        assert holder.line().startswith("held")
        waiting = us.acquiring("report")
        await_queue(valkey, "report", 1)
        until(lambda: valkey.raw("PTTL", "report") > 950, "a renewal, so that a second is left")
        holder.kill()
        watch = Stopwatch()
        waiting.result(20)
        assert watch.seconds < watch.most(1.25)


def test_dead_first_waiter_is_skipped_at_once(flavour: Flavour, us: Client, them: Client, valkey: Server) -> None:
    lease = us.acquire("report")
    us.warm_up_inbox()
    with Program("wait", flavour.name, valkey.url, "report") as dead:
        await_queue(valkey, "report", 1)
        waiting = us.acquiring("report")
        await_queue(valkey, "report", 2)
        dead.kill()
        until(lambda: pubsub_clients(valkey) == 1, "the server to notice the closed connection")
        watch = Stopwatch()
        us.release(lease)
        waiting.result(20)
        assert watch.seconds < watch.most(0.15)
    us.release(waiting.result())
    assert traces(valkey, "report") == []


def test_many_dead_waiters_are_skipped_at_once(flavour: Flavour, us: Client, valkey: Server) -> None:
    lease = us.acquire("report")
    us.warm_up_inbox()
    with Program("wait", flavour.name, valkey.url, "report") as dead:
        await_queue(valkey, "report", 1)
        record = valkey.raw("HGETALL", "lockfast:{report}:w")[1]
        for number in range(500):  # 500 more waiters with the address of the dead one
            valkey.raw("ZADD", "lockfast:{report}:q", number, f"dead-{number}")
            valkey.raw("HSET", "lockfast:{report}:w", f"dead-{number}", record)
        dead.kill()
        waiting = us.acquiring("report")
        await_queue(valkey, "report", 502)
        until(lambda: pubsub_clients(valkey) == 1, "the server to notice the closed connection")
        watch = Stopwatch()
        us.release(lease)
        waiting.result(20)
        assert watch.seconds < watch.most(0.15)


@pytest.mark.parametrize("next_ttl", [1.2, 30], ids=["equal ttls", "mixed ttls"])
def test_waiter_that_dies_when_it_is_granted_blocks_for_its_ttl_only(
    flavour: Flavour, us: Client, valkey: Server, next_ttl: float
) -> None:
    """The waiter is stopped, granted the lock, and killed before it can read the notification."""
    lease = us.acquire("report")
    us.warm_up_inbox()
    with Program("wait", flavour.name, valkey.url, "report", ttl=1.2) as unlucky:
        await_queue(valkey, "report", 1)
        waiting: Future[Any] = us.acquiring("report", ttl=next_ttl)
        await_queue(valkey, "report", 2)
        unlucky.freeze()
        watch = Stopwatch()
        assert us.release(lease) is True
        assert valkey.raw("GET", "report") not in (None, lease.holder)
        assert not waiting.done()
        unlucky.kill()
        waiting.result(10)
        assert watch.seconds < watch.most(1.2 + 0.25)


@pytest.mark.parametrize("role", ["wait_ahead", "wait_behind"])
def test_wrong_wall_clock_does_not_matter(
    flavour: Flavour, us: Client, them: Client, valkey: Server, role: str
) -> None:
    lease = us.acquire("report", ttl=5)
    with Program(role, flavour.name, valkey.url, "report", ttl=5) as other:
        assert other.line() == "waiting"
        await_queue(valkey, "report", 1)
        waiting = them.acquiring("report", ttl=5)  # its ticket must not expire because of the other clock
        await_queue(valkey, "report", 2)
        us.release(lease)
        held, fence = other.line().split()
        assert held == "held"
        assert int(fence) > lease.fence
        assert not waiting.done()
        assert 0 < valkey.raw("PTTL", "report") <= 5000
        waiters = us.inspect("report").waiters
        assert [waiter.waiting_for < 10 for waiter in waiters] == [True]
        other.tell()
        assert other.line() == "True"
        assert waiting.result(20).fence > int(fence)
        assert other.end() == 0
