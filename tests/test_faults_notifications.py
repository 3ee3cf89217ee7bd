"""Notifications that are lost, late, repeated or forged. A client accepts only current ones."""

from collections.abc import Iterator, Sequence

import pytest

from lockfast import State
from tests.support.proxy import FaultProxy
from tests.support.servers import Server
from tests.support.waiting import until
from tests.traps.flavours import FLAVOURS, Flavour
from tests.traps.observation import Stopwatch, await_queue, companions, on, pubsub_clients
from tests.traps.programs import Program

pytestmark = pytest.mark.timing


@pytest.fixture(params=FLAVOURS)
def flavour(request: pytest.FixtureRequest) -> Iterator[Flavour]:
    with FLAVOURS[request.param]() as flavour:
        yield flavour


def a_grant(args: Sequence[bytes]) -> bool:
    """Whether a notification is a grant, with three words; "now first" has four."""
    return args[0] == b"message" and len(args[-1].split()) == 3


def test_a_lost_notification_is_recovered(proxy: FaultProxy, flavour: Flavour, valkey: Server) -> None:
    holder, client = flavour.connect(valkey.url), flavour.connect(proxy.url).warm_up_inbox()
    lease = holder.acquire("report")
    waiting = client.acquiring("report")
    await_queue(valkey, "report", 1)
    lost = proxy.drop_pushes(a_grant)
    watch = Stopwatch()
    holder.release(lease)
    granted = waiting.result(20)
    assert lost.hits == 1
    assert watch.seconds < watch.most(1.15)
    assert valkey.raw("GET", "report") == granted.holder
    client.release(granted)


def test_lost_notifications_in_a_long_queue_are_recovered(proxy: FaultProxy, flavour: Flavour, valkey: Server) -> None:
    holder, client = flavour.connect(valkey.url), flavour.connect(proxy.url).warm_up_inbox()
    lease = holder.acquire("report")
    waiting = [client.acquiring("report") for _ in range(5)]
    await_queue(valkey, "report", 5)
    lost = proxy.drop_pushes(a_grant, times=2)
    watch = Stopwatch()
    holder.release(lease)
    left = list(waiting)
    while left:
        until(lambda: any(future.done() for future in left), "the next waiter to acquire the lock")
        granted = next(future for future in left if future.done())
        left.remove(granted)
        client.release(granted.result())
    assert lost.hits == 2
    assert watch.seconds < watch.most(2 * 1.15)


def test_a_late_notification_is_rejected(proxy: FaultProxy, flavour: Flavour, valkey: Server) -> None:
    """It is delayed until its grant has expired and another client has acquired the lock."""
    holder, client = flavour.connect(valkey.url), flavour.connect(proxy.url).warm_up_inbox()
    lease = holder.acquire("report")
    late = proxy.hold_pushes(a_grant)
    waiting = client.acquiring("report", ttl=3)
    await_queue(valkey, "report", 1)
    proxy.stall("to_server")  # the waiter cannot repeat its request meanwhile
    holder.release(lease)
    late.wait()
    valkey.raw("PEXPIRE", "report", 1)  # expires the grant at once
    until(lambda: not valkey.raw("EXISTS", "report"), "the grant to expire")
    taken = holder.try_acquire("report")
    assert taken is not None
    seen = len(proxy.requests)
    until(lambda: any(on("report")(args) for args in proxy.requests[seen:]), "the waiter to repeat its request")  # type: ignore[operator]
    late.release()
    proxy.unstall("to_server")
    await_queue(valkey, "report", 1)  # its request arrived, and the server queued it
    assert not waiting.done()
    assert valkey.raw("GET", "report") == taken.holder
    holder.release(taken)
    granted = waiting.result(20)
    assert granted.fence > taken.fence
    client.release(granted)


def test_a_notification_for_an_earlier_attempt_is_rejected(proxy: FaultProxy, flavour: Flavour, valkey: Server) -> None:
    holder, client = flavour.connect(valkey.url), flavour.connect(proxy.url).warm_up_inbox()
    lease = holder.acquire("report")
    late = proxy.hold_pushes(a_grant)
    waiting = client.acquiring("report", ttl=0.6)
    await_queue(valkey, "report", 1)
    with_replies_held = proxy.hold_replies(on("report"))
    holder.release(lease)
    late.wait()
    valkey.raw("DEL", "report")
    taken = holder.try_acquire("report")
    assert taken is not None
    with_replies_held.wait()  # the server has executed the repeated request, and queued it again
    await_queue(valkey, "report", 1)
    late.release()
    with_replies_held.release()
    seen = len(proxy.requests)
    until(lambda: len(proxy.requests) > seen, "the waiter to send another request")
    assert not waiting.done()
    assert valkey.raw("GET", "report") == taken.holder
    holder.release(taken)
    client.release(waiting.result(20))


def test_a_waiter_that_was_suspended_through_its_grant_rejects_it(flavour: Flavour, valkey: Server) -> None:
    """Its process was stopped. When it continues, it reads a notification of an expired grant first."""
    holder = flavour.connect(valkey.url)
    lease = holder.acquire("report")
    with Program("wait", flavour.name, valkey.url, "report", ttl=0.5) as sleeper:
        await_queue(valkey, "report", 1)
        sleeper.freeze()
        holder.release(lease)
        assert valkey.raw("GET", "report") != lease.holder
        taken = holder.acquire("report", timeout=20)  # once the sleeper's grant has expired
        sleeper.thaw()
        await_queue(valkey, "report", 1)  # it repeated its request, and waits again
        assert valkey.raw("GET", "report") == taken.holder
        holder.release(taken)
        assert sleeper.line() == "waiting"
        held, fence = sleeper.line().split()
        assert (held, int(fence) > taken.fence) == ("held", True)


def test_a_notification_for_a_waiter_that_left_changes_nothing(
    proxy: FaultProxy, flavour: Flavour, valkey: Server
) -> None:
    """The waiter times out just when it is granted the lock: it releases it, and nobody reads the notification."""
    holder, client = flavour.connect(valkey.url), flavour.connect(proxy.url).warm_up_inbox()
    lease = holder.acquire("report")
    late = proxy.hold_pushes(a_grant)
    leaving = client.acquiring("report", timeout=0.9)
    await_queue(valkey, "report", 1)
    staying = holder.acquiring("report")
    await_queue(valkey, "report", 2)
    holder.release(lease)
    late.wait()
    assert leaving.result(20) is None
    granted = staying.result(20)
    late.release()
    assert valkey.raw("GET", "report") == granted.holder
    assert holder.state(granted) is State.HELD
    holder.release(granted)


def test_a_forged_or_foreign_message_is_ignored(flavour: Flavour, valkey: Server) -> None:
    """Every client that may publish can send anything to an inbox; the waiter accepts only what fits its request."""
    client = flavour.connect(valkey.url)
    valkey.raw("SET", "report", "a stranger's")
    waiting = client.acquiring("report")
    await_queue(valkey, "report", 1)
    holder = valkey.raw("ZRANGE", companions("report")["q"], 0, -1)[0]
    entry = valkey.raw("HGET", companions("report")["w"], holder)
    attempt, _, _, inbox, _ = entry.split(" ", 4)
    for message in (
        "",
        "nonsense",
        f"{holder} {int(attempt) + 1} 17",
        f"{holder} 0 17",
        f"{holder} {attempt} -1x",
        f"{holder} {attempt} next",
        f"{holder} {attempt} next x",
        f"{holder} x 17",
        f"somebody {attempt} 17",
        "\xff\xfe\x00",
        "x" * 100_000,
    ):
        assert valkey.raw("PUBLISH", inbox, message) == 1
    until(
        lambda: int(valkey.raw("HGET", companions("report")["w"], holder).split()[0]) > int(attempt), "another request"
    )
    assert not waiting.done()
    assert pubsub_clients(valkey) == 1
    valkey.raw("DEL", "report")
    client.release(waiting.result(20))


def test_notifications_that_arrive_together_reach_the_right_waiters(
    proxy: FaultProxy, flavour: Flavour, valkey: Server
) -> None:
    holder, client = flavour.connect(valkey.url), flavour.connect(proxy.url).warm_up_inbox()
    leases = [holder.acquire(f"report:{number}") for number in range(10)]
    waiting = [client.acquiring(f"report:{number}") for number in range(10)]
    for number in range(10):
        await_queue(valkey, f"report:{number}", 1)
    rule = proxy.hold_pushes(a_grant)
    for lease in leases:
        holder.release(lease)
    rule.wait()
    rule.release()  # all arrive together
    granted = [future.result(20) for future in waiting]
    assert [lease.name for lease in granted] == [f"report:{number}" for number in range(10)]
    assert [valkey.raw("GET", lease.name) for lease in granted] == [lease.holder for lease in granted]
