"""The wire and the inbox for asyncio: each is one connection, shared by all tasks of a client.

redis-py connects and authenticates. Then `TaskLink` becomes the protocol of the transport: replies settle futures
directly from the event loop, without a reader task.

Rules:

- Requests leave in one order and replies arrive in it. A cancelled caller only stops waiting: the connection survives,
  and the caller's clean-up, sent next, is executed after the cancelled request.
- One timer serves all requests, and a reply does not cancel it: a timer per request would double the cost of one.
- A connection with a request unanswered for `STALE_AFTER` seconds fails at the next timeout.
"""

from __future__ import annotations

import asyncio
import math
from abc import abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from lockfast.errors import StoreError, StoreUnavailable, closed_error
from lockfast.ports import Runtime
from lockfast.stores.redis.protocol import notifications
from lockfast.stores.redis.protocol.resp import Feed, Pushed, new_reader
from lockfast.stores.redis.transport import connect
from lockfast.stores.redis.transport.connect import BaseInbox, Channels, PendingReply, no_reply
from lockfast.stores.redis.watch import TaskWatchConnection

# Connections of the parent process, never collected: __del__ would write to its TLS connection, or warn.
_inherited: list[TaskLink] = []

CONNECT_TIMEOUT = 5.0  # seconds; a caller with an earlier deadline stops waiting sooner


class TaskLink(asyncio.Protocol):
    """One connection.

    Invariants: `_pending` has one entry per reply that the server owes, in order: its future (None if nobody waits),
    when it was sent, and the deadline of the caller. `_timer_at` is not later than any future deadline in it.
    """

    def __init__(self, connection: Any, runtime: Runtime) -> None:
        # Keep the writer: its __del__ would close the transport.
        self._writer: asyncio.StreamWriter = connection._writer
        connection._reader = connection._writer = None
        self._transport = self._writer.transport
        self._loop = asyncio.get_running_loop()
        self._runtime = runtime
        self.feed: Feed = new_reader().feed
        self._pending: deque[tuple[asyncio.Future[Any] | None, float, float]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._timer_due = 0.0  # by the loop's clock: not every loop has TimerHandle.when()
        self.protocol = connect.protocol_of(connection)
        self.subscribed = False
        self.on_push: Callable[[Any], None] | None = None
        self.on_failure: Callable[[], None] | None = None
        self.error: StoreError | None = None
        self.max_wait = math.inf  # seconds that a reply may take
        self._transport.set_protocol(self)

    def send(self, request: bytes) -> None:
        self._transport.write(request)

    def request(self, request: bytes, until: float, before: Sequence[bytes] = ()) -> asyncio.Future[Any]:
        """Send a request, and the requests `before` it, whose replies are dropped; return the reply's future."""
        now = self._runtime.now()
        if until > now + self.max_wait:
            until = now + self.max_wait
        if before:
            self._pending.extend([(None, now, math.inf)] * len(before))
            request = b"".join([*before, request])  # one write, so that the server reads them together
        future: asyncio.Future[Any] = self._loop.create_future()
        self._pending.append((future, now, until))
        self._transport.write(request)
        # The loop's clock stops while the machine is suspended, so the timer can be late.
        late = self._timer_at < now and self._timer is not None and self._timer_due > self._loop.time()
        if until < self._timer_at or late:
            self._set_timer(min(until, self._timer_at), now)
        return future

    def _set_timer(self, moment: float, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = moment
        self._timer_due = self._loop.time() + max(0.0, moment - now)
        self._timer = self._loop.call_at(self._timer_due, self._time_out)

    def _time_out(self) -> None:
        """Fail the requests whose deadline has passed, and set the timer for the next deadline."""
        now, next_deadline, overdue = self._runtime.now(), math.inf, False
        for future, _, until in tuple(self._pending):
            if future is None or future.done():
                continue
            if until <= now:
                _fail(future, "it did not answer in time")
                overdue = True
            elif until < next_deadline:
                next_deadline = until
        self._timer, self._timer_at = None, math.inf
        if next_deadline < math.inf:
            self._set_timer(next_deadline, now)
        if overdue and now - self._pending[0][1] > connect.STALE_AFTER:
            self.fail("it has not answered for too long")

    def post(self, requests: Sequence[bytes], until: float) -> list[asyncio.Future[Any]]:
        """Send several requests; return a future for each reply. Replies arrive in order."""
        futures: list[asyncio.Future[Any]] = [self._loop.create_future() for _ in requests[:-1]]
        now = self._runtime.now()
        self._pending.extend((future, now, math.inf) for future in futures)
        self._transport.write(b"".join(requests[:-1]))
        return [*futures, self.request(requests[-1], until)]

    @property
    def silent_since(self) -> float | None:
        """When the oldest unanswered request was sent."""
        return self._pending[0][1] if self._pending else None

    def data_received(self, data: bytes) -> None:
        for reply in self.feed(data):
            if self.subscribed or type(reply) is Pushed:
                if self.on_push is not None:
                    self.on_push(reply)
            elif self._pending:
                future = self._pending.popleft()[0]
                if future is not None and not future.done():
                    future.set_result(reply)

    async def wait_for(self, pending: PendingReply, until: float) -> None:
        if not pending.ready and self.error is None:
            pending.waker = waker = self._runtime.waker()
            await waker.wait(until)

    def connection_lost(self, exc: Exception | None) -> None:
        self.fail("the server closed the connection")

    def fail(self, why: str) -> None:
        """Close the connection and fail every request that waits for its reply."""
        if self.error is not None:
            return
        self.error = no_reply(why)
        self._transport.abort()
        if self._timer is not None:
            self._timer.cancel()
        while self._pending:
            future = self._pending.popleft()[0]
            if future is not None and not future.done():
                _fail(future, why)
        if self.on_failure is not None:
            self.on_failure()

    disconnect = fail

    def reset(self, *, forked: bool) -> None:
        """Forget the connection of a closed event loop or of the parent process, without touching it."""
        self.error = no_reply("the connection belonged to a parent process or a closed event loop")
        if forked:
            _inherited.append(self)


def _fail(future: asyncio.Future[Any], why: str) -> None:
    future.set_exception(no_reply(why))
    future.exception()  # marks it as retrieved: a cancelled caller, or one of a batch, never looks


async def connect_task_link(new_connection: connect.ConnectionFactory, runtime: Runtime, limit: float) -> TaskLink:
    """Connect through redis-py and take over the transport."""
    limit = max(connect.MIN_CONNECT_TIME, limit)
    connection = new_connection(limit)
    try:
        async with asyncio.timeout(limit):
            await connection.connect()
    except (Exception, asyncio.CancelledError) as error:
        await connection.disconnect(nowait=True)
        if isinstance(error, asyncio.CancelledError):
            raise
        raise connect.connect_error(error) from error
    return TaskLink(connection, runtime)


class TaskConnector(connect.BaseConnector[TaskLink]):
    """All callers share one attempt to connect, and a cancelled caller does not stop it."""

    _task: asyncio.Task[TaskLink] | None = None

    @property
    def connected(self) -> bool:
        link = self._link
        return link is not None and link.error is None

    @abstractmethod
    async def _connect(self) -> TaskLink: ...

    async def connect_link(self, until: float) -> TaskLink:
        link = self._link
        if link is not None and link.error is None:
            return link
        if self._closed:
            raise closed_error()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._connect(), name="lockfast-connect")
            self._task.add_done_callback(self._on_connected)
        task = self._task
        await asyncio.wait([task], timeout=max(0.0, until - self.runtime.now()))
        if self._closed:
            raise closed_error()
        if not task.done():
            raise StoreUnavailable("Connecting to the server took too long, so the request was not sent. Try again.")
        if task.cancelled():
            raise StoreUnavailable("Connecting to the server was cancelled, so the request was not sent. Try again.")
        link = task.result()
        if link.error is not None:  # it broke before this task woke up, and would never answer
            raise StoreUnavailable("The new connection broke at once, so the request was not sent. Try again.")
        return link

    def _on_connected(self, task: asyncio.Task[TaskLink]) -> None:
        self._task = None
        if task.cancelled() or task.exception() is not None:
            return
        self._link = task.result()
        if self._closed:
            self._link.fail("the connection was closed")

    def reset(self, *, forked: bool) -> None:
        self._task = None
        super().reset(forked=forked)

    async def close(self) -> None:
        await super().close()
        task, link = self._task, self._link
        if link is not None:
            link.fail("the connection was closed")
            await asyncio.sleep(0)  # a transport closes its socket in the next iteration of the loop
        if task is not None:
            task.cancel()
            await asyncio.wait([task])


class TaskWire(TaskConnector):
    """`store.Wire` for asyncio."""

    grace = connect.INITIAL_GRACE
    pushes = False
    on_push: Callable[[Any], None] | None = None

    async def _connect(self) -> TaskLink:
        started = self.runtime.now()
        link = await connect_task_link(self._new_connection, self.runtime, min(CONNECT_TIMEOUT, self._max_wait))
        self.grace = connect.grace_after(self.runtime.now() - started)
        self.pushes = link.protocol == 3
        link.on_push = self.on_push
        link.max_wait = self._max_wait
        return link

    def request(self, request: bytes, until: float, before: Sequence[bytes] = ()) -> Awaitable[Any]:
        link = self._link
        if link is None or link.error is not None:
            return self._connect_and_request(request, until, before)
        return link.request(request, until, before)

    async def _connect_and_request(self, request: bytes, until: float, before: Sequence[bytes]) -> Any:
        link = await self.open_link(until)
        return await link.request(request, until, before)

    async def post(
        self, requests: Sequence[bytes], until: float, on: TaskLink | None = None
    ) -> tuple[TaskLink, list[asyncio.Future[Any]]]:
        """Send several requests, on the link `on` if given. `collect` returns their replies."""
        link = await self.open_link(until) if on is None else connect.same_link(on, self._link)
        return link, link.post(requests, until)

    async def collect(self, posted: tuple[TaskLink, list[asyncio.Future[Any]]], until: float) -> list[Any]:
        _, futures = posted
        await futures[-1]
        return [future.result() for future in futures]

    def watch_connection(self) -> TaskWatchConnection:
        return TaskWatchConnection(self._new_connection, self.runtime)

    def poll_events(self) -> None:
        return  # the event loop reads the connection

    @property
    def silent_since(self) -> float | None:
        return None if self._link is None else self._link.silent_since


class TaskInbox(BaseInbox[TaskLink], TaskConnector):
    """`store.Inbox` for asyncio. The event loop reads the connection."""

    async def _connect(self) -> TaskLink:
        limit = min(CONNECT_TIMEOUT, self._max_wait)
        link = await connect_task_link(self._new_connection, self.runtime, limit)
        address = notifications.new_address(self.runtime)
        channels = Channels(address)
        link.subscribed = True
        link.on_push = lambda reply: self.receive(reply, channels)
        link.on_failure = lambda: self._wake_all(channels)
        if not self.sharded:
            request = notifications.subscribe_request(address)
            try:
                await self._subscribe(link, channels, request, self.runtime.now() + limit)
            except BaseException:
                link.fail("the server did not confirm the subscription")
                raise
            link.feed = notifications.grant_fast_path(link.feed, address, link.protocol, self.notify)
        self._heard_at = self.runtime.now()
        self.address, self._channels = address, channels
        return link

    async def _subscribe(self, link: TaskLink, channels: Channels, request: bytes, until: float) -> None:
        answer = channels.expect_reply()
        link.send(request)
        await link.wait_for(answer, until)
        error = link.error or notifications.subscribe_error(answer.value, answer.ready)
        if error is not None:
            raise error

    def _wake_all(self, channels: Channels) -> None:
        for mailbox in self.mailboxes.values():
            mailbox.wake()
        for answer in channels.pending:
            answer.settle(None)

    def _ping(self, link: TaskLink, now: float) -> None:
        self._pinged_at = now
        link.send(notifications.PING)
