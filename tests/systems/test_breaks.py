"""The rows that break, on a real server, each by the shortest order of steps that does it.

`tests/explore/` has the same locks as models and finds these orders by search; `docs/ladder.md` tells the story.
"""

from collections.abc import Iterator

import pytest
import redis

from tests.support.servers import Server
from tests.support.waiting import until


class Machine:
    """One who uses a naive lock. Each step is a method, so that others can come between."""

    def __init__(self, client: "redis.Redis", me: str) -> None:
        self.client = client
        self.me = me
        self.saw: bytes | None = None

    def look(self) -> None:
        self.saw = self.client.get("lock")  # type: ignore[assignment]

    def owns(self) -> bool:
        return self.client.get("lock") == self.me.encode()


@pytest.fixture
def two(any_server: Server) -> Iterator[tuple[Machine, Machine]]:
    with redis.Redis.from_url(any_server.url) as first, redis.Redis.from_url(any_server.url) as second:
        yield Machine(first, "a"), Machine(second, "b")


Two = tuple[Machine, Machine]


def test_a4_setex_overwrites(two: Two) -> None:
    a, b = two
    assert a.client.execute_command("SETEX", "lock", 60, a.me)  # type: ignore[no-untyped-call]
    assert b.client.execute_command("SETEX", "lock", 60, b.me), "and b is told that it has the lock, as a was"  # type: ignore[no-untyped-call]
    assert not a.owns()


def test_a5_setnx_then_expire_with_a_crash_between(two: Two) -> None:
    a, b = two
    assert a.client.setnx("lock", a.me)
    a.client.close()  # and never comes to EXPIRE
    assert b.client.ttl("lock") == -1, "locked for ever"
    assert not b.client.setnx("lock", b.me)


def test_b2_del_by_anyone(two: Two) -> None:
    a, b = two
    assert a.client.set("lock", a.me, nx=True, px=60_000)
    b.client.delete("lock")
    assert b.client.set("lock", b.me, nx=True, px=60_000), "two holders: nobody told a"


def test_b3_no_longest_hold(two: Two) -> None:
    a, b = two
    assert a.client.set("lock", a.me, nx=True)
    a.client.close()
    assert b.client.pttl("lock") == -1, "its holder is dead, and nothing ends it"


def test_c2_get_then_set(two: Two) -> None:
    a, b = two
    a.look()
    b.look()
    assert a.saw is b.saw is None
    a.client.set("lock", a.me)
    b.client.set("lock", b.me)
    assert not a.owns(), "both found it free, and both set it"


def test_c3_del_after_ones_own_ttl_has_run_out(two: Two) -> None:
    a, b = two
    assert a.client.set("lock", a.me, nx=True, px=20)
    until(lambda: b.client.set("lock", b.me, nx=True, px=60_000), "a's time to run out")
    a.client.delete("lock")
    assert a.client.set("lock", "c", nx=True, px=60_000), "b holds it, and now c does too"


def test_c3_comparing_first_only_makes_it_rarer(two: Two) -> None:
    a, b = two
    assert a.client.set("lock", a.me, nx=True, px=60_000)
    mine = a.owns()
    a.client.pexpire("lock", 1)
    until(lambda: b.client.set("lock", b.me, nx=True, px=60_000), "a's time to run out")
    assert mine, "a has looked, and deletes what it saw"
    a.client.delete("lock")
    assert not b.owns()


def test_d1_set_nx_px_is_one_command(two: Two) -> None:
    a, b = two
    assert a.client.set("lock", a.me, nx=True, px=60_000)
    assert not b.client.set("lock", b.me, nx=True, px=60_000)
    assert 0 < int(a.client.pttl("lock")) <= 60_000


def test_e5_a_waiter_expires_whatever_it_finds(two: Two) -> None:
    a, b = two
    assert a.client.set("lock", a.me, nx=True, px=60_000)
    a.client.close()
    for _ in range(3):  # each time that a waiter comes by, the dead holder's lock lives on
        b.client.pexpire("lock", 100)
        if not b.client.setnx("lock", b.me):
            b.client.expire("lock", 60)
        assert int(b.client.pttl("lock")) > 50_000
