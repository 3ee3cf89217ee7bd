"""One dialled connection for threads, read by whoever waits on it.

The first who waits becomes the leader: it reads the socket, passes what it reads to `dispatch`, and when it leaves,
wakes another to read_until. So one waiter pays for no extra thread, and three hundred share one connection.

Rules kept here:

- No wake-up is lost: a follower first makes itself known and then tries once more to read; a leader first steps down
  and then looks for sleepers; and whoever leaves while nobody leads wakes another.
- The kernel bounds every read and write (`SLICE`), so that the leader looks at the clock and nobody hangs; shorter
  waits are done in poll(). One thread may send while another reads; with TLS, which forbids that, they take turns.
- After an error, or an interrupt in the midst of reading, the connection is of no use: it fails for everyone at once.
"""

from __future__ import annotations

# Connecting needs this codec. If one thread imported it while another forked, the child would wait for that import
# for ever.
import encodings.idna  # noqa: F401
import math
import select
import socket
import ssl
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from lockfast.errors import Outcome, StoreError, StoreUnavailable, closed_error
from lockfast.ports import Runtime, Waker
from lockfast.stores.redis.protocol.resp import Feed, Pushed, new_reader
from lockfast.stores.redis.transport.connect import (
    CLOSE_TIMEOUT,
    INITIAL_GRACE,
    MIN_CONNECT_TIME,
    STALE_AFTER,
    ConnectionFactory,
    connect_error,
    grace_after,
    protocol_of,
    same_link,
)

if TYPE_CHECKING:
    from lockfast.stores.redis.watch import ThreadWatchConnection

SLICE = 0.25
"""Seconds that one system call may last; a plain read that waits is one call, a poll() and then a read are two."""
AT_ONCE = 4096
A_RECORD = 65536
"""Bytes that one read takes. Nearly all that comes is short, and room costs time; but with TLS a whole record is read,
since poll() does not see the rest of one."""
AGAIN = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class PendingReply:
    """Something that a thread waits for; `ready` is set by whoever reads it. Every request makes one, so what all have
    at first stands in the class."""

    ready = False
    value: Any = None
    sent_at = 0.0
    waker: Waker | None = None

    def settle(self, value: Any) -> None:
        self.value = value
        self.ready = True
        if self.waker is not None:
            self.wake()

    def wake(self) -> bool:
        waker = self.waker  # read once: its owner takes it away when its time is up
        if waker is not None:
            waker.wake()
        return waker is not None


class ThreadLink:
    """Invariants: `reading` is locked exactly while one thread reads; whoever sleeps is in `sleepers`; `unanswered` has
    one pending per reply that is owed, in order. What answers no request goes to `dispatch`."""

    blocking_reads = True
    """Whether who waits for this connection waits for no other, and so may block in reading it."""

    def __init__(self, connection: Any, runtime: Runtime, dispatch: Callable[[Any], None]) -> None:
        self._connection = connection
        self._socket: socket.socket = connection._sock
        self.protocol = protocol_of(connection)
        # OpenSSL does not allow one thread to read while another writes, so with TLS nobody may block in either.
        self._tls_mutex = threading.Lock() if isinstance(self._socket, ssl.SSLSocket) else None
        self._socket.setblocking(self._tls_mutex is None)
        if self._tls_mutex is None:
            limit = struct.pack("ll", 0, int(SLICE * 1e6))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self.write: Callable[[bytes], int] = self._socket.send if self._tls_mutex is None else self._write_tls
        self._receive: Callable[[int], bytes] = self._socket.recv if self._tls_mutex is None else self._receive_tls
        self._polls = self._tls_mutex is not None
        self.may_block = self.blocking_reads and not self._polls  # whether one who waits may just block in reading
        self._at_once = AT_ONCE if self._tls_mutex is None else A_RECORD
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self.feed: Feed = new_reader().feed
        self._runtime = runtime
        self.dispatch = dispatch
        self.unanswered: deque[PendingReply] = deque()
        self.reading = threading.Lock()
        self.sleepers: dict[PendingReply, None] = {}
        self.error: StoreError | None = None

    def send(self, requests: bytes, until: float, replies: Iterable[PendingReply] = ()) -> None:
        """Send all of it; the replies come into the replies. The caller sees to it that one thread sends at a time."""
        try:
            self.unanswered.extend(replies)
            while True:
                try:
                    sent = self.write(requests)
                    if sent == len(requests):
                        return
                    requests = requests[sent:]
                except AGAIN:
                    pass
                self._await_room(until)
        except OSError as error:
            self.fail(f"the connection broke while sending ({error})")
        except BaseException:
            # Half a request may be out; and a pending without one would take the reply of the next.
            self.fail("sending was interrupted")
            raise

    def _write_tls(self, data: bytes) -> int:
        with self._tls_mutex:  # type: ignore[union-attr] # this is called only where it is one
            return self._socket.send(data)

    def _receive_tls(self, most: int) -> bytes:
        with self._tls_mutex:  # type: ignore[union-attr]
            return self._socket.recv(most)

    def _await_room(self, until: float) -> None:
        local_queue = select.poll()
        local_queue.register(self._socket, select.POLLOUT)
        if not local_queue.poll(max(0.0, until - self._runtime.now()) * 1000):
            raise TimeoutError("the server does not read")

    def read_available(self) -> None:
        """Take in what has come, without waiting, unless another reads."""
        if self.reading.acquire(False):
            self.read_until(PendingReply(), 0.0)

    async def wait_for(self, pending: PendingReply, until: float) -> None:
        """Return when the pending is ready, the link has failed, or the time is up."""
        try:
            while not pending.ready and self.error is None:
                if self.reading.acquire(False):
                    if not self.read_until(pending, until):
                        return
                elif pending.waker is None:
                    pending.waker = self._runtime.waker()
                    self.sleepers[pending] = None
                elif not await pending.waker.wait(until):
                    return
        finally:
            if pending.waker is not None:
                self.sleepers.pop(pending, None)
                pending.waker = None
                if not self.reading.locked():
                    self.wake_sleeper()

    def read_for(self, pending: PendingReply, until: float) -> None:
        """Read alone, before anyone else knows this link."""
        if self.reading.acquire(False):
            self.read_until(pending, until)

    def read_until(self, pending: PendingReply, until: float) -> bool:
        """Read for all until the pending is ready, and let go of `reading`; False when the time is up."""
        try:
            while not pending.ready and self.error is None:
                if (self._polls or until - self._runtime.now() < SLICE) and not self._await_data(until):
                    return False
                self.read_once()
            return True
        except BaseException:
            self.fail("reading was interrupted")
            raise
        finally:
            self.reading.release()
            if self.sleepers:
                self.wake_sleeper()

    def wake_sleeper(self) -> None:
        for pending in tuple(self.sleepers):
            if pending.wake():
                return

    def _await_data(self, until: float) -> bool:
        """Whether there is something to read before the time is up."""
        if self._tls_mutex is not None:
            with self._tls_mutex:
                if self._socket.pending():  # type: ignore[attr-defined] # with TLS it has that
                    return True  # decrypted already, so that poll() does not see it
        left = until - self._runtime.now()
        return bool(self._poll.poll(left * 1000 if left > 0 else 0))

    def read_once(self) -> None:
        """Read once, for no longer than the kernel waits, and give everyone what is theirs."""
        try:
            data = self._receive(self._at_once)
        except AGAIN:
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
        """This connection is of no use any more; what was asked over it has an unknown outcome."""
        if self.error is None:
            self.error = StoreUnavailable(
                f"The request got no answer: {why}. It may or may not have been carried out.",
                outcome=Outcome.UNKNOWN,
            )
        try:
            if isinstance(self._socket, ssl.SSLSocket):
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # its own would have a reader go on in the clear
            else:
                self._socket.shutdown(socket.SHUT_RDWR)  # ends the poll() of a thread that leads
        except OSError:
            pass
        for pending in tuple(self.sleepers):
            pending.wake()

    def close(self) -> None:
        """Close the socket, but not under a thread that reads: its poll() would wait on whoever gets the number."""
        self.fail("the connection was closed")
        if self.reading.acquire(timeout=1.0):  # failing has woken it
            self._connection.disconnect()
            self.reading.release()

    def disconnect(self, why: str) -> None:
        """The same without waiting: if a thread reads, whoever dials next closes the socket after it."""
        self.fail(why)
        if self.reading.acquire(blocking=False):
            self._connection.disconnect()
            self.reading.release()

    def reset(self) -> None:
        """In a forked child: close our copy of the descriptor, which does not end the parent's connection."""
        self._connection.disconnect()


def connect_link(
    dial: ConnectionFactory,
    runtime: Runtime,
    until: float,
    dispatch: Callable[[Any], None],
    link_class: type[ThreadLink] = ThreadLink,
) -> ThreadLink:
    """Connect and shake hands by the client library's own means."""
    connection = dial(max(MIN_CONNECT_TIME, until - runtime.now()))
    try:
        connection.connect()
    except Exception as error:
        connection.disconnect()
        raise connect_error(error) from error
    return link_class(connection, runtime, dispatch)


class ThreadWire:
    """`store.Wire`. `_mutex` is held by whoever dials or sends."""

    link_class = ThreadLink

    has_sessions = True

    def __init__(self, dial: ConnectionFactory, runtime: Runtime, longest: float = math.inf) -> None:
        self._dial = dial
        self._runtime = runtime
        self._longest = longest
        self.grace = INITIAL_GRACE
        self.pushes = False
        self.on_push: Callable[[Any], None] | None = None
        self._link: ThreadLink | None = None
        self.reset(forked=False)

    def reset(self, *, forked: bool) -> None:
        link, self._link = self._link, None
        self._mutex = threading.Lock()
        self._closed = False
        if link is not None:
            link.reset()

    async def request(self, request: bytes, until: float, before: Sequence[bytes] = ()) -> Any:
        sent = self.submit(request, self._runtime.now(), until, before)
        reply = self.fetch(sent, until)
        return await self.reply(sent, until) if reply is None else reply

    def submit(
        self, request: bytes, now: float, until: float, before: Sequence[bytes] = ()
    ) -> tuple[ThreadLink, PendingReply]:
        """Send a request, at the moment `now`; what to fetch the reply with. In few steps, as every cycle comes by here
        twice: what is unusual is left to others."""
        link = self._link
        if link is None or link.error is not None or self._mutex.locked():
            return self._send(request, until, before)
        pending = PendingReply()
        pending.sent_at = now
        try:
            with self._mutex:  # not by acquire(): an interrupt right after that would leave it taken for ever
                if before:
                    link.unanswered.extend(_in_order(before, pending))
                    request = b"".join((*before, request))
                else:
                    link.unanswered.append(pending)
                try:
                    written = link.write(request)
                except AGAIN:
                    written = 0
                if written != len(request):
                    link.send(request[written:], until)
                    pending.sent_at = self._runtime.now()  # that may have taken a while
        except OSError as error:
            link.fail(f"the connection broke while sending ({error})")
        except BaseException:
            link.fail("sending was interrupted")  # half a request may be out
            raise
        return link, pending

    def fetch(self, sent: tuple[ThreadLink, PendingReply], until: float) -> Any:
        """The reply to what was submitted, if it comes at once, as nearly always; None when it is to be awaited."""
        link, pending = sent
        leads = False
        try:
            if link.may_block and until - pending.sent_at > SLICE and link.reading.acquire(False):
                leads = True
                if not pending.ready:  # another may have read it
                    link.read_once()
        except BaseException:  # in the midst of reading, or reading without knowing it
            link.fail("reading was interrupted")
            raise
        finally:
            if leads:
                link.reading.release()
                if link.sleepers:
                    link.wake_sleeper()
        return pending.value

    async def reply(self, sent: tuple[ThreadLink, PendingReply], until: float) -> Any:
        """The same, whenever it comes."""
        link, pending = sent
        await link.wait_for(pending, min(until, pending.sent_at + self._longest))
        if pending.ready:
            return pending.value
        raise link.error or self._overdue(link)

    async def post(
        self, requests: Sequence[bytes], until: float, on: ThreadLink | None = None
    ) -> tuple[ThreadLink, list[PendingReply]]:
        replies: list[PendingReply] = []
        link, last = self._send(requests[-1], until, requests[:-1], replies, on)
        return link, [*replies, last]

    async def collect(self, posted: tuple[ThreadLink, list[PendingReply]], until: float) -> list[Any]:
        link, replies = posted
        await self.reply((link, replies[-1]), until)  # replies come in order, so with it all are there
        return [pending.value for pending in replies]

    @property
    def connected(self) -> bool:
        link = self._link
        return link is not None and link.error is None

    def session(self) -> ThreadWatchConnection:
        """A connection of its own, to the same place."""
        from lockfast.stores.redis.watch import ThreadWatchConnection

        return ThreadWatchConnection(self._dial, self._runtime)

    def listen(self) -> None:
        link = self._link
        if link is not None and link.error is None:
            link.read_available()

    def _send(
        self,
        request: bytes,
        until: float,
        before: Sequence[bytes],
        early: list[PendingReply] | None = None,
        on: ThreadLink | None = None,
    ) -> tuple[ThreadLink, PendingReply]:
        mutex = self._mutex
        if not mutex.acquire(False) and not mutex.acquire(timeout=max(0.0, until - self._runtime.now())):
            raise StoreUnavailable("The connection is busy, so the request was not sent. Try again later.")
        try:
            link = self._link
            if link is None or link.error is not None or on is not None:
                link = self._connect(until) if on is None else same_link(on, link)
            pending = PendingReply()
            pending.sent_at = self._runtime.now()
            replies = _in_order(before, pending)
            if early is not None:
                early += replies[:-1]
            link.send(b"".join((*before, request)), until, replies)
            return link, pending
        finally:
            mutex.release()

    def _connect(self, until: float) -> ThreadLink:
        if self._closed:
            raise closed_error()
        if self._link is not None:
            self._link.close()
            self._link = None
        started = self._runtime.now()
        until = min(until, started + self._longest)
        link = connect_link(self._dial, self._runtime, until, self._told, self.link_class)
        if self._closed:  # meanwhile, and without waiting for us
            link.close()
            raise closed_error()
        self._link = link
        self.grace = grace_after(self._runtime.now() - started)
        self.pushes = link.protocol == 3
        return link

    def _told(self, reply: Any) -> None:
        """What no request asked for."""
        if type(reply) is Pushed and self.on_push is not None:
            self.on_push(reply)

    def _overdue(self, link: ThreadLink) -> StoreUnavailable:
        unanswered = link.unanswered
        if unanswered and self._runtime.now() - unanswered[0].sent_at > STALE_AFTER:
            link.fail("the server has been silent for too long")
        return StoreUnavailable(
            "The server did not answer in time; the request may or may not have been carried out.",
            outcome=Outcome.UNKNOWN,
        )

    def drop(self) -> None:
        if self._link is not None:
            self._link.disconnect("the server is no master any more")

    async def close(self) -> None:
        self._closed = True
        in_time = self._mutex.acquire(timeout=CLOSE_TIMEOUT)  # else somebody dials, and hangs up when that succeeds
        link, self._link = self._link, None
        if in_time:
            self._mutex.release()
        if link is not None:
            link.close()


def _in_order(before: Sequence[bytes], last: PendingReply) -> list[PendingReply]:
    """A pending for each request that goes out `before` that of `last`, and that one."""
    replies = []
    for _ in before:
        pending = PendingReply()
        pending.sent_at = last.sent_at
        replies.append(pending)
    replies.append(last)
    return replies
