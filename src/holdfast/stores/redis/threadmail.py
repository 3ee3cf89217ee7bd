"""Where one acquisition of a thread hears its pushes; the inbox in `threads.py` brings them.

Rules kept here: a mailbox that may have missed a push says so: its `wait` returns None, and the core asks again.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from holdfast.stores.redis.link import Link, Slot
from holdfast.values import Next, Push

if TYPE_CHECKING:
    from holdfast.stores.redis.threads import ThreadInbox


class ThreadMailbox:
    """`ports.Mailbox`. `_link` is the connection under which this acquisition asked last; `channel` is what it listens
    to there when that is the channel of a cluster `slot`."""

    __slots__ = ("_inbox", "_link", "_pushes", "_slot", "channel", "holder", "slot")

    def __init__(self, inbox: ThreadInbox, holder: str, slot: int | None = None) -> None:
        self._inbox = inbox
        self.holder = holder
        self.slot = slot
        self.channel = ""
        self._slot = Slot()
        self._pushes: deque[Push | Next] = deque()
        self._link: Link | None = None

    @property
    def address(self) -> str:
        return self.channel or self._inbox.address

    @property
    def sound(self) -> bool:
        """Whether pushes arrive."""
        link = self._link
        return link is not None and link.error is None and bool(self.channel or not self._inbox.sharded)

    async def open(self, until: float) -> None:
        self._inbox.add(self)
        if self.slot is None or not self._inbox.sharded:
            self._link = self._inbox.sound_link(until)
        else:
            self._link, self.channel = await self._inbox.join(self.slot, until)

    def push(self, push: Push | Next) -> None:
        self._pushes.append(push)
        slot = self._slot
        slot.ready = True
        if slot.waker is not None:
            slot.wake()

    def moved(self) -> None:
        """The slot is another node's now, and its channel with it."""
        self.channel = ""
        self._slot.settle(None)

    async def hear(self, until: float) -> Push | Next | None:
        """The next push; None when `until` passed, or when this mailbox is not `sound`."""
        link = self._link
        self._slot.ready = False  # before looking: a push that comes now is seen in one place or the other
        if not self._pushes and link is not None and self.sound:
            self._inbox.check(link)
            await link.await_slot(self._slot, until)
        return self._pushes.popleft() if self._pushes else None

    async def wait(self, until: float) -> Push | Next | None:
        push = await self.hear(until)
        if push is None and not self.sound:
            self._link = self._inbox.sound_link(until)  # a push may have come while nobody listened
        return push

    def close(self) -> None:
        self._inbox.remove(self)
