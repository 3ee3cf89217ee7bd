"""Waits that are longer than a client's socket timeout: five seconds unless told otherwise, in redis-py 8.

They last by their nature, so they begin with the first test of this folder and go on beside the others.
"""

from concurrent.futures import Future
from typing import Any

from tests.support.servers import Server
from tests.traps.flavours import Colour
from tests.traps.watching import Stopwatch, await_queue

WAIT = 7.0


class LongWaits:
    """For each colour, one wait that ends by its timeout and one that has none, for locks that stay taken."""

    def __init__(self, server: Server, flavours: list[Colour]) -> None:
        self.server = server
        self.bounded: dict[str, Future[Any]] = {}
        self.endless: dict[str, Future[Any]] = {}
        for flavour in flavours:
            self.bounded[f"bounded:{flavour.name}"] = self._wait(flavour, f"bounded:{flavour.name}", WAIT)
            self.endless[f"endless:{flavour.name}"] = self._wait(flavour, f"endless:{flavour.name}", None)

    def _wait(self, flavour: Colour, name: str, timeout: float | None) -> Future[Any]:
        """A future of the lease and of the seconds that it took."""
        self.server.raw("SET", name, "a stranger's")
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
