"""One interface to threads and asyncio, so that each scenario is written once.

A scenario is a coroutine. On asyncio it runs in an event loop. On threads it never suspends: each call blocks until it
has a result, which `done` passes through, so one `send(None)` runs the scenario in the thread of the test. Contenders
run in other threads, or in tasks on asyncio.

Every wait has a bound, so that a missing event fails the test instead of hanging it.
"""

import asyncio
import functools
import inspect
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import lockfast
import lockfast.aio
from lockfast.runtime.base import run
from tests.support.servers import Server

T = TypeVar("T")
Work = Callable[..., Coroutine[Any, Any, Any]]

BOUND = 20.0
"""Seconds to wait for an event that is due at once; long, because the machine may be busy."""
POLL = 0.002
"""Seconds between two checks of a condition."""


async def done(result: Any) -> Any:
    """Return the result of a call of either flavour: `await done(lock.acquire())`."""
    return await result if inspect.isawaitable(result) else result


@asynccontextmanager
async def held(lock: Any) -> AsyncIterator[Any]:
    """`with lock` or `async with lock`, by its flavour."""
    if hasattr(lock, "__aenter__"):
        async with lock as lease:
            yield lease
    else:
        with lock as lease:
            yield lease


class Gate(Protocol):
    """An event that one contender sets and another waits for."""

    def open(self) -> None: ...

    async def passed(self) -> None:
        """Wait until the gate is open; raise TimeoutError after `BOUND` seconds."""


class Contender(Protocol):
    """Concurrent work, in a thread or a task."""

    async def result(self) -> Any:
        """Return its result or raise its error; raise TimeoutError if it does not end within `BOUND` seconds."""

    @property
    def ended(self) -> bool: ...


class Driver(ABC):
    """One store in one flavour. `server` is the single server behind it, if there is one."""

    flavour: str
    options: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, store: str, url: str, server: Server | None = None) -> None:
        self.store = store
        self.url = url
        self.server = server
        self._clients: list[Any] = []

    @functools.cached_property
    def locks(self) -> Any:
        return self.connect()

    def connect(self, *, url: str | None = None, **options: Any) -> Any:
        """Another client of the same store, through a proxy if its url is given; closed when the scenario ends."""
        client = self.open(url or self.url, **{**self.options, **options})
        self._clients.append(client)
        return client

    def lock(self, name: str = "thing", **options: Any) -> Any:
        return self.locks.lock(name, **options)

    async def until(self, check: Callable[[], Any], what: str, bound: float = BOUND) -> Any:
        """Poll `check`, of either flavour, and return its first true result."""
        deadline = time.monotonic() + bound
        while not (answer := await done(check())):
            if time.monotonic() >= deadline:
                raise TimeoutError(f"waited {bound:g} s for {what}")
            await self.pause()
        return answer

    async def queue_length(self, lock: Any, length: int) -> Any:
        """Wait until `length` waiters are queued, and return that `lock.inspect()`."""

        async def reached() -> Any:
            info = await done(lock.inspect())
            if self.store == "transactions":  # it has no queue; its waiters poll, each with an open mailbox
                inboxes = [one.session.store.inbox for one in self._clients]
                info = info._replace(waiting=sum(len(getattr(inbox, "open", ())) for inbox in inboxes))
            return info if info.waiting == length else None

        return await self.until(reached, f"{length} waiters")

    @staticmethod
    @abstractmethod
    def open(target: Any, **options: Any) -> Any:
        """`connect` of this flavour; the caller closes the result."""

    @abstractmethod
    def run(self, scenario: Coroutine[Any, Any, None]) -> None:
        """Run the scenario and close all clients; raise TimeoutError if a contender is still running."""

    @abstractmethod
    def start(self, work: Work, *args: Any) -> Contender: ...

    @abstractmethod
    def gate(self) -> Gate: ...

    @abstractmethod
    def function(self, work: Work) -> Callable[..., Any]:
        """Convert `work` to a function of this flavour with the same name and signature."""

    @abstractmethod
    async def pause(self) -> None: ...

    async def _run_and_close(self, scenario: Coroutine[Any, Any, None]) -> None:
        try:
            await scenario
        finally:
            for client in reversed(self._clients):
                await done(client.close())


class ThreadGate:
    def __init__(self) -> None:
        self._event = threading.Event()

    def open(self) -> None:
        self._event.set()

    async def passed(self) -> None:
        if not self._event.wait(BOUND):
            raise TimeoutError("the gate stayed closed")


class ThreadContender:
    def __init__(self, work: Work, args: tuple[Any, ...]) -> None:
        self._future: Future[Any] = Future()
        self._work = functools.partial(work, *args)
        self.thread = threading.Thread(target=self._body, name=f"contender-{work.__name__}", daemon=True)
        self.thread.start()

    def _body(self) -> None:
        try:
            self._future.set_result(run(self._work()))
        except BaseException as error:
            self._future.set_exception(error)

    async def result(self) -> Any:
        return self._future.result(BOUND)

    @property
    def ended(self) -> bool:
        return self._future.done()


class Threads(Driver):
    flavour = "threads"

    def __init__(self, store: str, url: str, server: Server | None = None) -> None:
        super().__init__(store, url, server)
        self._contenders: list[ThreadContender] = []

    @staticmethod
    def open(target: Any, **options: Any) -> Any:
        return lockfast.connect(target, **options)

    def run(self, scenario: Coroutine[Any, Any, None]) -> None:
        run(self._run_and_close(scenario))
        for contender in self._contenders:
            contender.thread.join(BOUND)
            if contender.thread.is_alive():
                raise TimeoutError(f"{contender.thread.name} did not end")

    def start(self, work: Work, *args: Any) -> Contender:
        contender = ThreadContender(work, args)
        self._contenders.append(contender)
        return contender

    def gate(self) -> Gate:
        return ThreadGate()

    def function(self, work: Work) -> Callable[..., Any]:
        @functools.wraps(work)
        def blocking(*args: Any, **kwargs: Any) -> Any:
            return run(work(*args, **kwargs))

        return blocking

    async def pause(self) -> None:
        time.sleep(POLL)  # noqa: ASYNC251 - on threads a scenario blocks


class TaskGate:
    def __init__(self) -> None:
        self._event = asyncio.Event()

    def open(self) -> None:
        self._event.set()

    async def passed(self) -> None:
        async with asyncio.timeout(BOUND):
            await self._event.wait()


class TaskContender:
    def __init__(self, work: Work, args: tuple[Any, ...]) -> None:
        self.task = asyncio.get_running_loop().create_task(work(*args), name=f"contender-{work.__name__}")

    async def result(self) -> Any:
        async with asyncio.timeout(BOUND):
            return await asyncio.shield(self.task)

    def cancel(self) -> None:
        self.task.cancel()

    @property
    def ended(self) -> bool:
        return self.task.done()


class Tasks(Driver):
    flavour = "asyncio"

    def __init__(self, store: str, url: str, server: Server | None = None) -> None:
        super().__init__(store, url, server)
        self._contenders: list[TaskContender] = []

    @staticmethod
    def open(target: Any, **options: Any) -> Any:
        return lockfast.aio.connect(target, **options)

    def run(self, scenario: Coroutine[Any, Any, None]) -> None:
        asyncio.run(self._run_and_wait(scenario))

    async def _run_and_wait(self, scenario: Coroutine[Any, Any, None]) -> None:
        await self._run_and_close(scenario)
        if self._contenders:
            _, left = await asyncio.wait([one.task for one in self._contenders], timeout=BOUND)
            if left:
                raise TimeoutError(f"{left} did not end")

    def start(self, work: Work, *args: Any) -> TaskContender:
        contender = TaskContender(work, args)
        self._contenders.append(contender)
        return contender

    def gate(self) -> Gate:
        return TaskGate()

    def function(self, work: Work) -> Callable[..., Any]:
        return work

    async def pause(self) -> None:
        await asyncio.sleep(POLL)


FLAVOURS: dict[str, type[Driver]] = {"threads": Threads, "asyncio": Tasks}


def scenario(body: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Turn a scenario into a test; its first parameter `d` is the driver that runs it."""

    @functools.wraps(body)
    def test(d: Driver, **others: Any) -> None:
        d.run(body(d, **others))  # type: ignore[arg-type]

    return test
