"""Named pipes as inboxes: how one process tells another of a grant, without a server.

Rules kept here:

- Each client that waits has one pipe, readable by its own user alone. A line is `holder turn fence` for a grant, or
  `holder turn next ttl_left`, shorter than what the system writes in one piece.
- Opening a pipe for writing fails at once when nobody reads it: so a dead process is told from a living one,
  however it died. For that no other process may keep the reading end, and a forked child closes its copy.
- The reader keeps a writing end too, or it would read "end of file" without pause when the last writer leaves.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import time
from pathlib import Path

from lockfast.values import FirstNotification, GrantNotification

PREFIX = "inbox-"
STALE_AFTER = 60.0
"""Seconds after which a pipe that nobody reads is no longer about to be opened by the process that made it."""
TRIES = 3


class Pipe:
    """The inbox of this process: a pipe in `folder` that it reads."""

    def __init__(self, folder: str) -> None:
        self.name, self.fd = _make(folder)
        self._path = f"{folder}/{self.name}"
        self._writer = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK)
        self._rest = b""

    def read(self) -> list[tuple[str, GrantNotification | FirstNotification]]:
        """All that has come, without waiting; lines that are none are left out."""
        try:
            text = self._rest + os.read(self.fd, 65_536)
        except BlockingIOError:
            return []
        *lines, self._rest = text.split(b"\n")
        return [letter for line in lines if (letter := decode(line)) is not None]

    def nudge(self) -> None:
        """Wake whoever polls this pipe."""
        try:
            os.write(self._writer, b"\n")
        except BlockingIOError:
            pass  # full: there is plenty to wake up for

    def close(self, *, remove: bool) -> None:
        os.close(self.fd)
        os.close(self._writer)
        if remove:
            _remove(self._path)


class PipeOutlet:
    """The way to a waiter in another process, open since before its grant was committed."""

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def send(self, holder: str, news: GrantNotification | FirstNotification) -> bool:
        """False when the reader has gone meanwhile. A pipe that has just become full says nothing about that: its
        reader may live, and even have found out by asking; so it is left to do that."""
        try:
            _write_unharmed(self._fd, encode(holder, news))
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True

    def has_room(self) -> bool:
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        return poll.poll(0) == [(self._fd, select.POLLOUT)]

    def __del__(self) -> None:
        os.close(self._fd)


def outlet_to(folder: str, address: str) -> PipeOutlet | None:
    """The way to the process that reads `address`; None when there is none, and then its pipe is removed, or when it
    has not read for so long that the pipe is full."""
    path = f"{folder}/{address}"
    try:
        outlet = PipeOutlet(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW))
    except OSError as error:
        if error.errno == errno.ENXIO:
            _remove(path)
        return None
    return outlet if outlet.has_room() else None


def encode(holder: str, news: GrantNotification | FirstNotification) -> bytes:
    what = str(news.fence) if isinstance(news, GrantNotification) else f"next {news.ttl_left}"
    return f"{holder} {news.attempt} {what}\n".encode("ascii")


def decode(line: bytes) -> tuple[str, GrantNotification | FirstNotification] | None:
    """What a line says; None when it is none of ours.

    >>> decode(b"moto 3 1700000000000000"), decode(b"moto 3 next 1.5")
    (('moto', Push(turn=3, fence=1700000000000000)), ('moto', Next(turn=3, ttl_left=1.5)))
    >>> decode(b"") is decode(b"moto three 4") is None
    True
    """
    try:
        holder, attempt, *what = line.decode("ascii").split(" ")
        if len(what) == 1:
            return holder, GrantNotification(int(attempt), int(what[0]))
        kind, ttl_left = what
        return (holder, FirstNotification(int(attempt), float(ttl_left))) if kind == "next" else None
    except ValueError:
        return None


def sweep(folder: str) -> None:
    """Remove the pipes of processes that are gone."""
    before = time.time() - STALE_AFTER
    with os.scandir(folder) as entries:
        stale = [entry.name for entry in entries if _is_old_pipe(entry, before)]
    for name in stale:
        outlet_to(folder, name)


def _is_old_pipe(entry: os.DirEntry[str], before: float) -> bool:
    try:
        return entry.name.startswith(PREFIX) and entry.stat(follow_symlinks=False).st_mtime < before
    except OSError:
        return False  # gone meanwhile


def _make(folder: str) -> tuple[str, int]:
    for tries_left in reversed(range(TRIES)):
        name = PREFIX + os.urandom(8).hex()
        os.mkfifo(f"{folder}/{name}", 0o600)
        try:
            return name, os.open(f"{folder}/{name}", os.O_RDONLY | os.O_NONBLOCK)
        except FileNotFoundError:  # this process stood still for so long that another swept the pipe
            if not tries_left:
                raise
    raise AssertionError("unreachable")


def _remove(path: str) -> None:
    try:
        Path(path).unlink()
    except OSError:
        pass  # another process was quicker


def _write_unharmed(fd: int, line: bytes) -> int:
    """Write without being killed by SIGPIPE, which a program may have set back to its deadly default."""
    if signal.getsignal(signal.SIGPIPE) is not signal.SIG_DFL:
        return os.write(fd, line)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
    try:
        return os.write(fd, line)
    except BrokenPipeError:
        signal.sigwait({signal.SIGPIPE})  # it is pending: this takes it away
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
