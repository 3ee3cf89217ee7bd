"""Chance for both colours, from the operating system: ids that nobody can guess, and jitter.

Ids are made in batches, because a call of the operating system for each costs more than all else that is done for one.
A forked child must not repeat its parent's ids, so each batch belongs to one process, by its pid: not every program
that forks lets Python know.
"""

from __future__ import annotations

import os
from binascii import b2a_base64

ID_BYTES = 15
ID_CHARS = ID_BYTES * 4 // 3
BATCH = 64

_ready: tuple[int, list[str]] = (0, [])
"""Whose they are, and ids that nobody has yet. Threads may take from it at the same time."""


def new_holder_id() -> str:
    """120 unguessable bits in 20 visible characters.

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
    """From 0 up to 1.

    >>> 0 <= random() < 1
    True
    """
    return int.from_bytes(os.urandom(4), "big") / 4294967296
