"""Threads and asyncio behind one face, so that each scenario is written once.

A scenario is a coroutine. On asyncio it runs in an event loop. On threads nothing in it suspends: every call has
blocked and returned before `done` sees its result, so that one `send(None)` runs it to the end, in the thread of the
test; contenders run in threads of their own, as tasks do on asyncio.

Every wait has a bound: what never happens fails a test, and does not hang it.
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
from lockfast.runtime.runner import run
from tests.support.servers import Server

T = TypeVar("T")
Work = Callable[..., Coroutine[Any, Any, Any]]

BOUND = 20.0
"""Seconds for which a test waits for what should happen at once, however busy the machine is."""
POLL = 0.002


async def done(result: Any) -> Any:
    """What a call of either colour gave: `await done(lock.acquire())`."""
    return await result if inspect.isawaitable(result) else result


@asynccontextmanager
async def held(lock: Any) -> AsyncIterator[Any]:
    """`with lock` or `async with lock`, whichever it has."""
    if hasattr(lock, "__aenter__"):
        async with lock as lease:
            yield lease
    else:
        with lock as lease:
            yield lease


class Gate(Protocol):
    """What one contender opens and another waits for."""

    def open(self) -> None: ...

    async def passed(self) -> None:
        """Return when it is open; TimeoutError when it stays closed."""


class Contender(Protocol):
    """Work that goes on beside the scenario."""

    async def result(self) -> Any:
        """What it returned, or raise what it raised; TimeoutError when it does not end."""

    @property
    def ended(self) -> bool: ...


class Driver(ABC):
    """One store in one colour. `server` is the server behind it, where there is one."""

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

    def connect(self, **options: Any) -> Any:
        """Another client of the same store; closed when the scenario ends."""
        client = self.open(self.url, **{**self.options, **options})
        self._clients.append(client)
        return client

    def lock(self, name: str = "thing", **options: Any) -> Any:
        return self.locks.lock(name, **options)

    async def until(self, check: Callable[[], Any], what: str, bound: float = BOUND) -> Any:
        """The first true answer of `check`, which may be of either colour."""
        deadline = time.monotonic() + bound
        while not (answer := await done(check())):
            if time.monotonic() >= deadline:
                raise TimeoutError(f"waited {bound:g} s for {what}")
            await self.pause()
        return answer

    async def queue_length(self, lock: Any, length: int) -> Any:
        """What `lock.inspect()` says once so many wait."""

        async def reached() -> Any:
            info = await done(lock.inspect())
            if self.store == "transactions":  # nobody queues there: who waits looks again and again
                inboxes = [one.store._store.inbox for one in self._clients]
                info = info._replace(waiting=sum(len(getattr(inbox, "open", ())) for inbox in inboxes))
            return info if info.waiting == length else None

        return await self.until(reached, f"{length} waiters")

    @staticmethod
    @abstractmethod
    def open(target: Any, **options: Any) -> Any:
        """`connect` of this colour; the scenario closes what it opened."""

    @abstractmethod
    def run(self, scenario: Coroutine[Any, Any, None]) -> None:
        """Run it to the end and close all clients; nothing that it started may be left running."""

    @abstractmethod
    def start(self, work: Work, *args: Any) -> Contender: ...

    @abstractmethod
    def gate(self) -> Gate: ...

    @abstractmethod
    def function(self, work: Work) -> Callable[..., Any]:
        """`work` as a function of this colour, with the same name and signature."""

    @abstractmethod
    async def pause(self) -> None: ...

    async def _play(self, scenario: Coroutine[Any, Any, None]) -> None:
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
        run(self._play(scenario))
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
        asyncio.run(self._play_and_wait(scenario))

    async def _play_and_wait(self, scenario: Coroutine[Any, Any, None]) -> None:
        await self._play(scenario)
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
    """Make a test of a scenario: its first argument is the driver `d` that runs it."""

    @functools.wraps(body)
    def test(d: Driver, **others: Any) -> None:
        d.run(body(d, **others))  # type: ignore[arg-type]

    return test
