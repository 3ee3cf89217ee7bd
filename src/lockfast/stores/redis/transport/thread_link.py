"""One dialled connection for threads, read by whoever waits on it.

The first who waits becomes the leader: it reads the socket, passes what it reads to `dispatch`, and when it leaves,
wakes another to lead. So one waiter pays for no extra thread, and three hundred share one connection.

Rules kept here:

- No wake-up is lost: a follower first makes itself known and then tries once more to lead; a leader first steps down
  and then looks for followers; and whoever leaves while nobody leads wakes another.
- The kernel bounds every read and write (`SLICE`), so that the leader looks at the clock and nobody hangs; shorter
  waits are done in poll(). One thread may send while another reads; with TLS, which forbids that, they take turns.
- After an error, or an interrupt in the midst of reading, the connection is of no use: it fails for everyone at once.
"""

from __future__ import annotations

# Dialling needs this codec. If one thread imported it then while another forked, the child would wait for that import
# for ever.
import encodings.idna  # noqa: F401
import select
import socket
import ssl
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from lockfast.errors import Outcome, StoreError, StoreUnavailable
from lockfast.ports import Runtime, Waker
from lockfast.stores.redis.protocol.resp import Feed, Pushed, new_reader
from lockfast.stores.redis.transport.dial import LEAST_DIAL, Dial, dialling_error, protocol_of

SLICE = 0.25
"""Seconds that one system call may last; a plain read that waits is one call, a poll() and then a read are two."""
AT_ONCE = 4096
A_RECORD = 65536
"""Bytes that one read takes. Nearly all that comes is short, and room costs time; but with TLS a whole record is read,
since poll() does not see the rest of one."""
AGAIN = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Slot:
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


class Link:
    """Invariants: `leading` is locked exactly while one thread reads; whoever sleeps is in `followers`; `pending` has
    one slot per reply that is owed, in order. What answers no request goes to `dispatch`."""

    leads_alone = True
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
        self.reads_freely = self.leads_alone and not self._polls  # whether one who waits may just block in reading
        self._at_once = AT_ONCE if self._tls_mutex is None else A_RECORD
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self.feed: Feed = new_reader().feed
        self._runtime = runtime
        self.dispatch = dispatch
        self.pending: deque[Slot] = deque()
        self.leading = threading.Lock()
        self.followers: dict[Slot, None] = {}
        self.error: StoreError | None = None

    def send(self, requests: bytes, until: float, slots: Iterable[Slot] = ()) -> None:
        """Send all of it; the replies come into the slots. The caller sees to it that one thread sends at a time."""
        try:
            self.pending.extend(slots)
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
            # Half a request may be out; and a slot without one would take the reply of the next.
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

    def look(self) -> None:
        """Take in what has come, without waiting, unless another reads."""
        if self.leading.acquire(False):
            self.lead(Slot(), 0.0)

    async def await_slot(self, slot: Slot, until: float) -> None:
        """Return when the slot is ready, the link has failed, or the time is up."""
        try:
            while not slot.ready and self.error is None:
                if self.leading.acquire(False):
                    if not self.lead(slot, until):
                        return
                elif slot.waker is None:
                    slot.waker = self._runtime.waker()
                    self.followers[slot] = None
                elif not await slot.waker.wait(until):
                    return
        finally:
            if slot.waker is not None:
                self.followers.pop(slot, None)
                slot.waker = None
                if not self.leading.locked():
                    self.wake_a_follower()

    def read_for(self, slot: Slot, until: float) -> None:
        """Read alone, before anyone else knows this link."""
        if self.leading.acquire(False):
            self.lead(slot, until)

    def lead(self, slot: Slot, until: float) -> bool:
        """Read for all until the slot is ready, and let go of `leading`; False when the time is up."""
        try:
            while not slot.ready and self.error is None:
                if (self._polls or until - self._runtime.now() < SLICE) and not self._await_data(until):
                    return False
                self.take_in()
            return True
        except BaseException:
            self.fail("reading was interrupted")
            raise
        finally:
            self.leading.release()
            if self.followers:
                self.wake_a_follower()

    def wake_a_follower(self) -> None:
        for slot in tuple(self.followers):
            if slot.wake():
                return

    def _await_data(self, until: float) -> bool:
        """Whether there is something to read before the time is up."""
        if self._tls_mutex is not None:
            with self._tls_mutex:
                if self._socket.pending():  # type: ignore[attr-defined] # with TLS it has that
                    return True  # decrypted already, so that poll() does not see it
        left = until - self._runtime.now()
        return bool(self._poll.poll(left * 1000 if left > 0 else 0))

    def take_in(self) -> None:
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
        pending = self.pending
        for reply in self.feed(data):
            if type(reply) is Pushed or not pending:
                self.dispatch(reply)
                continue
            slot = pending.popleft()
            slot.value = reply
            slot.ready = True
            if slot.waker is not None:
                slot.wake()

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
        for slot in tuple(self.followers):
            slot.wake()

    def close(self) -> None:
        """Close the socket, but not under a thread that reads: its poll() would wait on whoever gets the number."""
        self.fail("the connection was closed")
        if self.leading.acquire(timeout=1.0):  # failing has woken it
            self._connection.disconnect()
            self.leading.release()

    def disconnect(self, why: str) -> None:
        """The same without waiting: if a thread reads, whoever dials next closes the socket after it."""
        self.fail(why)
        if self.leading.acquire(blocking=False):
            self._connection.disconnect()
            self.leading.release()

    def reset(self) -> None:
        """In a forked child: close our copy of the descriptor, which does not end the parent's connection."""
        self._connection.disconnect()


def dial_link(
    dial: Dial, runtime: Runtime, until: float, dispatch: Callable[[Any], None], link_class: type[Link] = Link
) -> Link:
    """Connect and shake hands by the client library's own means."""
    connection = dial(max(LEAST_DIAL, until - runtime.now()))
    try:
        connection.connect()
    except Exception as error:
        connection.disconnect()
        raise dialling_error(error) from error
    return link_class(connection, runtime, dispatch)
