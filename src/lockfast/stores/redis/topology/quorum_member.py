"""One Redis or Valkey server as a member of a quorum.

A request to a server that is not connected fails at once, so that it delays no caller. Only `connect` connects, and the
quorum calls it in the background.

A thread that waits on one connection reads it (see `transport/threads.py`). Here each wait suspends its coroutine
instead, so that all requests are sent before the thread blocks. It then reads all connections with one poll(), without
a thread per connection. One thread reads a connection at a time. A thread that finds another one reading first
registers as a sleeper and then tries again to become the reader; a thread that stops reading wakes a sleeper. So no
wake-up is lost.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Collection, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lockfast.facts import Facts
from lockfast.ports import Runtime
from lockfast.stores.redis.lua import scripts
from lockfast.stores.redis.protocol import replies
from lockfast.stores.redis.protocol.resp import pack
from lockfast.stores.redis.store import RedisStore, release_request
from lockfast.stores.redis.transport.connect import ConnectionFactory, PendingReply
from lockfast.stores.redis.transport.tasks import TaskInbox, TaskWire
from lockfast.stores.redis.transport.threads import ThreadInbox, ThreadLink, ThreadWire
from lockfast.values import AUX_PREFIX, Claim

_this_thread = threading.local()

LOAD = tuple(pack(b"SCRIPT", b"LOAD", script.text) for script in (scripts.ACQUIRE, scripts.RENEW))
"""Sent before the first request. If the account may not load scripts, the first use of each loads it."""
UNREAD_AFTER = 0.02  # seconds; then a reply that no thread waits for is read, to find out whether it has arrived


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
        if not self.reading.acquire(blocking=False):
            return False
        if self._tls is not None:
            self.read_once()  # poll() does not see data that TLS has already decrypted
        return True

    def stop_reading(self) -> None:
        self.reading.release()
        if self.sleepers:
            self.wake_sleeper()

    def remove_sleeper(self, pending: PendingReply) -> None:
        self.sleepers.pop(pending, None)
        pending.waker = None
        if not self.reading.locked():
            self.wake_sleeper()


@dataclass(eq=False, slots=True)
class _Wait:
    """`ports.PendingWait`: one coroutine's wait for one reply."""

    link: MultiWaitLink
    pending: PendingReply
    until: float

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
        with suppress(OSError):  # the pipe is full: the wake-up is pending already
            os.write(self._write_end, b"!")

    async def wait(self, until: float | None) -> bool:
        raise NotImplementedError("poll() waits for this waker.")

    def clear(self) -> None:
        with suppress(BlockingIOError):
            os.read(self.fileno, 4096)

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
                one.pending.waker = _thread_waker()
                one.link.sleepers[one.pending] = None
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


class TaskMemberWire(TaskWire):
    """A wire for asyncio whose requests fail at once while it is not connected."""

    on_demand = False

    @property
    def silent_since(self) -> float | None:
        """When the oldest unanswered request was sent; None if there is none."""
        return None if self._link is None else self._link.silent_since

    async def connect(self, until: float) -> bool:
        """Connect unless connected; True if the connection is new."""
        before = self._link
        return await self.connect_link(until) is not before


class TaskMemberInbox(TaskInbox):
    """An inbox for asyncio whose mailboxes fail to open while it is not connected."""

    on_demand = False


class ThreadMemberWire(ThreadWire):
    """`TaskMemberWire` for threads."""

    link_class = MultiWaitLink
    on_demand = False

    @property
    def silent_since(self) -> float | None:
        if self._link is None:
            return None
        unanswered = self._link.unanswered
        try:
            sent_at = unanswered[0].sent_at
            if self.runtime.now() - sent_at > UNREAD_AFTER:
                self.poll_events()
                sent_at = unanswered[0].sent_at
            return sent_at
        except IndexError:
            return None

    async def connect(self, until: float) -> bool:
        before = self._link
        return await self.connect_link(until) is not before


class ThreadMemberInbox(ThreadInbox):
    """`TaskMemberInbox` for threads."""

    link_class = MultiWaitLink
    on_demand = False


class RedisMember(RedisStore):
    """`ports.MemberStore` on Redis or Valkey."""

    wire: TaskMemberWire | ThreadMemberWire
    inbox: TaskMemberInbox | ThreadMemberInbox

    def __init__(self, wire: TaskMemberWire | ThreadMemberWire, inbox: TaskMemberInbox | ThreadMemberInbox) -> None:
        super().__init__(wire, inbox, reasserts=True)

    @property
    def silent_since(self) -> float | None:
        return self.wire.silent_since

    async def connect(self, until: float) -> bool:
        return await self.wire.connect(until)

    async def identity(self, until: float) -> Facts:
        # A quorum does not wait for replies beyond a majority, so it could miss that a script must be loaded.
        info = await self.wire.request(replies.IDENTITY_REQUEST, until, before=LOAD)
        return replies.facts_in([info, None, None, None], 0.0)

    async def mark(self, secret: str, number: int, until: float) -> int | None:
        key = f"{AUX_PREFIX}twin:{secret}".encode()
        put = pack(b"SET", key, b"%d" % number, b"NX", b"PX", b"5000")
        found = await self.wire.request(pack(b"GET", key), until, before=(put,))
        return int(found) if isinstance(found, bytes) and found.isdigit() else None

    async def release(self, name: str, holder: str, until: float) -> bool:
        """Send the whole script: nobody may be waiting for the reply that it has to be loaded first."""
        request = scripts.RELEASE.in_full(release_request(name, holder))
        return bool(await self._run(scripts.RELEASE, request, name, until) == 1)

    def _prepare_release(self, claim: Claim, position: int) -> None:
        return  # `release` above does not use prepared requests

    async def connect_inbox(self, until: float) -> None:
        await self.inbox.connect_link(until)


def redis_member(factory: ConnectionFactory, runtime: Runtime, flavour: str) -> RedisMember:
    if flavour == "threads":
        return RedisMember(ThreadMemberWire(factory, runtime), ThreadMemberInbox(factory, runtime))
    return RedisMember(TaskMemberWire(factory, runtime), TaskMemberInbox(factory, runtime))
