"""Chance for both colours, from the operating system: ids that nobody can guess, and jitter.

A forked child must not repeat its parent's numbers; the operating system's never do.
"""

from __future__ import annotations

import os
from binascii import b2a_base64


def new_holder() -> str:
    """120 unguessable bits in 20 visible characters.

    >>> len(new_holder()), new_holder() == new_holder()
    (20, False)
    """
    return b2a_base64(os.urandom(15), newline=False).decode("ascii")


def random() -> float:
    """From 0 up to 1.

    >>> 0 <= random() < 1
    True
    """
    return int.from_bytes(os.urandom(4), "big") / 4294967296
