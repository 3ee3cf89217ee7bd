"""Waiting on asyncio: the event loop watches the pipe while any task waits."""

from __future__ import annotations

import asyncio

from lockfast.ports import Runtime
from lockfast.stores.sqlite.inbox import Inbox, SqliteMailbox
from lockfast.values import FirstNotification, GrantNotification


class LoopingInbox(Inbox):
    """Invariant: the pipe is watched by `_loop` exactly while `_waiting` is not empty."""

    def __init__(self, folder: str, runtime: Runtime) -> None:
        super().__init__(folder, runtime)
        self._waiting: set[SqliteMailbox] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def wait(self, box: SqliteMailbox, until: float) -> GrantNotification | FirstNotification | None:
        if box.waker is None:
            box.waker = self._runtime.waker()
        self._watch(box)
        try:
            while not box.news and not self._closed and await box.waker.wait(until):
                pass  # woken for a push, for the end, or by a call from before this wait
        finally:
            self._unwatch(box)
        return self._taken(box)

    def _watch(self, box: SqliteMailbox) -> None:
        if not self._waiting and self._pipe is not None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._pipe.fd, self._read)
        self._waiting.add(box)

    def _unwatch(self, box: SqliteMailbox) -> None:
        self._waiting.discard(box)
        if not self._waiting:
            self._stop_watching()

    def _stop_watching(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None and self._pipe is not None and not loop.is_closed():
            loop.remove_reader(self._pipe.fd)

    def _alert(self, box: SqliteMailbox) -> None:
        if box.waker is not None:
            box.waker.wake()

    def close(self) -> None:
        self._closed = True
        self._stop_watching()
        for box in self._waiting:
            self._alert(box)
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            pipe.close(remove=True)

    def reset(self, *, forked: bool) -> None:
        # The loop is not asked to stop watching: it is closed, or in a child it is still the parent's.
        self._waiting = set()
        self._loop = None
        super().reset(forked=forked)
