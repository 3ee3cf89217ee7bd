"""A connection for threads that wait on several at once, as a quorum does.

Who waits on one connection reads it (see `link.py`). Who waits on five parks each wait instead of blocking in it, and
then reads all of them in one poll(): no thread per connection, and the requests of all are out before the first wait.

Rules kept here: as in `link.py`, one thread reads a connection at a time. Whoever finds that another reads it already
makes itself known as a follower first, and looks again whether it may read; whoever stops reading wakes a follower.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Collection, Generator, Sequence
from typing import Any

from lockfast.stores.redis.topology.quorum_node import not_connected
from lockfast.stores.redis.transport.thread_inbox import ThreadInbox
from lockfast.stores.redis.transport.threads import PendingReply, ThreadLink, ThreadWire

DRAIN_AFTER = 0.02
"""Seconds after which an answer that nobody waits for is read, to see whether it has come."""

_this_thread = threading.local()


class ParkingLink(ThreadLink):
    """Its waits are parked: `ports.Together` serves many of them with one wait."""

    blocking_reads = False

    async def wait_for(self, pending: PendingReply, until: float) -> None:
        while not pending.ready and self.error is None and self._runtime.now() < until:
            await _Parked(self, pending, until)

    def start_reading(self) -> bool:
        """Whether this thread is the one that reads now; what TLS has decrypted already is taken in at once."""
        if not self.reading.acquire(blocking=False):
            return False
        if self._tls_mutex is not None:
            self.read_once()
        return True

    def stop_reading(self) -> None:
        self.reading.release()
        if self.sleepers:
            self.wake_sleeper()

    def follow(self, pending: PendingReply, bell: _Bell) -> None:
        pending.waker = bell
        self.sleepers[pending] = None

    def unfollow(self, pending: PendingReply) -> None:
        self.sleepers.pop(pending, None)
        pending.waker = None
        if not self.reading.locked():
            self.wake_sleeper()

    def fileno(self) -> int:
        return self._socket.fileno()


class _Parked:
    """`ports.Parked`: one wait for one pending."""

    __slots__ = ("link", "pending", "until")

    def __init__(self, link: ParkingLink, pending: PendingReply, until: float) -> None:
        self.link = link
        self.pending = pending
        self.until = until

    def __await__(self) -> Generator[_Parked, None, None]:
        yield self

    @property
    def ready(self) -> bool:
        return self.pending.ready or self.link.error is not None

    def wait_any(self, others: Sequence[Any]) -> None:
        _Watch(others).wait()


class _Bell:
    """`ports.Waker` that poll() can wait for: other threads ring it when they have read what we wait for."""

    def __init__(self) -> None:
        self.inlet, self._outlet = os.pipe()
        os.set_blocking(self.inlet, False)
        os.set_blocking(self._outlet, False)

    def wake(self) -> None:
        try:
            os.write(self._outlet, b"!")
        except (BlockingIOError, OSError):
            pass  # it has been rung often enough

    async def wait(self, until: float | None) -> bool:
        raise NotImplementedError("A bell is waited for by poll().")

    def silence(self) -> None:
        try:
            os.read(self.inlet, 4096)
        except BlockingIOError:
            pass

    def __del__(self) -> None:
        os.close(self.inlet)
        os.close(self._outlet)


def _bell() -> _Bell:
    bell: _Bell | None = getattr(_this_thread, "bell", None)
    if bell is None:
        _this_thread.bell = bell = _Bell()
    return bell


def _poll_of(numbers: Collection[int]) -> select.poll:
    """A poll object for these descriptors. The one of last time serves again: a thread mostly asks the same nodes."""
    wanted = frozenset(number for number in numbers if number >= 0)
    watched, poll = getattr(_this_thread, "poll", (frozenset[int](), None))
    if poll is None:
        poll = select.poll()
    if watched != wanted:
        for number in watched - wanted:
            poll.unregister(number)
        for number in wanted - watched:
            poll.register(number, select.POLLIN)
    _this_thread.poll = (wanted, poll)
    return poll


class _Watch:
    """One wait for several replies, each on its own link."""

    def __init__(self, parked: Sequence[_Parked]) -> None:
        self._parked = parked
        self._read: dict[int, ParkingLink] = {}
        self._followed: list[_Parked] = []

    def wait(self) -> None:
        try:
            self._start()
            if not any(one.ready for one in self._parked):
                self._poll()
        except BaseException:
            for link in self._read.values():
                link.fail("reading was interrupted")
            raise
        finally:
            self._stop()

    def _start(self) -> None:
        for one in self._parked:
            if not self._reads(one.link):
                one.link.follow(one.pending, _bell())
                self._followed.append(one)
        for one in self._followed:  # whoever read may have stopped before it could see us follow
            self._reads(one.link)

    def _reads(self, link: ParkingLink) -> bool:
        if self._read.get(number := link.fileno()) is link:
            return True
        if not link.start_reading():
            return False
        self._read[number] = link
        return True

    def _poll(self) -> None:
        first = min([one.until for one in self._parked])
        left = first - self._parked[0].link._runtime.now()
        watched = [*self._read, _bell().inlet] if self._followed else self._read
        for number, _ in _poll_of(watched).poll(left * 1000 if left > 0 else 0):
            link = self._read.get(number)
            if link is not None:
                link.read_once()

    def _stop(self) -> None:
        for link in self._read.values():
            link.stop_reading()
        for one in self._followed:
            one.link.unfollow(one.pending)
        if self._followed:
            _bell().silence()


class ThreadVotingWire(ThreadWire):
    """`voting.VotingWire` for threads."""

    link_class = ParkingLink
    _may_dial = False

    @property
    def connected(self) -> bool:
        link = self._link
        return link is not None and link.error is None

    @property
    def silent_since(self) -> float | None:
        if self._link is None:
            return None
        unanswered = self._link.unanswered
        try:
            sent_at = unanswered[0].sent_at
            if self._runtime.now() - sent_at > DRAIN_AFTER:
                self.listen()  # it may have answered long ago, and nobody had to read that
                sent_at = unanswered[0].sent_at
            return sent_at
        except IndexError:
            return None

    async def connect(self, until: float) -> bool:
        with self._mutex:
            if self.connected:
                return False
            self._may_dial = True
            try:
                self._connect(until)
            finally:
                self._may_dial = False
            return True

    def _connect(self, until: float) -> ThreadLink:
        if not self._may_dial:
            raise not_connected()
        return super()._connect(until)


class ThreadVotingInbox(ThreadInbox):
    """`voting.VotingInbox` for threads."""

    link_class = ParkingLink

    async def connect(self, until: float) -> None:
        await super().open_link(until)

    async def open_link(self, until: float) -> ThreadLink:
        if not self.listening:
            raise not_connected()
        return await super().open_link(until)
