"""A server that stops or restarts, and a network that breaks: the states of the lease, and when they change."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lockfast import LeaseLost, State
from lockfast.runtime.base import now
from tests.keepalive.callbacks import SLACK, CallbackRecorder
from tests.keepalive.measurements import note
from tests.support.faults import Direction
from tests.support.lateness import kept_waiting, kept_waiting_since, lateness
from tests.support.proxy import FaultProxy
from tests.support.servers import Server
from tests.support.waiting import until
from tests.traps.flavours import Client, Flavour
from tests.traps.observation import await_nothing_left, on

pytestmark = pytest.mark.timing

DIRECTIONS: tuple[Direction, ...] = ("to_server", "to_client")


@pytest.fixture(autouse=True)
def no_errors_in_the_log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No error is logged: asyncio logs errors that no task retrieved, and the keepalive unexpected ones."""
    yield
    bad = [record for record in caplog.get_records("call") if record.levelno >= logging.ERROR]
    assert [record.getMessage() for record in bad] == []


def deadline_of(lease: Any) -> float:
    """When the lease ends without another renewal, on the clock of `now`."""
    moment: float = lease._core.valid_until
    return moment


def is_state(client: Client, lease: Any, state: State) -> Callable[[], bool]:
    return lambda: client.state(lease) is state


def assert_lost_at_the_deadline(callbacks: CallbackRecorder, lease: Any, what: str) -> None:
    """`on_lost` was called at the deadline of the lease: not before, and hardly after."""
    (call,) = callbacks.wait_for("lost")
    late = note(f"loss reported late, {what}", (call.at - deadline_of(lease)) * 1000) / 1000
    assert 0 <= late < SLACK + lateness()


class TestTheServerStops:
    def test_for_longer_than_the_ttl(self, fresh_server: Server, flavour: Flavour, callbacks: CallbackRecorder) -> None:
        client = flavour.connect(fresh_server.url)
        lease = client.acquire("report", ttl=1.8, **callbacks.options)
        until(lambda: fresh_server.commands_processed().get("pexpire", 0) >= 1, "a renewal")
        fresh_server.pause()
        callbacks.wait_for("risk")
        client.do(lease.ensure_held)  # a lease at risk is still held
        assert client.do(lambda: lease.lost.wait(20)) is True
        assert_lost_at_the_deadline(callbacks, lease, "server stopped")
        assert callbacks.kinds() == ["risk", "lost"]
        with pytest.raises(LeaseLost, match="ran out"):
            client.do(lease.ensure_held)
        fresh_server.resume()
        await_nothing_left(fresh_server, "report")
        assert client.release(lease) is False
        assert callbacks.kinds() == ["risk", "lost"]

    def test_for_a_moment(self, fresh_server: Server, flavour: Flavour, callbacks: CallbackRecorder) -> None:
        client = flavour.connect(fresh_server.url)
        lease = client.acquire("report", ttl=3, **callbacks.options)
        fresh_server.pause()
        callbacks.wait_for("risk")
        fresh_server.resume()
        until(is_state(client, lease, State.HELD), "the lease to be held again")
        assert client.state(lease) is State.HELD
        assert fresh_server.raw("GET", "report") == lease.holder
        assert client.release(lease) is True
        assert callbacks.kinds() == ["risk"]

    def test_with_many_leases_every_loss_is_reported(
        self, fresh_server: Server, flavour: Flavour, callbacks: CallbackRecorder
    ) -> None:
        client = flavour.connect(fresh_server.url)
        leases = [client.acquire(f"report {n}", ttl=1.0, renew=n % 2 == 0, **callbacks.options) for n in range(300)]
        fresh_server.pause()
        before = kept_waiting()
        calls = callbacks.wait_for("lost", len(leases))
        waited = kept_waiting_since(before)
        assert {call.lease for call in calls} == set(leases)
        worst = max(call.at - deadline_of(call.lease) for call in calls)
        note("loss reported late, 300 leases at once", worst * 1000)
        each = 0.0005  # pytest keeps every line that is logged
        assert worst < SLACK + lateness() + len(leases) * each + waited
        assert len(callbacks.kinds()) == len(leases) + callbacks.kinds().count("risk")
        fresh_server.resume()

    def test_and_restarts_empty(self, fresh_server: Server, flavour: Flavour, callbacks: CallbackRecorder) -> None:
        client = flavour.connect(fresh_server.url)
        lease = client.acquire("report", ttl=1.5, **callbacks.options)
        fresh_server.restart()
        restarted_at = now()
        (call,) = callbacks.wait_for("lost")
        note("loss reported after a restart, share of the ttl", (call.at - restarted_at) / 1.5, "ttl")
        assert call.at <= deadline_of(lease) + SLACK + lateness()
        assert call.at - restarted_at < 1.5 / 3 + 0.5 + lateness(), "at the next renewal, not at the end of the ttl"
        other = client.acquire("report", timeout=0)
        assert client.release(lease) is False
        assert fresh_server.raw("GET", "report") == other.holder


class TestTheNetworkBreaks:
    def test_connections_that_are_cut_repeatedly(
        self, flavour: Flavour, valkey: Server, proxy: FaultProxy, callbacks: CallbackRecorder
    ) -> None:
        client = flavour.connect(proxy.url).warm_up()
        lease = client.acquire("report", ttl=2.4, **callbacks.options)
        seen = len(proxy.requests)
        for round_ in range(1, 5):
            proxy.reset_connections()
            proxy.wait_for(_renewal_after(seen), round_)
        until(is_state(client, lease, State.HELD), "the lease to be held")
        assert valkey.raw("GET", "report") == lease.holder
        assert client.release(lease) is True
        assert "lost" not in callbacks.kinds()

    @pytest.mark.parametrize("direction", DIRECTIONS)
    def test_in_one_direction_until_the_deadline(
        self, flavour: Flavour, valkey: Server, proxy: FaultProxy, callbacks: CallbackRecorder, direction: Direction
    ) -> None:
        client = flavour.connect(proxy.url).warm_up()
        lease = client.acquire("report", ttl=1.8, **callbacks.options)
        proxy.wait_for(on("report"), 2)
        proxy.stall(direction)
        callbacks.wait_for("risk")
        assert_lost_at_the_deadline(callbacks, lease, f"stalled {direction}")
        with pytest.raises(LeaseLost):
            client.do(lease.ensure_held)
        proxy.unstall()
        await_nothing_left(valkey, "report")
        assert callbacks.kinds() == ["risk", "lost"]

    @pytest.mark.parametrize("direction", DIRECTIONS)
    def test_in_one_direction_for_a_moment(
        self, flavour: Flavour, valkey: Server, proxy: FaultProxy, callbacks: CallbackRecorder, direction: Direction
    ) -> None:
        client = flavour.connect(proxy.url).warm_up()
        lease = client.acquire("report", ttl=3, **callbacks.options)
        proxy.stall(direction)
        callbacks.wait_for("risk")
        proxy.unstall()
        until(is_state(client, lease, State.HELD), "the lease to be held again")
        assert valkey.raw("GET", "report") == lease.holder
        assert client.release(lease) is True
        assert callbacks.kinds() == ["risk"]

    def test_every_other_reply_is_lost(self, flavour: Flavour, proxy: FaultProxy, callbacks: CallbackRecorder) -> None:
        """Renewals are executed but not answered; the retry shows that the lock is still held."""
        client = flavour.connect(proxy.url).warm_up()
        lease = client.acquire("report", ttl=2.4, **callbacks.options)
        for _ in range(3):
            proxy.drop_reply(on("report")).wait()
            until(is_state(client, lease, State.HELD), "the lease to be held again")
        assert client.release(lease) is True
        assert "lost" not in callbacks.kinds()


def _renewal_after(seen: int) -> Callable[[Any], bool]:
    """Match requests about the lock after the first `seen` requests."""
    count = 0

    def fits(args: Any) -> bool:
        nonlocal count
        count += 1
        return count > seen and on("report")(args)  # type: ignore[operator]

    return fits


class TestConnecting:
    def test_does_not_delay_the_report_of_a_loss(
        self, flavour: Flavour, valkey: Server, proxy: FaultProxy, callbacks: CallbackRecorder
    ) -> None:
        """The connection is dead, and the server accepts new ones without an answer: the loss is reported in time."""
        client = flavour.connect(proxy.url).warm_up()
        lease = client.acquire("report", ttl=1.2, **callbacks.options)
        proxy.wait_for(on("report"), 2)
        proxy.stall()
        proxy.reset_connections()
        assert_lost_at_the_deadline(callbacks, lease, "connecting without an answer")
        assert callbacks.kinds()[-1] == "lost"
        proxy.unstall()
        await_nothing_left(valkey, "report")

    def test_is_part_of_every_layer(self, flavour: Flavour, valkey: Server) -> None:
        """Every store between the keepalive and the connection forwards `connected` and `cancel_waits`."""
        client = flavour.connect(valkey.url)
        store = client.locks.session.store
        assert client.do(lambda: store.connected) is False
        client.acquire("report", ttl=30)
        assert client.do(lambda: store.connected) is True
        assert callable(store.cancel_waits)
