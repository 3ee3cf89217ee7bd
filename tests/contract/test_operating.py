"""`locks.list()` and `lock.break_()`: what an operator sees and does."""

from typing import Any

import pytest

import lockfast
from tests.contract.driver import BOUND, Driver, done, scenario
from tests.contract.stores import SERVERS, only


async def names(d: Driver, *args: Any, **options: Any) -> list[str]:
    return sorted(info.name for info in await listed(d, *args, **options))


async def listed(d: Driver, *args: Any, **options: Any) -> list[lockfast.LockInfo]:
    found = d.locks.list(*args, **options)
    if d.flavour == "threads":
        return list(found)
    return [info async for info in found]


ODD = ["plain", "file:1", "file:2", "with space", "tag{42}", "a}b", "{", "}", "[x]", "Grüße 数据", "a{}b", "*"]


@scenario
async def test_every_lock_is_listed_whatever_its_name(d: Driver) -> None:
    for name in ODD:
        await done(d.lock(name).acquire(timeout=BOUND))
    assert await names(d) == sorted(ODD)
    assert await names(d, "file:?") == ["file:1", "file:2"]
    assert await names(d, "file:[!1]") == ["file:2"]
    assert await names(d, "*}*") == ["a{}b", "a}b", "tag{42}", "}"]
    assert await names(d, "[[]x]") == ["[x]"]
    assert await names(d, "nothing:*") == []


@scenario
async def test_free_locks_are_listed_when_asked_for(d: Driver) -> None:
    lease = await done(d.lock("was held").acquire())
    await done(lease.release())
    assert await names(d) == []
    (info,) = await listed(d, free=True)
    assert (info.name, info.locked, info.fence) == ("was held", False, lease.fence)
    assert await names(d, "was held") == []
    assert await names(d, "was held", free=True) == ["was held"]
    assert await names(d, "never used", free=True) == []


@scenario
async def test_what_is_told_of_each(d: Driver) -> None:
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
async def test_more_locks_than_one_part_holds_none_twice(d: Driver) -> None:
    asks = [f"many:{number}" for number in range(1203)]
    for name in asks:
        await done(d.lock(name, renew=False).acquire(timeout=BOUND))
    assert await names(d, "many:*") == sorted(asks)
    assert await names(d, "many:12?2") == ["many:1202"]


@pytest.mark.parametrize("pattern", ["", None, 7, b"x"])
@scenario
async def test_patterns_that_cannot_be(d: Driver, pattern: Any) -> None:
    with pytest.raises(lockfast.ConfigurationError):
        d.locks.list(pattern)


@only(stores=SERVERS)
@scenario
async def test_a_lock_of_another_program_is_found_by_its_name(d: Driver) -> None:
    assert d.server is not None
    d.server.raw("SET", "theirs", "0xc0ffee", "PX", "20000")
    assert await names(d) == []
    (info,) = await listed(d, "theirs")
    assert (info.holder, info.owner, info.fence) == ("0xc0ffee", None, None)


@only(stores=SERVERS)
@scenario
async def test_keys_that_only_look_like_ours_are_no_locks(d: Driver) -> None:
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
async def test_listing_never_asks_for_all_keys_at_once(d: Driver) -> None:
    assert d.server is not None
    await done(d.lock("thing").acquire(timeout=0))
    assert await names(d) == ["thing"]
    used = d.server.commands_processed()
    assert "keys" not in used
    assert used["scan"] >= 1


@scenario
async def test_a_broken_lock_goes_to_the_next_and_its_holder_is_told(d: Driver) -> None:
    first = d.connect(label="stuck").lock("thing", ttl=2)
    lease = await done(first.acquire())

    async def waiter() -> Any:
        lock = d.connect().lock("thing")
        return await done(lock.acquire(timeout=BOUND))

    contender = d.start(waiter)
    await d.queue_length(d.lock(), 1)
    broken = await done(d.lock().force_release())
    assert (broken.holder, broken.owner.label, broken.fence) == (lease.holder, "stuck", lease.fence)
    successor = await contender.result()
    assert successor.fence > lease.fence
    assert await done(lease.lost.wait(BOUND))
    with pytest.raises(lockfast.LeaseLost):
        lease.ensure_held()
    assert (await done(d.lock().inspect())).holder == successor.holder


@scenario
async def test_only_the_holder_that_was_seen_is_hit(d: Driver) -> None:
    lease = await done(d.lock().acquire())
    seen = await done(d.lock().inspect())
    await done(lease.release())
    assert await done(d.lock().force_release()) is None
    successor = await done(d.lock().acquire())
    assert await done(d.lock().force_release(seen.holder)) is None
    successor.ensure_held()
    broken = await done(d.lock().force_release(successor.holder))
    assert (broken.holder, broken.fence) == (successor.holder, successor.fence)
    info = await done(d.lock().inspect())
    assert info.locked is False
    assert info.fence > successor.fence


@only(stores=SERVERS)
@pytest.mark.parametrize("value", [b"0xc0ffee", b"\xff\x00\xfe binary", b"x" * 400, "Grüße\n".encode()])
@scenario
async def test_a_lock_of_another_program_can_be_broken(d: Driver, value: bytes) -> None:
    assert d.server is not None
    d.server.raw("SET", "theirs", value)
    seen = await done(d.lock("theirs").inspect())
    assert seen.ttl_left is None
    broken = await done(d.lock("theirs").force_release(seen.holder))
    assert broken == seen
    assert d.server.raw("EXISTS", "theirs") == 0


@only(stores=SERVERS)
@scenario
async def test_a_key_with_other_data_is_left_alone(d: Driver) -> None:
    assert d.server is not None
    d.server.raw("HSET", "data", "field", "value")
    with pytest.raises(lockfast.StoreProtocolError):
        await done(d.lock("data").force_release())
    assert d.server.raw("HGET", "data", "field") == "value"
