"""The wire and the inbox for threads: each is one connection, shared by all threads of a client.

There is no reader thread. Among the threads that wait for replies, one reads the socket for all of them; when its own
reply is there, it wakes another one, which reads next. The `async def` functions here never suspend: the runner for
threads runs them to their end, and an `await` blocks the thread.

Rules:

- Replies arrive in the order of the requests. If a caller stops waiting, its entry stays in `unanswered`, so that its
  late reply is matched to it and dropped. A clean-up that it sends afterwards is executed after the abandoned request.
- No wake-up is lost. A waiting thread registers in `sleepers` and then tries once more to read. A reader stops
  reading and then wakes a sleeper. A thread that leaves while nobody reads wakes a sleeper too.
- A socket timeout ends each blocking call after `SLICE`, so that the reader can check its deadline. So a read is one
  system call, where poll() and recv() would be two. Waits shorter than `SLICE`, and TLS, use poll().
- One thread may send while another reads, except under TLS, where OpenSSL forbids it and a mutex separates them.
- A member of a quorum waits in another way: each wait suspends its coroutine, so that all requests are sent before the
  thread blocks. The thread then reads all connections with one poll().
- An I/O error, or an interrupt during a read or a write, fails the link for every caller. So does a timeout if some
  request is unanswered for `STALE_AFTER` seconds.
"""

from __future__ import annotations

# redis-py needs this codec to connect. Imported here and not at the first connect, because a fork during that import
# would leave the child waiting for the import lock for ever.
import encodings.idna  # noqa: F401
import os
import select
import socket
import ssl
import struct
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any

from lockfast.errors import StoreError, StoreUnavailable, closed_error
from lockfast.ports import Runtime
from lockfast.stores.redis.protocol import notifications
from lockfast.stores.redis.protocol.resp import Feed, Pushed, new_reader
from lockfast.stores.redis.transport import connect
from lockfast.stores.redis.transport.connect import BaseConnector, BaseInbox, Channels, PendingReply, no_reply
from lockfast.stores.redis.watch import ThreadWatchConnection

# Seconds after which a blocking read or write returns, so that its thread can check the deadline.
SLICE = 0.25
# Bytes per read. Nearly all replies are short. Under TLS a read must take a whole record, because poll() does not see
# a rest that is already decrypted.
PLAIN_READ, TLS_READ = 4096, 65536
# Seconds after which `silent_since` reads for an unanswered request: if no thread waits, its reply may be there unread.
UNREAD_AFTER = 0.02
WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class ThreadLink:
    """One connection. Replies that answer no request go to `dispatch`.

    Invariants: `reading` is locked exactly while one thread reads; every sleeping thread is in `sleepers`;
    `unanswered` has one entry per reply that the server owes, in order.
    """

    blocking_reads = True  # whether a thread may block in recv(); False if it waits for several links at once

    def __init__(self, connection: Any, runtime: Runtime, dispatch: Callable[[Any], None]) -> None:
        self._connection = connection
        self.socket: socket.socket = connection._sock
        self.runtime = runtime
        self.dispatch = dispatch
        self.protocol = connect.protocol_of(connection)
        self.feed: Feed = new_reader().feed
        self.unanswered: deque[PendingReply] = deque()
        self.reading = threading.Lock()
        self.sleepers: dict[PendingReply, None] = {}
        self.error: StoreError | None = None
        self._poll = select.poll()
        self._poll.register(self.socket, select.POLLIN)
        self._tls = self.socket if isinstance(self.socket, ssl.SSLSocket) else None
        self._tls_lock = threading.Lock()
        self.socket.setblocking(self._tls is None)
        if self._tls is None:
            limit = struct.pack("ll", 0, int(SLICE * 1e6))
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self.write: Callable[[bytes], int] = self.socket.send if self._tls is None else self._write_tls
        self._receive: Callable[[int], bytes] = self.socket.recv if self._tls is None else self._receive_tls
        self._read_size = PLAIN_READ if self._tls is None else TLS_READ
        self.fast_reads = self.blocking_reads and self._tls is None

    def send(self, requests: bytes, until: float, replies: Iterable[PendingReply] = ()) -> None:
        """Send `requests`, which `replies` answer. The caller makes sure that only one thread sends."""
        try:
            self.unanswered.extend(replies)
            while True:
                try:
                    sent = self.write(requests)
                    if sent == len(requests):
                        return
                    requests = requests[sent:]
                except WOULD_BLOCK:
                    pass
                self._await_writable(until)
        except OSError as error:
            self.fail(f"the connection broke while sending ({error})")
        except BaseException:
            # Half a request may be sent, and an entry without a request would take the next reply.
            self.fail("sending was interrupted")
            raise

    def _write_tls(self, data: bytes) -> int:
        with self._tls_lock:
            return self.socket.send(data)

    def _receive_tls(self, size: int) -> bytes:
        with self._tls_lock:
            return self.socket.recv(size)

    def _await_writable(self, until: float) -> None:
        poll = select.poll()
        poll.register(self.socket, select.POLLOUT)
        if not poll.poll(max(0.0, until - self.runtime.now()) * 1000):
            raise TimeoutError("the server does not read")

    async def wait_for(self, pending: PendingReply, until: float) -> None:
        try:
            while not pending.ready and self.error is None:
                if self.read(pending, until, self.runtime.now()):
                    return
                if pending.waker is None:
                    pending.waker = self.runtime.waker()
                    self.sleepers[pending] = None
                elif not await pending.waker.wait(until):
                    return
        finally:
            if pending.waker is not None:
                self.remove_sleeper(pending)

    def read(self, pending: PendingReply, until: float, now: float, *, once: bool = False) -> bool:
        """Read for all threads until `pending` is ready, the link has failed, or `until` has passed.

        With `once`, stop after one read, for a caller that expects no reply: replies to other threads could keep it
        reading for ever. Returns False at once if another thread reads.
        """
        reads = False
        try:
            if not self.reading.acquire(False):
                return False
            reads = True
            while not pending.ready and self.error is None:
                if (self._tls is not None or until - now < SLICE) and not self._await_readable(until):
                    break
                self.read_once()
                if once:
                    break
                if not pending.ready:
                    now = self.runtime.now()
            return True
        except BaseException:
            self.fail("reading was interrupted")
            raise
        finally:
            if reads:
                self.reading.release()
                if self.sleepers:
                    self.wake_sleeper()

    def wake_sleeper(self) -> None:
        """Wake one sleeping thread, to read."""
        for pending in tuple(self.sleepers):
            if pending.wake():
                return

    def remove_sleeper(self, pending: PendingReply) -> None:
        self.sleepers.pop(pending, None)
        pending.waker = None
        if not self.reading.locked():
            self.wake_sleeper()

    def _await_readable(self, until: float) -> bool:
        if self._tls is not None:
            with self._tls_lock:
                if self._tls.pending():
                    return True  # decrypted already, so poll() does not see it
        left = until - self.runtime.now()
        return bool(self._poll.poll(left * 1000 if left > 0 else 0))

    def read_once(self) -> None:
        """Do one read and hand out the replies in it. Blocks for at most `SLICE`."""
        try:
            data = self._receive(self._read_size)
        except WOULD_BLOCK:
            return
        except OSError:
            data = b""
        if not data:
            self.fail("the server closed the connection")
            return
        unanswered = self.unanswered
        for reply in self.feed(data):
            if type(reply) is Pushed or not unanswered:
                self.dispatch(reply)
                continue
            pending = unanswered.popleft()
            pending.value = reply
            pending.ready = True
            if pending.waker is not None:
                pending.wake()

    def fail(self, why: str) -> None:
        """Mark the connection as failed and wake every waiting thread."""
        if self.error is None:
            self.error = no_reply(why)
        with suppress(OSError):
            if self._tls is None:
                self.socket.shutdown(socket.SHUT_RDWR)  # ends the poll() or recv() of the reader
            else:
                # The method of SSLSocket would let the reader continue in plain text.
                socket.socket.shutdown(self._tls, socket.SHUT_RDWR)
        for pending in tuple(self.sleepers):
            pending.wake()

    def close(self) -> None:
        """Close the socket once nobody reads it: a reader could otherwise poll() a reused descriptor."""
        self.disconnect("the connection was closed", patience=1.0)

    def disconnect(self, why: str, patience: float = 0.0) -> None:
        """Fail the link, and close its socket unless a thread still reads it after `patience`.

        The connector calls `close()` before it connects again, so a socket that stayed open is closed then.
        """
        self.fail(why)
        if self.reading.acquire(timeout=patience):
            self._connection.disconnect()
            self.reading.release()

    def reset(self, *, forked: bool) -> None:
        """Close a forked child's copy of the descriptor. The parent's connection stays open."""
        self._connection.disconnect()


class MultiWaitLink(ThreadLink):
    """A link whose waits suspend, so that `Runtime.gather` can serve many of them in one poll()."""

    blocking_reads = False

    async def wait_for(self, pending: PendingReply, until: float) -> None:
        while not pending.ready and self.error is None and self.runtime.now() < until:
            await _Wait(self, pending, until)

    def start_reading(self, reading: dict[int, MultiWaitLink]) -> bool:
        """Become the reader and enter `reading`, unless done already; False if another thread reads."""
        descriptor = self.socket.fileno()
        if reading.get(descriptor) is not self:
            if not self.reading.acquire(blocking=False):
                return False
            reading[descriptor] = self
            if self._tls is not None:
                self.read_once()  # poll() does not see data that TLS has already decrypted
        return True

    def stop_reading(self) -> None:
        self.reading.release()
        if self.sleepers:
            self.wake_sleeper()


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


class _Poller(threading.local):
    """The poll object of this thread. Descriptors stay registered: a thread mostly waits for the same servers."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._registered: set[int] = set()

    @cached_property
    def waker(self) -> _PipeWaker:
        return _PipeWaker()

    def poll(self, descriptors: set[int], left: float) -> list[tuple[int, int]]:
        for number in self._registered - descriptors:
            self._poll.unregister(number)
        for number in descriptors - self._registered:
            self._poll.register(number, select.POLLIN)
        self._registered = descriptors
        return self._poll.poll(left * 1000 if left > 0 else 0)


_poller = _Poller()


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
        reading: dict[int, MultiWaitLink] = {}  # the links that this thread reads, by descriptor
        sleeping: list[_Wait] = []  # the waits on links that other threads read
        try:
            for one in others:
                if not one.link.start_reading(reading):
                    one.pending.waker = _poller.waker
                    one.link.sleepers[one.pending] = None
                    sleeping.append(one)
            for one in sleeping:  # the reader may have stopped before it could see this sleeper
                one.link.start_reading(reading)
            if not any(one.ready for one in others):
                descriptors = {number for number in reading if number >= 0}
                if sleeping:
                    descriptors.add(_poller.waker.fileno)
                left = min([one.until for one in others]) - self.link.runtime.now()
                for descriptor, _ in _poller.poll(descriptors, left):
                    if descriptor in reading:
                        reading[descriptor].read_once()
        except BaseException:
            for link in reading.values():
                link.fail("reading was interrupted")
            raise
        finally:
            for link in reading.values():
                link.stop_reading()
            for one in sleeping:
                one.link.remove_sleeper(one.pending)
            if sleeping:
                _poller.waker.clear()


class ThreadConnector(BaseConnector[ThreadLink]):
    """A thread holds `_mutex` while it connects or sends."""

    def reset(self, *, forked: bool) -> None:
        self._mutex = threading.Lock()
        self._closed = False
        super().reset(forked=forked)

    @property
    def connected(self) -> bool:
        link = self._link
        return link is not None and link.error is None

    def _connect(self, until: float) -> ThreadLink:
        if self._closed:
            raise closed_error()
        if self._link is not None:
            self._link.close()
            self._link = None
        link = self._open(min(until, self.runtime.now() + self._max_wait))
        if self._closed:  # close() does not wait for a slow connect
            link.close()
            raise closed_error()
        self._link = link
        return link

    async def connect_link(self, until: float) -> ThreadLink:
        if not self._mutex.acquire(timeout=max(0.0, until - self.runtime.now())):
            raise StoreUnavailable("Another thread is still connecting to the server, so nothing was sent. Try again.")
        try:
            link = self._link
            return self._connect(until) if link is None or link.error is not None else link
        finally:
            self._mutex.release()

    @abstractmethod
    def _open(self, until: float) -> ThreadLink: ...

    def _new_link(self, until: float, dispatch: Callable[[Any], None]) -> ThreadLink:
        """Connect through redis-py and take over the socket."""
        connection = self._new_connection(max(connect.MIN_CONNECT_TIME, until - self.runtime.now()))
        try:
            connection.connect()
        except Exception as error:
            connection.disconnect()
            raise connect.connect_error(error) from error
        link_class = MultiWaitLink if self._member else ThreadLink
        return link_class(connection, self.runtime, dispatch)

    async def close(self) -> None:
        await super().close()
        # After a timeout another thread is still connecting or sending; one that connects then checks `_closed`.
        locked = self._mutex.acquire(timeout=connect.CLOSE_TIMEOUT)
        link, self._link = self._link, None
        if locked:
            self._mutex.release()
        if link is not None:
            link.close()


class ThreadWire(ThreadConnector):
    """`store.Wire` for threads."""

    grace = connect.INITIAL_GRACE
    pushes = False
    on_push: Callable[[Any], None] | None = None

    async def request(self, request: bytes, until: float, before: Sequence[bytes] = ()) -> Any:
        link = self._link
        if before or link is None or link.error is not None or self._mutex.locked():
            link, replies = await self.post([*before, request], until)
            return await self._reply(link, replies[-1], until)
        # The common case, in as few calls as possible: an uncontended lock runs it twice.
        pending = PendingReply()
        pending.sent_at = now = self.runtime.now()
        try:
            with self._mutex:  # not acquire() and try: an interrupt between them would leave it locked for ever
                link.unanswered.append(pending)
                try:
                    sent = link.write(request)
                except WOULD_BLOCK:
                    sent = 0
                if sent != len(request):
                    link.send(request[sent:], until)
                    pending.sent_at = now = self.runtime.now()  # that may have taken long
        except OSError as error:
            link.fail(f"the connection broke while sending ({error})")
        except BaseException:
            link.fail("sending was interrupted")
            raise
        if link.fast_reads:
            link.read(pending, until if self._max_wait == inf else min(until, now + self._max_wait), now)
            if pending.ready:
                return pending.value
        return await self._reply(link, pending, until)

    async def _reply(self, link: ThreadLink, pending: PendingReply, until: float) -> Any:
        await link.wait_for(pending, min(until, pending.sent_at + self._max_wait))
        if pending.ready:
            return pending.value
        if link.error is not None:
            raise link.error
        try:
            oldest = link.unanswered[0]
        except IndexError:  # a reader has just taken the last one
            oldest = pending
        if self.runtime.now() - oldest.sent_at > connect.STALE_AFTER:
            link.fail("it has not answered for too long")
        raise no_reply("it did not answer in time")

    async def post(
        self, requests: Sequence[bytes], until: float, on: ThreadLink | None = None
    ) -> tuple[ThreadLink, list[PendingReply]]:
        """Send several requests, on the link `on` if given. `collect` returns their replies."""
        mutex = self._mutex
        if not mutex.locked():
            with mutex:  # as in `request()`; only a contended mutex needs a time limit
                return self._post(requests, until, on)
        if not mutex.acquire(timeout=max(0.0, until - self.runtime.now())):
            raise StoreUnavailable("Other threads kept the connection busy, so nothing was sent. Try again.")
        try:
            return self._post(requests, until, on)
        finally:
            mutex.release()

    def _post(
        self, requests: Sequence[bytes], until: float, on: ThreadLink | None
    ) -> tuple[ThreadLink, list[PendingReply]]:
        """Under the mutex: connect if necessary, and send."""
        link = self._link
        if on is not None:
            link = connect.same_link(on, link)
        elif link is None or link.error is not None:
            if self._member:
                raise connect.not_connected()
            link = self._connect(until)
        replies = [PendingReply() for _ in requests]
        now = self.runtime.now()
        for pending in replies:
            pending.sent_at = now
        link.send(b"".join(requests), until, replies)
        return link, replies

    async def collect(self, posted: tuple[ThreadLink, list[PendingReply]], until: float) -> list[Any]:
        link, replies = posted
        await self._reply(link, replies[-1], until)  # replies arrive in order
        return [pending.value for pending in replies]

    def _open(self, until: float) -> ThreadLink:
        started = self.runtime.now()
        link = self._new_link(until, self._dispatch)
        self.grace = connect.grace_after(self.runtime.now() - started)
        self.pushes = link.protocol == 3
        return link

    def _dispatch(self, reply: Any) -> None:
        if type(reply) is Pushed and self.on_push is not None:
            self.on_push(reply)

    def watch_connection(self) -> ThreadWatchConnection:
        return ThreadWatchConnection(self._new_connection, self.runtime)

    def poll_events(self) -> None:
        link = self._link
        if link is not None and link.error is None:
            link.read(PendingReply(), 0.0, 0.0, once=True)

    @property
    def silent_since(self) -> float | None:
        if self._link is None:
            return None
        unanswered = self._link.unanswered
        try:
            if self.runtime.now() - unanswered[0].sent_at > UNREAD_AFTER:
                self.poll_events()
            return unanswered[0].sent_at
        except IndexError:
            return None


class ThreadInbox(BaseInbox[ThreadLink], ThreadConnector):
    """`store.Inbox` for threads. A waiting thread reads the connection itself."""

    def _open(self, until: float) -> ThreadLink:
        self.address = notifications.new_address(self.runtime)
        channels = Channels(self.address)
        link = self._new_link(until, lambda reply: self.receive(reply, channels))
        if not self.sharded:
            answer = channels.expect_reply()
            link.send(notifications.subscribe_request(self.address), until)
            link.read(answer, until, self.runtime.now())
            error = notifications.subscribe_error(answer.value, answer.ready)
            if error is not None:
                link.close()
                raise closed_error() if self._closed else error
            link.feed = notifications.grant_fast_path(link.feed, self.address, link.protocol, self.notify)
        self._heard_at = self.runtime.now()
        self._channels = channels
        return link

    async def _subscribe(self, link: ThreadLink, channels: Channels, request: bytes, until: float) -> None:
        with self._mutex:
            answer = channels.expect_reply()
            link.send(request, until)
        await link.wait_for(answer, until)
        error = link.error or notifications.subscribe_error(answer.value, answer.ready)
        if error is not None:
            raise error

    def _ping(self, link: ThreadLink, now: float) -> None:
        if self._mutex.acquire(False):
            try:
                self._pinged_at = now
                link.send(notifications.PING, now)
            finally:
                self._mutex.release()
