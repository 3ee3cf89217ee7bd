"""A network between a client and a server that loses, delays and holds frames.

    with FaultProxy(server.port) as proxy:
        lost = proxy.drop_reply(b"EVALSHA")     # the server executes it, the client gets no reply
        ...
        lost.wait()

Every fault returns its rule: `rule.wait()` blocks until it has happened and `rule.release()` ends it, so a test never
guesses how long something takes. `match` is bytes that occur in an argument of the request, or a callable that gets all
arguments; b"" fits every request.

All methods are thread-safe. Methods that wait block the thread; in a coroutine use `asyncio.to_thread`.
"""

import asyncio
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

from tests.support.faults import Direction, Ledger, Match, Rule, Then
from tests.support.link import Flow, Link
from tests.support.waiting import LONG

HOST = "127.0.0.1"
DIRECTIONS: tuple[Direction, Direction] = ("to_server", "to_client")


class FaultProxy:
    """Listens on its own port and forwards to `port`, subject to the rules."""

    def __init__(self, port: int, host: str = HOST) -> None:
        self.host = HOST
        self._upstream = (host, port)
        self._ledger = Ledger(self._post)
        self._flows = {direction: Flow(self._ledger) for direction in DIRECTIONS}
        self._links: dict[asyncio.Task[None], Link] = {}
        self._stop = asyncio.Event()
        self._listener: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve, name="fault-proxy", daemon=True)

    @property
    def url(self) -> str:
        return f"redis://{self.host}:{self.port}/0"

    def drop_request(self, match: Match, times: int = 1, then: Then = "close") -> Rule:
        """Lose the request before the server sees it."""
        return self._ledger.add(Rule(self._ledger, "request", "drop", match, times, then=then))

    def drop_reply(self, match: Match, times: int = 1, then: Then = "close") -> Rule:
        """Lose the reply after the server has executed the request."""
        return self._ledger.add(Rule(self._ledger, "reply", "drop", match, times, then=then))

    def half_reply(self, match: Match, times: int = 1) -> Rule:
        """Send the first half of the reply and close."""
        return self._ledger.add(Rule(self._ledger, "reply", "half", match, times))

    def delay_requests(self, match: Match, seconds: float) -> Rule:
        return self._ledger.add(Rule(self._ledger, "request", "delay", match, seconds=seconds))

    def delay_replies(self, match: Match, seconds: float) -> Rule:
        return self._ledger.add(Rule(self._ledger, "reply", "delay", match, seconds=seconds))

    def hold_requests(self, match: Match) -> Rule:
        """Hold requests until released, even if their client disconnects."""
        return self._ledger.add(Rule(self._ledger, "request", "hold", match))

    def hold_replies(self, match: Match) -> Rule:
        """Hold replies until released; after `rule.wait()` the server has executed the request."""
        return self._ledger.add(Rule(self._ledger, "reply", "hold", match))

    def drop_pushes(self, match: Match, times: int = 1) -> Rule:
        """Lose single published messages; `match` gets the parts of the push: kind, channel, payload."""
        return self._ledger.add(Rule(self._ledger, "push", "drop", match, times, then="continue"))

    def hold_pushes(self, match: Match) -> Rule:
        return self._ledger.add(Rule(self._ledger, "push", "hold", match))

    def release_held(self) -> None:
        """End every hold and forward the frames that it holds."""
        self._ledger.release(*self._ledger.rules("hold"))

    def clear(self) -> None:
        """End every rule and every stall."""
        self._ledger.release(*self._ledger.rules())
        self.unstall()

    def stall(self, direction: Direction | None = None) -> None:
        """Forward nothing, in one direction or both, and keep connections open."""
        for chosen in _directions(direction):
            self._call(self._flows[chosen].stall)

    def unstall(self, direction: Direction | None = None) -> None:
        for chosen in _directions(direction):
            self._call(self._flows[chosen].unstall)

    def refuse(self) -> None:
        """Refuse new connections; open ones stay."""
        self._call(self._unlisten)

    def accept(self) -> None:
        """Accept new connections again."""
        self._call(self._listen)

    def reset_connections(self) -> None:
        """Break every open connection with a TCP reset."""
        self._call(lambda: self._end_links(reset=True))

    @property
    def requests(self) -> list[list[bytes]]:
        """Every request so far, lost ones included, in order of arrival."""
        return self._ledger.requests()

    @property
    def connections(self) -> int:
        """The number of open client connections."""
        return self._ledger.connections

    def wait_for(self, match: Match, count: int = 1, timeout: float = LONG) -> None:
        """Block until the proxy has seen `count` matching requests since its start."""
        self._ledger.wait_for(match, count, timeout)

    def wait_connections(self, count: int, timeout: float = LONG) -> None:
        """Block until exactly `count` client connections are open."""
        self._ledger.wait(lambda: self._ledger.connections == count, timeout, f"{count} connections")

    def wait_stalled(self, count: int = 1, timeout: float = LONG) -> None:
        """Block until a stall holds frames of `count` streams; each connection has one per direction."""
        self._ledger.wait(lambda: self._ledger.stalled >= count, timeout, f"{count} stalled streams")

    def start(self) -> None:
        # Bound but never listening, so that nothing else gets the port while connections are refused.
        self._reservation = _bind(0)
        self.port: int = self._reservation.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._failed)
        self._thread.start()
        self.accept()

    def close(self) -> None:
        """Close every connection and end the thread; raise if the proxy itself failed."""
        if self._thread.is_alive():
            self._post(self._stop.set)
            self._thread.join()
        self._reservation.close()
        if self._ledger.failure is not None:
            raise RuntimeError("the proxy failed") from self._ledger.failure

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._until_stopped())

    async def _until_stopped(self) -> None:
        await self._stop.wait()
        self._unlisten()
        self._end_links()
        await asyncio.gather(*self._links)

    def _post(self, act: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(act)

    def _call(self, act: Callable[[], None]) -> None:
        """Run `act` in the proxy thread, and wait for it."""
        done: Future[None] = Future()

        def run() -> None:
            try:
                act()
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        self._post(run)
        done.result(LONG)

    def _listen(self) -> None:
        if self._listener is None:
            self._listener = _bind(self.port)
            self._listener.setblocking(False)
            self._listener.listen(100)
            self._loop.add_reader(self._listener, self._connected, self._listener)

    def _unlisten(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    def _end_links(self, *, reset: bool = False) -> None:
        for link in self._links.values():
            link.end(reset=reset)

    def _connected(self, listener: socket.socket) -> None:
        # Not asyncio.start_server: it forgets a connection that it accepts just before it is closed.
        try:
            client, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # the client disconnected already
        link = Link(self._ledger, self._flows, client, self._upstream)
        task = self._loop.create_task(self._run(link))
        self._links[task] = link
        task.add_done_callback(self._links.pop)

    async def _run(self, link: Link) -> None:
        try:
            await link.run()
        except Exception as error:
            self._ledger.fail(error)

    def _failed(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._ledger.fail(context.get("exception") or RuntimeError(context["message"]))


def _bind(port: int) -> socket.socket:
    # asyncio disables Nagle's algorithm, which adds 40 ms, only on sockets with an explicit protocol.
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((HOST, port))
    return bound


def _directions(direction: Direction | None) -> tuple[Direction, ...]:
    return DIRECTIONS if direction is None else (direction,)
