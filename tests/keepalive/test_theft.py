"""Somebody takes the lock away behind the holder's back: when it is found out, and who is left alone."""

import logging
from collections.abc import Iterator

import pytest

from lockfast import LeaseLost, State
from lockfast.runtime.base import now
from tests.keepalive.listening import SLACK, Listener
from tests.keepalive.measuring import note
from tests.support.lateness import lateness
from tests.support.servers import Server
from tests.support.waiting import until
from tests.traps.flavours import Client

pytestmark = pytest.mark.timing


@pytest.fixture(autouse=True)
def nothing_goes_unheard(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """asyncio logs what nobody retrieved or awaited, and the keeper what it did not expect: there must be none."""
    yield
    bad = [record for record in caplog.get_records("call") if record.levelno >= logging.ERROR]
    assert [record.getMessage() for record in bad] == []


THEFTS: dict[str, list[tuple[str, ...]]] = {
    "deleted": [("DEL", "report")],
    "unlinked": [("UNLINK", "report")],
    "overwritten": [("SET", "report", "another")],
    "moved away": [("RENAME", "report", "elsewhere")],
    "cut short": [("PEXPIRE", "report", "1")],
    "flushed": [("FLUSHALL",)],
    "another type": [("DEL", "report"), ("RPUSH", "report", "a list")],
}


class TestTheft:
    @pytest.mark.parametrize("theft", THEFTS)
    def test_is_found_at_the_next_renewal_at_the_latest(
        self, us: Client, valkey: Server, listener: Listener, theft: str
    ) -> None:
        lease = us.acquire("report", ttl=1.5, **listener.options)
        for command in THEFTS[theft]:
            valkey.raw(*command)
        stolen_at = now()
        (call,) = listener.wait_for("lost")
        assert call.at - stolen_at < 1.5 / 3 + SLACK + lateness()
        with pytest.raises(LeaseLost):
            us.do(lease.ensure_held)
        assert us.release(lease) is False
        assert listener.words() == ["lost"]

    def test_is_found_soon_where_the_server_tells(self, us: Client, valkey: Server, listener: Listener) -> None:
        """The ttl is long, the next renewal far away; but the server watches a lease that is older than a second."""
        names = {"deleted": "a", "overwritten": "b", "moved": "c"}
        leases = {what: us.acquire(name, ttl=30, **listener.options) for what, name in names.items()}
        bystander = us.acquire("bystander", ttl=30, **listener.options)
        tracked = "tracking_total_keys:4"
        until(lambda: tracked in valkey.raw("INFO", "stats"), "the server to watch the locks")
        for number, command in enumerate((("DEL", "a"), ("SET", "b", "another"), ("RENAME", "c", "d")), 1):
            valkey.raw(*command)
            stolen_at = now()
            call = listener.wait_for("lost", number)[-1]
            note("theft told after, where the server tells", (call.at - stolen_at) * 1000)
            assert call.at - stolen_at < 1.5 + lateness()
        assert {call.lease for call in listener.calls} == set(leases.values())
        assert us.release(bystander) is True
        assert listener.words() == ["lost"] * 3

    def test_of_all_at_once_is_found_soon(self, us: Client, valkey: Server, listener: Listener) -> None:
        for number in range(20):
            us.acquire(f"report {number}", ttl=30, **listener.options)
        until(lambda: "tracking_total_keys:20" in valkey.raw("INFO", "stats"), "the server to watch the locks")
        valkey.raw("FLUSHALL")
        stolen_at = now()
        calls = listener.wait_for("lost", 20)
        assert max(call.at for call in calls) - stolen_at < 1.5 + lateness()
        assert len(listener.words()) == 20

    def test_the_new_owner_is_left_alone(self, us: Client, valkey: Server, listener: Listener) -> None:
        lease = us.acquire("report", ttl=0.6, **listener.options)
        valkey.raw("SET", "report", "another", "PX", "60000")
        listener.wait_for("lost")
        assert us.release(lease) is False
        us.close()
        assert valkey.raw("GET", "report") == "another"
        assert valkey.raw("PTTL", "report") > 50_000

    def test_of_one_lease_does_not_hurt_the_others(self, us: Client, valkey: Server, listener: Listener) -> None:
        """Leases are renewed together: one whose key can't even be read must not cost the others theirs."""
        leases = {name: us.acquire(name, ttl=2.4, **listener.options) for name in ("a", "b", "c")}
        valkey.raw("DEL", "b")
        valkey.raw("RPUSH", "b", "a list")
        listener.wait_for("lost")
        renewed = valkey.commands_processed().get("pexpire", 0)
        until(lambda: valkey.commands_processed().get("pexpire", 0) >= renewed + 4, "a few more renewals")
        assert {name: us.state(lease) for name, lease in leases.items()} == {
            "a": State.HELD,
            "b": State.LOST,
            "c": State.HELD,
        }
        assert listener.words() == ["lost"]
        assert valkey.raw("LRANGE", "b", "0", "-1") == ["a list"]
