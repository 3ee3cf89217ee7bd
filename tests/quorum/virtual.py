"""A quorum of virtual servers in virtual time: the shipped `QuorumStore` without sockets, sleeps or chance.

The servers run the rules of the memory store. Without a wall clock, their fences count 1, 2, 3 …, so that members
disagree whenever their histories differ.
"""

import asyncio
import selectors
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from random import Random
from typing import Any, TypeVar

from lockfast.core.quorum.store import QuorumStore
from lockfast.errors import Outcome, StoreUnavailable
from lockfast.facts import Facts, Persistence
from lockfast.ports import Capabilities, MemberStore
from lockfast.runtime.asyncio import AsyncioRuntime
from lockfast.stores.memory import Hub, MemoryStore
from lockfast.values import Answer, Claim, Enqueue, Granted, HolderInfo, LockInfo, Mode, Renewal

T = TypeVar("T")
NAME = "thing"
LATENCY = 0.001


class Selector(selectors.SelectSelector):
    """Advances the clock to the next timer instead of waiting for it."""

    now = 1000.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise AssertionError("deadlock: every task waits, and no timer is set")
        self.now += max(0.0, timeout)
        return super().select(0)


class Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


class Server:
    """One server. `request_delay` and `reply_delay` are one-way times in seconds.

    `after["acquire", 1]` is called when the first `acquire` has been executed, before its reply is sent.
    """

    def __init__(self, number: int, loop: Loop, clock: Callable[[], float] | None) -> None:
        self.number = number
        self.clock = clock
        self.loop = loop
        self.up = True
        self.run_id = f"server-{number}"
        self.started_at = loop.time() - 1e6
        self.hub = Hub(wall_us=lambda: 0 if clock is None else int(clock() * 1e6))
        self.request_delay = self.reply_delay = LATENCY
        self.preemption = 0.0  # seconds for which a client's thread is preempted before it sends a claim
        self.connection_epoch = 0
        self.executed: list[str] = []
        self.after: dict[tuple[str, int], Callable[[], None]] = {}

    def stop(self) -> None:
        """Break all connections and accept no new ones; the data survives."""
        self.up = False
        self.connection_epoch += 1

    def start(self) -> None:
        self.up = True

    def restart(self) -> None:
        """Restart without persistence."""
        self.connection_epoch += 1
        self.hub.space.clear()
        self.run_id += "'"
        self.started_at = self.loop.time()

    def delay_requests(self, seconds: float) -> None:
        self.request_delay = seconds

    def delay_replies(self, seconds: float) -> None:
        self.reply_delay = seconds

    def execute(self, what: str) -> None:
        self.executed.append(what)
        self.after.get((what, self.executed.count(what)), lambda: None)()

    @property
    def view(self) -> LockInfo:
        return self.hub.space.inspect(NAME, self.loop.time())

    def raise_fence(self, fence: int) -> None:
        """Remember grants up to `fence`, as after requests that no other server received."""
        while (self.view.fence or 0) < fence:
            self.hub.space.acquire(Claim(NAME, "earlier", 1.0, ""), None, self.loop.time())
            self.hub.space.release(NAME, "earlier", self.loop.time())


class Member(MemoryStore, MemberStore):
    """`MemberStore` of one client on one server."""

    capabilities = Capabilities(reassert=True, readers=True)

    def __init__(self, server: Server, runtime: AsyncioRuntime) -> None:
        super().__init__(server.hub, runtime)
        self.server = server
        self._epoch = -1
        self._has_inbox = False
        self._unanswered: list[float] = []
        self._last: asyncio.Future[None] | None = None

    @property
    def connected(self) -> bool:
        return self.server.up and self._epoch == self.server.connection_epoch

    @property
    def inbox_open(self) -> bool:
        return self.connected and self._has_inbox

    @property
    def silent_since(self) -> float | None:
        return self._unanswered[0] if self._unanswered else None

    async def connect(self, until: float) -> bool:
        if not self.server.up:
            raise StoreUnavailable("The server is down.")
        is_new, self._epoch = not self.connected, self.server.connection_epoch
        if is_new:
            self._unanswered = []
            self._last = None
            self._has_inbox = False
        return is_new

    async def connect_inbox(self, until: float) -> None:
        self._has_inbox = True

    async def identity(self, until: float) -> Facts:
        return await self.facts(until)

    async def mark(self, secret: str, number: int, until: float) -> int | None:
        return number

    async def facts(self, until: float) -> Facts:
        async def operation() -> Facts:
            server = self.server
            clock = None if server.clock is None else server.clock()
            uptime = server.loop.time() - server.started_at
            return Facts("server", persistence=Persistence.NONE, identity=server.run_id, uptime=uptime, clock=clock)

        return await self._send("facts", operation, until)

    async def _send(self, what: str, operation: Callable[[], Awaitable[T]], until: float) -> T:
        """Execute `operation` on the server, after all earlier ones of this connection, even if nobody waits."""
        if not self.connected:
            raise StoreUnavailable("There is no connection.")
        server, epoch, before = self.server, self._epoch, self._last
        answered = self._last = server.loop.create_future()
        self._unanswered.append(server.loop.time())
        unanswered = self._unanswered

        async def execute() -> T:
            await asyncio.sleep(server.request_delay)
            if before is not None:
                await before
            if not server.up or server.connection_epoch != epoch:
                await server.loop.create_future()  # lost with its connection
            result = await operation()
            server.execute(what)
            await asyncio.sleep(server.reply_delay)
            unanswered.pop(0)
            answered.set_result(None)
            return result

        task = server.loop.create_task(execute())
        await asyncio.wait([task], timeout=max(0.0, until - server.loop.time()))
        if not task.done():
            raise StoreUnavailable("No reply in time.", outcome=Outcome.UNKNOWN)
        return task.result()

    async def acquire(self, claim: Claim, enqueue: Enqueue | None, until: float) -> Answer:
        if self.server.preemption:
            await asyncio.sleep(self.server.preemption)
        return await self._send("acquire", partial(super().acquire, claim, enqueue, until), until)

    async def renew(self, renewals: Sequence[Renewal], until: float) -> list[bool]:
        async def operation() -> list[bool]:
            # Like Redis: an exclusive renewal does not find a shared grant.
            shared = {one.holder for one in self.server.view.holders if one.mode is Mode.READ}
            found = await MemoryStore.renew(self, renewals, until)
            return [old and (new.shared or new.holder not in shared) for old, new in zip(found, renewals, strict=True)]

        return await self._send("renew", operation, until)

    async def downgrade(self, claim: Claim, until: float) -> bool:
        return await self._send("downgrade", partial(super().downgrade, claim, until), until)

    async def release(self, name: str, holder: str, until: float) -> bool:
        return await self._send("release", partial(super().release, name, holder, until), until)

    async def adopt(self, claim: Claim, old_holder: str, until: float) -> Granted | None:
        return await self._send("adopt", partial(super().adopt, claim, old_holder, until), until)

    async def inspect(self, name: str, until: float) -> LockInfo:
        return await self._send("inspect", partial(super().inspect, name, until), until)

    async def reassert(self, claim: Claim, fence: int, until: float) -> bool:
        async def operation() -> bool:
            view = self.server.view
            if view.holder is None and (view.fence or 0) < fence:
                self.server.hub.space.acquire(claim._replace(floor=fence, weight=0), None, self.server.loop.time())
            return self.server.view.holder == claim.holder

        await asyncio.sleep(self.server.preemption)
        return await self._send("reassert", operation, until)


class World:
    """Some servers and the clients of a scenario. `skews` gives each server a wall clock, by so many seconds wrong."""

    def __init__(self, loop: Loop, count: int = 3, skews: Sequence[float] = ()) -> None:
        self.loop = loop
        clocks = [partial(lambda skew: loop.time() + skew, skew) for skew in skews]
        self.servers = [Server(number, loop, clocks[number] if clocks else None) for number in range(count)]

    def client(self, servers: Sequence[Server] | None = None, sits_out: float = 0.0) -> QuorumStore:
        runtime = AsyncioRuntime()
        runtime.now = self.loop.time
        runtime.random = Random(7).random
        members = self.servers if servers is None else servers
        return QuorumStore(
            [(Member(one, runtime), f"server-{one.number}") for one in members], runtime, sits_out=sits_out
        )

    @property
    def now(self) -> float:
        return self.loop.time()

    def soon(self) -> float:
        return self.now + 2.0

    def holders(self) -> list[str | None]:
        return [server.view.holder for server in self.servers]

    def modes(self) -> list[Mode | None]:
        return [server.view.mode for server in self.servers]


def claim(holder: str, ttl: float = 30.0) -> Claim:
    return Claim(NAME, holder, ttl, "host:1:")


def reading(holder: str, ttl: float = 30.0) -> Claim:
    """The claim of a reader."""
    return Claim(NAME, holder, ttl, "host:1:", weight=1)


def view(*holders: str, mode: Mode = Mode.EXCLUSIVE) -> LockInfo:
    """What a member reports that has granted the lock to these holders."""
    return LockInfo(NAME, tuple(HolderInfo(holder, mode=mode) for holder in holders))


def play(scenario: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    """Run a scenario to its end in virtual time."""
    loop = Loop()
    try:
        loop.run_until_complete(asyncio.wait_for(scenario(World(loop)), 600))
    finally:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks))
        loop.close()
