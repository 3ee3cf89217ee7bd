"""The parts that both runtimes share: the clock, randomness, the identity of a thread, and the runner.

The clock is monotonic and includes the time during which the machine is suspended: a laptop that sleeps past a lease's
deadline must find the lease expired when it wakes. Linux' ordinary monotonic clock stops meanwhile; the boot-time
clock does not.

Holder ids are made in batches, because one call of the operating system for each would cost more than the rest. A
forked child must not repeat the ids of its parent, so each batch belongs to one process, by its pid: not every program
that forks lets Python know.

The runner runs a coroutine of the core without an event loop. On threads every port blocks instead of suspending, so a
coroutine runs to its end at once. A coroutine that suspends has awaited something that is not a port; that is a bug.
"""

from __future__ import annotations

import os
import threading
import time
from binascii import b2a_base64
from collections.abc import Callable, Coroutine, Hashable
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")

ID_BYTES = 15
ID_CHARS = ID_BYTES * 4 // 3
BATCH = 64

_ready: tuple[int, list[str]] = (0, [])
"""The pid that made the batch, and its unused ids. Threads may take from it at the same time."""
_this_thread = threading.local()


now: Callable[[], float] = time.monotonic
if hasattr(time, "CLOCK_BOOTTIME"):
    now = partial(time.clock_gettime, time.CLOCK_BOOTTIME)


def new_holder_id() -> str:
    """Return 120 unguessable bits in 20 visible characters.

    >>> len(new_holder_id()), new_holder_id() == new_holder_id()
    (20, False)
    """
    pid, ids = _ready
    if pid == os.getpid():
        try:
            return ids.pop()
        except IndexError:
            pass
    return _refill()


def _refill() -> str:
    global _ready
    text = b2a_base64(os.urandom(ID_BYTES * BATCH), newline=False).decode("ascii")
    fresh, *others = [text[at : at + ID_CHARS] for at in range(0, len(text), ID_CHARS)]
    _ready = (os.getpid(), others)
    return fresh


def random() -> float:
    """Return a number from 0 up to 1.

    >>> 0 <= random() < 1
    True
    """
    return int.from_bytes(os.urandom(4), "big") / 4294967296


def current_thread() -> Hashable:
    """Identify the running thread. Its ident is reused after its end; an object of its own is not."""
    try:
        return _this_thread.token  # type: ignore[no-any-return]
    except AttributeError:
        _this_thread.token = token = object()
        return token


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end in this thread.

    >>> async def answer() -> int:
    ...     return 42
    >>> run(answer())
    42
    >>> import asyncio
    >>> run(asyncio.sleep(0))
    Traceback (most recent call last):
    RuntimeError: A coroutine of the core suspended on threads: it awaited something that is not a port.
    """
    results: list[T] = []
    # A `for` sees the end of a coroutine without a StopIteration being raised, which `send(None)` would have to catch.
    collecting = _collect(work, results)
    for _ in collecting.__await__():
        collecting.close()
        raise RuntimeError("A coroutine of the core suspended on threads: it awaited something that is not a port.")
    return results[0]


async def _collect(work: Coroutine[Any, Any, T], results: list[T]) -> None:
    results.append(await work)
