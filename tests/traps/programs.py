"""Small programs in their own processes, to be stopped and killed.

    python -m tests.traps.programs ROLE FLAVOUR URL NAME TTL

A program prints a line at each point that a test waits for, and continues when it reads one.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support import guardian

ROOT = Path(__file__).parents[2]
END_SECONDS = 30.0


class Program:
    """A running program; killed at the end of its block."""

    def __init__(self, role: str, flavour: str, url: str, name: str, ttl: float = 30.0) -> None:
        command = [sys.executable, "-m", "tests.traps.programs", role, flavour, url, name, str(ttl)]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        guardian.watch(self._process.pid)

    def line(self) -> str:
        """The next line of its output; '' at the end."""
        if self._process.stdout is None:
            raise RuntimeError("the program has no pipe")
        return self._process.stdout.readline().rstrip("\n")

    def tell(self, line: str = "continue") -> None:
        if self._process.stdin is None:
            raise RuntimeError("the program has no pipe")
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Send SIGKILL and wait; its connections are closed then."""
        self._process.kill()
        self._process.wait(END_SECONDS)

    def end(self) -> int:
        """Wait for its end; return the exit code."""
        return self._process.wait(END_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        guardian.unwatch(self._process.pid)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def say(*words: object) -> None:
    print(*words, flush=True)


def next_line() -> str:
    return sys.stdin.readline().rstrip("\n")


def hold(client: Any, name: str, ttl: float) -> None:
    """Acquire the lock, and hold it until a line arrives."""
    lease = client.acquire(name, timeout=10, ttl=ttl)
    say("held", lease.fence)
    next_line()
    say(client.release(lease))


def wait(client: Any, name: str, ttl: float) -> None:
    """Wait for the lock without a limit."""
    say("waiting")
    lease = client.acquire(name, ttl=ttl)
    say("held", lease.fence)
    next_line()
    say(client.release(lease))


def skew_clock(seconds: float) -> None:
    """Shift the wall clock of this process."""
    right, right_ns = time.time, time.time_ns
    time.time = lambda: right() + seconds
    time.time_ns = lambda: right_ns() + int(seconds * 1e9)


def wait_ahead(client: Any, name: str, ttl: float) -> None:
    skew_clock(40)
    wait(client, name, ttl)


def wait_behind(client: Any, name: str, ttl: float) -> None:
    skew_clock(-40)
    wait(client, name, ttl)


def hold_permits(client: Any, name: str, ttl: float) -> None:
    """Take all four permits of a semaphore, and hold them until a line arrives."""
    semaphore = client.locks.semaphore(name, 4, ttl=ttl)
    permit = client.do(lambda: semaphore.acquire(permits=4))
    say("held", permit.fence)
    next_line()
    say(client.release(permit))


def read(client: Any, name: str, ttl: float) -> None:
    """Read until a line arrives."""
    reader = client.locks.rwlock(name, ttl=ttl).reader
    lease = client.do(reader.acquire)
    say("held", lease.fence)
    next_line()
    say(client.release(lease))


def pass_through(client: Any, name: str, ttl: float) -> None:
    """Take one of four permits again and again; say when it was held, by the clock that all processes share."""
    semaphore = client.locks.semaphore(name, 4, ttl=ttl, timeout=30)
    next_line()
    for _ in range(10):
        permit = client.do(semaphore.acquire)
        start = time.clock_gettime(time.CLOCK_BOOTTIME)
        time.sleep(0.002)
        end = time.clock_gettime(time.CLOCK_BOOTTIME)
        client.release(permit)
        say(permit.slot, start, end)


def take_pairs(client: Any, name: str, ttl: float) -> None:
    """Take several locks at once, in the order in which `name` lists them."""
    locks = client.locks.all_of(*name.split(","), ttl=ttl, timeout=30)
    next_line()
    for _ in range(25):
        client.release(client.do(locks.acquire))
    say("done")


def take_random_sets(client: Any, name: str, ttl: float) -> None:
    """Take three of ten locks at once, some of them to read; `name` is the seed."""
    randomness = random.Random(name)
    next_line()
    for _ in range(25):
        names = [f"set:{number}" for number in randomness.sample(range(10), 3)]
        reader = client.locks.rwlock(names[0], ttl=ttl).reader
        chosen = reader if randomness.random() < 0.5 else names[0]
        locks = client.locks.all_of(chosen, *names[1:], ttl=ttl, timeout=30)
        client.release(client.do(locks.acquire))
    say("done")


ROLES: dict[str, Callable[[Any, str, float], None]] = {
    role.__name__: role
    for role in (
        hold,
        wait,
        wait_ahead,
        wait_behind,
        hold_permits,
        read,
        pass_through,
        take_pairs,
        take_random_sets,
    )
}


def main(role: str, flavour_name: str, url: str, name: str, ttl: str) -> None:
    from tests.traps.flavours import FLAVOURS

    with FLAVOURS[flavour_name]() as flavour:
        ROLES[role](flavour.connect(url), name, float(ttl))


if __name__ == "__main__":
    main(*sys.argv[1:])
