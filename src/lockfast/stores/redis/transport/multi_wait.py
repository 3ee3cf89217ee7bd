"""A connection for threads that wait on several connections at once, as a quorum does.

A thread that waits on one connection reads it (see `threads.py`). Here each wait suspends its coroutine instead, so
that all requests are sent before the thread blocks. It then reads all connections with one poll(), without a thread
per connection.

One thread reads a connection at a time. A thread that finds another one reading first registers as a sleeper and then
tries again to become the reader; a thread that stops reading wakes a sleeper. So no wake-up is lost.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Collection, Generator, Sequence
from typing import Any

from lockfast.stores.redis.transport.threads import PendingReply, ThreadLink

_this_thread = threading.local()


class MultiWaitLink(ThreadLink):
    """A link whose waits suspend, so that `Runtime.gather` can serve many of them in one poll()."""

    blocking_reads = False

    async def wait_for(self, pending: PendingReply, until: float) -> None:
        while not pending.ready and self.error is None and self._runtime.now() < until:
            await _Wait(self, pending, until)

    def now(self) -> float:
        return self._runtime.now()

    def fileno(self) -> int:
        return self._socket.fileno()

    def start_reading(self) -> bool:
        """Try to become the reader."""
        if not self.reading.acquire(blocking=False):
            return False
        if self.uses_tls:
            self.read_once()  # poll() does not see data that TLS has already decrypted
        return True

    def stop_reading(self) -> None:
        self.reading.release()
        if self.sleepers:
            self.wake_sleeper()

    def add_sleeper(self, pending: PendingReply, waker: _PipeWaker) -> None:
        pending.waker = waker
        self.sleepers[pending] = None

    def remove_sleeper(self, pending: PendingReply) -> None:
        self.sleepers.pop(pending, None)
        pending.waker = None
        if not self.reading.locked():
            self.wake_sleeper()


class _Wait:
    """`ports.PendingWait`: one coroutine's wait for one reply."""

    __slots__ = ("link", "pending", "until")

    def __init__(self, link: MultiWaitLink, pending: PendingReply, until: float) -> None:
        self.link = link
        self.pending = pending
        self.until = until

    def __await__(self) -> Generator[_Wait, None, None]:
        yield self

    @property
    def ready(self) -> bool:
        return self.pending.ready or self.link.error is not None

    def wait_any(self, others: Sequence[Any]) -> None:
        _MultiWait(others).wait()


class _PipeWaker:
    """`ports.Waker` as a file descriptor for poll(): another thread wakes it when it has read our reply."""

    def __init__(self) -> None:
        self.fileno, self._write_end = os.pipe()
        os.set_blocking(self.fileno, False)
        os.set_blocking(self._write_end, False)

    def wake(self) -> None:
        try:
            os.write(self._write_end, b"!")
        except OSError:
            pass  # the pipe is full: the wake-up is pending already

    async def wait(self, until: float | None) -> bool:
        raise NotImplementedError("poll() waits for this waker.")

    def clear(self) -> None:
        try:
            os.read(self.fileno, 4096)
        except BlockingIOError:
            pass

    def __del__(self) -> None:
        os.close(self.fileno)
        os.close(self._write_end)


def _thread_waker() -> _PipeWaker:
    waker: _PipeWaker | None = getattr(_this_thread, "waker", None)
    if waker is None:
        _this_thread.waker = waker = _PipeWaker()
    return waker


def _poller(descriptors: Collection[int]) -> select.poll:
    """Return a poll object for these descriptors. It is kept, because a thread mostly waits for the same servers."""
    wanted = frozenset(number for number in descriptors if number >= 0)
    registered, poller = getattr(_this_thread, "poller", (frozenset[int](), None))
    if poller is None:
        poller = select.poll()
    for number in registered - wanted:
        poller.unregister(number)
    for number in wanted - registered:
        poller.register(number, select.POLLIN)
    _this_thread.poller = (wanted, poller)
    return poller


class _MultiWait:
    """One thread's wait for several replies. `_reading` has the links that this thread reads, by descriptor."""

    def __init__(self, waits: Sequence[_Wait]) -> None:
        self._waits = waits
        self._reading: dict[int, MultiWaitLink] = {}
        self._sleeping: list[_Wait] = []

    def wait(self) -> None:
        """Block until one reply is ready or the earliest limit has passed."""
        try:
            self._start()
            if not any(one.ready for one in self._waits):
                self._poll()
        except BaseException:
            for link in self._reading.values():
                link.fail("reading was interrupted")
            raise
        finally:
            self._stop()

    def _start(self) -> None:
        for one in self._waits:
            if not self._try_to_read(one.link):
                one.link.add_sleeper(one.pending, _thread_waker())
                self._sleeping.append(one)
        for one in self._sleeping:  # the reader may have stopped before it could see this sleeper
            self._try_to_read(one.link)

    def _try_to_read(self, link: MultiWaitLink) -> bool:
        descriptor = link.fileno()
        if self._reading.get(descriptor) is link:
            return True
        if not link.start_reading():
            return False
        self._reading[descriptor] = link
        return True

    def _poll(self) -> None:
        left = min([one.until for one in self._waits]) - self._waits[0].link.now()
        descriptors = [*self._reading, _thread_waker().fileno] if self._sleeping else self._reading
        for descriptor, _ in _poller(descriptors).poll(left * 1000 if left > 0 else 0):
            link = self._reading.get(descriptor)
            if link is not None:
                link.read_once()

    def _stop(self) -> None:
        for link in self._reading.values():
            link.stop_reading()
        for one in self._sleeping:
            one.link.remove_sleeper(one.pending)
        if self._sleeping:
            _thread_waker().clear()
