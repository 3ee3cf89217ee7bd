"""What a mailbox is in both colours: where one acquisition hears its pushes. An inbox brings them.

Rules kept here: if a mailbox may have missed a notification, `wait` returns None and the core repeats its
request.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import Any, Generic

from lockfast.stores.redis.transport.connect import LinkT
from lockfast.values import FirstNotification, GrantNotification


class BaseMailbox(ABC, Generic[LinkT]):
    """`_link` is the connection under which this acquisition asked last; `channel` is what it listens to there when
    that is the channel of a cluster `slot`."""

    __slots__ = ("_inbox", "_link", "_notifications", "channel", "holder", "slot")

    def __init__(self, inbox: Any, holder: str, slot: int | None = None) -> None:
        self._inbox = inbox
        self.holder = holder
        self.slot = slot
        self.channel = ""
        self._notifications: deque[GrantNotification | FirstNotification] = deque()
        self._link: LinkT | None = None

    @property
    def address(self) -> str:
        return self.channel or str(self._inbox.address)

    @property
    def connected(self) -> bool:
        """Whether pushes arrive."""
        link = self._link
        return link is not None and link.error is None and bool(self.channel or not self._inbox.sharded)

    @abstractmethod
    def wake(self) -> None:
        """Let whoever waits look."""

    def deliver(self, notification: GrantNotification | FirstNotification) -> None:
        self._notifications.append(notification)
        self.wake()

    def moved(self) -> None:
        """The slot is another node's now, and its channel with it."""
        self.channel = ""
        self.wake()

    def close(self) -> None:
        self._inbox.mailboxes.pop(self.holder, None)
