"""`locks.list()` and `lock.force_release()`."""

from typing import Any

import pytest

import lockfast
from tests.contract.driver import BOUND, Driver, done, scenario
from tests.contract.stores import QUEUEING, SERVERS, only


async def names(d: Driver, *args: Any, **options: Any) -> list[str]:
    return sorted(info.name for info in await listed(d, *args, **options))


async def listed(d: Driver, *args: Any, **options: Any) -> list[lockfast.LockInfo]:
    found = d.locks.list(*args, **options)
    if d.flavour == "threads":
        return list(found)
    return [info async for info in found]


ODD = ["plain", "file:1", "file:2", "with space", "tag{42}", "a}b", "{", "}", "[x]", "Grüße 数据", "a{}b", "*"]


@scenario
async def test_every_name_is_listed(d: Driver) -> None:
    for name in ODD:
        await done(d.lock(name).acquire(timeout=BOUND))
    assert await names(d) == sorted(ODD)
    assert await names(d, "file:?") == ["file:1", "file:2"]
    assert await names(d, "file:[!1]") == ["file:2"]
    assert await names(d, "*}*") == ["a{}b", "a}b", "tag{42}", "}"]
    assert await names(d, "[[]x]") == ["[x]"]
    assert await names(d, "nothing:*") == []


@scenario
async def test_free_locks_are_listed_on_request(d: Driver) -> None:
    lease = await done(d.lock("was held").acquire())
    await done(lease.release())
    assert await names(d) == []
    (info,) = await listed(d, free=True)
    assert (info.name, info.locked, info.fence) == ("was held", False, lease.fence)
    assert await names(d, "was held") == []
    assert await names(d, "was held", free=True) == ["was held"]
    assert await names(d, "never used", free=True) == []


@only(stores=QUEUEING)
@scenario
async def test_listing_shows_holder_owner_and_queue_length(d: Driver) -> None:
    lease = await done(d.connect(label="nightly").lock("thing", ttl=20).acquire())

    async def waiter() -> None:
        lock = d.connect().lock("thing")
        await done(lock.acquire(timeout=BOUND))
        await done(lock.release())

    contender = d.start(waiter)
    await d.queue_length(d.lock(), 1)
    for pattern in ("*", "thing"):
        (info,) = await listed(d, pattern)
        assert (info.holder, info.fence, info.waiting, info.waiters) == (lease.holder, lease.fence, 1, ())
        assert info.owner is not None
        assert info.owner.label == "nightly"
        assert 0 <= (info.held_for or 0) < BOUND
        assert 20 - BOUND < (info.ttl_left or 0) <= 20
    await done(lease.release())
    await contender.result()


@scenario
async def test_listing_of_many_pages_has_no_duplicates(d: Driver) -> None:
    expected = [f"many:{number}" for number in range(1203)]
    for name in expected:
        await done(d.lock(name, renew=False).acquire(timeout=BOUND))
    assert await names(d, "many:*") == sorted(expected)
    assert await names(d, "many:12?2") == ["many:1202"]


@pytest.mark.parametrize("pattern", ["", None, 7, b"x"])
@scenario
async def test_invalid_patterns(d: Driver, pattern: Any) -> None:
    with pytest.raises(lockfast.ConfigurationError):
        d.locks.list(pattern)


@only(stores=SERVERS)
@scenario
async def test_lock_of_another_program_is_listed_by_its_exact_name(d: Driver) -> None:
    assert d.server is not None
    d.server.raw("SET", "theirs", "0xc0ffee", "PX", "20000")
    assert await names(d) == []
    (info,) = await listed(d, "theirs")
    assert (info.holder, info.owner, info.fence) == ("0xc0ffee", None, None)


@only(stores=SERVERS)
@scenario
async def test_other_keys_with_our_prefix_are_not_listed(d: Driver) -> None:
    assert d.server is not None
    await done(d.lock("thing").acquire(timeout=0))
    await done(d.lock("spoilt").acquire(timeout=0))
    for key in ("lockfast:{thing}:m:other", "lockfast:{}:m", "lockfast:{x}:mine", b"lockfast:{\xff}:m"):
        d.server.raw("SET", key, "7 x y")
    d.server.raw("DEL", "spoilt")
    d.server.raw("HSET", "spoilt", "other", "data")
    assert await names(d) == ["thing"]
    assert await names(d, free=True) == ["spoilt", "thing"]


@only(stores=SERVERS)
@scenario
async def test_listing_uses_scan_and_not_keys(d: Driver) -> None:
    assert d.server is not None
    await done(d.lock("thing").acquire(timeout=0))
    assert await names(d) == ["thing"]
    used = d.server.commands_processed()
    assert "keys" not in used
    assert used["scan"] >= 1


@scenario
async def test_force_release_grants_to_the_next_and_the_holder_loses_its_lease(d: Driver) -> None:
    first = d.connect(label="stuck").lock("thing", ttl=2)
    lease = await done(first.acquire())

    async def waiter() -> Any:
        lock = d.connect().lock("thing")
        return await done(lock.acquire(timeout=BOUND))

    contender = d.start(waiter)
    await d.queue_length(d.lock(), 1)
    released = await done(d.lock().force_release())
    assert (released.holder, released.owner.label, released.fence) == (lease.holder, "stuck", lease.fence)
    successor = await contender.result()
    assert successor.fence > lease.fence
    assert await done(lease.lost.wait(BOUND))
    with pytest.raises(lockfast.LeaseLost):
        lease.ensure_held()
    assert (await done(d.lock().inspect())).holder == successor.holder


@scenario
async def test_force_release_affects_only_the_given_holder(d: Driver) -> None:
    lease = await done(d.lock().acquire())
    seen = await done(d.lock().inspect())
    await done(lease.release())
    assert await done(d.lock().force_release()) is None
    successor = await done(d.lock().acquire())
    assert await done(d.lock().force_release(seen.holder)) is None
    successor.ensure_held()
    released = await done(d.lock().force_release(successor.holder))
    assert (released.holder, released.fence) == (successor.holder, successor.fence)
    info = await done(d.lock().inspect())
    assert info.locked is False
    assert info.fence > successor.fence


@only(stores=SERVERS)
@pytest.mark.parametrize("value", [b"0xc0ffee", b"\xff\x00\xfe binary", b"x" * 400, "Grüße\n".encode()])
@scenario
async def test_lock_of_another_program_can_be_force_released(d: Driver, value: bytes) -> None:
    assert d.server is not None
    d.server.raw("SET", "theirs", value)
    seen = await done(d.lock("theirs").inspect())
    assert seen.ttl_left is None
    released = await done(d.lock("theirs").force_release(seen.holder))
    assert released == seen
    assert d.server.raw("EXISTS", "theirs") == 0


@only(stores=SERVERS)
@scenario
async def test_key_with_other_data_is_not_changed(d: Driver) -> None:
    assert d.server is not None
    d.server.raw("HSET", "data", "field", "value")
    with pytest.raises(lockfast.StoreProtocolError):
        await done(d.lock("data").force_release())
    assert d.server.raw("HGET", "data", "field") == "value"
