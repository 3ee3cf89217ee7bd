"""Search for two simultaneous holders: many processes, short ttls, overrunning holders and a faulty network.

Each process records when it believed that it held a lock (`traps/hunter.py`); the test compares the records. Another
test shows that the comparison finds overlaps.
"""

import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Self

import pytest

from tests.support import guardian
from tests.support.proxy import FaultProxy
from tests.support.servers import Server
from tests.traps.hunter import NAMES, Hold
from tests.traps.observation import await_nothing_left

ROOT = Path(__file__).parents[1]


def overlaps(holds: list[Hold]) -> list[tuple[Hold, Hold]]:
    """Pairs of holds of one lock that overlap in time, or whose fences contradict their order."""
    found = []
    for name in NAMES:
        ordered = sorted((hold for hold in holds if hold.name == name), key=lambda hold: hold.start)
        found += [
            (one, other) for one, other in pairwise(ordered) if other.start <= one.end or other.fence <= one.fence
        ]
    return found


def test_overlaps_are_found() -> None:
    first, second = Hold("hunt:a", 1, 10.0, 11.0), Hold("hunt:a", 2, 11.5, 12.0)
    assert overlaps([first, second, Hold("hunt:b", 1, 10.5, 11.8)]) == []
    assert overlaps([first, second._replace(start=10.9)])
    assert overlaps([first, second._replace(fence=1)])
    assert overlaps([second, first._replace(fence=3)])


@contextmanager
def hunter(flavour: str, url: str, seconds: float, seed: int, path: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "tests.traps.hunter", flavour, url, str(seconds), str(seed), str(path)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        guardian.watch(process.pid)
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            guardian.unwatch(process.pid)


class Chaos:
    """Injects a random fault every few milliseconds."""

    def __init__(
        self, server: Server, proxies: list[FaultProxy], processes: list[subprocess.Popen[bytes]], seed: int
    ) -> None:
        self._server = server
        self._proxies = proxies
        self._processes = processes
        self._random = random.Random(seed)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.counts: dict[str, int] = {}
        self._faults: list[Callable[[FaultProxy], None]] = [
            self.resets,
            self.stalls,
            self.loses_replies,
            self.loses_requests,
            self.loses_notifications,
            self.halves_replies,
            self.delays_notifications,
            self.kills_inboxes,
            self.kills_requests,
            self.flushes_scripts,
            self.freezes_a_process,
            self.evicts_auxiliary_keys,
        ]

    def _run(self) -> None:
        while not self._done.wait(self._random.uniform(0.005, 0.06)):
            fault = self._random.choice(self._faults)
            fault(self._random.choice(self._proxies))
            self.counts[fault.__name__] = self.counts.get(fault.__name__, 0) + 1

    def resets(self, proxy: FaultProxy) -> None:
        proxy.reset_connections()

    def stalls(self, proxy: FaultProxy) -> None:
        proxy.stall(self._random.choice(("to_server", "to_client", None)))
        self._done.wait(self._random.uniform(0.01, 0.15))
        proxy.unstall()

    def loses_replies(self, proxy: FaultProxy) -> None:
        proxy.drop_reply(b"hunt:", times=2, then=self._random.choice(("close", "reset")))

    def loses_requests(self, proxy: FaultProxy) -> None:
        proxy.drop_request(b"hunt:", times=2)

    def loses_notifications(self, proxy: FaultProxy) -> None:
        proxy.drop_pushes(b"inbox", times=2)

    def halves_replies(self, proxy: FaultProxy) -> None:
        proxy.half_reply(b"hunt:", times=1)

    def delays_notifications(self, proxy: FaultProxy) -> None:
        rule = proxy.hold_pushes(b"inbox")
        self._done.wait(self._random.uniform(0.01, 0.3))
        rule.release()

    def kills_inboxes(self, _: FaultProxy) -> None:
        self._server.raw("CLIENT", "KILL", "TYPE", "pubsub")

    def kills_requests(self, _: FaultProxy) -> None:
        self._server.raw("CLIENT", "KILL", "TYPE", "normal")

    def flushes_scripts(self, _: FaultProxy) -> None:
        self._server.raw("SCRIPT", "FLUSH")

    def freezes_a_process(self, _: FaultProxy) -> None:
        victim = self._random.choice(self._processes)
        victim.send_signal(signal.SIGSTOP)
        self._done.wait(self._random.uniform(0.05, 0.5))
        victim.send_signal(signal.SIGCONT)

    def evicts_auxiliary_keys(self, _: FaultProxy) -> None:
        """Auxiliary keys may be evicted. The lock itself may not: the store must keep its state."""
        name = self._random.choice(NAMES)
        self._server.raw("DEL", *(f"lockfast:{{{name}}}:{kind}" for kind in self._random.choice(("q", "w", "qw"))))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        for proxy in self._proxies:
            proxy.clear()


@pytest.mark.timeout(200)
@pytest.mark.parametrize("seconds", [5, pytest.param(60, marks=pytest.mark.faults)])
def test_no_two_processes_hold_a_lock_at_once(fresh_server: Server, tmp_path: Path, seconds: float) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    with FaultProxy(fresh_server.port) as one, FaultProxy(fresh_server.port) as other:
        files = [tmp_path / f"holds-{number}" for number in range(4)]
        with (
            hunter("threads", one.url, seconds, seed, files[0]) as a,
            hunter("asyncio", one.url, seconds, seed + 1, files[1]) as b,
            hunter("threads", other.url, seconds, seed + 2, files[2]) as c,
            hunter("asyncio", other.url, seconds, seed + 3, files[3]) as d,
        ):
            one.wait_for(b"hunt:", timeout=20)
            other.wait_for(b"hunt:", timeout=20)
            with Chaos(fresh_server, [one, other], [a, b, c, d], seed) as chaos:
                for process in (a, b, c, d):
                    process.wait(seconds + 60)
        holds = [Hold.read(line) for file in files for line in file.read_text().splitlines()]
        print(f"{len(holds)} leases under {sum(chaos.counts.values())} faults: {chaos.counts}")
        assert overlaps(holds) == []
        assert [process.returncode for process in (a, b, c, d)] == [0, 0, 0, 0]
        assert len(holds) > seconds, "the processes acquired hardly any lease"
        for name in NAMES:
            await_nothing_left(fresh_server, name, timeout=20)
