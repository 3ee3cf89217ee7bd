"""Storage of a lock's token (redis-py's `lock.local.token`): per thread, per task, or shared.

Rules:
- A forked child does not inherit a token.
- A thread that never acquired the lock reads None, where redis-py raises AttributeError.
- A task that acquired the lock sees only its own token, so that two tasks that share a lock object cannot release each
  other's. A task that never acquired it sees the last token: redis-py lets any task release.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, MutableMapping
from typing import Any
from weakref import WeakKeyDictionary, ref


class SharedToken:
    """One token for all threads and tasks (`thread_local=False`), with the pid that set it."""

    _value: tuple[int, bytes | None] = (0, None)

    @property
    def token(self) -> bytes | None:
        pid, token = self._value
        return token if pid == os.getpid() else None

    @token.setter
    def token(self, token: bytes | None) -> None:
        self._value = (os.getpid(), token)


class ThreadToken(threading.local, SharedToken):
    """A token per thread."""


class TaskToken(SharedToken):
    """A token per task. `_value` holds the last token and `_setter` the task that set it."""

    def __init__(self) -> None:
        self._tokens: MutableMapping[Any, bytes | None] = WeakKeyDictionary()
        self._setter: Callable[[], asyncio.Task[Any] | None] = lambda: None

    @property
    def token(self) -> bytes | None:
        pid, last = self._value
        if pid != os.getpid():
            return None
        task = _current_task()
        if task not in self._tokens:
            return last
        return self._tokens[task] or (None if self._setter_runs() else last)

    @token.setter
    def token(self, token: bytes | None) -> None:
        pid, last = self._value
        if pid != os.getpid():
            self._tokens.clear()
            last = None
        task, before = _current_task(), self.token
        if token is None:
            for other in [one for one, its in self._tokens.items() if its == before]:
                self._tokens[other] = None  # a released token belongs to no task
        else:
            if task is not None:
                self._tokens[task] = token
            self._setter = (lambda: None) if task is None else ref(task)
        if token is not None or before == last:
            last = token
        self._value = (os.getpid(), last)

    def _setter_runs(self) -> bool:
        """Whether the task that set the last token still runs. Before Python 3.12 `asyncio.wait_for` acquires in a
        task of its own, which ends: then the token belongs to the task that awaited it."""
        setter = self._setter()
        return setter is not None and not setter.done()


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None  # outside an event loop
