"""The inbox of a client: one named pipe, and a mailbox for each acquisition that waits.

    another process ──line──▶ pipe ──read by one who waits──▶ the mailbox of the holder it names
    this process ───────────────────────────────────────────▶ the mailbox, without the pipe

Rules kept here:

- The pipe is made when the first mailbox opens, and serves all that follow. Lines wait in it until somebody reads,
  so an open mailbox that nobody waits on misses nothing.
- A push to a holder that has no mailbox here is dropped: that acquisition has ended, and cleans up after itself.
- How one waits is what the two colours differ in: `leading.py` for threads, `looping.py` for asyncio.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from pathlib import Path

from lockfast.errors import StoreRefused, StoreUnavailable, closed_error
from lockfast.ports import Runtime, Waker
from lockfast.stores.sqlite.folder import make_private
from lockfast.stores.sqlite.pipe import Pipe, outlet_to, sweep
from lockfast.stores.sqlite.rules import Outlet
from lockfast.values import FirstNotification, GrantNotification


class SqliteMailbox:
    """`ports.Mailbox`; `news` is what came and was not yet taken, in order."""

    __slots__ = ("_inbox", "holder", "news", "waker")

    def __init__(self, inbox: Inbox, holder: str) -> None:
        self._inbox = inbox
        self.holder = holder
        self.news: deque[GrantNotification | FirstNotification] = deque()
        self.waker: Waker | None = None

    @property
    def address(self) -> str:
        return self._inbox.address

    async def open(self, until: float) -> None:
        self._inbox.register(self)

    async def wait(self, until: float) -> GrantNotification | FirstNotification | None:
        return await self._inbox.wait(self, until)

    def close(self) -> None:
        self._inbox.unregister(self)

    def take(self) -> GrantNotification | FirstNotification | None:
        return self.news.popleft() if self.news else None


class Inbox(ABC):
    """What both colours share. Invariants: `_boxes` has every open mailbox by its holder, and changes only under
    `_mutex`; `_pipe` is None until the first one opens, and again after `close` and `forget`."""

    def __init__(self, folder: str, runtime: Runtime) -> None:
        self._folder = folder
        self._runtime = runtime
        self._mutex = runtime.mutex()
        self._boxes: dict[str, SqliteMailbox] = {}
        self._pipe: Pipe | None = None
        self._closed = False

    @property
    def ready(self) -> bool:
        return self._pipe is not None

    @property
    def in_use(self) -> bool:
        """Whether any acquisition still has a mailbox here."""
        return bool(self._boxes)

    @property
    def address(self) -> str:
        """The name of the pipe; empty before there is one."""
        return "" if self._pipe is None else self._pipe.name

    def register(self, box: SqliteMailbox) -> None:
        with self._mutex:
            if self._pipe is None and not self._closed:
                self._pipe = self._make_pipe()
            self._boxes[box.holder] = box

    def _make_pipe(self) -> Pipe:
        try:
            make_private(Path(self._folder))
            sweep(self._folder)
            return Pipe(self._folder)
        except PermissionError as error:
            raise StoreRefused(
                f"No named pipe may be made in {self._folder}, so waiting is not possible: {error.strerror}. Give "
                "this user the right to write there."
            ) from error
        except OSError as error:
            raise StoreUnavailable(
                f"No named pipe could be made in {self._folder}, so waiting is not possible: {error.strerror}."
            ) from error

    def unregister(self, box: SqliteMailbox) -> None:
        with self._mutex:
            if self._boxes.get(box.holder) is box:
                del self._boxes[box.holder]

    def reach(self, address: str, holder: str) -> Outlet | None:
        """An open way to a waiter, None when it is gone."""
        if address != self.address:
            return outlet_to(self._folder, address)
        return _LocalOutlet(self) if holder in self._boxes else None

    def deliver(self, holder: str, news: GrantNotification | FirstNotification) -> None:
        """Put news into the mailbox they are for, if there is one, and wake who waits there."""
        with self._mutex:
            box = self._boxes.get(holder)
            if box is not None:
                box.news.append(news)
                self._alert(box)

    def _read(self) -> None:
        """Take everything out of the pipe."""
        if self._pipe is not None:
            for holder, news in self._pipe.read():
                self.deliver(holder, news)

    def _taken(self, box: SqliteMailbox) -> GrantNotification | FirstNotification | None:
        """What a wait on `box` ends with."""
        if self._closed:
            raise closed_error()
        return box.take()

    @abstractmethod
    async def wait(self, box: SqliteMailbox, until: float) -> GrantNotification | FirstNotification | None: ...

    @abstractmethod
    def _alert(self, box: SqliteMailbox) -> None:
        """Under `_mutex`: make who waits on `box` look."""

    @abstractmethod
    def close(self) -> None:
        """Wake everyone, and remove the pipe; a second time it does nothing."""

    def reset(self, *, forked: bool) -> None:
        """Drop all mailboxes: who waited there is gone, with its process or its event loop."""
        self._boxes = {}
        if forked:
            self._mutex = self._runtime.mutex()
            pipe, self._pipe = self._pipe, None
            if pipe is not None:
                pipe.close(remove=False)


class _LocalOutlet:
    """The way to a waiter of the same client."""

    __slots__ = ("_inbox",)

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox

    def send(self, holder: str, news: GrantNotification | FirstNotification) -> bool:
        """True even if the mailbox was closed meanwhile: its acquisition has learnt of the grant by asking, and must
        not lose it now, or it has given up, and gives back what it was given."""
        self._inbox.deliver(holder, news)
        return True
