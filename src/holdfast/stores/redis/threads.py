"""The wire and the inbox for threads: two connections, shared by all threads of a client.

Rules kept here:

- Requests go out in one order and replies come back in it. A caller that gave up leaves its slot behind, so that the
  late reply is recognised and dropped; the connection survives that, and what the caller sends next (its clean-up)
  is executed after what it gave up on.
- A connection that has owed a reply for `STALE` seconds is given up.
- A mailbox that may have missed a push says so: its `wait` returns None, and the core asks again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from holdfast.errors import LockError, Outcome, StoreUnavailable, closed_error
from holdfast.ports import Mailbox, Runtime
from holdfast.stores.redis.clients import Dial
from holdfast.stores.redis.link import Link, Slot, dial_link
from holdfast.stores.redis.messages import (
    FIRST_GRACE,
    HEAR_WITHIN,
    LEAVE_WITHIN,
    PING,
    STALE,
    cut_off,
    grace_after,
    new_address,
    push_in,
    subscribe_error,
    subscribe_request,
)
from holdfast.stores.redis.resp import Pushed
from holdfast.values import Next, Push


class ThreadWire:
    """`store.Wire`. Invariant: `_pending` has one slot per reply that `_link` owes, in order."""

    def __init__(self, dial: Dial, runtime: Runtime) -> None:
        self._dial = dial
        self._runtime = runtime
        self.grace = FIRST_GRACE
        self.pushes = False
        self.on_push: Callable[[Any], None] | None = None
        self._link: Link | None = None
        self.forget(forked=False)

    def forget(self, *, forked: bool) -> None:
        link, self._link = self._link, None
        self._mutex = threading.Lock()
        self._pending: deque[Slot] = deque()
        self._closed = False
        if link is not None:
            link.forget()

    async def ask(self, request: bytes, until: float, before: Sequence[bytes] = ()) -> Any:
        link, slot = self._send(request, until, before)
        if not link.try_to_lead(slot, until):
            await link.await_slot(slot, until)
        if slot.ready:
            return slot.value
        if link.error is not None:
            raise link.error
        raise self._overdue(link)

    async def exchange(self, requests: Sequence[bytes], until: float, on: Link | None = None) -> tuple[Link, list[Any]]:
        """`transactions.Conversation`."""
        with self._sending(until):
            link = self._link
            if on is not None and (link is not on or on.error is not None):
                raise cut_off()
            if link is None or link.error is not None:
                link = self._connect(until)
            now = self._runtime.now()
            slots = [Slot(now) for _ in requests]
            self._pending.extend(slots)
            link.send(b"".join(requests), until)
        if not link.try_to_lead(slots[-1], until):
            await link.await_slot(slots[-1], until)
        if slots[-1].ready:
            return link, [slot.value for slot in slots]
        raise link.error or self._overdue(link)

    @contextmanager
    def _sending(self, until: float) -> Iterator[None]:
        """One thread sends at a time."""
        mutex = self._mutex
        if not mutex.acquire(timeout=max(0.0, until - self._runtime.now())):
            raise StoreUnavailable("The connection is busy, so the request was not sent. Try again later.")
        try:
            yield
        finally:
            mutex.release()

    def listen(self) -> None:
        link = self._link
        if link is not None and link.error is None:
            link.try_to_lead(Slot(), 0.0)

    def _send(self, request: bytes, until: float, before: Sequence[bytes]) -> tuple[Link, Slot]:
        mutex = self._mutex
        if not mutex.acquire(blocking=False) and not mutex.acquire(timeout=max(0.0, until - self._runtime.now())):
            raise StoreUnavailable("The connection is busy, so the request was not sent. Try again later.")
        try:
            link = self._link
            if link is None or link.error is not None:
                link = self._connect(until)
            slot = Slot(self._runtime.now())
            if before:
                self._pending.extend(Slot(slot.sent_at) for _ in before)
                request = b"".join(before) + request
            self._pending.append(slot)
            link.send(request, until)
            return link, slot
        finally:
            mutex.release()

    def _connect(self, until: float) -> Link:
        if self._closed:
            raise closed_error()
        if self._link is not None:
            self._link.close()
            self._link = None
        pending = self._pending = deque()
        started = self._runtime.now()

        def dispatch(reply: Any) -> None:
            if type(reply) is Pushed:
                if self.on_push is not None:
                    self.on_push(reply)
            elif pending:
                pending.popleft().settle(reply)

        link = dial_link(self._dial, self._runtime, until, dispatch)
        if self._closed:  # meanwhile, and without waiting for us
            link.close()
            raise closed_error()
        self._link = link
        self.grace = grace_after(self._runtime.now() - started)
        self.pushes = link.protocol == 3
        return link

    def _overdue(self, link: Link) -> StoreUnavailable:
        pending = self._pending
        if pending and self._runtime.now() - pending[0].sent_at > STALE:
            link.fail("the server has been silent for too long")
        return StoreUnavailable(
            "The server did not answer in time; the request may or may not have been carried out.",
            outcome=Outcome.UNKNOWN,
        )

    def drop(self) -> None:
        if self._link is not None:
            self._link.fail("the server is no master any more")

    async def close(self) -> None:
        self._closed = True
        in_time = self._mutex.acquire(timeout=LEAVE_WITHIN)  # else somebody dials, and hangs up when that succeeds
        link, self._link = self._link, None
        if in_time:
            self._mutex.release()
        if link is not None:
            link.close()


class ThreadInbox:
    """`store.Inbox`. Invariant: whoever is in `_boxes` gets its pushes as long as `_link` is sound."""

    def __init__(self, dial: Dial, runtime: Runtime) -> None:
        self._dial = dial
        self.runtime = runtime
        self.address = ""
        self._link: Link | None = None
        self.forget(forked=False)

    def forget(self, *, forked: bool) -> None:
        link, self._link = self._link, None
        self._mutex = threading.Lock()
        self._boxes: dict[str, ThreadMailbox] = {}
        self._heard_at = self._pinged_at = 0.0
        self._closed = False
        if link is not None:
            link.forget()

    @property
    def listening(self) -> bool:
        return self._link is not None and self._link.error is None

    def mailbox(self, holder: str) -> Mailbox:
        return ThreadMailbox(self, holder)

    def add(self, box: ThreadMailbox) -> None:
        self._boxes[box.holder] = box

    def remove(self, box: ThreadMailbox) -> None:
        self._boxes.pop(box.holder, None)

    def sound_link(self, until: float) -> Link:
        """A subscribed connection, dialled if need be."""
        link = self._link
        if link is not None and link.error is None:
            return link
        if not self._mutex.acquire(timeout=max(0.0, until - self.runtime.now())):
            raise StoreUnavailable("The inbox is still being connected. Try again later.")
        try:
            if self._link is None or self._link.error is not None:
                self._connect(until)
            link = self._link
            if link is None:
                raise StoreUnavailable("The connection was closed.")
            return link
        finally:
            self._mutex.release()

    def _connect(self, until: float) -> None:
        if self._closed:
            raise closed_error()
        if self._link is not None:
            self._link.close()
            self._link = None
        self.address = new_address(self.runtime)
        subscribed = Slot()

        def dispatch(reply: Any) -> None:
            if not subscribed.ready:
                subscribed.settle(reply)
            else:
                self._deliver(reply)

        link = dial_link(self._dial, self.runtime, until, dispatch)
        link.send(subscribe_request(self.address), until)
        link.read_for(subscribed, until)
        error: LockError | None = subscribe_error(subscribed.value, subscribed.ready)
        if self._closed:  # meanwhile, and without waiting for us
            error = closed_error()
        if error is not None:
            link.close()
            raise error
        self._heard_at = self.runtime.now()
        self._link = link

    def _deliver(self, reply: Any) -> None:
        self._heard_at = self.runtime.now()
        found = push_in(reply)
        if found is not None:
            box = self._boxes.get(found[0])
            if box is not None:
                box.push(found[1])

    def check(self, link: Link) -> None:
        """A connection that is silent for long may be dead without knowing: make it speak."""
        now = self.runtime.now()
        if now - self._heard_at < HEAR_WITHIN:
            return
        if self._pinged_at > self._heard_at:
            if now - self._pinged_at > STALE:
                link.fail("the inbox has been silent for too long")
        elif self._mutex.acquire(blocking=False):
            try:
                self._pinged_at = now
                link.send(PING, now)
            finally:
                self._mutex.release()

    def drop(self) -> None:
        if self._link is not None:
            self._link.fail("the connection was closed")

    async def close(self) -> None:
        self._closed = True
        in_time = self._mutex.acquire(timeout=LEAVE_WITHIN)  # else somebody dials, and hangs up when that succeeds
        link, self._link = self._link, None
        if in_time:
            self._mutex.release()
        if link is not None:
            link.close()
        give_up_at = self.runtime.now() + LEAVE_WITHIN
        while self._boxes and self.runtime.now() < give_up_at:
            await self.runtime.sleep(0.002)  # who waited is giving back its place


class ThreadMailbox:
    """`ports.Mailbox`. `_link` is the connection under which this acquisition asked last."""

    __slots__ = ("_inbox", "_link", "_pushes", "_slot", "holder")

    def __init__(self, inbox: ThreadInbox, holder: str) -> None:
        self._inbox = inbox
        self.holder = holder
        self._slot = Slot()
        self._pushes: deque[Push | Next] = deque()
        self._link: Link | None = None

    @property
    def address(self) -> str:
        return self._inbox.address

    async def open(self, until: float) -> None:
        self._inbox.add(self)
        self._link = self._inbox.sound_link(until)

    def push(self, push: Push | Next) -> None:
        self._pushes.append(push)
        self._slot.settle(None)

    async def wait(self, until: float) -> Push | Next | None:
        link = self._link
        self._slot.ready = False  # before looking: a push that comes now is seen in one place or the other
        if self._pushes:
            return self._pushes.popleft()
        if link is not None and link.error is None:
            self._inbox.check(link)
            await link.await_slot(self._slot, until)
            if self._pushes:
                return self._pushes.popleft()
            if link.error is None:
                return None
        self._link = self._inbox.sound_link(until)
        return None  # a push may have come while nobody listened

    def close(self) -> None:
        self._inbox.remove(self)
