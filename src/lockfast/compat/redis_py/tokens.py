"""Where a lock keeps its token: per thread, per task, or in one place for all, as redis-py's `lock.local.token`.

Rules kept here: a forked child has no token of its parent's; a thread that never took the lock reads None, where
redis-py raises AttributeError; a task that took the lock sees its own token and nobody else's, so that two tasks that
share a lock object cannot free one another's. A task that never did sees the last one: redis-py lets any task release.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, MutableMapping
from typing import Any
from weakref import WeakKeyDictionary, ref


class SharedToken:
    """One token for all (`thread_local=False`)."""

    _value: tuple[int, bytes | None] = (0, None)

    @property
    def token(self) -> bytes | None:
        process, token = self._value
        return token if process == os.getpid() else None

    @token.setter
    def token(self, token: bytes | None) -> None:
        self._value = (os.getpid(), token)


class ThreadToken(threading.local, SharedToken):
    """A token per thread."""


class TaskToken(SharedToken):
    """A token per task. `_value` is the last one, and `_taker` the task that set it."""

    def __init__(self) -> None:
        self._tokens: MutableMapping[Any, bytes | None] = WeakKeyDictionary()
        self._taker: Callable[[], asyncio.Task[Any] | None] = lambda: None

    @property
    def token(self) -> bytes | None:
        process, last = self._value
        if process != os.getpid():
            return None
        task = _task()
        if task not in self._tokens:
            return last
        return self._tokens[task] or (None if self._is_used() else last)

    @token.setter
    def token(self, token: bytes | None) -> None:
        process, last = self._value
        if process != os.getpid():
            self._tokens.clear()
            last = None
        task, before = _task(), self.token
        if token is None:
            for one in [one for one, its in self._tokens.items() if its == before]:
                self._tokens[one] = None  # given back by one, it is nobody's
        else:
            if task is not None:
                self._tokens[task] = token
            self._taker = (lambda: None) if task is None else ref(task)
        if token is not None or before == last:
            last = token
        self._value = (os.getpid(), last)

    def _is_used(self) -> bool:
        """Whether the last one to take the lock goes on. It does not under `asyncio.wait_for`, which runs the call in a
        task of its own before Python 3.12: then the token is whoever's that waited for it."""
        taker = self._taker()
        return taker is not None and not taker.done()


def _task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None  # outside any loop
