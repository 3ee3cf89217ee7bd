"""Two processes that pass one lock back and forth, and how long each passing takes.

From just before one calls release until the other is inside its `with` block. Each asks again only once the other
holds: a lock that favours whoever released it last would else never be passed at all. The holder keeps it long enough
for the other to be waiting, and for a random while longer, so that a waiter that polls is not always met at the same
point of its nap.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import RawValue
from typing import Any

from bench.children import FORK, Child, closing
from bench.peers import Lock

HOLD_SECONDS = 0.003
WARM_UP = 2
"""Passings of each side that are not counted: they connect and load scripts."""
STUCK_SECONDS = 30.0


def pass_back_and_forth(make: Callable[[], Lock], count: int, nap: float = 0.002) -> list[float]:
    """Seconds that each of `count` passings took; `nap` is how long a waiter that polls sleeps."""
    released_at = RawValue("d", 0.0)  # CLOCK_MONOTONIC is one clock for all processes
    may_ask = (FORK.Semaphore(1), FORK.Semaphore(0))
    turns = count // 2 + WARM_UP

    def side(me: int) -> Callable[[Connection], None]:
        return lambda pipe: pipe.send(_play(make(), may_ask[me], may_ask[1 - me], released_at, turns, nap))

    players = [Child(side(0)), Child(side(1))]
    with closing(players):
        return [took for player in players for took in player.hear(STUCK_SECONDS)]


def _play(lock: Lock, may_ask: Any, other_may_ask: Any, released_at: Any, turns: int, nap: float) -> list[float]:
    took = []
    for _ in range(turns):
        may_ask.acquire()
        with lock:
            took.append(time.monotonic() - released_at.value)
            other_may_ask.release()
            time.sleep(HOLD_SECONDS + nap * random.random())
            released_at.value = time.monotonic()
    return took[WARM_UP:]
