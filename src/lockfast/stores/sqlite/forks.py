"""What has to happen around a fork, for every store of this process.

`database.py` says why. The hooks are registered once, and know the stores only weakly.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol


class Forkable(Protocol):
    """What lets go before a fork, goes on after it, and forgets in the child."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def reset(self, *, forked: bool) -> None: ...


_known: weakref.WeakSet[Forkable] = weakref.WeakSet()
_gate = threading.Lock()
"""Held while `_known` changes, and from before a fork until after it."""


def remember(store: Forkable) -> None:
    """Include `store` from now on."""
    with _gate:
        _known.add(store)


def _before() -> None:
    _gate.acquire()
    for store in list(_known):
        store.pause()


def _after_in_parent() -> None:
    for store in list(_known):
        store.resume()
    _gate.release()


def _after_in_child() -> None:
    global _gate
    _gate = threading.Lock()
    for store in list(_known):
        store.reset(forked=True)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
