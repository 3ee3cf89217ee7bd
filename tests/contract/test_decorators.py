"""Decorated functions: `@lock` and `@locks.guard(...)`."""

from typing import Any

import pytest

from tests.contract.driver import Driver, done, scenario


@scenario
async def test_function_runs_under_the_lock(d: Driver) -> None:
    lock = d.lock()

    async def add(a: int, *, b: int = 1) -> tuple[int, bool]:
        """Adds."""
        return a + b, await done(lock.locked())

    guarded = lock(d.function(add))
    assert (guarded.__name__, guarded.__doc__) == ("add", "Adds.")
    assert await done(guarded(1)) == (2, True)
    assert await done(guarded(1, b=2)) == (3, True)
    assert await done(lock.locked()) is False


@scenario
async def test_error_in_the_function_propagates_and_releases(d: Driver) -> None:
    async def fail() -> None:
        raise KeyError("the function's own")

    with pytest.raises(KeyError, match="own"):
        await done(d.lock()(d.function(fail))())
    assert await done(d.lock().locked()) is False


async def _locked(d: Driver, *names: str) -> list[str]:
    return [name for name in names if await done(d.lock(name).locked())]


@scenario
async def test_name_from_the_arguments(d: Driver) -> None:
    candidates = [f"account:{number}" for number in (1, 2, 3)]

    async def deposit(amount: int, account_id: int = 3) -> Any:
        return amount, await _locked(d, *candidates)

    guarded = d.locks.guard("account:{account_id}", ttl=10)(d.function(deposit))
    assert guarded.__name__ == "deposit"
    assert await done(guarded(5, 1)) == (5, ["account:1"])
    assert await done(guarded(6, account_id=2)) == (6, ["account:2"])
    assert await done(guarded(amount=7)) == (7, ["account:3"])
    assert await _locked(d, *candidates) == []


@scenario
async def test_name_from_a_function(d: Driver) -> None:
    def name(account: dict[str, str], *_: Any) -> str:
        return f"account:{account['id']}"

    async def deposit(account: dict[str, str], amount: int) -> list[str]:
        return await _locked(d, "account:x")

    guarded = d.locks.guard(name)(d.function(deposit))
    assert await done(guarded({"id": "x"}, 1)) == ["account:x"]


@scenario
async def test_method(d: Driver) -> None:
    async def pay_in(self: Any, kind: str = "euro") -> list[str]:
        return await _locked(d, "account:4:'euro'")

    class Account:
        number = 4
        deposit = d.locks.guard("account:{self.number}:{kind!r}")(d.function(pay_in))

    assert await done(Account().deposit()) == ["account:4:'euro'"]


@scenario
async def test_wrong_arguments_raise_type_error(d: Driver) -> None:
    async def deposit(account_id: int) -> None: ...

    guarded = d.locks.guard("account:{account_id}")(d.function(deposit))
    with pytest.raises(TypeError):
        await done(guarded())
    with pytest.raises(TypeError):
        await done(guarded(1, 2))


@scenario
async def test_guard_keeps_its_timeout(d: Driver) -> None:
    async def deposit(account_id: int) -> None:
        raise AssertionError("must not be entered")

    guarded = d.locks.guard("account:{account_id}", timeout=0.05)(d.function(deposit))
    await done(d.lock("account:1").acquire())
    with pytest.raises(TimeoutError):
        await done(guarded(1))
