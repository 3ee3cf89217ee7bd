"""Waiting by looking again and again, where the server can push nothing: politely, with growing, jittered pauses."""

from __future__ import annotations

from lockfast.ports import Mailbox, Runtime, Waker
from lockfast.values import FirstNotification, GrantNotification

FIRST_PAUSE = 0.004
MOST_PAUSE = 0.1
"""Seconds between two looks: doubling from the one to the other, and each a random half shorter."""


class PollingInbox:
    """`store.Inbox` of a store that pushes nothing."""

    listening = True

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.open: set[PollingMailbox] = set()

    def mailbox(self, holder: str) -> Mailbox:
        return PollingMailbox(self)

    def drop(self) -> None:
        for box in tuple(self.open):
            box.wake()

    async def close(self) -> None:
        self.drop()  # who waits asks again at once, and is told that the connection is closed

    def reset(self, *, forked: bool) -> None:
        self.open = set()


class PollingMailbox:
    """`ports.Mailbox`: nothing ever comes; `wait` says when to look again."""

    address = "nowhere"

    def __init__(self, inbox: PollingInbox) -> None:
        self._inbox = inbox
        self._pause = FIRST_PAUSE
        self._waker: Waker | None = None

    async def open(self, until: float) -> None:
        self._inbox.open.add(self)

    async def wait(self, until: float) -> GrantNotification | FirstNotification | None:
        runtime = self._inbox.runtime
        if self._waker is None:
            self._waker = runtime.waker()
        pause = self._pause * (0.5 + 0.5 * runtime.random())
        self._pause = min(MOST_PAUSE, 2 * self._pause)
        await self._waker.wait(min(until, runtime.now() + pause))
        return None

    def wake(self) -> None:
        if self._waker is not None:
            self._waker.wake()

    def close(self) -> None:
        self._inbox.open.discard(self)
