"""A `with` block ends its own lease, also if the thread or task holds a newer lease of the same lock object.

In each scenario the outer block loses its lease, and a generator, suspended inside its own block, acquires the lock
again. The end of the outer block must report the loss and not affect the lease of the generator.
"""

import asyncio
import contextlib
import threading
import uuid
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import AsyncExitStack, ExitStack
from types import TracebackType
from typing import Any

import pytest

import lockfast
import lockfast.aio
from lockfast import LeaseLost, NotHeld, State


@pytest.fixture
def locks() -> Iterator[lockfast.Locks]:
    with lockfast.connect(f"memory://{uuid.uuid4()}") as connected:
        yield connected


@pytest.fixture
def aio_locks() -> lockfast.aio.Locks:
    return lockfast.aio.connect(f"memory://{uuid.uuid4()}")


class Wrapper:
    """A context manager of a user that enters and leaves a lock in its own functions."""

    def __init__(self, block: Any) -> None:
        self._block = block

    def __enter__(self) -> Any:
        return self._block.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._block.__exit__(kind, error, trace)


class AsyncWrapper:
    def __init__(self, block: Any) -> None:
        self._block = block

    async def __aenter__(self) -> Any:
        return await self._block.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._block.__aexit__(kind, error, trace)


# Threads

Held = Generator[Any, None, None]


def plain_block(block: Any) -> Held:
    with block as lease:
        yield lease


def stacked_block(block: Any) -> Held:
    with ExitStack() as stack:
        yield stack.enter_context(block)


def moved_block(block: Any) -> Held:
    with ExitStack() as stack:
        lease = stack.enter_context(block)
        moved = stack.pop_all()
    with moved:
        yield lease


def closed_block(block: Any) -> Held:
    stack = ExitStack()
    try:
        yield stack.enter_context(block)
    finally:
        stack.close()


@contextlib.contextmanager
def managed(block: Any) -> Held:
    with block as lease:
        yield lease


def managed_block(block: Any) -> Held:
    with managed(block) as lease:
        yield lease


def wrapped_block(block: Any) -> Held:
    with Wrapper(block) as lease:
        yield lease


EXACT = [plain_block, stacked_block, moved_block, closed_block, managed_block]
"""Blocks that are matched by identity."""
BLOCKS = [
    *((outer, inner) for outer in EXACT for inner in EXACT),
    *((wrapped_block, inner) for inner in EXACT),
    *((outer, wrapped_block) for outer in EXACT),
]
FORMS: list[Callable[[Any], Any]] = [lambda locks: locks.lock("thing", timeout=0), lambda locks: locks.once("thing")]
forms = pytest.mark.parametrize("form", FORMS, ids=["lock", "once"])


def names(value: object) -> str:
    return getattr(value, "__name__", "")


def lose(lease: lockfast.Lease, lock: lockfast.Lock) -> None:
    assert lock.force_release() is not None
    with pytest.raises(LeaseLost):
        lease.renew()


@forms
@pytest.mark.parametrize(("outer_block", "inner_block"), BLOCKS, ids=names)
def test_the_end_of_a_lost_block_leaves_the_lease_of_a_generator_alone(
    locks: lockfast.Locks,
    form: Callable[[Any], Any],
    outer_block: Callable[[Any], Held],
    inner_block: Callable[[Any], Held],
) -> None:
    block, lock = form(locks), locks.lock("thing")
    outer = outer_block(block)
    lost = next(outer)
    lose(lost, lock)
    inner = inner_block(block)
    lease = next(inner)
    with pytest.raises(LeaseLost) as caught:
        next(outer)
    assert caught.value.fence == lost.fence
    assert lease.state is State.HELD
    assert lock.inspect().holder == lease.holder
    inner.close()
    assert not lock.locked()


@forms
@pytest.mark.parametrize(("outer_block", "inner_block"), BLOCKS, ids=names)
def test_the_end_of_a_generator_does_not_end_the_lost_block_around_it(
    locks: lockfast.Locks,
    form: Callable[[Any], Any],
    outer_block: Callable[[Any], Held],
    inner_block: Callable[[Any], Held],
) -> None:
    block, lock = form(locks), locks.lock("thing")
    outer = outer_block(block)
    lost = next(outer)
    lose(lost, lock)
    inner = inner_block(block)
    lease = next(inner)
    assert next(inner, None) is None
    assert lease.state is State.RELEASED
    with pytest.raises(LeaseLost) as caught:
        next(outer)
    assert caught.value.fence == lost.fence
    assert not lock.locked()


def test_the_end_of_a_lost_block_in_a_plain_function(locks: lockfast.Locks) -> None:
    lock = locks.lock("thing", timeout=0)
    with pytest.raises(LeaseLost) as caught, lock as lost:  # noqa: PT012 - the end of the block raises
        lose(lost, lock)
        inner = plain_block(lock)
        lease = next(inner)
    assert caught.value.fence == lost.fence
    assert lease.state is State.HELD
    inner.close()
    assert not lock.locked()


def test_several_generators_end_in_any_order(locks: lockfast.Locks) -> None:
    lock = locks.lock("thing", timeout=0)
    generators, leases = [], []
    for _ in range(5):
        generators.append(plain_block(lock))
        leases.append(next(generators[-1]))
        lose(leases[-1], lock)
    last = plain_block(lock)
    lease = next(last)
    for number in (2, 0, 4, 1, 3):
        with pytest.raises(LeaseLost) as caught:
            next(generators[number])
        assert caught.value.fence == leases[number].fence
        assert lease.state is State.HELD
    last.close()
    assert not lock.locked()
    assert lock._scopes == []


def test_another_thread_ends_the_block_of_a_generator(locks: lockfast.Locks) -> None:
    lock = locks.lock("thing", timeout=0)
    generator = plain_block(lock)
    lost = next(generator)
    lose(lost, lock)
    caught: list[BaseException] = []

    def end() -> None:
        with lock as lease:
            try:
                next(generator)
            except LeaseLost as error:
                caught.append(error)
            assert lease.state is State.HELD

    thread = threading.Thread(target=end)
    thread.start()
    thread.join()
    assert [getattr(error, "fence", None) for error in caught] == [lost.fence]
    assert not lock.locked()


def test_an_end_without_a_beginning_does_not_end_the_block_of_a_generator(locks: lockfast.Locks) -> None:
    lock = locks.lock("thing", timeout=0)
    generator = plain_block(lock)
    lease = next(generator)
    with pytest.raises(NotHeld):
        lock.__exit__(None, None, None)
    with pytest.raises(NotHeld), ExitStack() as stack:
        stack.push(lock)
    assert lease.state is State.HELD
    generator.close()
    assert not lock.locked()


def test_nested_stacks_of_a_reentrant_lock(locks: lockfast.Locks) -> None:
    lock = locks.rlock("thing", timeout=0)
    with ExitStack() as outer, Wrapper(lock):
        outer.enter_context(lock)
        with ExitStack() as inner:
            inner.enter_context(lock)
            inner.enter_context(lock)
            assert lock.depth == 4
        assert lock.depth == 2
    assert lock.depth == 0
    assert not lock.locked()


# asyncio

AsyncHeld = AsyncGenerator[Any, None]


async def async_plain_block(block: Any) -> AsyncHeld:
    async with block as lease:
        yield lease


async def async_stacked_block(block: Any) -> AsyncHeld:
    async with AsyncExitStack() as stack:
        yield await stack.enter_async_context(block)


async def async_moved_block(block: Any) -> AsyncHeld:
    async with AsyncExitStack() as stack:
        lease = await stack.enter_async_context(block)
        moved = stack.pop_all()
    async with moved:
        yield lease


async def async_closed_block(block: Any) -> AsyncHeld:
    stack = AsyncExitStack()
    try:
        yield await stack.enter_async_context(block)
    finally:
        await stack.aclose()


@contextlib.asynccontextmanager
async def async_managed(block: Any) -> AsyncHeld:
    async with block as lease:
        yield lease


async def async_managed_block(block: Any) -> AsyncHeld:
    async with async_managed(block) as lease:
        yield lease


async def async_wrapped_block(block: Any) -> AsyncHeld:
    async with AsyncWrapper(block) as lease:
        yield lease


ASYNC_EXACT = [async_plain_block, async_stacked_block, async_moved_block, async_closed_block, async_managed_block]
ASYNC_BLOCKS = [
    *((outer, inner) for outer in ASYNC_EXACT for inner in ASYNC_EXACT),
    *((async_wrapped_block, inner) for inner in ASYNC_EXACT),
    *((outer, async_wrapped_block) for outer in ASYNC_EXACT),
]
ASYNC_FORMS: list[Callable[[Any], Any]] = [
    lambda locks: locks.lock("thing", timeout=0, cancel_on_loss=False),
    lambda locks: locks.once("thing", cancel_on_loss=False),
]


async def async_lose(lease: lockfast.aio.Lease, lock: lockfast.aio.Lock) -> None:
    assert await lock.force_release() is not None
    with pytest.raises(LeaseLost):
        await lease.renew()


@pytest.mark.parametrize("form", ASYNC_FORMS, ids=["lock", "once"])
@pytest.mark.parametrize(("outer_block", "inner_block"), ASYNC_BLOCKS, ids=names)
async def test_the_end_of_a_lost_block_leaves_the_lease_of_an_async_generator_alone(
    aio_locks: lockfast.aio.Locks,
    form: Callable[[Any], Any],
    outer_block: Callable[[Any], AsyncHeld],
    inner_block: Callable[[Any], AsyncHeld],
) -> None:
    async with aio_locks:
        block, lock = form(aio_locks), aio_locks.lock("thing")
        outer = outer_block(block)
        lost = await anext(outer)
        await async_lose(lost, lock)
        inner = inner_block(block)
        lease = await anext(inner)
        with pytest.raises(LeaseLost) as caught:
            await anext(outer)
        assert caught.value.fence == lost.fence
        assert lease.state is State.HELD
        assert (await lock.inspect()).holder == lease.holder
        await inner.aclose()
        assert not await lock.locked()


async def test_a_lost_body_that_is_cancelled_leaves_the_lease_of_an_async_generator_alone(
    aio_locks: lockfast.aio.Locks,
) -> None:
    async with aio_locks:
        lock = aio_locks.lock("thing", timeout=0)
        inner = async_plain_block(lock)
        with pytest.raises(LeaseLost) as caught:  # noqa: PT012 - the end of the block raises
            async with lock as lost:
                try:
                    await async_lose(lost, lock)
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    lease = await anext(inner)
                    raise
        assert caught.value.fence == lost.fence
        assert lease.state is State.HELD
        await inner.aclose()
        assert not await lock.locked()


async def test_another_task_ends_the_block_of_an_async_generator(aio_locks: lockfast.aio.Locks) -> None:
    async with aio_locks:
        lock = aio_locks.lock("thing", timeout=0, cancel_on_loss=False)
        generator = async_plain_block(lock)
        lost = await anext(generator)
        await async_lose(lost, lock)

        async def end() -> None:
            async with lock as lease:
                with pytest.raises(LeaseLost) as caught:
                    await anext(generator)
                assert caught.value.fence == lost.fence
                assert lease.state is State.HELD

        await asyncio.create_task(end())
        assert not await lock.locked()


async def test_tasks_that_share_a_lock_end_their_own_blocks(aio_locks: lockfast.aio.Locks) -> None:
    """The first task loses its lease, the second acquires the lock, then the first leaves its block."""
    async with aio_locks:
        lock = aio_locks.lock("thing", timeout=0, cancel_on_loss=False)
        lost, held, left = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def first() -> None:
            with pytest.raises(LeaseLost):  # noqa: PT012 - the end of the block raises
                async with lock as lease:
                    await async_lose(lease, lock)
                    lost.set()
                    await held.wait()
            left.set()

        async def second() -> None:
            await lost.wait()
            async with lock as lease:
                held.set()
                await left.wait()
                assert lease.state is State.HELD
                assert (await lock.inspect()).holder == lease.holder

        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            group.create_task(first())
            group.create_task(second())
        assert not await lock.locked()
