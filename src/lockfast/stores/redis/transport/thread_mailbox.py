"""A mailbox for threads: whoever waits for a push reads the inbox's connection, see `link.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockfast.stores.redis.transport.mailbox import BaseMailbox
from lockfast.stores.redis.transport.thread_link import Link, Slot
from lockfast.values import FirstNotification, GrantNotification

if TYPE_CHECKING:
    from lockfast.stores.redis.transport.threads import ThreadInbox


class ThreadMailbox(BaseMailbox[Link]):
    """`ports.Mailbox`."""

    __slots__ = ("_slot",)

    _inbox: ThreadInbox

    def __init__(self, inbox: ThreadInbox, holder: str, slot: int | None = None) -> None:
        super().__init__(inbox, holder, slot)
        self._slot = Slot()

    async def open(self, until: float) -> None:
        self._inbox.boxes[self.holder] = self
        if self.slot is None or not self._inbox.sharded:
            self._link = self._inbox.sound_link(until)
        else:
            self._link, self.channel = await self._inbox.join(self.slot, until)

    def wake(self) -> None:
        self._slot.settle(None)

    async def hear(self, until: float) -> GrantNotification | FirstNotification | None:
        """The next push; None when `until` passed, or when this mailbox is not `sound`."""
        link = self._link
        self._slot.ready = False  # before looking: a push that comes now is seen in one place or the other
        if not self._pushes and link is not None and self.sound:
            self._inbox.check(link)
            await link.await_slot(self._slot, until)
        return self._pushes.popleft() if self._pushes else None

    async def wait(self, until: float) -> GrantNotification | FirstNotification | None:
        push = await self.hear(until)
        if push is None and not self.sound:
            self._link = self._inbox.sound_link(until)  # a push may have come while nobody listened
        return push
