"""How waiters receive notifications: one named pipe per client, and a mailbox per acquisition.

    another process ──line──▶ pipe ──read by one waiter──▶ the mailbox of the holder id in the line
    this process ────────────────────────────────────────▶ the mailbox

Rules:

- The pipe is created with the first mailbox and serves all later ones. Lines stay in it until a waiter reads, so an
  open mailbox without a waiting thread or task misses nothing.
- A line is `holder attempt fence` or `holder attempt fence slots` for a grant, else `holder attempt next ttl_left`. It
  is short enough for an atomic write: instead of very many slots, it tells the waiter to poll for its grant. A line for
  a holder without a mailbox is dropped: that acquisition has ended, and cleans up after itself.
- Opening a pipe for writing fails at once if it has no reader. This detects a dead process, however it died, as long as
  no other process keeps the reading end: a forked child closes its copy.
- The reader also keeps a writing end open; otherwise it would read "end of file" in a loop after the last writer.
- On threads, one of the waiting threads reads for all. While threads wait, one of them is the reader or has been woken
  to become it. A thread that stops waiting for any reason, interrupts included, ensures that by waking another one.
- On asyncio, the event loop watches the pipe while any task waits.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import time
from abc import ABC, abstractmethod
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from lockfast.errors import StoreRefused, StoreUnavailable, closed_error
from lockfast.ports import Runtime
from lockfast.stores.sqlite.location import make_private
from lockfast.stores.sqlite.transactions import Channel
from lockfast.values import FirstNotification, GrantNotification, Notification

if TYPE_CHECKING:
    import asyncio

PREFIX = "inbox-"
STALE_AFTER = 60.0  # seconds after which a pipe without a reader is stale; before, its creator may be about to open it
LONGEST_POLL = 3600.0  # seconds; the system call takes milliseconds as an int


class Pipe:
    """A named pipe in `folder` that this process reads."""

    def __init__(self, folder: str) -> None:
        self.fd = -1
        while self.fd < 0:
            self.name = PREFIX + os.urandom(8).hex()
            self._path = f"{folder}/{self.name}"
            os.mkfifo(self._path, 0o600)
            # Not found if this process was stopped for so long that another one removed the pipe as stale.
            with suppress(FileNotFoundError):
                self.fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK)
        self._writer = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK)
        self._rest = b""

    def read(self) -> list[tuple[str, Notification]]:
        """Read all complete lines without blocking; skip invalid ones."""
        try:
            text = self._rest + os.read(self.fd, 65_536)
        except BlockingIOError:
            return []
        *lines, self._rest = text.split(b"\n")
        return [message for line in lines if (message := decode(line)) is not None]

    def wake_reader(self) -> None:
        with suppress(BlockingIOError):  # full: the reader wakes anyway
            os.write(self._writer, b"\n")

    def close(self, *, remove: bool) -> None:
        os.close(self.fd)
        os.close(self._writer)
        if remove:
            _remove(self._path)


class PipeChannel:
    """A connection to a client in another process, opened before its grant is committed."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def send(self, holder: str, notification: Notification) -> bool:
        """False if the reader is gone. A full pipe counts as sent: its reader may be alive, and finds its grant at its
        next request."""
        try:
            _write_without_sigpipe(self._fd, encode(holder, notification))
        except OSError as error:
            return isinstance(error, BlockingIOError)
        return True

    def __del__(self) -> None:
        os.close(self._fd)


def open_channel(folder: str, address: str) -> PipeChannel | None:
    """Connect to the client that reads the pipe `address`.

    None if the client is dead, whose pipe is then removed, or if the pipe is full because the client does not read.
    """
    path = f"{folder}/{address}"
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ENXIO:
            _remove(path)
        return None
    channel, poll = PipeChannel(fd), select.poll()
    poll.register(fd, select.POLLOUT)
    return channel if poll.poll(0) == [(fd, select.POLLOUT)] else None


def encode(holder: str, notification: Notification) -> bytes:
    match notification:
        case GrantNotification(attempt, fence, slots):
            line = f"{holder} {attempt} {fence} {','.join(map(str, slots))}".rstrip()
            if len(line) < select.PIPE_BUF:
                return f"{line}\n".encode("ascii")
            return encode(holder, FirstNotification(attempt, 0.0))
        case FirstNotification(attempt, ttl_left):
            return f"{holder} {attempt} next {ttl_left}\n".encode("ascii")


def decode(line: bytes) -> tuple[str, Notification] | None:
    """Parse a line; None if it is invalid.

    >>> decode(b"moto 3 1700000000000000")
    ('moto', GrantNotification(attempt=3, fence=1700000000000000, slots=()))
    >>> decode(b"moto 3 1700000000000000 0,2")
    ('moto', GrantNotification(attempt=3, fence=1700000000000000, slots=(0, 2)))
    >>> decode(b"moto 3 next 1.5")
    ('moto', FirstNotification(attempt=3, ttl_left=1.5))
    >>> decode(b"") is decode(b"moto three 4") is None
    True
    """
    with suppress(ValueError):
        match line.decode("ascii").split(" "):
            case holder, attempt, "next", ttl_left:
                return holder, FirstNotification(int(attempt), float(ttl_left))
            case holder, attempt, fence, *rest if len(rest) < 2:
                slots = tuple(int(slot) for part in rest for slot in part.split(","))
                return holder, GrantNotification(int(attempt), int(fence), slots)
    return None


def remove_stale_pipes(folder: str) -> None:
    """Remove the pipes of dead processes."""
    before = time.time() - STALE_AFTER
    for pipe in Path(folder).glob(f"{PREFIX}*"):
        with suppress(OSError):  # already removed
            if pipe.lstat().st_mtime < before:
                open_channel(folder, pipe.name)


def _remove(path: str) -> None:
    with suppress(OSError):  # another process removed it first
        Path(path).unlink()


def _write_without_sigpipe(fd: int, line: bytes) -> int:
    """Write, even if the program restored SIGPIPE's default action, which would kill this process."""
    if signal.getsignal(signal.SIGPIPE) is not signal.SIG_DFL:
        return os.write(fd, line)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
    try:
        return os.write(fd, line)
    except BrokenPipeError:
        signal.sigwait({signal.SIGPIPE})  # consume the pending signal
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


class SqliteMailbox:
    """`ports.Mailbox`. `notifications` are those received and not yet consumed, in order."""

    def __init__(self, inbox: Inbox, holder: str) -> None:
        self._inbox = inbox
        self.holder = holder
        self.notifications: deque[Notification] = deque()

    @property
    def address(self) -> str:
        return self._inbox.address

    async def open(self, until: float) -> None:
        self.waker = self._inbox.runtime.waker()
        self._inbox.register(self)

    async def wait(self, until: float) -> Notification | None:
        return await self._inbox.wait(self, until)

    def close(self) -> None:
        self._inbox.unregister(self)


class Inbox(ABC):
    """The part that both flavours share.

    Invariants: `_boxes` has every open mailbox by its holder id, and `_waiting` every mailbox that a thread or task
    waits on, oldest first. Both change only under `_mutex`. `_pipe` is None before the first mailbox opens and after
    `close` or a fork.
    """

    def __init__(self, folder: str, runtime: Runtime) -> None:
        self._folder = folder
        self.runtime = runtime
        self._mutex = runtime.mutex()
        self._boxes: dict[str, SqliteMailbox] = {}
        self._waiting: dict[SqliteMailbox, None] = {}
        self._pipe: Pipe | None = None
        self._closed = False

    @property
    def address(self) -> str:
        """The name of the pipe; empty before it exists."""
        return "" if self._pipe is None else self._pipe.name

    def register(self, box: SqliteMailbox) -> None:
        with self._mutex:
            if self._pipe is None and not self._closed:
                self._pipe = self._new_pipe()
            self._boxes[box.holder] = box

    def _new_pipe(self) -> Pipe:
        try:
            make_private(self._folder)
            remove_stale_pipes(self._folder)
            return Pipe(self._folder)
        except OSError as error:
            why = f"Cannot create a named pipe in {self._folder}: {error.strerror}. Waiting for a lock is not possible."
            if isinstance(error, PermissionError):
                raise StoreRefused(f"{why} Give this user the right to write there.") from error
            raise StoreUnavailable(why) from error

    def unregister(self, box: SqliteMailbox) -> None:
        with self._mutex:
            if self._boxes.get(box.holder) is box:
                del self._boxes[box.holder]

    def channel_to(self, address: str, holder: str) -> Channel | None:
        """Connect to a waiter; None if it is gone."""
        if address != self.address:
            return open_channel(self._folder, address)
        return self if holder in self._boxes else None

    def send(self, holder: str, notification: Notification) -> bool:
        """Put a notification into the mailbox of `holder`, if it is still open, and wake its waiter.

        Always True. The acquisition of a closed mailbox has the grant from a request and must keep it, or it gave up
        and releases the grant itself.
        """
        with self._mutex:
            box = self._boxes.get(holder)
            if box is not None:
                box.notifications.append(notification)
                self._wake(box)
        return True

    async def wait(self, box: SqliteMailbox, until: float) -> Notification | None:
        """Return the next notification for `box`, or None when `until` has passed."""
        with self._mutex:
            self._waiting[box] = None
        try:
            await self._wait(box, until)
        finally:
            with self._mutex:
                self._waiting.pop(box, None)
                self._leave(box)
        if self._closed:
            raise closed_error()
        return box.notifications.popleft() if box.notifications else None

    def close(self) -> None:
        """Wake all waiters and remove the pipe. A second call does nothing."""
        with self._mutex:
            self._closed = True
            for box in self._waiting:
                self._wake(box)
            self._remove_pipe()

    def reset(self, *, forked: bool) -> None:
        """Drop all mailboxes: their waiters ended with the parent process or the event loop."""
        self._boxes, self._waiting = {}, {}
        if forked:
            self._mutex = self.runtime.mutex()
            self._close_pipe(remove=False)

    def _read_pipe(self) -> None:
        if self._pipe is not None:
            for holder, notification in self._pipe.read():
                self.send(holder, notification)

    def _close_pipe(self, *, remove: bool) -> None:
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            pipe.close(remove=remove)

    @abstractmethod
    async def _wait(self, box: SqliteMailbox, until: float) -> None:
        """Return when `box` has a notification, the inbox is closed or `until` has passed."""

    # Called under `_mutex`:

    def _wake(self, box: SqliteMailbox) -> None:
        box.waker.wake()

    @abstractmethod
    def _leave(self, box: SqliteMailbox) -> None:
        """The thread or task of `box` has stopped waiting."""

    @abstractmethod
    def _remove_pipe(self) -> None: ...


class ThreadInbox(Inbox):
    """Invariant, under `_mutex`: only the thread of the mailbox `_reader` polls and reads the pipe."""

    _reader: SqliteMailbox | None = None

    async def _wait(self, box: SqliteMailbox, until: float) -> None:
        while not box.notifications and not self._closed:
            pipe = self._become_reader(box)
            if pipe is not None:
                self._poll(pipe, until)
            elif not await box.waker.wait(until):
                return
            if self.runtime.now() >= until:
                return

    def _become_reader(self, box: SqliteMailbox) -> Pipe | None:
        with self._mutex:
            if self._reader is not None or self._pipe is None or box.notifications or self._closed:
                return None
            self._reader = box
            return self._pipe

    def _poll(self, pipe: Pipe, until: float) -> None:
        left = min(until - self.runtime.now(), LONGEST_POLL)
        try:
            poll = select.poll()
            poll.register(pipe.fd, select.POLLIN)
            if poll.poll(max(0.0, left * 1000)):
                self._read_pipe()
        finally:
            with self._mutex:
                self._reader = None

    def _leave(self, box: SqliteMailbox) -> None:
        if self._reader is box:  # interrupted between becoming the reader and polling
            self._reader = None
        if self._closed:
            self._remove_pipe()
        if self._reader is None and self._waiting:
            # The newest waiter gets the lock last, so it can read for longest.
            next(reversed(self._waiting)).waker.wake()

    def _wake(self, box: SqliteMailbox) -> None:
        if box is self._reader and self._pipe is not None:
            self._pipe.wake_reader()  # it polls the pipe, not its waker
        else:
            super()._wake(box)

    def _remove_pipe(self) -> None:
        if self._reader is None:  # else the reader does it when it leaves
            self._close_pipe(remove=True)

    def reset(self, *, forked: bool) -> None:
        self._reader = None
        super().reset(forked=forked)


class AsyncInbox(Inbox):
    """Invariant: `_loop` watches the pipe while any task waits; None if no loop does."""

    _loop: asyncio.AbstractEventLoop | None = None

    async def _wait(self, box: SqliteMailbox, until: float) -> None:
        if self._loop is None and self._pipe is not None:
            import asyncio

            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._pipe.fd, self._read_pipe)
        while not box.notifications and not self._closed and await box.waker.wait(until):
            pass  # a wake-up may be left over from before this wait

    def _leave(self, box: SqliteMailbox) -> None:
        if not self._waiting:
            self._stop_watching()

    def _stop_watching(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None and self._pipe is not None and not loop.is_closed():
            loop.remove_reader(self._pipe.fd)

    def _remove_pipe(self) -> None:
        self._stop_watching()
        self._close_pipe(remove=True)

    def reset(self, *, forked: bool) -> None:
        # Leave the watch alone: the loop is closed, or in a forked child it belongs to the parent.
        self._loop = None
        super().reset(forked=forked)


INBOXES: dict[str, type[Inbox]] = {"threads": ThreadInbox, "asyncio": AsyncInbox}
