"""An acquisition that fails leaves nothing in the process, and error reports can show it."""

import asyncio
import gc
import traceback
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

import lockfast
import lockfast.aio
from lockfast import LockError, StoreUnavailable
from lockfast.stores.memory import MemoryMailbox

HUB = "memory://failed-acquire"


class UserObject:
    """An object of the user, in a task that waits for a lock."""


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def cancelled(locks: lockfast.aio.Locks, task: asyncio.Task[None]) -> None:
    task.cancel()


async def timed_out(locks: lockfast.aio.Locks, task: asyncio.Task[None]) -> None:
    """By the timeout of the lock."""


async def closed(locks: lockfast.aio.Locks, task: asyncio.Task[None]) -> None:
    await locks.close()


@pytest.mark.parametrize("ends", [cancelled, timed_out, closed])
@pytest.mark.parametrize("local_handoff", [True, False])
@pytest.mark.parametrize("kind", ["lock", "rlock"])
@pytest.mark.usefixtures("no_garbage_collection")
async def test_a_task_that_fails_to_acquire_is_freed_without_the_garbage_collector(
    ends: Any, local_handoff: bool, kind: str
) -> None:
    """The error refers to frames, and these to a lease without a grant, which must not refer to the task."""
    seen: list[weakref.ref[UserObject]] = []

    async def worker(lock: lockfast.aio.Lock) -> None:
        user_object = UserObject()
        seen.append(weakref.ref(user_object))
        async with lock:
            pass

    async with lockfast.aio.connect(HUB) as others, others.lock("door"):
        for _ in range(5):
            async with lockfast.aio.connect(HUB) as locks:
                timeout = 0.01 if ends is timed_out else None
                task = asyncio.create_task(
                    worker(getattr(locks, kind)("door", local_handoff=local_handoff, timeout=timeout))
                )
                while ends is not timed_out and not (await others.lock("door").inspect()).waiting:  # noqa: ASYNC110
                    await asyncio.sleep(0)
                await ends(locks, task)
                await asyncio.wait([task])
                assert task.cancelled() == (ends is cancelled)
                assert task.cancelled() or isinstance(task.exception(), LockError)
                del task
        await asyncio.sleep(0)
        assert [one() for one in seen] == [None] * 5


@pytest.mark.parametrize("kind", ["lock", "rlock"])
@pytest.mark.usefixtures("no_garbage_collection")
async def test_a_task_without_a_store_is_freed_without_the_garbage_collector(kind: str) -> None:
    async def worker(lock: lockfast.aio.Lock) -> None:
        async with lock:
            pass

    async with lockfast.aio.connect("redis://127.0.0.1:1", store_timeout=0.05) as locks:
        task = asyncio.create_task(worker(getattr(locks, kind)("door")))
        await asyncio.wait([task])
        assert isinstance(task.exception(), StoreUnavailable)
        seen = weakref.ref(task)
        del task
        await asyncio.sleep(0)
        assert seen() is None


def test_an_interrupt_during_the_close_of_a_mailbox_ends_the_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise every later acquisition would take the path of a contended lock."""

    def interrupted(_: MemoryMailbox) -> None:
        raise KeyboardInterrupt

    with lockfast.connect(HUB) as others, lockfast.connect(HUB) as locks, others.lock("door"):
        lock = locks.lock("door")
        with monkeypatch.context() as patch:
            patch.setattr(MemoryMailbox, "close", interrupted)
            with pytest.raises(KeyboardInterrupt):
                lock.acquire(timeout=0.01)
        assert not locks.session.local_queues.queue("door").claiming


@pytest.mark.usefixtures("no_garbage_collection")
def test_a_lease_without_a_grant_is_freed_at_once() -> None:
    with lockfast.connect("memory://") as locks, locks.lock("door") as held:
        for _ in range(10):
            assert locks.lock("door").acquire(blocking=False) is None
        leases = [one for one in gc.get_objects() if type(one) is type(held) and one._session is locks.session]
        assert leases == [held]


def test_an_error_report_can_show_the_locals_of_a_failed_acquisition() -> None:
    with lockfast.connect("redis://127.0.0.1:1", store_timeout=0.1) as locks:
        with pytest.raises(StoreUnavailable) as caught:
            locks.lock("door").acquire(timeout=0.1)
        report = "".join(traceback.TracebackException.from_exception(caught.value, capture_locals=True).format())
    assert "lease = <Lease without a grant>" in report
