"""Threads: a lease that is lost inside its `with` block, the end of the block, and closing."""

import logging
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

import lockfast
from lockfast import LeaseLost, Locks, State
from lockfast.stores.memory import hub
from tests.keepalive.callbacks import BOUND
from tests.keepalive.loss import lose
from tests.support.servers import Server
from tests.support.waiting import until


@pytest.fixture
def hub_name() -> str:
    return str(uuid.uuid4())


@pytest.fixture
def locks(hub_name: str) -> Iterator[Locks]:
    with lockfast.connect(f"memory://{hub_name}") as locks:
        yield locks


class TestWithinTheBlock:
    def test_lost_wakes_its_waiters(self, locks: Locks) -> None:
        lease = locks.lock("report").acquire()
        assert lease is not None
        assert not lease.lost
        answers: list[bool] = []
        waiters = [threading.Thread(target=lambda: answers.append(lease.lost.wait(BOUND))) for _ in range(5)]
        for waiter in waiters:
            waiter.start()
        assert lease.lost.wait(timeout=0.01) is False
        lost_at = time.monotonic()
        lose(lease)
        for waiter in waiters:
            waiter.join(BOUND)
        assert answers == [True] * 5
        assert time.monotonic() - lost_at < 10
        assert lease.lost
        assert lease.lost.is_set()
        assert lease.lost.wait() is True, "and again, at once"

    def test_lost_wakes_by_the_clock_without_a_keepalive(self, locks: Locks) -> None:
        lease = locks.lock("report", ttl=0.1, renew=False).acquire()
        assert lease is not None
        locks.session.keepalive.close()
        assert lease.lost.wait(2) is True

    def test_a_released_lease_is_not_lost(self, locks: Locks) -> None:
        lease = locks.lock("report").acquire()
        assert lease is not None
        lease.release()
        assert not lease.lost
        assert lease.lost.wait(0.01) is False

    def test_ensure_held_costs_next_to_nothing(self, locks: Locks) -> None:
        """It sends no request, takes no lock and does not wait, so inner loops can call it."""
        lease = locks.lock("report").acquire()
        assert lease is not None
        locks.session.store.renew = locks.session.store.inspect = None  # type: ignore[method-assign, assignment]
        used = time.process_time()
        for _ in range(10_000):
            lease.ensure_held()
        assert time.process_time() - used < 1.0


class TestTheEndOfTheBlock:
    def test_raises_although_the_body_succeeded(self, locks: Locks) -> None:
        steps: list[str] = []
        with pytest.raises(LeaseLost, match="ended it") as caught, locks.lock("report") as lease:  # noqa: PT012
            lose(lease)
            steps.append("to the end")
        assert steps == ["to the end"]
        assert (caught.value.name, caught.value.fence) == ("report", lease.fence)

    def test_detects_an_external_change(self, locks: Locks, hub_name: str) -> None:
        with pytest.raises(LeaseLost, match="on release"), locks.lock("report"):
            hub(hub_name).space.drop("report")

    def test_does_not_affect_the_next_holder(self, locks: Locks, hub_name: str) -> None:
        with pytest.raises(LeaseLost), locks.lock("report") as lease:  # noqa: PT012
            hub(hub_name).space.drop("report")
            successor = locks.lock("report").acquire(timeout=0)
            lose(lease)
        assert successor is not None
        assert locks.lock("report").inspect().holder == successor.holder
        successor.ensure_held()

    def test_does_not_affect_the_next_holder_after_an_undetected_loss(self, locks: Locks, hub_name: str) -> None:
        with pytest.raises(LeaseLost), locks.lock("report"):  # noqa: PT012
            hub(hub_name).space.drop("report")
            successor = locks.lock("report").acquire(timeout=0)
        assert successor is not None
        assert locks.lock("report").inspect().holder == successor.holder

    @pytest.mark.parametrize("lost", ["noticed", "unnoticed", "by the clock"])
    def test_does_not_mask_the_error_of_the_body(self, locks: Locks, hub_name: str, lost: str) -> None:
        ttl = 0.05 if lost == "by the clock" else 30
        with pytest.raises(KeyError, match="from the"), locks.lock("report", ttl=ttl, renew=False) as lease:  # noqa: PT012
            hub(hub_name).space.drop("report")
            if lost == "noticed":
                lose(lease)
            elif lost == "by the clock":
                assert lease.lost.wait(BOUND)
            raise KeyError("from the body")

    @pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
    def test_does_not_mask_exits_and_interrupts(self, locks: Locks, error: type[BaseException]) -> None:
        with pytest.raises(error), locks.lock("report") as lease:  # noqa: PT012
            lose(lease)
            raise error
        with pytest.raises(error), locks.lock("another"):
            raise error
        assert not locks.lock("another").locked()

    def test_of_a_client_that_was_closed_inside(self, locks: Locks) -> None:
        with locks.lock("report") as lease:
            locks.close()
        assert lease.state is State.RELEASED

    def test_of_a_client_that_could_not_release_on_close(
        self, locks: Locks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The block raises the error of the body, or nothing, and not that the connection is closed."""

        async def refuse(*_: Any) -> bool:
            raise lockfast.StoreUnavailable("down")

        monkeypatch.setattr("lockfast.core.keepalive.BUDGET", 0.05)
        with pytest.raises(KeyError, match="from the"), locks.lock("report"):  # noqa: PT012
            monkeypatch.setattr(locks.session.store, "release", refuse)
            locks.close()

            async def closed(*_: Any) -> bool:
                raise lockfast.ConfigurationError("This connection was closed; nothing was sent.")

            monkeypatch.setattr(locks.session.store, "release", closed)
            raise KeyError("from the body")

    def test_in_another_thread(self, locks: Locks) -> None:
        """A generator, such as a dependency in a web framework, may begin in one thread and end in another."""

        def dependency() -> Iterator[Any]:
            with locks.lock("report") as lease:
                yield lease

        generator = dependency()
        lease = next(generator)
        errors: list[BaseException] = []

        def end() -> None:
            try:
                next(generator, None)
            except BaseException as error:
                errors.append(error)

        ender = threading.Thread(target=end)
        ender.start()
        ender.join(BOUND)
        assert errors == []
        assert lease.state is State.RELEASED
        assert locks.session.keepalive.held() == []

    def test_nested_and_lost_inside_out(self, locks: Locks) -> None:
        with pytest.raises(LeaseLost) as caught, locks.lock("outer"), locks.lock("inner") as inner:
            lose(inner)
        assert caught.value.name == "inner"
        assert not locks.lock("outer").locked()
        with pytest.raises(LeaseLost) as caught, locks.lock("outer") as outer, locks.lock("again"):
            lose(outer)
        assert caught.value.name == "outer"
        assert not locks.lock("again").locked()

    def test_under_a_decorator(self, locks: Locks, hub_name: str) -> None:
        @locks.guard("account:{number}")
        def deposit(number: int, fail: bool = False) -> str:
            hub(hub_name).space.drop(f"account:{number}")
            if fail:
                raise KeyError("from the function")
            return "done"

        with pytest.raises(LeaseLost):
            deposit(1)
        with pytest.raises(KeyError, match="from the"):
            deposit(2, fail=True)


class TestTheKeepalive:
    def test_that_could_not_start_starts_with_the_next_lease(
        self, locks: Locks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """If no thread can be started, an error is logged, and the next lease tries again."""

        def refuse(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            first = locks.lock("first", ttl=0.3).acquire()
        assert first is not None
        assert any(record.levelno >= logging.ERROR for record in caplog.records)
        second = locks.lock("second", ttl=1.5).acquire()
        assert second is not None
        assert second.lost.wait(1.7) is False, "it is renewed"
        second.release()


class TestClosing:
    """A client is closed while its threads hold and wait."""

    def test_does_not_grant_the_lock_to_a_waiter_of_this_client(self, valkey: Server) -> None:
        for _ in range(20):
            with lockfast.connect(valkey.url) as others, lockfast.connect(valkey.url) as locks:
                held = locks.lock("report", local_handoff=False).acquire()
                assert held is not None
                outcomes: list[Any] = []

                def wait(locks: Locks = locks, outcomes: list[Any] = outcomes) -> None:
                    try:
                        outcomes.append(locks.lock("report", local_handoff=False).acquire(timeout=BOUND))
                    except lockfast.ConfigurationError:
                        outcomes.append("closed")

                waiters = [threading.Thread(target=wait) for _ in range(3)]
                for waiter in waiters:
                    waiter.start()
                until(lambda others=others: others.lock("report").inspect().waiting == 3, "three to wait")  # type: ignore[misc]
                locks.close()
                for waiter in waiters:
                    waiter.join(BOUND)
                assert outcomes == ["closed"] * 3
                info = others.lock("report").inspect()
                assert (info.locked, info.waiting) == (False, 0)

    def test_a_grant_that_arrives_during_close_is_released(
        self, locks: Locks, hub_name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        acquire = locks.session.store.acquire

        async def acquire_and_close(*args: Any) -> Any:
            answer = await acquire(*args)
            locks.close()
            return answer

        monkeypatch.setattr(locks.session.store, "acquire", acquire_and_close)
        with pytest.raises(lockfast.ConfigurationError, match="closed"):
            locks.lock("report").acquire()
        with lockfast.connect(f"memory://{hub_name}") as others:
            assert not others.lock("report").locked()
