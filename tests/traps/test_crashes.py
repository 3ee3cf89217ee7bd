"""Processes that are killed while they hold, while they wait, and in the very moment between."""

from concurrent.futures import Future
from typing import Any

import pytest

from tests.support.servers import Server
from tests.support.waiting import until
from tests.traps.flavours import Client, Colour
from tests.traps.programs import Program
from tests.traps.watching import Stopwatch, await_queue, pubsub_clients, traces

pytestmark = pytest.mark.timing


def test_a_crashed_holder_blocks_no_longer_than_its_ttl(flavour: Colour, us: Client, valkey: Server) -> None:
    us.warm_up_inbox()
    with Program("hold", flavour.name, valkey.url, "report", ttl=1) as holder:
        assert holder.line().startswith("held")
        waiting = us.acquiring("report")
        await_queue(valkey, "report", 1)
        until(lambda: valkey.raw("PTTL", "report") > 950, "a fresh renewal: a second is left")
        holder.kill()
        watch = Stopwatch()
        waiting.result(20)
        assert watch.seconds < watch.most(1.25)


def test_a_dead_waiter_at_the_head_of_the_queue_is_skipped_at_once(
    flavour: Colour, us: Client, them: Client, valkey: Server
) -> None:
    lease = us.acquire("report")
    us.warm_up_inbox()
    with Program("wait", flavour.name, valkey.url, "report") as dead:
        await_queue(valkey, "report", 1)
        waiting = us.acquiring("report")
        await_queue(valkey, "report", 2)
        dead.kill()
        until(lambda: pubsub_clients(valkey) == 1, "the server to notice")
        watch = Stopwatch()
        us.release(lease)
        waiting.result(20)
        assert watch.seconds < watch.most(0.15)
    us.release(waiting.result())
    assert traces(valkey, "report") == []


def test_many_dead_waiters_are_skipped_at_once(flavour: Colour, us: Client, valkey: Server) -> None:
    lease = us.acquire("report")
    us.warm_up_inbox()
    with Program("wait", flavour.name, valkey.url, "report") as dead:
        await_queue(valkey, "report", 1)
        enqueue = valkey.raw("HGETALL", "lockfast:{report}:w")[1]
        for number in range(500):  # as many again, each with the dead one's address
            valkey.raw("ZADD", "lockfast:{report}:q", number, f"dead-{number}")
            valkey.raw("HSET", "lockfast:{report}:w", f"dead-{number}", enqueue)
        dead.kill()
        waiting = us.acquiring("report")
        await_queue(valkey, "report", 502)
        until(lambda: pubsub_clients(valkey) == 1, "the server to notice")
        watch = Stopwatch()
        us.release(lease)
        waiting.result(20)
        assert watch.seconds < watch.most(0.15)


@pytest.mark.parametrize("next_ttl", [1.2, 30], ids=["equal ttls", "mixed ttls"])
def test_a_waiter_that_dies_in_the_moment_it_is_granted_does_not_keep_the_next_waiting(
    flavour: Colour, us: Client, valkey: Server, next_ttl: float
) -> None:
    """The waiter is stopped, made the holder by the server, and killed before it can know."""
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
def test_a_client_with_a_wrong_clock_waits_and_holds_like_any_other(
    flavour: Colour, us: Client, them: Client, valkey: Server, role: str
) -> None:
    lease = us.acquire("report", ttl=5)
    with Program(role, flavour.name, valkey.url, "report", ttl=5) as other:
        assert other.line() == "waiting"
        await_queue(valkey, "report", 1)
        waiting = them.acquiring("report", ttl=5)  # live waiters with the right time are not evicted
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
