"""An acquisition that comes to nothing: what of it stays in the process, and what an error report makes of it."""

import asyncio
import gc
import traceback
import weakref
from collections.abc import Iterator

import pytest

import holdfast
import holdfast.aio
from holdfast import StoreUnavailable


class Session:
    """Something of the user's, in a task that waits for a lock."""


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
async def test_a_task_that_is_cancelled_while_it_waits_leaves_nothing_to_the_collector() -> None:
    """Its error refers to its frames, and those to a lease that was never granted: that must not refer to the task."""
    seen: list[weakref.ref[Session]] = []

    async def worker(lock: holdfast.aio.Lock) -> None:
        session = Session()
        seen.append(weakref.ref(session))
        async with lock:
            pass

    async with holdfast.aio.connect("memory://") as locks, locks.lock("door"):
        for _ in range(10):
            task = asyncio.create_task(worker(locks.lock("door", passing=False)))
            while not (await locks.lock("door").inspect()).waiting:  # noqa: ASYNC110 - nobody announces it
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            del task
        await asyncio.sleep(0)
        assert len(seen) == 10
        assert [one() for one in seen] == [None] * 10


@pytest.mark.usefixtures("no_collector")
def test_what_was_not_granted_is_gone_at_once() -> None:
    with holdfast.connect("memory://") as locks, locks.lock("door") as held:
        for _ in range(10):
            assert locks.lock("door").acquire(blocking=False) is None
        leases = [one for one in gc.get_objects() if type(one) is type(held) and one._client is locks]
        assert leases == [held]


def test_an_error_report_can_show_the_locals_of_a_failed_acquisition() -> None:
    with holdfast.connect("redis://127.0.0.1:1", store_timeout=0.1) as locks:
        with pytest.raises(StoreUnavailable) as caught:
            locks.lock("door").acquire(timeout=0.1)
        report = "".join(traceback.TracebackException.from_exception(caught.value, capture_locals=True).format())
    assert "lease = <Lease '' released, fence 0, 0.0 s left>" in report
