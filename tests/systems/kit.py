"""One interface to both flavours of redis-py and of lockfast's functions for it, so that a scenario is written once.

As in `tests/contract/driver.py`, a scenario is a coroutine that never suspends on threads.
"""

import asyncio
import functools
import gc
import threading
import time
import warnings
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import redis
import redis.asyncio

import lockfast
import lockfast.aio
import lockfast.simple
import lockfast.simple.aio
from lockfast.runtime.base import run
from tests.contract.driver import TaskContender, ThreadContender, done
from tests.support.servers import Server

HOWS = ("script", "transaction", "native")


def run_cancelling(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine that cancels calls of a redis-py client.

    redis-py never closes a connection if it is cancelled while connecting. Collect those connections here, so that
    their warnings do not fail another test.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        asyncio.run(main())
        gc.collect()


class Kit:
    """One flavour on one server; its clients are closed at the end of the scenario."""

    flavour: str
    library: Any
    redis: Any
    simple: Any

    def __init__(self, server: Server) -> None:
        self.server = server
        self._clients: list[Any] = []

    def client(self, *, url: str | None = None, kind: Any = None, **options: Any) -> Any:
        client = (kind or self.redis).from_url(url or self.server.url, **options)
        self._clients.append(client)
        return client

    def connect(self, url: str | None = None, **options: Any) -> Any:
        """A lockfast client; closed at the end of the scenario."""
        locks = self.library.connect(url or self.server.url, **options)
        self._clients.insert(0, locks)
        return locks

    def run(self, scenario: Coroutine[Any, Any, None]) -> None:
        raise NotImplementedError

    def start(self, work: Callable[..., Coroutine[Any, Any, Any]], *args: Any) -> Any:
        raise NotImplementedError

    async def sleep(self, seconds: float) -> None:
        raise NotImplementedError

    async def until(self, check: Callable[[], Any], what: str, bound: float = 20.0) -> None:
        deadline = time.monotonic() + bound
        while not await done(check()):
            if time.monotonic() >= deadline:
                raise TimeoutError(f"waited {bound:g} s for {what}")
            await self.sleep(0.002)

    async def run_and_close(self, scenario: Coroutine[Any, Any, None]) -> None:
        try:
            await scenario
        finally:
            for client in self._clients:
                await done(client.aclose() if hasattr(client, "aclose") else client.close())


class Threads(Kit):
    flavour = "threads"
    library = lockfast
    redis = redis.Redis
    simple = lockfast.simple

    def run(self, scenario: Coroutine[Any, Any, None]) -> None:
        run(self.run_and_close(scenario))

    def start(self, work: Callable[..., Coroutine[Any, Any, Any]], *args: Any) -> ThreadContender:
        return ThreadContender(work, args)

    async def sleep(self, seconds: float) -> None:
        threading.Event().wait(seconds)


class Tasks(Kit):
    flavour = "asyncio"
    library = lockfast.aio
    redis = redis.asyncio.Redis
    simple = lockfast.simple.aio

    def run(self, scenario: Coroutine[Any, Any, None]) -> None:
        asyncio.run(self.run_and_close(scenario))

    def start(self, work: Callable[..., Coroutine[Any, Any, Any]], *args: Any) -> TaskContender:
        return TaskContender(work, args)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


KITS = {kit.flavour: kit for kit in (Threads, Tasks)}


def scenario(body: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Turn a scenario into a test; its first parameter `k` is the kit that runs it."""

    @functools.wraps(body)
    def test(k: Kit, **others: Any) -> None:
        k.run(body(k, **others))  # type: ignore[arg-type]

    return test
