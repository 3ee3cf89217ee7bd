"""Every valid name is a separate lock."""

from typing import Any

from tests.contract.driver import BOUND, Driver, done, scenario
from tests.contract.stores import QUEUEING, only

NAMES = [
    *("a", "a:q", "a:m", "a:w", "{a}", "{a}:q", "{a}{b}", "a}b", "a{b", "{", "}", "{}", "{}a", "}{", "}a{b}"),
    *(" ", "  ", "two words", " before", "after ", "a\u00a0b"),
    *("Ж", "數據", "🔒", "e\u0301", "\u00e9", "\u202eevil", "\u200b", "\ufeff"),
    *("%s", "%", "*", "?[a]", "\\", "'", '"', "'; DROP TABLE lock; --", "$1", "KEYS[1]", "..", "/", "a/b", "-"),
    *("0", "1", "None", "nil", "LOCKFAST:", "lockfast", "lockfast", "x" * 1024, "é" * 512),
]


@scenario
async def test_every_name_is_a_separate_lock(d: Driver) -> None:
    names = list(dict.fromkeys(NAMES))
    other = d.connect()
    leases = {name: await done(d.lock(name).acquire(timeout=0)) for name in names}
    assert [name for name, lease in leases.items() if lease is None] == [], "a name collides with another"
    for name, lease in leases.items():
        assert await done(other.lock(name).acquire(timeout=0)) is None
        info = await done(other.lock(name).inspect())
        assert (info.name, info.holder, info.fence, info.waiting) == (name, lease.holder, lease.fence, 0)
    for name, lease in leases.items():
        assert await done(lease.release()) is True
        assert await done(other.lock(name).locked()) is False


@only(stores=QUEUEING)
@scenario
async def test_every_name_has_a_separate_queue(d: Driver) -> None:
    names = ["a", "{a}", "a{b", "}", "{}", "a}b", "two words", "🔒", "%s", "'", "x" * 1024]
    other = d.connect()

    async def waiter(name: str) -> Any:
        return await done(other.lock(name).acquire(timeout=BOUND))

    leases = [await done(d.lock(name).acquire(timeout=0)) for name in names]
    contenders = [d.start(waiter, name) for name in names]
    for name in names:
        await d.queue_length(d.lock(name), 1)
    for lease, contender, name in zip(leases, contenders, names, strict=True):
        await done(lease.release())
        successor = await contender.result()
        assert successor.name == name
        assert successor.fence > lease.fence
        assert await done(successor.release()) is True
