"""Chance for both colours, from the operating system: ids that nobody can guess, and jitter.

A forked child must not repeat its parent's numbers. Ids are made from the operating system's in batches, because a call
for each costs as much as all else that is done for an id; so each batch belongs to one process, by its pid.
"""

from __future__ import annotations

import os
from binascii import b2a_base64

ID_BYTES = 15
BATCH = 64

_ready: tuple[int, list[bytes]] = (0, [])
"""Whose they are, and numbers that no id was made of yet. Threads may take from it at the same time."""


def new_holder() -> str:
    """120 unguessable bits in 20 visible characters.

    >>> len(new_holder()), new_holder() == new_holder()
    (20, False)
    """
    pid, numbers = _ready
    if pid != os.getpid() or not numbers:
        numbers = _refill()
    try:
        number = numbers.pop()
    except IndexError:  # another thread took the last one
        number = os.urandom(ID_BYTES)
    return b2a_base64(number, newline=False).decode("ascii")


def _refill() -> list[bytes]:
    global _ready
    chance = os.urandom(ID_BYTES * BATCH)
    numbers = [chance[at : at + ID_BYTES] for at in range(0, len(chance), ID_BYTES)]
    _ready = (os.getpid(), numbers)
    return numbers


def random() -> float:
    """From 0 up to 1.

    >>> 0 <= random() < 1
    True
    """
    return int.from_bytes(os.urandom(4), "big") / 4294967296
