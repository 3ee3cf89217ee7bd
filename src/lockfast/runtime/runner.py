"""Run a coroutine of the core to its end without an event loop.

On threads every port blocks instead of suspending, so a coroutine runs to its end as soon as it runs at all. One that
suspends all the same awaited something that is no port; that is a bug, and it raises.

A loop sees that a coroutine has ended without an exception being made, raised and caught, as `send` would have it; so
the result is put in a list.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, computed in this thread.

    >>> async def answer() -> int:
    ...     return 42
    >>> run(answer())
    42
    >>> import asyncio
    >>> run(asyncio.sleep(0))
    Traceback (most recent call last):
    RuntimeError: A coroutine of the core suspended on threads: it awaited something that is no port.
    """
    kept: list[T] = []
    keeping = _keep(work, kept)
    for _ in keeping.__await__():
        keeping.close()
        raise RuntimeError("A coroutine of the core suspended on threads: it awaited something that is no port.")
    return kept[0]


async def _keep(work: Coroutine[Any, Any, T], kept: list[T]) -> None:
    kept.append(await work)
