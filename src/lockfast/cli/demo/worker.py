"""One worker process: carries out orders and reports each round. Started with `python -m` and the counter's path.

    parent → worker (stdin)     order, an Order        do so many rounds
                                end of file            exit
    worker → parent (stdout)    ready                  ready for an order
                                holds, the fence       acquired the lock
                                stalls                 stopped between read and write
                                did, a Round           finished a round
                                done                   finished the order
                                failed, the error      cannot continue

A message is one line with a JSON array. The store's URL comes in LOCKFAST_URL, which other users cannot read. When
stdin ends, the worker exits, whatever it does: it never outlives its parent.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import lockfast
from lockfast.errors import LockError

NAME = "demo:counter"
TIMEOUT = 30.0
"""Seconds that a worker waits for the lock; many times the expected wait."""
STALL = 60.0
EXIT_TIMEOUT = 1.0
"""Seconds that a worker has to exit by itself after the end of stdin."""

READY, HOLDS, STALLS, DID, DONE, FAILED = "ready", "holds", "stalls", "did", "done", "failed"


class Order(NamedTuple):
    """Do `rounds` rounds with `pause` seconds between read and write, under the lock unless `ttl` is None. In round
    `stall_at` (from 1), stop between read and write."""

    rounds: int
    pause: float
    ttl: float | None = None
    stall_at: int | None = None


class Round(NamedTuple):
    """One finished round. Times are of the monotonic clock, which all processes of a machine share."""

    held_at: float
    released_at: float
    fence: int = 0


def encode(kind: str, value: Any = None) -> bytes:
    r"""Encode a message.

    >>> encode(DID, Round(1.5, 2.5, 7))
    b'["did", [1.5, 2.5, 7]]\n'
    """
    return json.dumps([kind, value]).encode() + b"\n"


def decode(line: bytes) -> tuple[str, Any]:
    kind, value = json.loads(line)
    return kind, value


def write_counter(path: Path, number: int) -> None:
    """Replace the file atomically: a killed worker has either written or not. Read plus write is not atomic, which is
    why the workers need a lock."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(str(number), "ascii")
    draft.replace(path)


def main(path: Path) -> int:
    """Carry out orders until stdin ends."""
    orders: SimpleQueue[Order | None] = SimpleQueue()
    threading.Thread(target=_read_orders, args=[orders], daemon=True).start()
    try:
        with lockfast.connect() as locks:
            _send(READY)
            while order := orders.get():
                _carry_out(order, path, locks)
                _send(DONE)
    except LockError as error:
        _send(FAILED, str(error))
        return 1
    return 0


def _read_orders(orders: SimpleQueue[Order | None]) -> None:
    for line in sys.stdin.buffer:
        orders.put(Order(*decode(line)[1]))
    orders.put(None)
    time.sleep(EXIT_TIMEOUT)
    os._exit(1)


def _send(kind: str, value: Any = None) -> None:
    os.write(1, encode(kind, value))  # shorter than PIPE_BUF, so the write is atomic


def _carry_out(order: Order, path: Path, locks: lockfast.Locks) -> None:
    for number in range(1, order.rounds + 1):
        with _lock_for(order, locks) as fence:
            held_at = time.monotonic()
            _increment(path, order, stall=number == order.stall_at)
            released_at = time.monotonic()
        _send(DID, Round(held_at, released_at, fence))


@contextmanager
def _lock_for(order: Order, locks: lockfast.Locks) -> Iterator[int]:
    if order.ttl is None:
        yield 0
        return
    with locks.lock(NAME, ttl=order.ttl, timeout=TIMEOUT) as lease:
        _send(HOLDS, lease.fence)
        yield lease.fence


def _increment(path: Path, order: Order, *, stall: bool) -> None:
    """Add 1 to the number in the file."""
    before = int(path.read_text("ascii"))
    if stall:
        _send(STALLS)
        time.sleep(STALL)
    time.sleep(order.pause)
    write_counter(path, before + 1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
