"""Naive locks that break, on a real server, each by the shortest sequence of steps.

The gallery has the same locks as models, and the explorer finds these sequences;
`docs/redis-lock-step-by-step.md` explains them.
"""

from collections.abc import Iterator

import pytest
import redis

from tests.support.servers import Server
from tests.support.waiting import until


class Machine:
    """A client of a naive lock. Each step is a method, so that steps of two clients can interleave."""

    def __init__(self, client: "redis.Redis", me: str) -> None:
        self.client = client
        self.me = me
        self.saw: bytes | None = None

    def read(self) -> None:
        self.saw = self.client.get("lock")  # type: ignore[assignment]

    def owns(self) -> bool:
        return self.client.get("lock") == self.me.encode()


@pytest.fixture
def two(any_server: Server) -> Iterator[tuple[Machine, Machine]]:
    with redis.Redis.from_url(any_server.url) as first, redis.Redis.from_url(any_server.url) as second:
        yield Machine(first, "a"), Machine(second, "b")


Two = tuple[Machine, Machine]


@pytest.mark.system("A4")
def test_setex_overwrites_the_holder(two: Two) -> None:
    a, b = two
    assert a.client.execute_command("SETEX", "lock", 60, a.me)  # type: ignore[no-untyped-call]
    assert b.client.execute_command("SETEX", "lock", 60, b.me), "SETEX reports success to b as it did to a"  # type: ignore[no-untyped-call]
    assert not a.owns()


@pytest.mark.system("A5")
def test_crash_between_setnx_and_expire_locks_for_ever(two: Two) -> None:
    a, b = two
    assert a.client.setnx("lock", a.me)
    a.client.close()  # before it sends EXPIRE
    assert b.client.ttl("lock") == -1, "locked for ever"
    assert not b.client.setnx("lock", b.me)


@pytest.mark.system("B2")
def test_del_by_another_client_makes_two_holders(two: Two) -> None:
    a, b = two
    assert a.client.set("lock", a.me, nx=True, px=60_000)
    b.client.delete("lock")
    assert b.client.set("lock", b.me, nx=True, px=60_000), "two holders, and a does not know"


@pytest.mark.system("B3")
def test_without_a_ttl_a_dead_holder_locks_for_ever(two: Two) -> None:
    a, b = two
    assert a.client.set("lock", a.me, nx=True)
    a.client.close()
    assert b.client.pttl("lock") == -1, "its holder is dead, and it never expires"


@pytest.mark.system("C2")
def test_get_then_set_makes_two_holders(two: Two) -> None:
    a, b = two
    a.read()
    b.read()
    assert a.saw is b.saw is None
    a.client.set("lock", a.me)
    b.client.set("lock", b.me)
    assert not a.owns(), "both found it free, and both set it"


@pytest.mark.system("C3")
def test_del_after_expiry_frees_the_lock_of_the_next_holder(two: Two) -> None:
    a, b = two
    assert a.client.set("lock", a.me, nx=True, px=20)
    until(lambda: b.client.set("lock", b.me, nx=True, px=60_000), "a's ttl to run out")
    a.client.delete("lock")
    assert a.client.set("lock", "c", nx=True, px=60_000), "b holds it, and now c does too"


@pytest.mark.system("C3")
def test_comparing_before_del_leaves_a_race(two: Two) -> None:
    a, b = two
    assert a.client.set("lock", a.me, nx=True, px=60_000)
    mine = a.owns()
    a.client.pexpire("lock", 1)
    until(lambda: b.client.set("lock", b.me, nx=True, px=60_000), "a's ttl to run out")
    assert mine, "a compared before its ttl ran out"
    a.client.delete("lock")
    assert not b.owns()


@pytest.mark.system("D1")
def test_set_nx_px_is_atomic(two: Two) -> None:
    a, b = two
    assert a.client.set("lock", a.me, nx=True, px=60_000)
    assert not b.client.set("lock", b.me, nx=True, px=60_000)
    assert 0 < int(a.client.pttl("lock")) <= 60_000


@pytest.mark.system("E5")
def test_waiters_that_set_expire_prolong_a_dead_holders_lock(two: Two) -> None:
    a, b = two
    assert a.client.set("lock", a.me, nx=True, px=60_000)
    a.client.close()
    for _ in range(3):  # each waiter prolongs the lock of the dead holder
        b.client.pexpire("lock", 100)
        if not b.client.setnx("lock", b.me):
            b.client.expire("lock", 60)
        assert int(b.client.pttl("lock")) > 50_000
