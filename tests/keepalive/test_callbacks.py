"""`on_risk` and `on_lost`: one call per change, never inside an operation of the caller, and harmless if they fail."""

import asyncio
import logging
import threading
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import lockfast.aio
from lockfast import LeaseLost, State
from lockfast.stores.memory import hub
from tests.keepalive.callbacks import BOUND, CallbackRecorder, running_task
from tests.keepalive.loss import Outage, lose
from tests.support.waiting import until
from tests.traps.flavours import Client, Flavour


@pytest.fixture
def hub_name() -> str:
    return str(uuid.uuid4())


@pytest.fixture
def client(flavour: Flavour, hub_name: str) -> Client:
    return flavour.connect(f"memory://{hub_name}")


class TestNumberOfCalls:
    def test_once_per_change(self, client: Client, callbacks: CallbackRecorder) -> None:
        outage = Outage(client.locks)
        lease = client.acquire("report", ttl=1.8, **callbacks.options)
        for number in (1, 2, 3):
            outage.on = True
            callbacks.wait_for("risk", number)
            outage.on = False
            until(lambda: client.state(lease) is State.HELD, "the lease to be held again")
        outage.on = True
        callbacks.wait_for("lost")
        for _ in range(5):
            assert client.state(lease) is State.LOST
        assert client.release(lease) is False
        assert callbacks.kinds() == ["risk"] * 4 + ["lost"]

    def test_one_call_even_if_many_detect_the_loss_at_once(self, client: Client, callbacks: CallbackRecorder) -> None:
        for _ in range(20):
            lease = client.acquire("report", ttl=0.03, renew=False, **callbacks.options)
            pollers = [client.start(partial(_poll_until_lost, lease)) for _ in range(8)]
            for poller in pollers:
                poller.result(BOUND)
        callbacks.wait_for("lost", 20)
        assert callbacks.kinds() == ["lost"] * 20

    def test_none_after_a_release(self, client: Client, callbacks: CallbackRecorder, hub_name: str) -> None:
        outage = Outage(client.locks)
        lease = client.acquire("report", ttl=1, **callbacks.options)
        assert client.release(lease) is True
        hub(hub_name).space.clear()
        outage.on = True
        other = client.acquire("another", ttl=0.3, **callbacks.options)
        callbacks.wait_for("lost")
        assert {call.lease for call in callbacks.calls} == {other}


def _poll_until_lost(lease: Any) -> Any:
    if asyncio.iscoroutinefunction(lease.release):

        async def request() -> None:
            while lease.state is not State.LOST:  # noqa: ASYNC110 - polling is the subject of this test
                await asyncio.sleep(0.001)

        return request()
    while lease.state is not State.LOST:
        pass
    return None


class TestThreadOrTask:
    @pytest.mark.parametrize("found_by", ["the keepalive", "ensure_held", "state", "renew", "release", "lost.wait"])
    def test_outside_the_operation_that_detects_the_loss(
        self, client: Client, callbacks: CallbackRecorder, hub_name: str, found_by: str
    ) -> None:
        lease = client.acquire("report", ttl=0.05, renew=False, **callbacks.options)
        caller: list[tuple[int, Any, int]] = []

        def operate() -> Any:
            operation: Callable[[], Any] = {
                "the keepalive": lambda: None,
                "ensure_held": lambda: _refused(lease.ensure_held),
                "state": lambda: lease.state,
                "renew": lambda: _refused(lease.renew),
                "release": lease.release,
                "lost.wait": lease.lost.wait,
            }[found_by]
            caller.append((threading.get_ident(), running_task(), len(callbacks.calls)))
            return operation()

        if found_by in ("ensure_held", "state"):  # by the clock alone: the keepalive must not be first
            client.locks.session.keepalive.close()
            until(lambda: client.locks.session.runtime.now() >= lease._core.valid_until, "its time to run out")
        elif found_by in ("renew", "release"):
            hub(hub_name).space.drop("report")
        client.do(operate)
        if found_by == "release":
            return  # only its return value reports that
        (call,) = callbacks.wait_for("lost")
        ((thread, task, _),) = caller
        assert (call.thread, call.task) != (thread, task)
        assert callbacks.kinds() == ["lost"]

    def test_operations_on_locks_within_a_callback(self, client: Client) -> None:
        """All operations work in a callback, while the keepalive runs."""
        done: list[Any] = []
        finished = threading.Event()
        in_asyncio = client.locks.__class__.__name__ == "AsyncLocks"

        async def asynchronous(lease: Any) -> None:
            done.append(lease.state)
            done.append(await lease.release())
            again = await client.locks.lock("report", ttl=5).acquire(timeout=5)
            done.append((await client.locks.lock("report").inspect()).holder == again.holder)
            async with client.locks.lock("another", timeout=5):
                done.append("within")
            done.append(await again.release())
            finished.set()

        def blocking(lease: Any) -> None:
            done.append(lease.state)
            done.append(lease.release())
            again = client.locks.lock("report", ttl=5).acquire(timeout=5)
            done.append(client.locks.lock("report").inspect().holder == again.holder)
            with client.locks.lock("another", timeout=5):
                done.append("within")
            done.append(again.release())
            finished.set()

        client.acquire("report", ttl=0.05, renew=False, on_lost=asynchronous if in_asyncio else blocking)
        assert finished.wait(BOUND)
        assert done == [State.LOST, False, True, "within", True]

    def test_closing_the_client_within_a_callback(self, client: Client) -> None:
        finished = threading.Event()

        async def asynchronous(_: Any) -> None:
            await client.locks.close()
            finished.set()

        def blocking(_: Any) -> None:
            client.locks.close()
            finished.set()

        in_asyncio = client.locks.__class__.__name__ == "AsyncLocks"
        client.acquire("report", ttl=0.05, renew=False, on_lost=asynchronous if in_asyncio else blocking)
        other = client.acquire("another", ttl=5)
        assert finished.wait(BOUND)
        assert client.state(other) is State.RELEASED


def _refused(call: Callable[[], Any]) -> Any:
    if asyncio.iscoroutinefunction(call):

        async def refused() -> None:
            with pytest.raises(LeaseLost):
                await call()

        return refused()
    with pytest.raises(LeaseLost):
        call()
    return None


class TestHarmless:
    @pytest.mark.parametrize("what", ["on_risk", "on_lost"])
    def test_an_error_is_logged_and_affects_nothing_else(
        self, client: Client, callbacks: CallbackRecorder, caplog: pytest.LogCaptureFixture, what: str
    ) -> None:
        outage = Outage(client.locks)

        def fail(_: Any) -> None:
            raise ZeroDivisionError("from the callback")

        bad = client.acquire("bad", ttl=1.8, **{**callbacks.options, what: fail})
        good = client.acquire("good", ttl=1.8, **callbacks.options)
        outage.on = True
        callbacks.wait_for("lost", 2 if what == "on_risk" else 1)
        assert callbacks.kinds(good) == ["risk", "lost"]
        assert client.state(bad) is State.LOST
        until(lambda: any("callback" in record.getMessage() for record in caplog.records), "a line in the log")
        (failure,) = [record for record in caplog.records if "callback" in record.getMessage()]
        assert failure.levelno == logging.ERROR
        assert failure.exc_info is not None
        outage.on = False
        again = client.acquire("again", ttl=1, **callbacks.options)
        until(lambda: again._core.next_renewal > again._core.valid_until - 0.7, "renewals to continue")
        assert client.state(again) is State.HELD

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    @pytest.mark.parametrize("error", [SystemExit, asyncio.CancelledError], ids=["SystemExit", "CancelledError"])
    def test_an_exit_of_one_does_not_end_the_others(
        self, client: Client, callbacks: CallbackRecorder, error: type[BaseException]
    ) -> None:
        """A callback may call sys.exit(), or await something that was cancelled."""
        if error is SystemExit and client.locks.__class__.__name__ == "AsyncLocks":
            pytest.skip("asyncio lets SystemExit of any task end the event loop")

        def end(lease: Any) -> None:
            callbacks.record("ended", lease)
            raise error

        for number in range(40):
            client.acquire(f"report {number}", ttl=0.05, renew=False, on_lost=end)
        callbacks.wait_for("ended", 40)
        client.acquire("the last", ttl=0.05, renew=False, **callbacks.options)
        callbacks.wait_for("lost")

    @pytest.mark.parametrize("answer", [True, 42, "text", object()], ids=lambda answer: type(answer).__name__)
    def test_their_result_is_ignored(self, client: Client, caplog: pytest.LogCaptureFixture, answer: object) -> None:
        """A lambda such as `lambda lease: queue.put(...)` may return anything."""
        called = threading.Event()

        def callback(_: Any) -> Any:
            called.set()
            return answer

        client.acquire("report", ttl=0.05, renew=False, on_lost=callback)
        assert called.wait(BOUND)
        until(lambda: client.locks.session.callbacks._workers == 0, "the callback to end")
        assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []

    def test_a_slow_one_does_not_delay_the_others_or_renewal(self, client: Client, callbacks: CallbackRecorder) -> None:
        continued = threading.Event()
        in_asyncio = client.locks.__class__.__name__ == "AsyncLocks"

        async def asynchronous(_: Any) -> None:
            while not continued.is_set():  # noqa: ASYNC110 - set by another thread
                await asyncio.sleep(0.002)

        def blocking(_: Any) -> None:
            continued.wait(BOUND)

        kept = client.acquire("kept", ttl=1.5, **callbacks.options)
        for number in range(5):
            slow = asynchronous if in_asyncio else blocking
            client.acquire(f"slow {number}", ttl=0.05, renew=False, on_lost=slow)
        client.acquire("quick", ttl=0.1, renew=False, **callbacks.options)
        try:
            callbacks.wait_for("lost")
            first = kept._core.valid_until
            until(lambda: kept._core.valid_until > first + 0.2, "renewals to continue")
        finally:
            continued.set()
        assert client.state(kept) is State.HELD

    def test_risk_is_reported_before_loss(self, client: Client, callbacks: CallbackRecorder) -> None:
        outage = Outage(client.locks)
        leases = [client.acquire(f"report {number}", ttl=1.8, **callbacks.options) for number in range(30)]
        outage.on = True
        callbacks.wait_for("lost", 30)
        assert {tuple(callbacks.kinds(lease)) for lease in leases} == {("risk", "lost")}

    async def test_an_asynchronous_one_is_awaited(self, hub_name: str) -> None:
        steps: list[str] = []
        ended = asyncio.Event()

        async def on_lost(_: Any) -> None:
            steps.append("begun")
            await asyncio.sleep(0.01)
            steps.append("ended")
            ended.set()

        async with lockfast.aio.connect(f"memory://{hub_name}") as locks:
            lease = await locks.lock("report", on_lost=on_lost).acquire()
            lose(lease)
            assert steps == []
            async with asyncio.timeout(BOUND):
                await ended.wait()
        assert steps == ["begun", "ended"]
