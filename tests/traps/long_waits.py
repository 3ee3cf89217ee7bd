"""Waits that are longer than the socket timeout of a client: five seconds by default in redis-py 8.

They start with the first test of this folder and run in the background of the others.
"""

from concurrent.futures import Future
from typing import Any

from tests.support.servers import Server
from tests.traps.flavours import Flavour
from tests.traps.observation import Stopwatch, await_queue

WAIT = 7.0


class LongWaits:
    """In each flavour one wait with a timeout and one without, for locks that stay held."""

    def __init__(self, server: Server, flavours: list[Flavour]) -> None:
        self.server = server
        self.bounded: dict[str, Future[Any]] = {}
        self.endless: dict[str, Future[Any]] = {}
        for flavour in flavours:
            self.bounded[f"bounded:{flavour.name}"] = self._wait(flavour, f"bounded:{flavour.name}", WAIT)
            self.endless[f"endless:{flavour.name}"] = self._wait(flavour, f"endless:{flavour.name}", None)

    def _wait(self, flavour: Flavour, name: str, timeout: float | None) -> Future[Any]:
        """Start to wait; return a future of the lease and of the seconds that the wait took."""
        self.server.raw("SET", name, "another holder")
        client = flavour.connect(flavour.redis_module.Redis(port=self.server.port))
        done: Future[Any] = Future()
        watch = Stopwatch()

        def ended(acquired: Future[Any]) -> None:
            if (error := acquired.exception()) is not None:
                done.set_exception(error)
            else:
                done.set_result((acquired.result(), watch.seconds))

        client.acquiring(name, timeout=timeout).add_done_callback(ended)
        await_queue(self.server, name, 1)
        return done
