"""A server that stops or restarts, and a network that breaks: what the holder sees, and when."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lockfast import LeaseLost, State
from lockfast.runtime.base import now
from tests.keepalive.listening import SLACK, Listener
from tests.keepalive.measuring import note
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
def nothing_goes_unheard(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """asyncio logs what nobody retrieved or awaited, and the keeper what it did not expect: there must be none."""
    yield
    bad = [record for record in caplog.get_records("call") if record.levelno >= logging.ERROR]
    assert [record.getMessage() for record in bad] == []


def deadline_of(lease: Any) -> float:
    """When the lease ends if no renewal gets through any more, on the clock of `now`."""
    moment: float = lease._core.valid_until
    return moment


def is_state(client: Client, lease: Any, state: State) -> Callable[[], bool]:
    return lambda: client.state(lease) is state


def assert_lost_at_the_deadline(listener: Listener, lease: Any, what: str) -> None:
    """On_lost was called at the lease's deadline: not before, and hardly after."""
    (call,) = listener.wait_for("lost")
    late = note(f"loss told late, {what}", (call.at - deadline_of(lease)) * 1000) / 1000
    assert 0 <= late < SLACK + lateness()


class TestTheServerStops:
    def test_for_longer_than_the_ttl(self, fresh_server: Server, flavour: Flavour, listener: Listener) -> None:
        client = flavour.connect(fresh_server.url)
        lease = client.acquire("report", ttl=1.8, **listener.options)
        until(lambda: fresh_server.commands_processed().get("pexpire", 0) >= 1, "a renewal")
        fresh_server.pause()
        listener.wait_for("risk")
        client.do(lease.ensure_held)  # at risk is still held
        assert client.do(lambda: lease.lost.wait(20)) is True
        assert_lost_at_the_deadline(listener, lease, "server stopped")
        assert listener.words() == ["risk", "lost"]
        with pytest.raises(LeaseLost, match="ran out"):
            client.do(lease.ensure_held)
        fresh_server.resume()
        await_nothing_left(fresh_server, "report")
        assert client.release(lease) is False
        assert listener.words() == ["risk", "lost"]

    def test_for_a_moment(self, fresh_server: Server, flavour: Flavour, listener: Listener) -> None:
        client = flavour.connect(fresh_server.url)
        lease = client.acquire("report", ttl=3, **listener.options)
        fresh_server.pause()
        listener.wait_for("risk")
        fresh_server.resume()
        until(is_state(client, lease, State.HELD), "the lease to be held again")
        assert client.state(lease) is State.HELD
        assert fresh_server.raw("GET", "report") == lease.holder
        assert client.release(lease) is True
        assert listener.words() == ["risk"]

    def test_with_many_leases_every_loss_is_told(
        self, fresh_server: Server, flavour: Flavour, listener: Listener
    ) -> None:
        client = flavour.connect(fresh_server.url)
        leases = [client.acquire(f"report {n}", ttl=1.0, renew=n % 2 == 0, **listener.options) for n in range(300)]
        fresh_server.pause()
        before = kept_waiting()
        calls = listener.wait_for("lost", len(leases))
        waited = kept_waiting_since(before)
        assert {call.lease for call in calls} == set(leases)
        worst = max(call.at - deadline_of(call.lease) for call in calls)
        note("loss told late, 300 leases at once", worst * 1000)
        each = 0.0005  # pytest keeps every line that is logged
        assert worst < SLACK + lateness() + len(leases) * each + waited
        assert len(listener.words()) == len(leases) + listener.words().count("risk")
        fresh_server.resume()

    def test_and_starts_again_empty(self, fresh_server: Server, flavour: Flavour, listener: Listener) -> None:
        client = flavour.connect(fresh_server.url)
        lease = client.acquire("report", ttl=1.5, **listener.options)
        fresh_server.restart()
        restarted_at = now()
        (call,) = listener.wait_for("lost")
        note("loss told after a restart, share of the ttl", (call.at - restarted_at) / 1.5, "ttl")
        assert call.at <= deadline_of(lease) + SLACK + lateness()
        assert call.at - restarted_at < 1.5 / 3 + 0.5 + lateness(), "at the next renewal, not at the end of the ttl"
        other = client.acquire("report", timeout=0)
        assert client.release(lease) is False
        assert fresh_server.raw("GET", "report") == other.holder


class TestTheNetworkBreaks:
    def test_connections_cut_again_and_again(
        self, flavour: Flavour, valkey: Server, proxy: FaultProxy, listener: Listener
    ) -> None:
        client = flavour.connect(proxy.url).warm_up()
        lease = client.acquire("report", ttl=2.4, **listener.options)
        seen = len(proxy.requests)
        for round_ in range(1, 5):
            proxy.reset_connections()
            proxy.wait_for(_renewal_after(seen), round_)
        until(is_state(client, lease, State.HELD), "the lease to be held")
        assert valkey.raw("GET", "report") == lease.holder
        assert client.release(lease) is True
        assert "lost" not in listener.words()

    @pytest.mark.parametrize("direction", DIRECTIONS)
    def test_one_way_for_good(
        self, flavour: Flavour, valkey: Server, proxy: FaultProxy, listener: Listener, direction: Direction
    ) -> None:
        client = flavour.connect(proxy.url).warm_up()
        lease = client.acquire("report", ttl=1.8, **listener.options)
        proxy.wait_for(on("report"), 2)
        proxy.stall(direction)
        listener.wait_for("risk")
        assert_lost_at_the_deadline(listener, lease, f"stalled {direction}")
        with pytest.raises(LeaseLost):
            client.do(lease.ensure_held)
        proxy.unstall()
        await_nothing_left(valkey, "report")
        assert listener.words() == ["risk", "lost"]

    @pytest.mark.parametrize("direction", DIRECTIONS)
    def test_one_way_for_a_moment(
        self, flavour: Flavour, valkey: Server, proxy: FaultProxy, listener: Listener, direction: Direction
    ) -> None:
        client = flavour.connect(proxy.url).warm_up()
        lease = client.acquire("report", ttl=3, **listener.options)
        proxy.stall(direction)
        listener.wait_for("risk")
        proxy.unstall()
        until(is_state(client, lease, State.HELD), "the lease to be held again")
        assert valkey.raw("GET", "report") == lease.holder
        assert client.release(lease) is True
        assert listener.words() == ["risk"]

    def test_every_other_reply_is_lost(self, flavour: Flavour, proxy: FaultProxy, listener: Listener) -> None:
        """Renewals are executed and not heard of; the retry says that the lock is still ours."""
        client = flavour.connect(proxy.url).warm_up()
        lease = client.acquire("report", ttl=2.4, **listener.options)
        for _ in range(3):
            proxy.drop_reply(on("report")).wait()
            until(is_state(client, lease, State.HELD), "the lease to be held again")
        assert client.release(lease) is True
        assert "lost" not in listener.words()


def _renewal_after(seen: int) -> Callable[[Any], bool]:
    """Fits the requests about the lock, without the first `seen` requests of all."""
    count = 0

    def fits(args: Any) -> bool:
        nonlocal count
        count += 1
        return count > seen and on("report")(args)  # type: ignore[operator]

    return fits


class TestDialling:
    def test_holds_up_nobody(self, flavour: Flavour, valkey: Server, proxy: FaultProxy, listener: Listener) -> None:
        """The connection is known to be dead, and the server takes calls without a word: the keeper tells in time."""
        client = flavour.connect(proxy.url).warm_up()
        lease = client.acquire("report", ttl=1.2, **listener.options)
        proxy.wait_for(on("report"), 2)
        proxy.stall()
        proxy.reset_connections()
        assert_lost_at_the_deadline(listener, lease, "dialling in vain")
        assert listener.words()[-1] == "lost"
        proxy.unstall()
        await_nothing_left(valkey, "report")

    def test_is_foreseen(self, flavour: Flavour, valkey: Server) -> None:
        """Whatever stands between the keeper and the wire passes on that there is no connection, and that waits end."""
        client = flavour.connect(valkey.url)
        store = client.locks.session.store
        assert client.do(lambda: store.connected) is False
        client.acquire("report", ttl=30)
        assert client.do(lambda: store.connected) is True
        assert callable(store.cancel_waits)
