"""One dialled connection for asyncio, and how it is dialled.

After the client library has dialled and shaken hands, a protocol of ours takes its place on the transport: replies
settle futures straight from the event loop, without a reader task between.

Rules kept here: a cancelled caller only loses interest in its reply. The connection lives on, so that its clean-up,
sent next, is executed after what was cancelled. One timer serves all who wait, and is left alone when a reply comes:
setting and cancelling one for each request would cost as much as all else that is done for it.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from lockfast.errors import Outcome, StoreError, StoreUnavailable, closed_error
from lockfast.ports import Runtime
from lockfast.stores.redis.protocol.resp import Feed, Pushed, new_reader
from lockfast.stores.redis.transport.connect import (
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
    from lockfast.stores.redis.watch import TaskWatchConnection

_inherited: list[TaskLink] = []

CONNECT_TIMEOUT = 5.0
"""Seconds after which dialling is given up, for all who wait for it; each of them may give up sooner."""


class TaskLink(asyncio.Protocol):
    """One dialled connection. Invariants: `_pending` has one future per reply that is owed, in order, with when it was
    asked for and until when it is waited for; `_timer_at` is not after any of these moments that are to come."""

    def __init__(self, connection: Any, runtime: Runtime) -> None:
        # From here on the transport is ours. The writer must live as long: its end would close the transport.
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
        self.heard_at = runtime.now()
        self._transport.set_protocol(self)

    def send(self, request: bytes) -> None:
        self._transport.write(request)

    def request(self, request: bytes, until: float, before: Sequence[bytes] = ()) -> asyncio.Future[Any]:
        """The reply to be; `StoreUnavailable` when there is none by then."""
        now = self._runtime.now()
        if before:
            self._pending.extend([(None, now, math.inf)] * len(before))  # nobody waits for their replies
            request = b"".join([*before, request])  # at once, so that the server takes them in at once
        future: asyncio.Future[Any] = self._loop.create_future()
        self._pending.append((future, now, until))
        self._transport.write(request)
        late = self._timer_at < now and self._timer is not None and self._timer.when() > self._loop.time()
        if until < self._timer_at or late:  # the loop's own clock stands still in a suspended machine
            self._set_timer(min(until, self._timer_at), now)
        return future

    def _set_timer(self, moment: float, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = moment
        self._timer = self._loop.call_later(max(0.0, moment - now), self._end_overdue)

    def _end_overdue(self) -> None:
        """Tell those whose time is up, and see when to look again."""
        now, next_end, overdue = self._runtime.now(), math.inf, False
        for future, _, until in tuple(self._pending):
            if future is None or future.done():
                continue
            if until <= now:
                future.set_exception(_no_answer("The server did not answer in time"))
                _seen(future)  # whoever waited may be destroyed, and then nobody is to be told
                overdue = True
            elif until < next_end:
                next_end = until
        self._timer, self._timer_at = None, math.inf
        if next_end < math.inf:
            self._set_timer(next_end, now)
        if overdue:
            self._give_up_if_stale(now)

    def post(self, requests: Sequence[bytes]) -> list[asyncio.Future[Any]]:
        """Send them all; a future for the reply to each."""
        now = self._runtime.now()
        futures: list[asyncio.Future[Any]] = [self._loop.create_future() for _ in requests]
        for future, request in zip(futures, requests, strict=True):
            future.add_done_callback(_seen)
            self._pending.append((future, now, math.inf))
            self._transport.write(request)
        return futures

    async def collect(self, futures: Sequence[asyncio.Future[Any]], until: float) -> list[Any]:
        """The replies; they come in order, so with the last all are there."""
        timer = self._loop.call_later(until - self._runtime.now(), self._overdue, futures[-1])
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

    @property
    def silent_since(self) -> float | None:
        """When the oldest request was sent that is not answered yet."""
        return self._pending[0][1] if self._pending else None

    def _overdue(self, future: asyncio.Future[Any]) -> None:
        if not future.done():
            future.set_exception(_no_answer("The server did not answer in time"))
        self._give_up_if_stale(self._runtime.now())

    def _give_up_if_stale(self, now: float) -> None:
        if self._pending and now - self._pending[0][1] > STALE_AFTER:
            self.fail("the server has been silent for too long")

    def data_received(self, data: bytes) -> None:
        self.heard_at = self._runtime.now()
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
        """This connection is of no use any more; what was asked over it has an unknown outcome."""
        if self.error is not None:
            return
        self.error = _no_answer(f"The request got no answer: {why}")
        self._transport.abort()
        if self._timer is not None:
            self._timer.cancel()
        while self._pending:
            future = self._pending.popleft()[0]
            if future is not None and not future.done():
                future.set_exception(_no_answer(f"The request got no answer: {why}"))
                _seen(future)
        if self.on_failure is not None:
            self.on_failure()

    def reset(self, *, forked: bool) -> None:
        """The loop is closed, or we are a forked child: let go without touching the parent's connection."""
        self.error = _no_answer("The connection belonged to a parent process or a closed event loop")
        if forked:
            _inherited.append(self)  # its end would write to the parent's connection (TLS) or warn


def _seen(future: asyncio.Future[Any]) -> None:
    """Whoever waits looks at the last of several alone: the failure of the others is no news."""
    if not future.cancelled():
        future.exception()


def _no_answer(what: str) -> StoreUnavailable:
    return StoreUnavailable(f"{what}; it may or may not have been carried out.", outcome=Outcome.UNKNOWN)


async def connect_task_link(dial: ConnectionFactory, runtime: Runtime, limit: float) -> TaskLink:
    """Connect and shake hands by the client library's own means."""
    connection = dial(max(MIN_CONNECT_TIME, limit))
    try:
        async with asyncio.timeout(max(MIN_CONNECT_TIME, limit)):
            await connection.connect()
    except (Exception, asyncio.CancelledError) as error:
        await connection.disconnect(nowait=True)
        if isinstance(error, asyncio.CancelledError):
            raise
        raise connect_error(error) from error
    return TaskLink(connection, runtime)


class Connector:
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
            self._task = asyncio.get_running_loop().create_task(self._make(), name="lockfast-dial")
            self._task.add_done_callback(self._dialled)
        task = self._task
        await asyncio.wait([task], timeout=max(0.0, until - self._runtime.now()))
        if self._closed:
            raise closed_error()
        if not task.done():
            raise StoreUnavailable("The server could not be reached in time, so nothing was sent.")
        if task.cancelled():
            raise StoreUnavailable("Connecting was cancelled, so nothing was sent.")
        link = task.result()
        if link.error is not None:  # it broke before we woke up: a request over it would wait for its reply in vain
            raise StoreUnavailable("The connection broke as soon as it was made, so nothing was sent.")
        return link

    def _dialled(self, task: asyncio.Task[TaskLink]) -> None:
        self._task = None
        if task.cancelled() or task.exception() is not None:
            return
        self.link = task.result()
        if self._closed:
            self.link.fail("the connection was closed")

    def reset(self, *, forked: bool) -> None:
        link, self.link, self._task = self.link, None, None
        if link is not None:
            link.reset(forked=forked)

    async def close(self) -> None:
        self._closed = True
        task, link = self._task, self.link
        if link is not None:
            link.fail("the connection was closed")
            await asyncio.sleep(0)  # a transport closes its socket in the next round: until then the server sees us
        if task is not None:
            task.cancel()
            await asyncio.wait([task])


class TaskWire:
    """`store.Wire` for asyncio."""

    has_sessions = True

    def __init__(self, dial: ConnectionFactory, runtime: Runtime, longest: float = math.inf) -> None:
        self._dial = dial
        self._runtime = runtime
        self._longest = longest
        self._connector = Connector(self._connect, runtime)
        self.grace = INITIAL_GRACE
        self.pushes = False
        self.on_push: Callable[[Any], None] | None = None

    async def _connect(self) -> TaskLink:
        started = self._runtime.now()
        link = await connect_task_link(self._dial, self._runtime, min(CONNECT_TIMEOUT, self._longest))
        self.grace = grace_after(self._runtime.now() - started)
        self.pushes = link.protocol == 3
        link.on_push = self.on_push
        return link

    def request(self, request: bytes, until: float, before: Sequence[bytes] = ()) -> Awaitable[Any]:
        link = self._connector.link
        if link is None or link.error is not None:
            return self._dial_and_ask(request, until, before)
        return link.request(request, self._bounded(until) if self._longest < math.inf else until, before)

    async def _dial_and_ask(self, request: bytes, until: float, before: Sequence[bytes]) -> Any:
        link = await self._connector.get(until)
        return await link.request(request, self._bounded(until), before)

    def _bounded(self, until: float) -> float:
        return min(until, self._runtime.now() + self._longest)

    async def post(
        self, requests: Sequence[bytes], until: float, on: TaskLink | None = None
    ) -> tuple[TaskLink, list[asyncio.Future[Any]]]:
        link = await self._connector.get(until) if on is None else same_link(on, self._connector.link)
        return link, link.post(requests)

    async def collect(self, posted: tuple[TaskLink, list[asyncio.Future[Any]]], until: float) -> list[Any]:
        link, futures = posted
        return await link.collect(futures, until)

    @property
    def connected(self) -> bool:
        link = self._connector.link
        return link is not None and link.error is None

    def session(self) -> TaskWatchConnection:
        """A connection of its own, to the same place."""
        from lockfast.stores.redis.watch import TaskWatchConnection

        return TaskWatchConnection(self._dial, self._runtime)

    def listen(self) -> None:
        return  # the event loop reads by itself

    def drop(self) -> None:
        if self._connector.link is not None:
            self._connector.link.fail("the server is no master any more")

    async def close(self) -> None:
        await self._connector.close()

    def reset(self, *, forked: bool) -> None:
        self._connector.reset(forked=forked)
