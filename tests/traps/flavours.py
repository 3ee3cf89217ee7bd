"""One blocking interface to threads and asyncio, so that a test is written once.

`start(call)` starts a call, in a thread or as a task of an event loop in another thread, and returns its future.
`do(call)` waits for its result. `call` takes no argument and may return an awaitable.
"""

import asyncio
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

import redis
import redis.asyncio

import lockfast
import lockfast.aio

LIMIT = 20.0
"""Seconds after which an unfinished call fails its test."""


class Client:
    """One client of either flavour."""

    def __init__(self, flavour: "Flavour", locks: Any) -> None:
        self.locks = locks
        self.start = flavour.start
        self.do = flavour.do

    def acquiring(self, name: str, *, blocking: bool = True, timeout: float | None = None, **options: Any) -> Any:
        """Start an acquisition; return a future of the lease, or of None."""
        lock = self.locks.lock(name, **options)
        return self.start(lambda: lock.acquire(blocking, timeout))

    def acquire(self, name: str, *, blocking: bool = True, timeout: float | None = None, **options: Any) -> Any:
        lock = self.locks.lock(name, **options)
        return self.do(lambda: lock.acquire(blocking, timeout))

    def try_acquire(self, name: str, **options: Any) -> Any:
        return self.acquire(name, blocking=False, **options)

    def release(self, lease: Any) -> Any:
        return self.do(lease.release)

    def renew(self, lease: Any, ttl: float | None = None) -> Any:
        return self.do(lambda: lease.renew(ttl))

    def adopt(self, text: str, **options: Any) -> Any:
        return self.do(lambda: self.locks.adopt(text, **options))

    def state(self, lease: Any) -> lockfast.State:
        found: lockfast.State = self.do(lambda: lease.state)
        return found

    def inspect(self, name: str) -> lockfast.LockInfo:
        info: lockfast.LockInfo = self.do(self.locks.lock(name).inspect)
        return info

    def warm_up(self) -> Self:
        """Connect and load the scripts, so that each later operation is one request."""
        lease = self.acquire("warm-up", timeout=20)
        self.renew(lease)
        self.release(lease)
        return self

    def warm_up_inbox(self) -> Self:
        """Connect the inbox as well."""
        self.warm_up()
        lease = self.acquire("warm-up")
        while not self.locks.session.store.inbox_open:  # on a busy machine the timeout may end before it opens
            assert self.acquire("warm-up", timeout=0.05) is None
        self.release(lease)
        return self

    def close(self) -> None:
        self.do(self.locks.close)


class Flavour:
    """Creates clients, and closes them at the end of its block."""

    name: str
    connect_function: Callable[..., Any]
    redis_module: Any

    def __init__(self) -> None:
        self._clients: list[Client] = []

    def connect(self, target: Any, **options: Any) -> Client:
        client = Client(self, self.connect_function(target, **options))
        self._clients.append(client)
        return client

    def start(self, call: Callable[[], Any]) -> Any:
        raise NotImplementedError

    def do(self, call: Callable[[], Any]) -> Any:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for client in self._clients:
            client.close()


class Threads(Flavour):
    name = "threads"
    connect_function = staticmethod(lockfast.connect)
    redis_module = redis

    def start(self, call: Callable[[], Any]) -> Any:
        future: Future[Any] = Future()

        def body() -> None:
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=body, daemon=True).start()
        return future

    def do(self, call: Callable[[], Any]) -> Any:
        return call()


class Asyncio(Flavour):
    name = "asyncio"
    connect_function = staticmethod(lockfast.aio.connect)
    redis_module = redis.asyncio

    def __enter__(self) -> Self:
        self._ended = asyncio.Event()
        ready: Future[asyncio.AbstractEventLoop] = Future()

        async def serve() -> None:
            ready.set_result(asyncio.get_running_loop())
            await self._ended.wait()

        self._thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
        self._thread.start()
        self._loop = ready.result(LIMIT)
        return self

    def start(self, call: Callable[[], Any]) -> Any:
        async def body() -> Any:
            result = call()
            return await result if inspect.isawaitable(result) else result

        return asyncio.run_coroutine_threadsafe(body(), self._loop)

    def do(self, call: Callable[[], Any]) -> Any:
        return self.start(call).result(LIMIT)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            super().__exit__(kind, error, trace)
        finally:
            self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join(LIMIT)


FLAVOURS: dict[str, type[Flavour]] = {kind.name: kind for kind in (Threads, Asyncio)}
