"""Two processes that hand one lock to each other, and the time of each hand-off.

A hand-off lasts from just before the release in one process until the other process is inside its `with` block. Each
process acquires again only after the other holds the lock; otherwise a lock that favours its last holder would never
change hands. The holder keeps the lock long enough for the other to wait, plus a random time: a polling waiter is then
met at another point of its pause each time.
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
"""Hand-offs per process that are not counted: they connect and load scripts."""
STUCK_SECONDS = 30.0


def ping_pong(make: Callable[[], Lock], count: int, poll: float = 0.002) -> list[float]:
    """Seconds of each of `count` hand-offs; `poll` is the pause of a polling waiter."""
    released_at = RawValue("d", 0.0)  # CLOCK_MONOTONIC is the same in all processes
    may_acquire = (FORK.Semaphore(1), FORK.Semaphore(0))
    rounds = count // 2 + WARM_UP

    def side(me: int) -> Callable[[Connection], None]:
        return lambda pipe: pipe.send(_play(make(), may_acquire[me], may_acquire[1 - me], released_at, rounds, poll))

    players = [Child(side(0)), Child(side(1))]
    with closing(players):
        return [took for player in players for took in player.receive(STUCK_SECONDS)]


def _play(
    lock: Lock, may_acquire: Any, other_may_acquire: Any, released_at: Any, rounds: int, poll: float
) -> list[float]:
    took = []
    for _ in range(rounds):
        may_acquire.acquire()
        with lock:
            took.append(time.monotonic() - released_at.value)
            other_may_acquire.release()
            time.sleep(HOLD_SECONDS + poll * random.random())
            released_at.value = time.monotonic()
    return took[WARM_UP:]
