"""Several operations at the same time, for asyncio: nobody is told when it is over, and nothing that came in time is
lost."""

import asyncio
from typing import Any

from lockfast.runtime.asyncio import AsyncioRuntime


async def after(rounds: int, name: str) -> str:
    for _ in range(rounds):
        await asyncio.sleep(0)
    return name


class Told(list[Any]):
    """What was told; `enough` is what the teller hears."""

    def __init__(self, *, enough: bool) -> None:
        self._enough = enough

    def __call__(self, number: int, outcome: Any) -> bool:
        self.append((number, outcome))
        return self._enough


async def test_nobody_is_told_after_it_is_over() -> None:
    """One that ends while the first is being told has ended in time: a push that it took out of a mailbox would be
    lost, and a vote that is counted later would be one too many."""
    told = Told(enough=True)
    await AsyncioRuntime().gather([after(rounds, f"after {rounds}") for rounds in range(4)], told)
    in_time = list(told)
    for _ in range(10):
        await asyncio.sleep(0)
    assert told == in_time
    assert in_time == [(0, "after 0"), (1, "after 1")]


async def test_all_are_told_while_it_is_not_enough() -> None:
    told = Told(enough=False)
    await AsyncioRuntime().gather([after(rounds, "done") for rounds in (3, 0, 1)], told)
    assert told == [(1, "done"), (2, "done"), (0, "done")]
