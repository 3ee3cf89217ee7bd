"""External changes of a held lock: when the holder detects them, and that other leases are not affected."""

import logging
from collections.abc import Iterator

import pytest

from lockfast import LeaseLost, State
from lockfast.runtime.base import now
from tests.keepalive.callbacks import SLACK, CallbackRecorder
from tests.keepalive.measurements import note
from tests.support.lateness import lateness
from tests.support.servers import Server
from tests.support.waiting import until
from tests.traps.flavours import Client

pytestmark = pytest.mark.timing


@pytest.fixture(autouse=True)
def no_errors_in_the_log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No error is logged: asyncio logs errors that no task retrieved, and the keepalive unexpected ones."""
    yield
    bad = [record for record in caplog.get_records("call") if record.levelno >= logging.ERROR]
    assert [record.getMessage() for record in bad] == []


CHANGES: dict[str, list[tuple[str, ...]]] = {
    "deleted": [("DEL", "report")],
    "unlinked": [("UNLINK", "report")],
    "overwritten": [("SET", "report", "another")],
    "renamed": [("RENAME", "report", "elsewhere")],
    "shortened": [("PEXPIRE", "report", "1")],
    "flushed": [("FLUSHALL",)],
    "another type": [("DEL", "report"), ("RPUSH", "report", "a list")],
}


class TestExternalChange:
    @pytest.mark.parametrize("change", CHANGES)
    def test_is_detected_by_the_next_renewal(
        self, us: Client, valkey: Server, callbacks: CallbackRecorder, change: str
    ) -> None:
        lease = us.acquire("report", ttl=1.5, **callbacks.options)
        for command in CHANGES[change]:
            valkey.raw(*command)
        changed_at = now()
        (call,) = callbacks.wait_for("lost")
        assert call.at - changed_at < 1.5 / 3 + SLACK + lateness()
        with pytest.raises(LeaseLost):
            us.do(lease.ensure_held)
        assert us.release(lease) is False
        assert callbacks.kinds() == ["lost"]

    def test_is_detected_soon_if_the_server_reports_it(
        self, us: Client, valkey: Server, callbacks: CallbackRecorder
    ) -> None:
        """The next renewal is far away, but the server reports changes of a lease that is older than a second."""
        names = {"deleted": "a", "overwritten": "b", "moved": "c"}
        leases = {what: us.acquire(name, ttl=30, **callbacks.options) for what, name in names.items()}
        bystander = us.acquire("bystander", ttl=30, **callbacks.options)
        tracked = "tracking_total_keys:4"
        until(lambda: tracked in valkey.raw("INFO", "stats"), "the server to track the locks")
        for number, command in enumerate((("DEL", "a"), ("SET", "b", "another"), ("RENAME", "c", "d")), 1):
            valkey.raw(*command)
            changed_at = now()
            call = callbacks.wait_for("lost", number)[-1]
            note("external change detected after, if the server reports it", (call.at - changed_at) * 1000)
            assert call.at - changed_at < 1.5 + lateness()
        assert {call.lease for call in callbacks.calls} == set(leases.values())
        assert us.release(bystander) is True
        assert callbacks.kinds() == ["lost"] * 3

    def test_of_all_locks_at_once_is_detected_soon(
        self, us: Client, valkey: Server, callbacks: CallbackRecorder
    ) -> None:
        for number in range(20):
            us.acquire(f"report {number}", ttl=30, **callbacks.options)
        until(lambda: "tracking_total_keys:20" in valkey.raw("INFO", "stats"), "the server to track the locks")
        valkey.raw("FLUSHALL")
        changed_at = now()
        calls = callbacks.wait_for("lost", 20)
        assert max(call.at for call in calls) - changed_at < 1.5 + lateness()
        assert len(callbacks.kinds()) == 20

    def test_the_new_holder_is_not_affected(self, us: Client, valkey: Server, callbacks: CallbackRecorder) -> None:
        lease = us.acquire("report", ttl=0.6, **callbacks.options)
        valkey.raw("SET", "report", "another", "PX", "60000")
        callbacks.wait_for("lost")
        assert us.release(lease) is False
        us.close()
        assert valkey.raw("GET", "report") == "another"
        assert valkey.raw("PTTL", "report") > 50_000

    def test_of_one_lease_does_not_affect_the_others(
        self, us: Client, valkey: Server, callbacks: CallbackRecorder
    ) -> None:
        """Leases are renewed together: a key of another type must not lose the other leases."""
        leases = {name: us.acquire(name, ttl=2.4, **callbacks.options) for name in ("a", "b", "c")}
        valkey.raw("DEL", "b")
        valkey.raw("RPUSH", "b", "a list")
        callbacks.wait_for("lost")
        renewed = valkey.commands_processed().get("pexpire", 0)
        until(lambda: valkey.commands_processed().get("pexpire", 0) >= renewed + 4, "a few more renewals")
        assert {name: us.state(lease) for name, lease in leases.items()} == {
            "a": State.HELD,
            "b": State.LOST,
            "c": State.HELD,
        }
        assert callbacks.kinds() == ["lost"]
        assert valkey.raw("LRANGE", "b", "0", "-1") == ["a list"]
