"""`lock.inspect()`."""

import os
import socket
from typing import Any

import pytest

from tests.contract.driver import BOUND, Driver, done, scenario
from tests.contract.stores import IN_ORDER, ONE_CLOCK, QUEUEING, only


@scenario
async def test_lock_that_was_never_acquired(d: Driver) -> None:
    info = await done(d.lock("never taken").inspect())
    assert info.name == "never taken"
    assert info.locked is False
    assert (info.holder, info.owner, info.fence, info.held_for, info.ttl_left) == (None, None, None, None, None)
    assert (info.waiters, info.waiting) == ((), 0)


@only(stores=ONE_CLOCK)
@scenario
async def test_held_lock(d: Driver) -> None:
    client = d.connect(label="the client's")
    lease = await done(client.lock("thing", ttl=20).acquire())
    info = await done(d.lock().inspect())
    assert info.locked is True
    assert (info.holder, info.fence, info.waiting) == (lease.holder, lease.fence, 0)
    assert info.owner.host == socket.gethostname()
    assert (info.owner.pid, info.owner.label) == (os.getpid(), "the client's")
    assert 0 <= info.held_for < BOUND
    assert 20 - BOUND < info.ttl_left <= 20
    later = await d.until(lambda: _held_longer(d, info.held_for), "time to pass")
    assert later.ttl_left < info.ttl_left


async def _held_longer(d: Driver, held_for: float) -> Any:
    info = await done(d.lock().inspect())
    return info if info.held_for > held_for + 0.002 else None  # servers report milliseconds


@scenario
async def test_released_lock_keeps_its_fence(d: Driver) -> None:
    lease = await done(d.lock().acquire())
    await done(lease.release())
    info = await done(d.lock().inspect())
    assert info.locked is False
    assert info.fence == lease.fence


@only(stores=IN_ORDER)
@scenario
async def test_waiters_are_listed_in_order(d: Driver) -> None:
    lease = await done(d.lock(label="in front").acquire())

    async def waiter(label: str) -> Any:
        lock = d.connect().lock("thing", label=label)
        successor = await done(lock.acquire(timeout=BOUND))
        await done(successor.release())
        return successor.holder

    labels = ["first", "second", "third"]
    contenders = []
    for count, label in enumerate(labels, start=1):
        contenders.append(d.start(waiter, label))
        info = await d.queue_length(d.lock(), count)
    assert info.owner.label == "in front"
    assert [one.owner.label for one in info.waiters] == labels
    assert {(one.owner.host, one.owner.pid) for one in info.waiters} == {(socket.gethostname(), os.getpid())}
    assert BOUND > info.waiters[0].waiting_for > info.waiters[1].waiting_for > info.waiters[2].waiting_for >= 0
    await done(lease.release())
    assert [one.holder for one in info.waiters] == [await contender.result() for contender in contenders]


ODD_LABELS = [
    "two words",
    "a:b:c",
    "1:2:3",
    "{tag} %s \\n 'single' \"double\"",
    "Grüße 数据 🔒",
    "'; DROP TABLE lock; --",
    "x" * 128,
    "",
]


@only(stores=QUEUEING)
@pytest.mark.parametrize("label", ODD_LABELS)
@scenario
async def test_labels_are_returned_unchanged(d: Driver, label: str) -> None:
    lease = await done(d.lock(label=label).acquire())

    async def waiter() -> None:
        lock = d.connect(label=label).lock("thing")
        await done(lock.acquire(timeout=BOUND))
        await done(lock.release())

    contender = d.start(waiter)
    info = await d.queue_length(d.lock(), 1)
    assert (info.owner.label, info.waiters[0].owner.label) == (label, label)
    await done(lease.release())
    await contender.result()
