"""Keys that disappear: the auxiliary keys or the lock itself are evicted or deleted."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.servers import Server
from tests.support.waiting import until
from tests.traps.flavours import FLAVOURS, Client, Flavour
from tests.traps.observation import (
    Stopwatch,
    await_queue,
    companions,
)

pytestmark = pytest.mark.timing


@pytest.fixture(params=FLAVOURS)
def flavour(request: pytest.FixtureRequest) -> Iterator[Flavour]:
    with FLAVOURS[request.param]() as flavour:
        yield flavour


class TestEviction:
    """The loss of auxiliary keys never breaks mutual exclusion, and no waiter waits for ever."""

    @pytest.fixture(params=["m", "q", "w", "qw", "mqw"])
    def evicted(self, request: pytest.FixtureRequest) -> list[str]:
        aux = companions("report")
        return [aux[kind] for kind in request.param]

    def test_while_held(self, flavour: Flavour, valkey: Server, evicted: list[str]) -> None:
        client, other = flavour.connect(valkey.url), flavour.connect(valkey.url)
        lease = client.acquire("report")
        valkey.raw("DEL", *evicted)
        assert other.try_acquire("report") is None
        client.renew(lease)
        assert client.inspect("report").holder == lease.holder
        assert client.release(lease) is True
        later = other.try_acquire("report")
        assert later.fence > lease.fence

    def test_while_others_wait(self, flavour: Flavour, valkey: Server, evicted: list[str]) -> None:
        client, other = flavour.connect(valkey.url), flavour.connect(valkey.url)
        lease = client.acquire("report")
        waiting = [other.acquiring("report", ttl=1.5) for _ in range(2)]
        await_queue(valkey, "report", 2)
        valkey.raw("DEL", *evicted)
        assert client.release(lease) is True
        watch = Stopwatch()
        self.check_one_after_another(other, waiting, [lease.fence])
        assert watch.seconds < watch.most(2.5)
        assert valkey.raw("EXISTS", "report", companions("report")["q"]) == 0

    def test_while_a_grant_is_in_flight(self, flavour: Flavour, valkey: Server, evicted: list[str]) -> None:
        client, other = flavour.connect(valkey.url), flavour.connect(valkey.url)
        lease = client.acquire("report")
        waiting = [other.acquiring("report", ttl=1.5) for _ in range(2)]
        await_queue(valkey, "report", 2)
        client.release(lease)
        valkey.raw("DEL", *evicted)
        self.check_one_after_another(other, waiting, [lease.fence])
        assert valkey.raw("EXISTS", "report", companions("report")["q"]) == 0

    def check_one_after_another(self, client: Client, waiting: list[Any], fences: list[int]) -> None:
        """The waiters acquire the lock one after another, each with a greater fence."""
        left = list(waiting)
        while left:
            until(lambda: any(future.done() for future in left), "a waiter to acquire the lock")
            done = [future for future in left if future.done()]
            assert len(done) == 1
            lease = done[0].result()
            assert lease.fence > fences[-1]
            fences.append(lease.fence)
            left.remove(done[0])
            assert client.release(lease) is True

    def test_deleting_the_lock_ends_the_lease_and_the_wait(self, flavour: Flavour, valkey: Server) -> None:
        client, other = flavour.connect(valkey.url), flavour.connect(valkey.url)
        lease = client.acquire("report", ttl=0.6)
        waiting = other.acquiring("report")
        await_queue(valkey, "report", 1)
        valkey.raw("DEL", "report")
        watch = Stopwatch()
        taken = waiting.result(20)
        assert watch.seconds < watch.most(1.3)
        assert client.do(lambda: lease.lost.wait(20)) is True
        assert client.release(lease) is False
        assert valkey.raw("GET", "report") == taken.holder
