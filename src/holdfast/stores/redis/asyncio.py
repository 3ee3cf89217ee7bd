"""The wire and the inbox for asyncio: two connections, shared by all tasks of a client.

After the client library has dialled and shaken hands, a protocol of ours takes its place on the transport: replies
settle futures straight from the event loop, without a reader task between.

Rules kept here: as in `threads.py`; and a cancelled caller only loses interest in its reply. The connection lives on,
so that its clean-up, sent next, is executed after what was cancelled.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from holdfast.errors import Outcome, StoreError, StoreUnavailable, closed_error
from holdfast.ports import Mailbox, Runtime, Waker
from holdfast.stores.redis.clients import LEAST_DIAL, Dial, dialling_error, protocol_of
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
from holdfast.stores.redis.resp import Pushed, new_reader
from holdfast.values import Next, Push

_inherited: list[TaskLink] = []

DIAL_WITHIN = 5.0
"""Seconds after which dialling is given up, for all who wait for it; each of them may give up sooner."""


class TaskLink(asyncio.Protocol):
    """One dialled connection. Invariant: `_pending` has one future per reply that is owed, in order."""

    def __init__(self, connection: Any, runtime: Runtime) -> None:
        # From here on the transport is ours. The writer must live as long: its end would close the transport.
        self._writer: asyncio.StreamWriter = connection._writer
        connection._reader = connection._writer = None
        self._transport = self._writer.transport
        self._loop = asyncio.get_running_loop()
        self._runtime = runtime
        self._reader = new_reader()
        self._pending: deque[tuple[asyncio.Future[Any] | None, float]] = deque()
        self.protocol = protocol_of(connection)
        self.subscribed = False
        self.on_push: Callable[[Any], None] | None = None
        self.on_failure: Callable[[], None] | None = None
        self.error: StoreError | None = None
        self.heard_at = runtime.now()
        self._transport.set_protocol(self)

    def send(self, request: bytes) -> None:
        self._transport.write(request)

    async def ask(self, request: bytes, until: float, before: Sequence[bytes] = ()) -> Any:
        now = self._runtime.now()
        for early in before:
            self._pending.append((None, now))  # nobody waits for its reply
            self._transport.write(early)
        future: asyncio.Future[Any] = self._loop.create_future()
        self._pending.append((future, now))
        self._transport.write(request)
        timer = self._loop.call_later(until - now, self._overdue, future)
        try:
            return await future
        finally:
            timer.cancel()

    async def ask_all(self, requests: Sequence[bytes], until: float) -> list[Any]:
        """The replies to requests that go out together; they come in order, so with the last all are there."""
        now = self._runtime.now()
        futures: list[asyncio.Future[Any]] = [self._loop.create_future() for _ in requests]
        for future in futures:
            future.add_done_callback(_look_at)
            self._pending.append((future, now))
        self._transport.write(b"".join(requests))
        timer = self._loop.call_later(until - now, self._overdue, futures[-1])
        try:
            await futures[-1]
        finally:
            timer.cancel()
        return [future.result() for future in futures]

    async def subscribe(self, request: bytes, limit: float) -> Any:
        """The first thing that comes back: with RESP3 that is a push, which no request owns."""
        future: asyncio.Future[Any] = self._loop.create_future()
        self.subscribed = True
        self.on_push = lambda reply: None if future.done() else future.set_result(reply)
        self.on_failure = lambda: None if future.done() else future.set_exception(self.error or _no_answer(""))
        self._transport.write(request)
        try:
            async with asyncio.timeout(limit):
                return await future
        except (TimeoutError, asyncio.CancelledError) as error:
            self.fail("the subscription was not answered")
            if isinstance(error, asyncio.CancelledError):
                raise
            raise _no_answer("The server did not answer the subscription of the inbox in time") from None

    def _overdue(self, future: asyncio.Future[Any]) -> None:
        if not future.done():
            future.set_exception(_no_answer("The server did not answer in time"))
        if self._pending and self._runtime.now() - self._pending[0][1] > STALE:
            self.fail("the server has been silent for too long")

    def data_received(self, data: bytes) -> None:
        self.heard_at = self._runtime.now()
        for reply in self._reader.feed(data):
            if self.subscribed or type(reply) is Pushed:
                if self.on_push is not None:
                    self.on_push(reply)
            elif self._pending:
                future, _ = self._pending.popleft()
                if future is not None and not future.done():
                    future.set_result(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        self.fail("the server closed the connection")

    def fail(self, why: str) -> None:
        """This connection is of no use any more; what was asked over it has an unknown outcome."""
        if self.error is not None:
            return
        self.error = _no_answer(f"The request got no answer: {why}")
        self._transport.abort()
        while self._pending:
            future, _ = self._pending.popleft()
            if future is not None and not future.done():
                future.set_exception(_no_answer(f"The request got no answer: {why}"))
        if self.on_failure is not None:
            self.on_failure()

    def forget(self, *, forked: bool) -> None:
        """The loop is closed, or we are a forked child: let go without touching the parent's connection."""
        self.error = _no_answer("The connection belonged to a parent process or a closed event loop")
        if forked:
            _inherited.append(self)  # its end would write to the parent's connection (TLS) or warn


def _look_at(future: asyncio.Future[Any]) -> None:
    """Nobody awaits but the last of several: that the others failed too is no news."""
    if not future.cancelled():
        future.exception()


def _no_answer(what: str) -> StoreUnavailable:
    return StoreUnavailable(f"{what}; it may or may not have been carried out.", outcome=Outcome.UNKNOWN)


async def _dial_link(dial: Dial, runtime: Runtime, limit: float) -> TaskLink:
    """Connect and shake hands by the client library's own means."""
    connection = dial(max(LEAST_DIAL, limit))
    try:
        async with asyncio.timeout(max(LEAST_DIAL, limit)):
            await connection.connect()
    except (Exception, asyncio.CancelledError) as error:
        await connection.disconnect(nowait=True)
        if isinstance(error, asyncio.CancelledError):
            raise
        raise dialling_error(error) from error
    return TaskLink(connection, runtime)


class _Dialler:
    """Dials at most one connection at a time for all who want it; nobody's cancellation stops it for the others."""

    def __init__(self, make: Callable[[], Any], runtime: Runtime) -> None:
        self._make = make
        self._runtime = runtime
        self._task: asyncio.Task[TaskLink] | None = None
        self._closed = False
        self.link: TaskLink | None = None

    async def get(self, until: float) -> TaskLink:
        link = self.link
        if link is not None and link.error is None:
            return link
        if self._closed:
            raise closed_error()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._make(), name="holdfast-dial")
            self._task.add_done_callback(self._dialled)
        task = self._task
        await asyncio.wait([task], timeout=max(0.0, until - self._runtime.now()))
        if self._closed:
            raise closed_error()
        if not task.done():
            raise StoreUnavailable("The server could not be reached in time, so nothing was sent.")
        if task.cancelled():
            raise StoreUnavailable("Connecting was cancelled, so nothing was sent.")
        return task.result()

    def _dialled(self, task: asyncio.Task[TaskLink]) -> None:
        self._task = None
        if task.cancelled() or task.exception() is not None:
            return
        self.link = task.result()
        if self._closed:
            self.link.fail("the connection was closed")

    def forget(self, *, forked: bool) -> None:
        link, self.link, self._task = self.link, None, None
        if link is not None:
            link.forget(forked=forked)

    async def close(self) -> None:
        self._closed = True
        task, link = self._task, self.link
        if link is not None:
            link.fail("the connection was closed")
        if task is not None:
            task.cancel()
            await asyncio.wait([task])


class TaskWire:
    """`store.Wire` for asyncio."""

    def __init__(self, dial: Dial, runtime: Runtime) -> None:
        self._dial = dial
        self._runtime = runtime
        self._dialler = _Dialler(self._connect, runtime)
        self.grace = FIRST_GRACE
        self.pushes = False
        self.on_push: Callable[[Any], None] | None = None

    async def _connect(self) -> TaskLink:
        started = self._runtime.now()
        link = await _dial_link(self._dial, self._runtime, DIAL_WITHIN)
        self.grace = grace_after(self._runtime.now() - started)
        self.pushes = link.protocol == 3
        link.on_push = self.on_push
        return link

    async def ask(self, request: bytes, until: float, before: Sequence[bytes] = ()) -> Any:
        link = self._dialler.link
        if link is None or link.error is not None:
            link = await self._dialler.get(until)
        return await link.ask(request, until, before)

    async def exchange(
        self, requests: Sequence[bytes], until: float, on: TaskLink | None = None
    ) -> tuple[TaskLink, list[Any]]:
        """`transactions.Conversation`."""
        link = self._dialler.link if on is not None else await self._dialler.get(until)
        if link is None or (on is not None and (link is not on or on.error is not None)):
            raise cut_off()
        return link, await link.ask_all(requests, until)

    def listen(self) -> None:
        return  # the event loop reads by itself

    def drop(self) -> None:
        if self._dialler.link is not None:
            self._dialler.link.fail("the server is no master any more")

    async def close(self) -> None:
        await self._dialler.close()

    def forget(self, *, forked: bool) -> None:
        self._dialler.forget(forked=forked)


class TaskInbox:
    """`store.Inbox` for asyncio."""

    def __init__(self, dial: Dial, runtime: Runtime) -> None:
        self._dial = dial
        self.runtime = runtime
        self.address = ""
        self._boxes: dict[str, TaskMailbox] = {}
        self._dialler = _Dialler(self._connect, runtime)
        self._pinged_at = 0.0

    @property
    def listening(self) -> bool:
        return self._dialler.link is not None and self._dialler.link.error is None

    def mailbox(self, holder: str) -> Mailbox:
        return TaskMailbox(self, holder)

    def add(self, box: TaskMailbox) -> None:
        self._boxes[box.holder] = box

    def remove(self, box: TaskMailbox) -> None:
        self._boxes.pop(box.holder, None)

    async def sound_link(self, until: float) -> TaskLink:
        return await self._dialler.get(until)

    async def _connect(self) -> TaskLink:
        link = await _dial_link(self._dial, self.runtime, DIAL_WITHIN)
        address = new_address(self.runtime)
        error = subscribe_error(await link.subscribe(subscribe_request(address), DIAL_WITHIN), True)
        if error is not None:
            link.fail("the subscription was refused")
            raise error
        link.on_push = self._deliver
        link.on_failure = self._failed
        self.address = address
        return link

    def _deliver(self, reply: Any) -> None:
        found = push_in(reply)
        if found is not None:
            box = self._boxes.get(found[0])
            if box is not None:
                box.push(found[1])

    def _failed(self) -> None:
        for box in self._boxes.values():
            box.wake()

    def check(self, link: TaskLink) -> None:
        """A connection that is silent for long may be dead without knowing: make it speak."""
        now = self.runtime.now()
        if now - link.heard_at < HEAR_WITHIN:
            return
        if self._pinged_at > link.heard_at:
            if now - self._pinged_at > STALE:
                link.fail("the inbox has been silent for too long")
        else:
            self._pinged_at = now
            link.send(PING)

    def drop(self) -> None:
        if self._dialler.link is not None:
            self._dialler.link.fail("the connection was closed")

    async def close(self) -> None:
        await self._dialler.close()
        give_up_at = self.runtime.now() + LEAVE_WITHIN
        while self._boxes and self.runtime.now() < give_up_at:
            await self.runtime.sleep(0.002)  # who waited is giving back its place

    def forget(self, *, forked: bool) -> None:
        self._boxes.clear()
        self._dialler.forget(forked=forked)


class TaskMailbox:
    """`ports.Mailbox`. `_link` is the connection under which this acquisition asked last."""

    __slots__ = ("_inbox", "_link", "_pushes", "_waker", "holder")

    def __init__(self, inbox: TaskInbox, holder: str) -> None:
        self._inbox = inbox
        self.holder = holder
        self._pushes: deque[Push | Next] = deque()
        self._waker: Waker | None = None
        self._link: TaskLink | None = None

    @property
    def address(self) -> str:
        return self._inbox.address

    async def open(self, until: float) -> None:
        self._inbox.add(self)
        self._link = await self._inbox.sound_link(until)

    def push(self, push: Push | Next) -> None:
        self._pushes.append(push)
        self.wake()

    def wake(self) -> None:
        if self._waker is not None:
            self._waker.wake()

    async def wait(self, until: float) -> Push | Next | None:
        link = self._link
        if link is not None and link.error is None:
            if not self._pushes:
                self._inbox.check(link)
                if self._waker is None:
                    self._waker = self._inbox.runtime.waker()
                await self._waker.wait(until)
            if self._pushes:
                return self._pushes.popleft()
            if link.error is None:
                return None
        self._link = await self._inbox.sound_link(until)
        return None  # a push may have come while nobody listened

    def close(self) -> None:
        self._inbox.remove(self)
