"""`AsyncioRuntime.gather`: no result after the end, and no result that arrived in time is lost."""

import asyncio
from typing import Any

from lockfast.runtime.asyncio import AsyncioRuntime


async def after(rounds: int, name: str) -> str:
    for _ in range(rounds):
        await asyncio.sleep(0)
    return name


class Results(list[Any]):
    """Records the results; `enough` is the answer to each of them."""

    def __init__(self, *, enough: bool) -> None:
        self._enough = enough

    def __call__(self, number: int, outcome: Any) -> bool:
        self.append((number, outcome))
        return self._enough


async def test_no_result_after_the_end() -> None:
    """An operation that ends while the first result is handled has ended in time: otherwise a notification that it took
    from a mailbox would be lost, and a vote would be counted too late."""
    results = Results(enough=True)
    await AsyncioRuntime().gather([after(rounds, f"after {rounds}") for rounds in range(4)], results)
    in_time = list(results)
    for _ in range(10):
        await asyncio.sleep(0)
    assert results == in_time
    assert in_time == [(0, "after 0"), (1, "after 1")]


async def test_all_results_until_it_is_enough() -> None:
    results = Results(enough=False)
    await AsyncioRuntime().gather([after(rounds, "done") for rounds in (3, 0, 1)], results)
    assert results == [(1, "done"), (2, "done"), (0, "done")]
