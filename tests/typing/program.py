"""A program that uses the public interface, for type checkers; it is never run.

A line that must be an error ends in `# expect error: CODE / RULE`: the error code of mypy and the rules of pyright. All
other lines must be correct. `tests/test_typed_edges.py` compares this with the reports of both checkers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from datetime import timedelta
from decimal import Decimal
from typing import Any, assert_type

import redis
import redis.asyncio

import lockfast
import lockfast.aio
from lockfast.client.all_of import AllOf, AsyncAllOf, AsyncLeaseSet, LeaseSet
from lockfast.client.guarantees import Guarantees
from lockfast.client.lease import AsyncLost, Lost
from lockfast.client.once import AsyncOnce, Once, Skipped
from lockfast.client.rlock import AsyncRLock, RLock
from lockfast.client.rwlock import AsyncReadLock, AsyncRWLock, ReadLock, RWLock
from lockfast.client.semaphore import AsyncPermit, AsyncSemaphore, Permit, Semaphore
from lockfast.events import Event


class Recorder:
    def observe(self, event: Event) -> None:
        print(event.kind, event.seconds)


class NoObserver:
    def watch(self, event: Event) -> None: ...


def report_loss(lease: lockfast.Lease) -> None:
    print(lease.fence)


async def report_async_loss(lease: lockfast.aio.Lease) -> None:
    await lease.release()


# connect


def connect_options() -> None:
    assert_type(lockfast.connect(), lockfast.Locks)
    assert_type(lockfast.aio.connect("memory://"), lockfast.aio.Locks)
    lockfast.connect(
        "redis://",
        label="worker",
        store_timeout=timedelta(seconds=3),
        observer=Recorder(),
        replicas=1,
        replica_timeout=0.5,
        aof=True,
        reassert=None,
        scripts=False,
        service="mymaster",
    )
    lockfast.aio.connect(["redis://a", "redis://b", "redis://c"], sits_out=30, observer=Recorder())
    lockfast.connect(relicas=1)  # expect error: call-arg / reportCallIssue
    lockfast.connect("redis://", replicas="1")  # expect error: arg-type / reportArgumentType
    lockfast.connect("redis://", aof="yes")  # expect error: arg-type / reportArgumentType
    lockfast.connect("redis://", label=7)  # expect error: arg-type / reportArgumentType
    lockfast.connect("redis://", store_timeout="3")  # expect error: arg-type / reportArgumentType
    lockfast.connect("redis://", observer=NoObserver())  # expect error: arg-type / reportArgumentType
    lockfast.connect("redis://", ttl=3)  # expect error: call-arg / reportCallIssue
    lockfast.aio.connect(relicas=1)  # expect error: call-arg / reportCallIssue
    lockfast.aio.connect("redis://", replica_timeout=None)  # expect error: arg-type / reportArgumentType
    lockfast.aio.connect("redis://", sits_out="30")  # expect error: arg-type / reportArgumentType


# Options of locks: once for each function that takes them


def lock_options(locks: lockfast.Locks, client: redis.Redis, text: str) -> None:
    assert_type(locks.lock("report"), lockfast.Lock)
    assert_type(locks.rlock("report"), RLock)
    assert_type(lockfast.Lock(client, "report"), lockfast.Lock)
    assert_type(locks.adopt(text), lockfast.Lease)
    locks.lock(
        "report",
        ttl=10,
        timeout=None,
        renew=False,
        max_hold=Decimal("1.5"),
        label="nightly",
        on_risk=report_loss,
        on_lost=print,
        cancel_on_loss=False,
        local_handoff=False,
    )
    locks.rlock("report", ttl=timedelta(seconds=10), on_lost=report_loss, max_hold=60)
    lockfast.Lock(client, "report", ttl=10, timeout=5, on_lost=lambda lease: lease.fence)
    locks.adopt(text, ttl=10, renew=True)

    locks.lock("report", tll=3)  # expect error: call-arg / reportCallIssue
    locks.lock(7)  # expect error: arg-type / reportArgumentType
    locks.lock()  # expect error: call-arg / reportCallIssue
    locks.lock("report", ttl="3")  # expect error: arg-type / reportArgumentType
    locks.lock("report", ttl=None)  # expect error: arg-type / reportArgumentType
    locks.lock("report", timeout="3")  # expect error: arg-type / reportArgumentType
    locks.lock("report", renew=1)  # expect error: arg-type / reportArgumentType
    locks.lock("report", max_hold="60")  # expect error: arg-type / reportArgumentType
    locks.lock("report", label=7)  # expect error: arg-type / reportArgumentType
    locks.lock("report", on_risk=7)  # expect error: arg-type / reportArgumentType
    locks.lock("report", on_lost=report_async_loss)  # expect error: arg-type / reportArgumentType
    locks.lock("report", on_lost=lambda lease: lease.renew(ttl="5"))  # expect error: arg-type / reportArgumentType
    locks.lock("report", cancel_on_loss=None)  # expect error: arg-type / reportArgumentType
    locks.lock("report", local_handoff="no")  # expect error: arg-type / reportArgumentType
    locks.rlock("report", tll=3)  # expect error: call-arg / reportCallIssue
    locks.rlock("report", ttl="3")  # expect error: arg-type / reportArgumentType
    lockfast.Lock(client, "report", tll=3)  # expect error: call-arg / reportCallIssue
    lockfast.Lock(client, "report", ttl="3")  # expect error: arg-type / reportArgumentType
    lockfast.Lock(client)  # expect error: call-arg / reportCallIssue
    locks.adopt(text, tll=3)  # expect error: call-arg / reportCallIssue
    locks.adopt(text, ttl="3")  # expect error: arg-type / reportArgumentType
    locks.adopt(7)  # expect error: arg-type / reportArgumentType


async def async_lock_options(locks: lockfast.aio.Locks, client: redis.asyncio.Redis, text: str) -> None:
    assert_type(locks.lock("report"), lockfast.aio.Lock)
    assert_type(locks.rlock("report"), AsyncRLock)
    assert_type(lockfast.aio.Lock(client, "report"), lockfast.aio.Lock)
    assert_type(await locks.adopt(text), lockfast.aio.Lease)
    locks.lock("report", ttl=10, timeout=5, on_lost=report_async_loss, on_risk=print, cancel_on_loss=False)
    locks.rlock("report", ttl=timedelta(seconds=10), on_lost=lambda lease: lease.release())
    lockfast.aio.Lock(client, "report", ttl=10, timeout=5)
    await locks.adopt(text, ttl=10)

    locks.lock("report", tll=3)  # expect error: call-arg / reportCallIssue
    locks.lock("report", ttl="3")  # expect error: arg-type / reportArgumentType
    locks.lock("report", cancel_on_loss=1)  # expect error: arg-type / reportArgumentType
    locks.lock("report", on_lost=report_loss)  # expect error: arg-type / reportArgumentType
    locks.rlock("report", tll=3)  # expect error: call-arg / reportCallIssue
    locks.rlock("report", ttl="3")  # expect error: arg-type / reportArgumentType
    lockfast.aio.Lock(client, "report", tll=3)  # expect error: call-arg / reportCallIssue
    lockfast.aio.Lock(client, "report", ttl="3")  # expect error: arg-type / reportArgumentType
    await locks.adopt(text, tll=3)  # expect error: call-arg / reportCallIssue
    await locks.adopt(text, ttl="3")  # expect error: arg-type / reportArgumentType


# Blocks and leases


def blocks(locks: lockfast.Locks) -> None:
    with lockfast.connect("memory://") as connected:
        assert_type(connected, lockfast.Locks)
    with locks.lock("report") as lease, locks.rlock("nested") as nested:
        assert_type(lease, lockfast.Lease)
        assert_type(nested, lockfast.Lease)
        assert_type(lease.fence, int)
        assert_type(lease.remaining, float)
        assert_type(lease.state, lockfast.State)
        assert_type(lease.lost, Lost)
        assert_type(lease.export(), str)
        lease.renew(ttl=5)
        lease.renew(ttl="5")  # expect error: arg-type / reportArgumentType
        lease.extend(5)  # expect error: attr-defined / reportAttributeAccessIssue, reportUnknownMemberType
    lock = locks.lock("report")
    assert_type(lock.acquire(timeout=0), lockfast.Lease | None)
    assert_type(lock.acquire(blocking=False), lockfast.Lease | None)
    assert_type(lock.release(), bool)
    assert_type(lock.inspect(), lockfast.LockInfo)
    assert_type(lock.force_release(), lockfast.LockInfo | None)
    assert_type(locks.rlock("report").depth, int)
    assert_type(locks.guarantees(), Guarantees)
    assert_type(locks.list("report:*", free=True), Iterator[lockfast.LockInfo])
    lock.acquire(timout=3)  # expect error: call-arg / reportCallIssue
    lock.acquire(timeout="3")  # expect error: arg-type / reportArgumentType
    lock.acquire().release()  # expect error: union-attr / reportOptionalMemberAccess
    locks.list(7)  # expect error: arg-type / reportArgumentType


async def async_blocks(locks: lockfast.aio.Locks) -> None:
    async with lockfast.aio.connect("memory://") as connected:
        assert_type(connected, lockfast.aio.Locks)
    async with locks.lock("report") as lease, locks.rlock("nested") as nested:
        assert_type(lease, lockfast.aio.Lease)
        assert_type(nested, lockfast.aio.Lease)
        assert_type(lease.lost, AsyncLost)
        assert_type(await lease.lost.wait(1), bool)
        await lease.renew(ttl=5)
        await lease.renew(ttl="5")  # expect error: arg-type / reportArgumentType
    lock = locks.lock("report")
    assert_type(await lock.acquire(timeout=0), lockfast.aio.Lease | None)
    assert_type(await lock.release(), bool)
    assert_type(await lock.inspect(), lockfast.LockInfo)
    assert_type(await lock.force_release(), lockfast.LockInfo | None)
    assert_type(await locks.guarantees(), Guarantees)
    assert_type(locks.list("report:*"), AsyncIterator[lockfast.LockInfo])
    await lock.acquire(timout=3)  # expect error: call-arg / reportCallIssue
    await lock.acquire(timeout="3")  # expect error: arg-type / reportArgumentType


# Read/write locks, semaphores and several locks


def report_permit_loss(permit: Permit) -> None:
    print(permit.slot)


def shared(locks: lockfast.Locks) -> None:
    config = locks.rwlock("config", ttl=10, on_lost=report_loss)
    assert_type(config, RWLock)
    assert_type(config.reader, ReadLock)
    assert_type(config.writer, lockfast.Lock)
    with config.reader as reading, config.writer as writing:
        assert_type(reading, lockfast.Lease)
        assert_type(writing, lockfast.Lease)
        assert_type(writing.downgrade(), None)
    gpus = locks.semaphore("gpu", 4, permits=2, unavailable="allow", ttl=10, on_lost=report_permit_loss)
    assert_type(gpus, Semaphore)
    with gpus as permit:
        assert_type(permit, Permit)
        assert_type(permit.slot, int)
        assert_type(permit.slots, tuple[int, ...])
        assert_type(permit.enforced, bool)
    assert_type(gpus.acquire(permits=2, timeout=5), Permit | None)
    assert_type(gpus.limit, int)
    both = locks.all_of("a", locks.lock("b"), config.reader, gpus, timeout=5, ttl=10)
    assert_type(both, AllOf)
    with both as leases:
        assert_type(leases, LeaseSet)
        assert_type(leases["a"], lockfast.Lease)
        assert_type(leases.fences, dict[str, int])
        assert_type(leases.lost, Lost)
    assert_type(both.acquire(timeout=1), LeaseSet | None)

    @gpus
    def infer(prompt: str) -> int:
        return len(prompt)

    @both
    def transfer(amount: int) -> bool:
        return amount > 0

    assert_type(infer("hello"), int)
    assert_type(transfer(7), bool)
    infer(7)  # expect error: arg-type / reportArgumentType
    transfer("7")  # expect error: arg-type / reportArgumentType
    locks.rwlock("config", tll=3)  # expect error: call-arg / reportCallIssue
    locks.rwlock(7)  # expect error: arg-type / reportArgumentType
    with config:  # expect error: attr-defined / reportGeneralTypeIssues
        pass
    locks.semaphore("gpu")  # expect error: call-arg / reportCallIssue
    locks.semaphore("gpu", "4")  # expect error: arg-type / reportArgumentType
    locks.semaphore("gpu", 4, unavailable="ignore")  # expect error: arg-type / reportArgumentType
    locks.semaphore("gpu", 4, permit=2)  # expect error: call-arg / reportCallIssue
    gpus.acquire(permits="2")  # expect error: arg-type / reportArgumentType
    locks.lock("report").acquire(permits=2)  # expect error: call-arg / reportCallIssue
    locks.all_of("a", 7)  # expect error: arg-type / reportArgumentType
    locks.all_of("a", config)  # expect error: arg-type / reportArgumentType
    locks.all_of("a", tll=3)  # expect error: call-arg / reportCallIssue


async def report_async_permit_loss(permit: AsyncPermit) -> None:
    print(permit.slot)


async def async_shared(locks: lockfast.aio.Locks, threads: lockfast.Locks) -> None:
    config = locks.rwlock("config", ttl=10, on_lost=report_async_loss)
    assert_type(config, AsyncRWLock)
    assert_type(config.reader, AsyncReadLock)
    assert_type(config.writer, lockfast.aio.Lock)
    async with config.reader as reading, config.writer as writing:
        assert_type(reading, lockfast.aio.Lease)
        assert_type(await writing.downgrade(), None)
    gpus = locks.semaphore("gpu", 4, permits=2, unavailable="allow", on_lost=report_async_permit_loss)
    assert_type(gpus, AsyncSemaphore)
    async with gpus as permit:
        assert_type(permit, AsyncPermit)
        assert_type(permit.slots, tuple[int, ...])
    assert_type(await gpus.acquire(permits=2, timeout=5), AsyncPermit | None)
    both = locks.all_of("a", locks.lock("b"), config.reader, gpus, timeout=5)
    assert_type(both, AsyncAllOf)
    async with both as leases:
        assert_type(leases, AsyncLeaseSet)
        assert_type(leases["a"], lockfast.aio.Lease)
        assert_type(leases.lost, AsyncLost)
    assert_type(await both.acquire(timeout=1), AsyncLeaseSet | None)

    @gpus
    async def infer(prompt: str) -> int:
        return len(prompt)

    assert_type(await infer("hello"), int)
    await infer(7)  # expect error: arg-type / reportArgumentType
    locks.semaphore("gpu", 4, tll=3)  # expect error: call-arg / reportCallIssue
    await gpus.acquire(permits="2")  # expect error: arg-type / reportArgumentType
    locks.all_of("a", threads.lock("b"))  # expect error: arg-type / reportArgumentType


# Jobs


def once(locks: lockfast.Locks) -> None:
    assert_type(locks.once("report"), Once[Skipped])
    with locks.once("report", every=timedelta(days=1), at_least=60, at_most=600, ttl=10, label="nightly") as run:
        assert_type(run, lockfast.Lease | Skipped)
        if run:
            assert_type(run, lockfast.Lease)
        else:
            assert_type(run, Skipped)
            assert_type(run.owner, lockfast.Owner | None)
    with locks.once("report", busy="wait", timeout=5, on_lost=report_loss) as certain:
        assert_type(certain, lockfast.Lease)
    with locks.once("report", busy="raise") as certain:
        assert_type(certain, lockfast.Lease)

    @locks.once("report", every=3600)
    def report(day: str, *, pages: int = 1) -> int:
        return len(day) * pages

    @locks.once("report", busy="wait")
    def certain_report(day: str) -> int:
        return len(day)

    assert_type(report("monday", pages=2), int | Skipped)
    assert_type(certain_report("monday"), int)
    report(7)  # expect error: arg-type / reportArgumentType
    report("monday", page=2)  # expect error: call-arg / reportCallIssue
    certain_report()  # expect error: call-arg / reportCallIssue
    locks.once("report", evry=3600)  # expect error: call-overload / reportCallIssue
    locks.once("report", every="1h")  # expect error: call-overload / reportArgumentType
    locks.once("report", busy="stop")  # expect error: call-overload / reportCallIssue, reportArgumentType
    locks.once("report", tll=3)  # expect error: call-overload / reportCallIssue
    locks.once("report", renew=False)  # expect error: call-overload / reportCallIssue
    locks.once("report", max_hold=3)  # expect error: call-overload / reportCallIssue


async def async_once(locks: lockfast.aio.Locks) -> None:
    assert_type(locks.once("report"), AsyncOnce[Skipped])
    async with locks.once("report", every=timedelta(days=1), at_least=60) as run:
        assert_type(run, lockfast.aio.Lease | Skipped)
        if run:
            assert_type(run, lockfast.aio.Lease)
    async with locks.once("report", busy="wait", on_lost=report_async_loss) as certain:
        assert_type(certain, lockfast.aio.Lease)

    @locks.once("report", every=3600)
    async def report(day: str, *, pages: int = 1) -> int:
        return len(day) * pages

    @locks.once("report", busy="raise")
    async def certain_report(day: str) -> int:
        return len(day)

    assert_type(await report("monday", pages=2), int | Skipped)
    assert_type(await certain_report("monday"), int)
    await report(7)  # expect error: arg-type / reportArgumentType
    await certain_report()  # expect error: call-arg / reportCallIssue
    locks.once("report", evry=3600)  # expect error: call-overload / reportCallIssue
    locks.once("report", tll=3)  # expect error: call-overload / reportCallIssue
    locks.once("report", busy="stop")  # expect error: call-overload / reportCallIssue, reportArgumentType


# Decorated functions keep their signature


def name_of(account_id: int) -> str:
    return f"account:{account_id}"


def decorated(locks: lockfast.Locks) -> None:
    @locks.guard("account:{account_id}", ttl=10, timeout=5, on_lost=report_loss)
    def deposit(account_id: int, amount: float = 1.0) -> str:
        return f"{account_id} {amount}"

    @locks.lock("report")
    def report(day: str) -> int:
        return len(day)

    @locks.guard(name_of)
    def withdraw(account_id: int) -> None: ...

    class Account:
        @locks.guard("account:{self}")
        def close(self, reason: str) -> bool:
            return bool(reason)

    assert_type(deposit(7, amount=2.5), str)
    assert_type(report("monday"), int)
    assert_type(Account().close("moved"), bool)
    function: Callable[[int], None] = withdraw
    function(7)
    deposit("7")  # expect error: arg-type / reportArgumentType
    deposit(7, amont=2.5)  # expect error: call-arg / reportCallIssue
    deposit()  # expect error: call-arg / reportCallIssue
    report(7)  # expect error: arg-type / reportArgumentType
    withdraw("7")  # expect error: arg-type / reportArgumentType
    Account().close()  # expect error: call-arg / reportCallIssue
    locks.guard("account", tll=3)  # expect error: call-arg / reportCallIssue
    locks.guard("account", ttl="3")  # expect error: arg-type / reportArgumentType
    locks.guard(7)  # expect error: arg-type / reportArgumentType
    locks.lock("report")(7)  # expect error: arg-type / reportArgumentType


async def async_decorated(locks: lockfast.aio.Locks) -> None:
    @locks.guard("account:{account_id}", ttl=10, on_lost=report_async_loss)
    async def deposit(account_id: int, amount: float = 1.0) -> str:
        return f"{account_id} {amount}"

    @locks.lock("report")
    async def report(day: str) -> int:
        return len(day)

    def plain(day: str) -> int:
        return len(day)

    assert_type(await deposit(7, amount=2.5), str)
    function: Callable[[str], Coroutine[Any, Any, int]] = report
    assert_type(await function("monday"), int)
    await deposit("7")  # expect error: arg-type / reportArgumentType
    await report()  # expect error: call-arg / reportCallIssue
    locks.lock("report")(plain)  # expect error: arg-type / reportArgumentType
    locks.guard("report")(plain)  # expect error: arg-type / reportArgumentType
    locks.guard("account", tll=3)  # expect error: call-arg / reportCallIssue
    locks.guard("account", ttl="3")  # expect error: arg-type / reportArgumentType


# Values under optimistic locking


def update(locks: lockfast.Locks) -> None:
    def one_less(old: bytes | None) -> int:
        return int(old or 0) - 1

    assert_type(locks.update("stock:7", one_less), int)
    assert_type(locks.update("stock:7", lambda old: old, attempts=3, timeout=1, adaptive=False), bytes | None)
    locks.update("stock:7", one_less, attemps=3)  # expect error: call-arg / reportCallIssue
    locks.update("stock:7", one_less, attempts="3")  # expect error: arg-type / reportArgumentType
    locks.update("stock:7", one_less, ttl=3)  # expect error: call-arg / reportCallIssue
    locks.update("stock:7", len)  # expect error: arg-type / reportArgumentType
    locks.update("stock:7", lambda old: [old])  # expect error: type-var / reportArgumentType


async def async_update(locks: lockfast.aio.Locks) -> None:
    async def one_less(old: bytes | None) -> int:
        return int(old or 0) - 1

    def plain(old: bytes | None) -> str:
        return str(old)

    assert_type(await locks.update("stock:7", one_less), int)
    assert_type(await locks.update("stock:7", plain, attempts=3), str)
    await locks.update("stock:7", one_less, attemps=3)  # expect error: call-arg / reportCallIssue
    await locks.update("stock:7", one_less, timeout="3")  # expect error: arg-type / reportArgumentType
