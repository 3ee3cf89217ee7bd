"""asyncio: a lost lease cancels the body of its block at the next await, and the block raises `LeaseLost`.

As with `asyncio.timeout`, nesting, task groups and cancellation from outside work.
"""

import asyncio
import threading
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest

import lockfast.aio
from lockfast import LeaseLost, LockError, State
from lockfast.aio import Locks as AsyncLocks
from lockfast.client.lock import Scope
from tests.keepalive.callbacks import BOUND
from tests.keepalive.loss import lose

LONG = 30.0


@pytest.fixture
async def locks() -> AsyncIterator[AsyncLocks]:
    """A client. After the test, no cancellation of its task must be pending."""
    async with lockfast.aio.connect(f"memory://{uuid.uuid4()}") as locks:
        yield locks


def cancelling() -> int:
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling()


def lose_soon(*leases: Any) -> None:
    """Lose the lease in the next round of the event loop, as the keepalive does."""
    loop = asyncio.get_running_loop()
    for lease in leases:
        loop.call_soon(lose, lease)


async def free(locks: AsyncLocks, *names: str) -> bool:
    return not any([await locks.lock(name).locked() for name in names])


class TestTheBody:
    async def test_is_cancelled_at_its_next_await(self, locks: AsyncLocks) -> None:
        steps: list[str] = []
        with pytest.raises(LeaseLost, match="ended it") as caught:  # noqa: PT012
            async with locks.lock("report") as lease:
                lose(lease)
                steps.append("before the await")
                await asyncio.sleep(LONG)
                steps.append("after the await")
        assert steps == ["before the await"]
        assert isinstance(caught.value.__cause__, asyncio.CancelledError)
        assert (caught.value.name, caught.value.fence) == ("report", lease.fence)
        assert cancelling() == 0
        await asyncio.sleep(0)

    async def test_may_end_while_another_thread_detects_the_loss(
        self, locks: AsyncLocks, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Then it is not cancelled after its end."""
        lock, looked = locks.lock("report"), threading.Event()

        def cancel_late(scope: Scope[Any]) -> None:
            looked.set()  # the body still runs
            ended.wait(BOUND)
            shipped(scope)

        shipped, ended = Scope.cancel_body, threading.Event()
        monkeypatch.setattr(Scope, "cancel_body", cancel_late)
        with pytest.raises(LeaseLost):  # noqa: PT012
            async with lock as lease:
                finder = asyncio.create_task(asyncio.to_thread(lose, lease))
                await asyncio.to_thread(looked.wait, BOUND)
        ended.set()
        await finder
        for _ in range(5):
            await asyncio.sleep(0)  # no late cancellation
        assert cancelling() == 0

    async def test_of_a_task_of_another_class_is_cancelled_too(self, locks: AsyncLocks) -> None:
        """A loop may have a task factory."""
        steps: list[str] = []

        async def body() -> None:
            async with locks.lock("report") as lease:
                lose_soon(lease)
                await asyncio.sleep(LONG)
                steps.append("continued")

        made = asyncio.tasks._PyTask(body(), loop=asyncio.get_running_loop())  # type: ignore[attr-defined]
        assert not isinstance(made, asyncio.Task)
        with pytest.raises(LeaseLost):
            await asyncio.wait_for(made, BOUND)
        assert steps == []

    async def test_that_does_not_await_raises_at_its_end(self, locks: AsyncLocks) -> None:
        with pytest.raises(LeaseLost):
            async with locks.lock("report") as lease:
                lose(lease)
        assert cancelling() == 0
        for _ in range(5):
            await asyncio.sleep(0)  # no late cancellation

    async def test_may_clean_up(self, locks: AsyncLocks) -> None:
        cleaned: list[bool] = []
        with pytest.raises(LeaseLost):  # noqa: PT012
            async with locks.lock("report") as lease:
                lose_soon(lease)
                try:
                    await asyncio.sleep(LONG)
                finally:
                    await asyncio.sleep(0.01)
                    cleaned.append(True)
        assert cleaned == [True]

    async def test_that_swallows_the_cancellation_raises_at_its_end(self, locks: AsyncLocks) -> None:
        reached: list[int] = []
        with pytest.raises(LeaseLost):  # noqa: PT012
            async with locks.lock("report") as lease:
                lose_soon(lease)
                try:
                    await asyncio.sleep(LONG)
                except asyncio.CancelledError:
                    reached.append(cancelling())
                await asyncio.sleep(0.01)
                reached.append(cancelling())
        assert reached == [1, 1], "cancelled once, and not again at every await"
        assert cancelling() == 0

    async def test_that_fails_after_swallowing_keeps_its_error(self, locks: AsyncLocks) -> None:
        with pytest.raises(KeyError, match="from the"):  # noqa: PT012
            async with locks.lock("report") as lease:
                lose_soon(lease)
                try:
                    await asyncio.sleep(LONG)
                except asyncio.CancelledError:
                    raise KeyError("from the body") from None
        assert cancelling() == 0

    async def test_that_failed_before_keeps_its_error(self, locks: AsyncLocks) -> None:
        with pytest.raises(KeyError, match="from the"):  # noqa: PT012
            async with locks.lock("report") as lease:
                lose(lease)
                raise KeyError("from the body")
        assert cancelling() == 0
        await asyncio.sleep(0)

    async def test_that_raises_cancelled_error_is_cancelled(self, locks: AsyncLocks) -> None:
        with pytest.raises(asyncio.CancelledError):
            async with locks.lock("report"):
                raise asyncio.CancelledError
        assert await free(locks, "report")

    async def test_continues_without_cancel_on_loss(self, locks: AsyncLocks) -> None:
        steps: list[Any] = []
        with pytest.raises(LeaseLost):  # noqa: PT012
            async with locks.lock("report", cancel_on_loss=False) as lease:
                lose(lease)
                await asyncio.sleep(0.01)
                steps.append(cancelling())
                with pytest.raises(LeaseLost):
                    lease.ensure_held()
                assert await lease.lost.wait() is True
        assert steps == [0]

    async def test_in_the_queue_of_another_lock_leaves_no_ticket(self, locks: AsyncLocks) -> None:
        other = await locks.lock("another").acquire()
        assert other is not None
        with pytest.raises(LeaseLost):  # noqa: PT012
            async with locks.lock("report") as lease:
                asyncio.get_running_loop().call_later(0.02, lose, lease)
                await locks.lock("another").acquire()
        assert (await locks.lock("another").inspect()).waiting == 0
        assert await other.release() is True

    async def test_of_one_task_only(self, locks: AsyncLocks) -> None:
        """Two tasks share a lock object; the first has lost its lease, and the second now holds the lock."""
        lock = locks.lock("report")
        entered = asyncio.Event()

        async def second() -> str:
            async with lock:
                entered.set()
                await asyncio.sleep(0.05)
                return "undisturbed"

        with pytest.raises(LeaseLost):  # noqa: PT012
            async with lock as lease:
                task = asyncio.create_task(second())
                locks.session.store._hub.space.drop("report")  # type: ignore[attr-defined]
                async with asyncio.timeout(BOUND):
                    await entered.wait()
                lose(lease)
                await asyncio.sleep(LONG)
        assert await task == "undisturbed"

    async def test_of_a_lease_without_a_block_is_not_cancelled(self, locks: AsyncLocks) -> None:
        lease = await locks.lock("report").acquire()
        lose(lease)
        await asyncio.sleep(0.01)
        assert cancelling() == 0

    async def test_may_acquire_the_lock_again_at_once(self, locks: AsyncLocks) -> None:
        lock = locks.lock("report")
        for _ in range(3):
            with pytest.raises(LeaseLost):  # noqa: PT012
                async with lock as lease:
                    locks.session.store._hub.space.drop("report")  # type: ignore[attr-defined]
                    lose(lease)
                    await asyncio.sleep(LONG)
        async with lock as lease:
            await asyncio.sleep(0)
            assert lease.state is State.HELD
        assert await free(locks, "report")


class TestFunctions:
    async def test_under_a_lock(self, locks: AsyncLocks) -> None:
        lock = locks.lock("report")
        steps: list[str] = []

        @lock
        async def work(ending: str) -> str:
            (scope,) = lock._scopes
            lease = scope.lease
            lose(lease)
            if ending == "fails":
                raise KeyError("from the function")
            await asyncio.sleep(LONG if ending == "is cancelled" else 0)
            steps.append(ending)
            return ending

        with pytest.raises(LeaseLost):
            await work("is cancelled")
        locks.session.store._hub.space.drop("report")  # type: ignore[attr-defined]
        with pytest.raises(KeyError, match="from the"):
            await work("fails")
        assert steps == []
        assert cancelling() == 0

    async def test_under_a_guard(self, locks: AsyncLocks) -> None:
        seen: list[Any] = []

        @locks.guard("account:{number}", ttl=0.06, on_lost=seen.append)
        async def deposit(number: int) -> str:
            locks.session.store._hub.space.drop(f"account:{number}")  # type: ignore[attr-defined]
            await asyncio.sleep(LONG)
            return "continued"

        with pytest.raises(LeaseLost) as caught:
            await deposit(7)
        assert caught.value.name == "account:7"
        assert [lease.name for lease in seen] == ["account:7"]
        assert cancelling() == 0

    async def test_under_a_guard_that_does_not_cancel(self, locks: AsyncLocks) -> None:
        steps: list[str] = []

        @locks.guard("account:{number}", ttl=0.06, cancel_on_loss=False)
        async def deposit(number: int) -> None:
            locks.session.store._hub.space.drop(f"account:{number}")  # type: ignore[attr-defined]
            await asyncio.sleep(0.1)
            steps.append("continued")

        with pytest.raises(LeaseLost):
            await deposit(7)
        assert steps == ["continued"]


class TestNesting:
    async def test_the_inner_is_lost(self, locks: AsyncLocks) -> None:
        async with locks.lock("outer") as outer:
            with pytest.raises(LeaseLost) as caught:  # noqa: PT012
                async with locks.lock("inner") as inner:
                    lose_soon(inner)
                    await asyncio.sleep(LONG)
            assert caught.value.name == "inner"
            assert cancelling() == 0
            await asyncio.sleep(0.01)
            outer.ensure_held()
        assert await free(locks, "outer")

    async def test_the_outer_is_lost(self, locks: AsyncLocks) -> None:
        with pytest.raises(LeaseLost) as caught:  # noqa: PT012
            async with locks.lock("outer") as outer, locks.lock("inner"):
                lose_soon(outer)
                await asyncio.sleep(LONG)
        assert caught.value.name == "outer"
        assert await free(locks, "inner")
        assert cancelling() == 0

    @pytest.mark.parametrize("first", ["outer", "inner"])
    async def test_both_are_lost_at_once(self, locks: AsyncLocks, first: str) -> None:
        with pytest.raises(LeaseLost) as caught:  # noqa: PT012
            async with locks.lock("outer") as outer, locks.lock("inner") as inner:
                lose_soon(*((outer, inner) if first == "outer" else (inner, outer)))
                await asyncio.sleep(LONG)
        assert caught.value.name == "outer"
        assert cancelling() == 0
        await asyncio.sleep(0)

    async def test_the_outer_is_lost_while_the_inner_is_released(
        self, locks: AsyncLocks, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(LeaseLost) as caught:  # noqa: PT012
            async with locks.lock("outer") as outer:
                async with locks.lock("inner"):
                    release = locks.session.store.release

                    async def slow(*args: Any) -> bool:
                        lose_soon(outer)
                        await asyncio.sleep(0.01)
                        return await release(*args)

                    monkeypatch.setattr(locks.session.store, "release", slow)
                await asyncio.sleep(LONG)
        monkeypatch.undo()
        assert caught.value.name == "outer"
        assert cancelling() == 0
        async with asyncio.timeout(BOUND):
            while not await free(locks, "inner"):  # noqa: ASYNC110 - the server tells nobody
                await asyncio.sleep(0.002)

    async def test_the_same_lock_object_in_many_tasks(self, locks: AsyncLocks) -> None:
        lock = locks.lock("report", ttl=5)
        survivors: list[int] = []

        async def one(number: int) -> None:
            async with lock as lease:
                await asyncio.sleep(0)
                if number % 2:
                    locks.session.store._hub.space.drop("report")  # type: ignore[attr-defined]
                    lose_soon(lease)
                    await asyncio.sleep(LONG)
                survivors.append(number)

        async with asyncio.timeout(BOUND):
            results = await asyncio.gather(*map(one, range(4)), return_exceptions=True)
        assert sorted(survivors) == [0, 2]
        assert [type(result) for result in results[1::2]] == [LeaseLost] * 2


async def _pending_after_a_failed_group() -> int:
    """Cancellations that are pending after a task group whose child failed: not 0 in Python 3.11 itself."""

    async def fail() -> None:
        await asyncio.sleep(0)
        raise KeyError

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
    except ExceptionGroup:
        pass
    return cancelling()


class TestTaskGroups:
    async def test_a_lease_lost_in_a_task_of_the_group(self, locks: AsyncLocks) -> None:
        sibling_cancelled: list[bool] = []

        async def loser() -> None:
            async with locks.lock("report") as lease:
                lose_soon(lease)
                await asyncio.sleep(LONG)

        async def sibling() -> None:
            try:
                await asyncio.sleep(LONG)
            finally:
                sibling_cancelled.append(True)

        with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012
            async with asyncio.TaskGroup() as group:
                group.create_task(sibling())
                group.create_task(loser())
        assert [type(error) for error in caught.value.exceptions] == [LeaseLost]
        assert sibling_cancelled == [True]

    async def test_a_group_within_the_body(self, locks: AsyncLocks) -> None:
        ended: list[bool] = []

        async def child() -> None:
            try:
                await asyncio.sleep(LONG)
            finally:
                ended.append(True)

        with pytest.raises(LeaseLost):  # noqa: PT012
            async with locks.lock("report") as lease, asyncio.TaskGroup() as group:
                group.create_task(child())
                group.create_task(child())
                asyncio.get_running_loop().call_later(0.01, lose, lease)
        assert ended == [True, True]
        assert cancelling() == 0

    async def test_a_child_that_fails_as_the_lease_is_lost_keeps_its_error(self, locks: AsyncLocks) -> None:
        async def child(lease: Any) -> None:
            await asyncio.sleep(0.01)
            lose(lease)
            raise KeyError("from the child")

        with pytest.raises(ExceptionGroup) as caught:
            async with locks.lock("report") as lease, asyncio.TaskGroup() as group:
                group.create_task(child(lease))
        assert [type(error) for error in caught.value.exceptions] == [KeyError]
        assert cancelling() == await asyncio.create_task(_pending_after_a_failed_group())

    async def test_a_group_around_the_block(self, locks: AsyncLocks) -> None:
        """The failure of a sibling cancels the body, which is not a loss."""

        async def fail() -> None:
            await asyncio.sleep(0.01)
            raise KeyError("from the sibling")

        with pytest.raises(ExceptionGroup):  # noqa: PT012
            async with asyncio.TaskGroup() as group:
                group.create_task(fail())
                async with locks.lock("report"):
                    await asyncio.sleep(LONG)
        assert await free(locks, "report")
        assert cancelling() == 0


class TestTimeouts:
    async def test_one_within_the_body_that_is_not_reached(self, locks: AsyncLocks) -> None:
        with pytest.raises(LeaseLost):  # noqa: PT012
            async with locks.lock("report") as lease, asyncio.timeout(LONG):
                lose_soon(lease)
                await asyncio.sleep(LONG)
        assert cancelling() == 0

    async def test_one_within_the_body_that_ends_it(self, locks: AsyncLocks) -> None:
        with pytest.raises(TimeoutError) as caught:
            async with locks.lock("report"), asyncio.timeout(0.01):
                await asyncio.sleep(LONG)
        assert not isinstance(caught.value, LockError)
        assert await free(locks, "report")

    async def test_one_around_the_block_that_is_not_reached(self, locks: AsyncLocks) -> None:
        with pytest.raises(LeaseLost):  # noqa: PT012
            async with asyncio.timeout(LONG), locks.lock("report") as lease:
                lose_soon(lease)
                await asyncio.sleep(LONG)
        assert cancelling() == 0

    async def test_one_around_the_block_that_ends_it(self, locks: AsyncLocks) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01), locks.lock("report"):
                await asyncio.sleep(LONG)
        assert await free(locks, "report")
        assert cancelling() == 0

    @pytest.mark.parametrize("first", ["the loss", "the timeout"])
    async def test_both_in_the_same_round(self, locks: AsyncLocks, first: str) -> None:
        """The timeout is around the block, so TimeoutError is raised."""
        with pytest.raises(TimeoutError):  # noqa: PT012
            async with asyncio.timeout(LONG) as limit, locks.lock("report") as lease:
                loop = asyncio.get_running_loop()
                if first == "the loss":
                    lose_soon(lease)
                loop.call_soon(limit.reschedule, loop.time())
                if first == "the timeout":
                    lose_soon(lease)
                await asyncio.sleep(LONG)
        assert cancelling() == 0


class TestCancellationFromOutside:
    async def test_without_a_loss(self, locks: AsyncLocks) -> None:
        task = asyncio.create_task(self._hold(locks))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()
        assert await free(locks, "report")

    @pytest.mark.parametrize("first", ["the loss", "the cancellation"])
    async def test_in_the_same_round_as_the_loss_wins(self, locks: AsyncLocks, first: str) -> None:
        leases: list[Any] = []
        task = asyncio.create_task(self._hold(locks, leases))
        await asyncio.sleep(0.01)
        loop = asyncio.get_running_loop()
        loop.call_soon(task.cancel) if first == "the cancellation" else lose_soon(leases[0])
        lose_soon(leases[0]) if first == "the cancellation" else loop.call_soon(task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()

    async def test_while_the_body_cleans_up_after_the_loss_wins(self, locks: AsyncLocks) -> None:
        cleaning = asyncio.Event()

        async def work() -> None:
            async with locks.lock("report") as lease:
                lose_soon(lease)
                try:
                    await asyncio.sleep(LONG)
                finally:
                    cleaning.set()
                    await asyncio.sleep(LONG)

        task = asyncio.create_task(work())
        async with asyncio.timeout(BOUND):
            await cleaning.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()

    async def test_before_the_block_stays_pending(self, locks: AsyncLocks) -> None:
        """A task that was cancelled before and still runs keeps its count of cancellations."""

        async def work() -> int:
            try:
                await asyncio.sleep(LONG)
            except asyncio.CancelledError:
                with pytest.raises(LeaseLost):  # noqa: PT012
                    async with locks.lock("report") as lease:
                        lose_soon(lease)
                        await asyncio.sleep(LONG)
            return cancelling()

        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        task.cancel()
        assert await task == 1

    @staticmethod
    async def _hold(locks: AsyncLocks, leases: list[Any] | None = None) -> None:
        async with locks.lock("report") as lease:
            if leases is not None:
                leases.append(lease)
            await asyncio.sleep(LONG)


class TestEdges:
    async def test_lost_before_the_body_begins(self, locks: AsyncLocks, monkeypatch: pytest.MonkeyPatch) -> None:
        lock = locks.lock("report")

        def lose_before(scope: Scope[Any], lease: Any) -> None:
            lose(lease)
            shipped(scope, lease)

        shipped = Scope.cancel_on_loss
        monkeypatch.setattr(Scope, "cancel_on_loss", lose_before)
        steps: list[str] = []
        with pytest.raises(LeaseLost):  # noqa: PT012
            async with lock as lease:
                steps.append(lease.state.value)
                await asyncio.sleep(LONG)
                steps.append("continued")
        assert steps == ["lost"]
        assert cancelling() == 0

    async def test_lost_in_the_round_in_which_the_body_ends(self, locks: AsyncLocks) -> None:
        for pauses in range(6):
            locks.session.store._hub.space.drop("report")  # type: ignore[attr-defined]
            with pytest.raises(LeaseLost):  # noqa: PT012
                async with locks.lock("report") as lease:
                    asyncio.get_running_loop().call_soon(lose, lease)
                    for _ in range(pauses):
                        await asyncio.sleep(0)
                    if not pauses:
                        lose(lease)
            assert cancelling() == 0
            for _ in range(5):
                await asyncio.sleep(0)

    async def test_lost_during_the_release(self, locks: AsyncLocks, monkeypatch: pytest.MonkeyPatch) -> None:
        """The body succeeded under a valid lease."""
        release = locks.session.store.release

        async def slow(*args: Any) -> bool:
            lose_soon(lease)
            await asyncio.sleep(0.01)
            return await release(*args)

        monkeypatch.setattr(locks.session.store, "release", slow)
        async with locks.lock("report") as lease:
            await asyncio.sleep(0)
        assert lease.state is State.RELEASED
        assert cancelling() == 0

    async def test_a_block_that_another_task_ends(self, locks: AsyncLocks) -> None:
        """A generator, such as a fixture or a dependency of a web framework, may end in another task than it began."""

        async def dependency() -> AsyncIterator[Any]:
            async with locks.lock("report") as lease:
                yield lease

        generator = dependency()
        lease: Any = await asyncio.create_task(generator.__anext__())  # type: ignore[arg-type]
        assert lease.state is State.HELD
        with pytest.raises(StopAsyncIteration):
            await asyncio.create_task(generator.__anext__())  # type: ignore[arg-type]
        assert await free(locks, "report")
        assert locks.session.keepalive.held() == []


class TestAWorkerThread:
    """`await asyncio.to_thread(crunch, lease)`, where `crunch` checks its lease now and then."""

    @pytest.mark.parametrize("debug", [False, True], ids=["plain", "debug"])
    async def test_that_detects_the_loss_first(self, locks: AsyncLocks, debug: bool) -> None:
        asyncio.get_running_loop().set_debug(debug)
        asyncio.get_running_loop().slow_callback_duration = LONG
        found: list[BaseException] = []
        called = asyncio.Event()

        async def on_lost(_: Any) -> None:
            called.set()

        def crunch(lease: Any) -> None:
            while True:
                try:
                    lease.ensure_held()
                except BaseException as error:
                    found.append(error)
                    return

        with pytest.raises(LeaseLost):  # noqa: PT012
            async with locks.lock("report", ttl=0.05, renew=False, on_lost=on_lost) as lease:
                worker = threading.Thread(target=crunch, args=(lease,))
                locks.session.keepalive.close()  # so that the worker detects it
                worker.start()
                await asyncio.sleep(0.5)
                worker.join(BOUND)
        worker.join(BOUND)
        assert [type(error) for error in found] == [LeaseLost]
        async with asyncio.timeout(BOUND):
            await called.wait()
        assert cancelling() == 0
