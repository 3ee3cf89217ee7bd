"""One worker, a process: carries out its parent's orders and reports each turn. `python -m` with the counter's path.

The store comes in LOCKFAST_URL, where other users of the machine cannot read it. A worker never outlives its
parent: when its stdin ends, so does the worker, whatever it is doing.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import lockfast
from lockfast.cli.demo import counter
from lockfast.cli.demo.messages import DID, DONE, FAILED, HOLDS, READY, STALLS, Order, Turn, decode, encode
from lockfast.errors import LockError

NAME = "demo:counter"
PATIENCE = 30.0
"""Seconds that a worker waits for the lock before it says that something is wrong; many times what it takes."""
STALL = 60.0
FAREWELL = 1.0
"""Seconds in which a worker that was told to leave has to end by itself."""


def main(path: Path) -> int:
    """Carry out orders until there are no more."""
    orders: SimpleQueue[Order | None] = SimpleQueue()
    threading.Thread(target=_listen, args=[orders], daemon=True).start()
    try:
        with lockfast.connect() as locks:
            _say(READY)
            while order := orders.get():
                _carry_out(order, path, locks)
                _say(DONE)
    except LockError as error:
        _say(FAILED, str(error))
        return 1
    return 0


def _listen(orders: SimpleQueue[Order | None]) -> None:
    for line in sys.stdin.buffer:
        orders.put(Order(*decode(line)[1]))
    orders.put(None)
    time.sleep(FAREWELL)
    os._exit(1)


def _say(word: str, what: Any = None) -> None:
    os.write(1, encode(word, what))  # shorter than a pipe takes at once, so it arrives whole or not at all


def _carry_out(order: Order, path: Path, locks: lockfast.Locks) -> None:
    for number in range(1, order.times + 1):
        with _held(order, locks) as fence:
            held_at = time.monotonic()
            rose = _turn(path, fence, order, stalling=number == order.stall_at)
            let_go_at = time.monotonic()
        _say(DID, Turn(held_at, let_go_at, fence, rose))


@contextmanager
def _held(order: Order, locks: lockfast.Locks) -> Iterator[int]:
    if order.ttl is None:
        yield 0
        return
    with locks.lock(NAME, ttl=order.ttl, timeout=PATIENCE) as lease:
        _say(HOLDS, lease.fence)
        yield lease.fence


def _turn(path: Path, fence: int, order: Order, *, stalling: bool) -> bool:
    """Add 1 to the number in the file; True if `fence` is above the one found there."""
    before = counter.read(path)
    if stalling:
        _say(STALLS)
        time.sleep(STALL)
    time.sleep(order.pause)
    counter.write(path, counter.Tally(before.total + 1, fence))
    return fence > before.fence


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
