"""Threads: how the holder of a `with` block learns of the loss, and what the end of the block does then."""

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
from tests.keepalive.listening import BOUND
from tests.keepalive.losing import lose
from tests.support.servers import Server
from tests.support.waiting import until


@pytest.fixture
def enqueue() -> str:
    return str(uuid.uuid4())


@pytest.fixture
def locks(enqueue: str) -> Iterator[Locks]:
    with lockfast.connect(f"memory://{enqueue}") as locks:
        yield locks


class TestWithinTheBlock:
    def test_lost_wakes_who_waits_for_it(self, locks: Locks) -> None:
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

    def test_lost_wakes_by_the_clock_even_if_the_keeper_is_gone(self, locks: Locks) -> None:
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
        """Fit for the innermost loop: no request, no lock, no wait."""
        lease = locks.lock("report").acquire()
        assert lease is not None
        locks.session.store.renew = locks.session.store.inspect = None  # type: ignore[method-assign, assignment]
        used = time.process_time()
        for _ in range(10_000):
            lease.ensure_held()
        assert time.process_time() - used < 1.0


class TestTheEndOfTheBlock:
    def test_raises_although_the_body_went_well(self, locks: Locks) -> None:
        steps: list[str] = []
        with pytest.raises(LeaseLost, match="took it away") as caught, locks.lock("report") as lease:  # noqa: PT012
            lose(lease)
            steps.append("to the end")
        assert steps == ["to the end"]
        assert (caught.value.name, caught.value.fence) == ("report", lease.fence)

    def test_finds_a_theft_that_nobody_had_noticed(self, locks: Locks, enqueue: str) -> None:
        with pytest.raises(LeaseLost, match="on release"), locks.lock("report"):
            hub(enqueue).space.drop("report")

    def test_leaves_the_next_holder_alone(self, locks: Locks, enqueue: str) -> None:
        with pytest.raises(LeaseLost), locks.lock("report") as lease:  # noqa: PT012
            hub(enqueue).space.drop("report")
            successor = locks.lock("report").acquire(timeout=0)
            lose(lease)
        assert successor is not None
        assert locks.lock("report").inspect().holder == successor.holder
        successor.ensure_held()

    def test_leaves_the_next_holder_alone_though_nobody_had_noticed(self, locks: Locks, enqueue: str) -> None:
        with pytest.raises(LeaseLost), locks.lock("report"):  # noqa: PT012
            hub(enqueue).space.drop("report")
            successor = locks.lock("report").acquire(timeout=0)
        assert successor is not None
        assert locks.lock("report").inspect().holder == successor.holder

    @pytest.mark.parametrize("lost", ["noticed", "unnoticed", "by the clock"])
    def test_does_not_mask_the_bodys_own_error(self, locks: Locks, enqueue: str, lost: str) -> None:
        ttl = 0.05 if lost == "by the clock" else 30
        with pytest.raises(KeyError, match="own"), locks.lock("report", ttl=ttl, renew=False) as lease:  # noqa: PT012
            hub(enqueue).space.drop("report")
            if lost == "noticed":
                lose(lease)
            elif lost == "by the clock":
                assert lease.lost.wait(BOUND)
            raise KeyError("the body's own")

    @pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
    def test_lets_the_ends_of_programs_pass(self, locks: Locks, error: type[BaseException]) -> None:
        with pytest.raises(error), locks.lock("report") as lease:  # noqa: PT012
            lose(lease)
            raise error
        with pytest.raises(error), locks.lock("another"):
            raise error
        assert not locks.lock("another").locked()

    def test_of_a_client_that_was_closed_within(self, locks: Locks) -> None:
        with locks.lock("report") as lease:
            locks.close()
        assert lease.state is State.RELEASED

    def test_of_a_client_that_could_not_give_back_when_closed(
        self, locks: Locks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The body's own error, or none, comes out; not that the connection is closed."""

        async def refuse(*_: Any) -> bool:
            raise lockfast.StoreUnavailable("down")

        monkeypatch.setattr("lockfast.core.keepalive.BUDGET", 0.05)
        with pytest.raises(KeyError, match="own"), locks.lock("report"):  # noqa: PT012
            monkeypatch.setattr(locks.session.store, "release", refuse)
            locks.close()

            async def closed(*_: Any) -> bool:
                raise lockfast.ConfigurationError("This connection was closed; nothing was sent.")

            monkeypatch.setattr(locks.session.store, "release", closed)
            raise KeyError("the body's own")

    def test_that_another_thread_reaches(self, locks: Locks) -> None:
        """A generator, as in a web framework's dependency, may be ended by another thread than began it."""

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

    def test_under_a_decorator(self, locks: Locks, enqueue: str) -> None:
        @locks.guard("account:{number}")
        def deposit(number: int, fail: bool = False) -> str:
            hub(enqueue).space.drop(f"account:{number}")
            if fail:
                raise KeyError("the function's own")
            return "done"

        with pytest.raises(LeaseLost):
            deposit(1)
        with pytest.raises(KeyError, match="own"):
            deposit(2, fail=True)


class TestTheKeeperItself:
    def test_that_could_not_be_started_is_started_with_the_next_lease(
        self, locks: Locks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The system had no thread to spare for a moment: that must be said, and must not last."""

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
    """A client is closed while threads of its own hold and wait."""

    def test_does_not_hand_the_lock_to_one_who_waits_here(self, valkey: Server) -> None:
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

    def test_a_grant_that_comes_as_the_client_is_closed_is_given_back(
        self, locks: Locks, enqueue: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        acquire = locks.session.store.acquire

        async def acquire_and_close(*args: Any) -> Any:
            answer = await acquire(*args)
            locks.close()
            return answer

        monkeypatch.setattr(locks.session.store, "acquire", acquire_and_close)
        with pytest.raises(lockfast.ConfigurationError, match="closed"):
            locks.lock("report").acquire()
        with lockfast.connect(f"memory://{enqueue}") as others:
            assert not others.lock("report").locked()
