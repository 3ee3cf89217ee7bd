"""Waiting on threads: one of those who wait reads the pipe for all.

    nobody leads ──somebody waits──▶ it leads: polls the pipe, and puts what comes into the mailboxes
                                     │
                 its own push came, or its time is up: it wakes one of the others, who leads from then on

Rules kept here: there is no thread besides those who wait; while anybody waits, somebody leads or has been woken to
lead; who leaves for whatever reason, an interrupt included, sees to that.
"""

from __future__ import annotations

import select

from lockfast.ports import Runtime
from lockfast.stores.sqlite.inbox import Inbox, SqliteMailbox
from lockfast.stores.sqlite.pipe import Pipe
from lockfast.values import FirstNotification, GrantNotification

LONGEST_POLL = 3600.0
"""Seconds; the system call takes milliseconds in an int."""


class LeadingInbox(Inbox):
    """Invariants, under `_mutex`: `_leader` is the one mailbox whose thread may poll and read the pipe; `_waiting`
    has every mailbox that a thread waits on, in the order in which they came."""

    def __init__(self, folder: str, runtime: Runtime) -> None:
        super().__init__(folder, runtime)
        self._waiting: dict[SqliteMailbox, None] = {}
        self._leader: SqliteMailbox | None = None

    async def wait(self, box: SqliteMailbox, until: float) -> GrantNotification | FirstNotification | None:
        if box.waker is None:
            box.waker = self._runtime.waker()
        with self._mutex:
            self._waiting[box] = None
        try:
            while not box.news and not self._closed:
                pipe = self._start_to_lead(box)
                if pipe is not None:
                    self._lead(pipe, until)
                elif not await box.waker.wait(until):
                    break
                if self._runtime.now() >= until:
                    break
        finally:
            self._leave(box)
        return self._taken(box)

    def _start_to_lead(self, box: SqliteMailbox) -> Pipe | None:
        with self._mutex:
            if self._leader is not None or self._pipe is None or box.news or self._closed:
                return None
            self._leader = box
            return self._pipe

    def _lead(self, pipe: Pipe, until: float) -> None:
        left = min(until - self._runtime.now(), LONGEST_POLL)
        try:
            poll = select.poll()
            poll.register(pipe.fd, select.POLLIN)
            if poll.poll(max(0.0, left * 1000)):
                self._read()
        finally:
            with self._mutex:
                self._leader = None

    def _leave(self, box: SqliteMailbox) -> None:
        with self._mutex:
            self._waiting.pop(box, None)
            if self._leader is box:  # an interrupt came just before it could begin to lead
                self._leader = None
            self._remove_pipe_if_done()
            if self._leader is None and self._waiting:
                # The newest is the last to get the lock, so it can lead for long.
                self._wake(next(reversed(self._waiting)))

    def _alert(self, box: SqliteMailbox) -> None:
        if box is self._leader and self._pipe is not None:
            self._pipe.nudge()  # it polls the pipe, and does not hear its waker
        else:
            self._wake(box)

    def _wake(self, box: SqliteMailbox) -> None:
        if box.waker is not None:
            box.waker.wake()

    def close(self) -> None:
        with self._mutex:
            self._closed = True
            for box in self._waiting:
                self._alert(box)
            self._remove_pipe_if_done()

    def _remove_pipe_if_done(self) -> None:
        if self._closed and self._leader is None and self._pipe is not None:
            pipe, self._pipe = self._pipe, None
            pipe.close(remove=True)

    def reset(self, *, forked: bool) -> None:
        self._waiting = {}
        self._leader = None
        super().reset(forked=forked)
