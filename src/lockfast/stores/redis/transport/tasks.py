"""The link and the wire for asyncio: one connection, shared by all tasks of a client.

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
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from lockfast.errors import StoreError, StoreUnavailable, closed_error
from lockfast.ports import Runtime
from lockfast.stores.redis.protocol.resp import Feed, Pushed, new_reader
from lockfast.stores.redis.transport.connect import (
    INITIAL_GRACE,
    MIN_CONNECT_TIME,
    STALE_AFTER,
    ConnectionFactory,
    connect_error,
    grace_after,
    no_reply,
    protocol_of,
    same_link,
)

if TYPE_CHECKING:
    from lockfast.stores.redis.watch import TaskWatchConnection

_inherited: list[TaskLink] = []

CONNECT_TIMEOUT = 5.0
"""Seconds that connecting may take. A caller with an earlier deadline stops waiting sooner."""


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
        self.protocol = protocol_of(connection)
        self.subscribed = False
        self.on_push: Callable[[Any], None] | None = None
        self.on_failure: Callable[[], None] | None = None
        self.error: StoreError | None = None
        self._transport.set_protocol(self)

    def send(self, request: bytes) -> None:
        self._transport.write(request)

    def request(self, request: bytes, until: float, before: Sequence[bytes] = ()) -> asyncio.Future[Any]:
        """Send a request, and the requests `before` it, whose replies are dropped; return the reply's future."""
        now = self._runtime.now()
        if before:
            self._pending.extend([(None, now, math.inf)] * len(before))
            request = b"".join([*before, request])  # one write, so that the server reads them together
        future: asyncio.Future[Any] = self._loop.create_future()
        self._pending.append((future, now, until))
        self._transport.write(request)
        # The loop's clock stops while the machine is suspended, so the timer can be late.
        late = self._timer_at < now and self._timer is not None and self._timer.when() > self._loop.time()
        if until < self._timer_at or late:
            self._set_timer(min(until, self._timer_at), now)
        return future

    def _set_timer(self, moment: float, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = moment
        self._timer = self._loop.call_later(max(0.0, moment - now), self._time_out)

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
        if overdue and now - self._pending[0][1] > STALE_AFTER:
            self.fail("it has not answered for too long")

    def post(self, requests: Sequence[bytes], until: float) -> list[asyncio.Future[Any]]:
        """Send several requests; return a future for each reply. Replies arrive in order."""
        futures: list[asyncio.Future[Any]] = [self._loop.create_future() for _ in requests[:-1]]
        now = self._runtime.now()
        self._pending.extend((future, now, math.inf) for future in futures)
        self._transport.write(b"".join(requests[:-1]))
        return [*futures, self.request(requests[-1], until)]

    async def subscribe(self, request: bytes, limit: float) -> Any:
        """Send SUBSCRIBE; return the first message. Under RESP3 it is a push, which answers no request."""
        future: asyncio.Future[Any] = self._loop.create_future()
        self.subscribed = True
        self.on_push = lambda reply: None if future.done() else future.set_result(reply)
        self.on_failure = lambda: None if future.done() else _fail(future, "the connection broke while subscribing")
        self._transport.write(request)
        try:
            async with asyncio.timeout(limit):
                return await future
        except (TimeoutError, asyncio.CancelledError) as error:
            self.fail("it did not confirm the subscription")
            if isinstance(error, asyncio.CancelledError):
                raise
            raise no_reply("it did not confirm the subscription of the inbox in time") from None

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

    def reset(self, *, forked: bool) -> None:
        """Forget the connection of a closed event loop or of the parent process, without touching it."""
        self.error = no_reply("the connection belonged to a parent process or a closed event loop")
        if forked:
            _inherited.append(self)  # never collected: __del__ would write to the parent's TLS connection, or warn


def _fail(future: asyncio.Future[Any], why: str) -> None:
    future.set_exception(no_reply(why))
    future.exception()  # marks it as retrieved: a cancelled caller, or one of a batch, never looks


async def connect_task_link(new_connection: ConnectionFactory, runtime: Runtime, limit: float) -> TaskLink:
    """Connect through redis-py and take over the transport."""
    limit = max(MIN_CONNECT_TIME, limit)
    connection = new_connection(limit)
    try:
        async with asyncio.timeout(limit):
            await connection.connect()
    except (Exception, asyncio.CancelledError) as error:
        await connection.disconnect(nowait=True)
        if isinstance(error, asyncio.CancelledError):
            raise
        raise connect_error(error) from error
    return TaskLink(connection, runtime)


class Connector:
    """Keeps one link. All callers share one attempt to connect, and a cancelled caller does not stop it."""

    def __init__(self, connect: Callable[[], Coroutine[Any, Any, TaskLink]], runtime: Runtime) -> None:
        self._connect = connect
        self._runtime = runtime
        self._task: asyncio.Task[TaskLink] | None = None
        self._closed = False
        self.link: TaskLink | None = None

    @property
    def connected(self) -> bool:
        return self.link is not None and self.link.error is None

    async def get(self, until: float) -> TaskLink:
        """Return the link; connect if necessary."""
        link = self.link
        if link is not None and link.error is None:
            return link
        if self._closed:
            raise closed_error()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._connect(), name="lockfast-connect")
            self._task.add_done_callback(self._on_connected)
        task = self._task
        await asyncio.wait([task], timeout=max(0.0, until - self._runtime.now()))
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
        self.link = task.result()
        if self._closed:
            self.link.fail("the connection was closed")

    def drop(self) -> None:
        if self.link is not None:
            self.link.fail("the server is not the master any more")

    def reset(self, *, forked: bool) -> None:
        link, self.link, self._task = self.link, None, None
        if link is not None:
            link.reset(forked=forked)

    async def close(self) -> None:
        self._closed = True
        task, link = self._task, self.link
        if link is not None:
            link.fail("the connection was closed")
            await asyncio.sleep(0)  # a transport closes its socket in the next iteration of the loop
        if task is not None:
            task.cancel()
            await asyncio.wait([task])


class TaskWire:
    """`store.Wire` for asyncio."""

    def __init__(self, new_connection: ConnectionFactory, runtime: Runtime, max_wait: float = math.inf) -> None:
        self._new_connection = new_connection
        self._runtime = runtime
        self._max_wait = max_wait
        self._connector = Connector(self._connect, runtime)
        self.grace = INITIAL_GRACE
        self.pushes = False
        self.on_push: Callable[[Any], None] | None = None

    async def _connect(self) -> TaskLink:
        started = self._runtime.now()
        link = await connect_task_link(self._new_connection, self._runtime, min(CONNECT_TIMEOUT, self._max_wait))
        self.grace = grace_after(self._runtime.now() - started)
        self.pushes = link.protocol == 3
        link.on_push = self.on_push
        return link

    def request(self, request: bytes, until: float, before: Sequence[bytes] = ()) -> Awaitable[Any]:
        link = self._connector.link
        if link is None or link.error is not None:
            return self._connect_and_request(request, until, before)
        return link.request(request, self._bounded(until) if self._max_wait < math.inf else until, before)

    async def _connect_and_request(self, request: bytes, until: float, before: Sequence[bytes]) -> Any:
        link = await self._connector.get(until)
        return await link.request(request, self._bounded(until), before)

    def _bounded(self, until: float) -> float:
        return min(until, self._runtime.now() + self._max_wait)

    async def post(
        self, requests: Sequence[bytes], until: float, on: TaskLink | None = None
    ) -> tuple[TaskLink, list[asyncio.Future[Any]]]:
        """Send several requests, on the link `on` if given. `collect` returns their replies."""
        link = await self._connector.get(until) if on is None else same_link(on, self._connector.link)
        return link, link.post(requests, until)

    async def collect(self, posted: tuple[TaskLink, list[asyncio.Future[Any]]], until: float) -> list[Any]:
        _, futures = posted
        await futures[-1]
        return [future.result() for future in futures]

    @property
    def connected(self) -> bool:
        return self._connector.connected

    def watch_connection(self) -> TaskWatchConnection:
        from lockfast.stores.redis.watch import TaskWatchConnection

        return TaskWatchConnection(self._new_connection, self._runtime)

    def poll_events(self) -> None:
        return  # the event loop reads the connection

    def drop(self) -> None:
        self._connector.drop()

    async def close(self) -> None:
        await self._connector.close()

    def reset(self, *, forked: bool) -> None:
        self._connector.reset(forked=forked)
