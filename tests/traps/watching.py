"""What can be seen on the server, and which requests a fault is meant for."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Self

from tests.support import lateness
from tests.support.faults import Match
from tests.support.servers import Server
from tests.support.waiting import LONG, until

ROOM = 0.2
SCRIPT_COMMANDS = (b"EVALSHA", b"EVAL")


class Stopwatch:
    """Seconds since it was made, and how many these may be."""

    def __init__(self) -> None:
        lateness.watch()
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def most(self, promised: float) -> float:
        """What is promised, a little for the test itself, and what the machine kept everyone waiting meanwhile."""
        return promised + ROOM + 3 * lateness.stolen(self._started)


def on(name: str) -> Match:
    """Every script that concerns the lock `name`."""
    wanted = name.encode()
    return lambda args: args[0] in SCRIPT_COMMANDS and wanted in args


def nth(count: int, match: Match) -> Match:
    """The request that is the `count`-th to fit, counted from 1."""
    seen = [0]

    def fits(args: Sequence[bytes]) -> bool:
        if any(match in arg for arg in args) if isinstance(match, bytes) else match(args):
            seen[0] += 1
            return seen[0] == count
        return False

    return fits


def companions(name: str) -> dict[str, str]:
    """The keys that stand beside the lock's own: meta, queue, waiters."""
    return {kind: f"lockfast:{{{name}}}:{kind}" for kind in "mqw"}


def queue_length(server: Server, name: str) -> int:
    length: int = server.raw("ZCARD", companions(name)["q"])
    return length


def await_queue(server: Server, name: str, length: int, timeout: float = LONG) -> None:
    until(lambda: queue_length(server, name) == length, f"{length} in the queue of {name}", timeout)


def traces(server: Server, name: str) -> list[str]:
    """What would keep others from the lock, or in front of them: its key, its queue, its waiters."""
    aux = companions(name)
    return [key for key in (name, aux["q"], aux["w"]) if server.raw("EXISTS", key)]


def await_nothing_left(server: Server, name: str, timeout: float = LONG) -> None:
    """For clean-up that goes on in the background, since the server could not be asked at once."""
    until(lambda: not traces(server, name), f"{name} to leave nothing on the server", timeout)


def stored_fence(server: Server, name: str) -> int:
    """The fence of the last grant, as the server knows it."""
    return int(server.raw("GET", companions(name)["m"]).split()[0])


def pubsub_clients(server: Server) -> int:
    listed: str = server.raw("CLIENT", "LIST", "TYPE", "pubsub")
    return len(listed.splitlines())


def normal_clients(server: Server) -> int:
    """Connections that are not subscribed, without the one that asks."""
    listed: str = server.raw("CLIENT", "LIST", "TYPE", "normal")
    return len(listed.splitlines()) - 1


def side_by_side(*calls: Callable[[], object]) -> None:
    """Run the calls at once, for those that last long by their nature; raise what the first to fail raised."""
    with ThreadPoolExecutor(len(calls)) as pool:
        for done in [pool.submit(call) for call in calls]:
            done.result()


class Sampler:
    """Looks again and again while the body of a `with` runs, and keeps what it saw."""

    def __init__(self, look: Callable[[], object]) -> None:
        self._look = look
        self._stop = threading.Event()
        self.seen: list[object] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._stop.is_set():
            self.seen.append(self._look())

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
