"""Exported and adopted leases; closed clients."""

from typing import Any

import pytest

from lockfast import ConfigurationError, LeaseLost, LockError, NotHeld, State
from tests.contract.driver import BOUND, Driver, done, scenario


@scenario
async def test_exported_lease_is_adopted(d: Driver) -> None:
    lock = d.lock(ttl=20)
    lease = await done(lock.acquire())
    text = lease.export()
    assert isinstance(text, str)
    assert lease.state is State.RELEASED
    with pytest.raises(LeaseLost):
        lease.ensure_held()
    assert await done(lock.locked()) is True, "the lock is not free in between"

    adopter = d.connect(label="the adopter")
    adopted = await done(adopter.adopt(text))
    assert (adopted.name, adopted.ttl, adopted.state) == ("thing", 20, State.HELD)
    assert adopted.fence > lease.fence
    assert adopted.holder != lease.holder
    info = await done(lock.inspect())
    assert (info.holder, info.fence, info.owner.label) == (adopted.holder, adopted.fence, "the adopter")

    assert await done(lease.release()) is False, "the exported lease holds nothing"
    with pytest.raises(NotHeld):
        await done(lock.release())
    assert (await done(lock.inspect())).holder == adopted.holder
    assert await done(adopted.release()) is True
    assert await done(lock.locked()) is False


@scenario
async def test_only_one_client_can_adopt(d: Driver) -> None:
    lease = await done(d.lock().acquire())
    text = lease.export()
    adopted = await done(d.connect().adopt(text))
    for client in (d.connect(), d.locks):
        with pytest.raises(LeaseLost) as caught:
            await done(client.adopt(text))
        assert caught.value.name == "thing"
    assert (await done(d.lock().inspect())).holder == adopted.holder


@scenario
async def test_adopting_with_other_options(d: Driver) -> None:
    lease = await done(d.lock(ttl=20).acquire())
    adopted = await done(d.connect().adopt(lease.export(), ttl=3, label="mine"))
    assert adopted.ttl == 3
    info = await done(d.lock().inspect())
    assert (info.owner.label, info.ttl_left <= 3) == ("mine", True)
    now = d.locks.session.runtime.now
    ends_at = now() + adopted.remaining
    await d.until(lambda: now() + adopted.remaining > ends_at + 0.5, "the adopted lease to be renewed")
    assert await done(adopted.release()) is True


@scenario
async def test_exported_lease_expires_if_nobody_adopts_it(d: Driver) -> None:
    lease = await done(d.lock(ttl=0.4).acquire())
    text = lease.export()
    assert await done(d.connect().lock("thing").acquire(timeout=BOUND)) is not None
    with pytest.raises(LeaseLost, match="has ended"):
        await done(d.locks.adopt(text))


@scenario
async def test_ended_lease_cannot_be_exported(d: Driver) -> None:
    lease = await done(d.lock().acquire())
    await done(lease.release())
    with pytest.raises(LeaseLost):
        lease.export()
    lease = await done(d.lock().acquire())
    lease.export()
    with pytest.raises(LeaseLost):
        lease.export()


@scenario
async def test_closing_releases_all_leases(d: Driver) -> None:
    client = d.connect()
    leases = [await done(client.lock(name).acquire()) for name in ("thing", "another")]
    await done(client.close())
    assert [lease.state for lease in leases] == [State.RELEASED, State.RELEASED]
    for name in ("thing", "another"):
        assert await done(d.lock(name).acquire(timeout=0)) is not None


@scenario
async def test_closing_hands_off_to_a_waiter(d: Driver) -> None:
    client = d.connect()
    await done(client.lock("thing").acquire())

    async def waiter() -> Any:
        return await done(d.lock().acquire(timeout=BOUND))

    contender = d.start(waiter)
    await d.queue_length(d.connect().lock("thing"), 1)
    await done(client.close())
    assert (await contender.result()).state is State.HELD


@scenario
async def test_closed_client_refuses_every_call(d: Driver) -> None:
    client = d.connect()
    lock = client.lock("thing")
    lease = await done(lock.acquire())
    text = (await done(client.lock("another").acquire())).export()
    await done(client.close())
    await done(client.close())
    assert "closed" in repr(client)
    calls = (
        lock.acquire,
        lambda: lock.acquire(timeout=0),
        lock.inspect,
        lock.locked,
        lambda: client.adopt(text),
        client.lock("new").acquire,
    )
    for call in calls:
        with pytest.raises(ConfigurationError, match="was closed; nothing was sent"):
            await done(call())
    with pytest.raises(LeaseLost):
        await done(lease.renew())
    assert await done(lease.release()) is False
    with pytest.raises(LockError):
        await done(lock.release())


@scenario
async def test_closing_ends_the_waits_of_that_client(d: Driver) -> None:
    """Its waiters raise, hold nothing later and leave the queue."""
    lease = await done(d.lock().acquire())
    client = d.connect()

    async def waiter() -> Any:
        with pytest.raises(LockError):
            await done(client.lock("thing").acquire(timeout=BOUND))

    contender = d.start(waiter)
    await d.queue_length(d.lock(), 1)
    await done(client.close())
    try:
        await d.until(lambda: contender.ended, "the wait to end", 3)
        await contender.result()
        assert (await done(d.lock().inspect())).waiting == 0
    finally:
        await done(lease.release())


@scenario
async def test_client_as_context_manager(d: Driver) -> None:
    client = d.connect()
    if d.flavour == "asyncio":
        async with client as same:
            lease = await done(same.lock("thing").acquire())
    else:
        with client as same:
            lease = await done(same.lock("thing").acquire())
    assert same is client
    assert lease.state is State.RELEASED
    assert await done(d.lock().locked()) is False
