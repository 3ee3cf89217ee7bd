"""What parent and worker say to each other: one JSON array per line, the word first.

parent → worker (stdin)     order, with an Order        take so many turns
                            end of file                 leave
worker → parent (stdout)    ready                       waiting for an order
                            holds, with the fence       the lock is mine
                            stalls                      read, not yet written, and in no hurry
                            did, with a Turn            one turn is over
                            done                        the order is carried out
                            failed, with a sentence     and why
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

READY, HOLDS, STALLS, DID, DONE, FAILED = "ready", "holds", "stalls", "did", "done", "failed"


class Order(NamedTuple):
    """`times` turns with `pause` seconds between read and write; under the lock with `ttl`, or without one if None.
    In turn number `stall_at` (from 1) the worker stands still between read and write."""

    times: int
    pause: float
    ttl: float | None = None
    stall_at: int | None = None


class Turn(NamedTuple):
    """One turn that is over. The times are of the monotonic clock, which the processes of a machine share. `rose`
    tells whether the fence was above that of the writer before."""

    held_at: float
    let_go_at: float
    fence: int = 0
    rose: bool = True


def encode(word: str, what: Any = None) -> bytes:
    """
    >>> encode(DID, Turn(1.5, 2.5, 7))
    b'["did", [1.5, 2.5, 7, true]]\\n'
    """
    return json.dumps([word, what]).encode() + b"\n"


def decode(line: bytes) -> tuple[str, Any]:
    word, what = json.loads(line)
    return word, what
