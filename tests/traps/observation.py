"""Observe a server, measure time, and select the requests that a fault applies to."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Self

from tests.support import lateness
from tests.support.faults import Match
from tests.support.servers import Server
from tests.support.waiting import LONG, until

SLACK = 0.2
"""Seconds added to every bound, for the test itself."""
SCRIPT_COMMANDS = (b"EVALSHA", b"EVAL")


class Stopwatch:
    """Measures elapsed time, and adapts bounds to a busy machine."""

    def __init__(self) -> None:
        lateness.watch()
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def most(self, promised: float) -> float:
        """The promised bound, plus slack and the time that this machine kept threads waiting meanwhile."""
        return promised + SLACK + 3 * lateness.stolen(self._started)


def on(name: str) -> Match:
    """Match every script call for the lock `name`."""
    wanted = name.encode()
    return lambda args: args[0] in SCRIPT_COMMANDS and wanted in args


def nth(count: int, match: Match) -> Match:
    """Match only the `count`-th request that fits, counted from 1."""
    seen = [0]

    def fits(args: Sequence[bytes]) -> bool:
        if any(match in arg for arg in args) if isinstance(match, bytes) else match(args):
            seen[0] += 1
            return seen[0] == count
        return False

    return fits


def companions(name: str) -> dict[str, str]:
    """The other keys of a lock by suffix: metadata, queue, waiters; grants, details and slots of shared claims."""
    return {kind: f"lockfast:{{{name}}}:{kind}" for kind in "mqwgds"}


def queue_length(server: Server, name: str) -> int:
    length: int = server.raw("ZCARD", companions(name)["q"])
    return length


def await_queue(server: Server, name: str, length: int, timeout: float = LONG) -> None:
    until(lambda: queue_length(server, name) == length, f"{length} waiters in the queue of {name}", timeout)


def traces(server: Server, name: str) -> list[str]:
    """The keys of a lock that exist, except for the metadata, which keep nobody out."""
    aux = companions(name)
    return [key for key in (name, *(aux[kind] for kind in "qwgds")) if server.raw("EXISTS", key)]


def await_nothing_left(server: Server, name: str, timeout: float = LONG) -> None:
    """Wait for clean-up that runs in the background because the server was unreachable."""
    until(lambda: not traces(server, name), f"all keys of {name} to be removed", timeout)


def stored_fence(server: Server, name: str) -> int:
    """The fence of the last grant on the server."""
    return int(server.raw("GET", companions(name)["m"]).split()[0])


def pubsub_clients(server: Server) -> int:
    listed: str = server.raw("CLIENT", "LIST", "TYPE", "pubsub")
    return len(listed.splitlines())


def normal_clients(server: Server) -> int:
    """The number of connections without a subscription, except our own."""
    listed: str = server.raw("CLIENT", "LIST", "TYPE", "normal")
    return len(listed.splitlines()) - 1


def side_by_side(*calls: Callable[[], object]) -> None:
    """Run the calls concurrently, and raise the first error."""
    with ThreadPoolExecutor(len(calls)) as pool:
        for done in [pool.submit(call) for call in calls]:
            done.result()


class Sampler:
    """Calls `look` in a loop while its block runs, and keeps the results."""

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
