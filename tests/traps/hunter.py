"""A process that acquires and releases locks at random, and records when it believed to hold each.

    python -m tests.traps.hunter FLAVOUR URL SECONDS SEED FILE

One line per lease: name, fence, start and end, by the clock that all processes of a machine share. The end is the
moment before the release if the lease was still held then, otherwise its last known deadline. Two overlapping lines of
one name prove that two processes held the lock at once.
"""

import asyncio
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple, Self

import lockfast
import lockfast.aio
from lockfast import LeaseLost, LockError

NAMES = ("hunt:a", "hunt:b")
WORKERS = 4
TTLS = (0.05, 0.1, 0.25)


def now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Hold(NamedTuple):
    name: str
    fence: int
    start: float
    end: float

    @classmethod
    def read(cls, line: str) -> Self:
        name, fence, start, end = line.split()
        return cls(name, int(fence), float(start), float(end))


class Plan(NamedTuple):
    """One acquisition: which lock, how long to wait, how long to hold, and how it ends."""

    name: str
    options: dict[str, Any]
    timeout: float
    hold: float
    cancel_after: float | None
    releases: bool


def plan(randomness: random.Random) -> Plan:
    ttl, renew = randomness.choice(TTLS), randomness.random() < 0.5
    return Plan(
        name=randomness.choice(NAMES),
        options={"ttl": ttl, "renew": renew},
        timeout=randomness.choice((0.0, 0.02, 0.5, 0.5)),
        hold=randomness.choice((0.0, 0.0, 0.002, 0.01, ttl / 2, ttl * 1.3)),  # some exceed the ttl
        cancel_after=randomness.choice((None, None, randomness.random() * 0.05)),  # asyncio only
        releases=renew or randomness.random() < 0.9,
    )


class Recorder:
    """Appends each hold to the file as one line."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def record(self, lease: Any, start: float, end: float) -> None:
        if end > start:
            self._file.write(f"{lease.name} {lease.fence} {start:.9f} {end:.9f}\n")


def deadline(lease: Any) -> float:
    """The deadline of the lease, or 0 if it is over already: this process may have been stopped since the grant.

    The clock is read first, so the result is never later than the true deadline.
    """
    started = now()
    remaining = float(lease.remaining)
    return started + remaining if remaining else 0.0


def end_of_hold(lease: Any, end: float) -> float:
    """The end of the hold, just before its release: now if the lease is held, otherwise `end`."""
    moment = now()
    try:
        lease.ensure_held()
    except LeaseLost:
        return end
    return moment


def run_threads(url: str, seconds: float, seed: int, recorder: Recorder) -> None:
    ends_at = now() + seconds

    def worker(number: int) -> None:
        randomness = random.Random(f"{seed}:{number}")
        while now() < ends_at:
            todo = plan(randomness)
            try:
                lease = locks.lock(todo.name, **todo.options).acquire(timeout=todo.timeout)
                if lease is not None:
                    start, end = now(), deadline(lease)
                    time.sleep(todo.hold)
                    end = end_of_hold(lease, max(end, deadline(lease)))
                    recorder.record(lease, start, end)
                    if todo.releases:
                        lease.release()
            except LockError:
                pass

    with lockfast.connect(url) as locks:
        workers = [threading.Thread(target=worker, args=(number,)) for number in range(WORKERS)]
        for thread in workers:
            thread.start()
        for thread in workers:
            thread.join()


async def run_tasks(url: str, seconds: float, seed: int, recorder: Recorder) -> None:
    ends_at = now() + seconds

    async def attempt(todo: Plan) -> None:
        lease = await locks.lock(todo.name, **todo.options).acquire(timeout=todo.timeout)
        if lease is not None:
            start, end = now(), deadline(lease)
            try:
                await asyncio.sleep(todo.hold)
            finally:
                end = end_of_hold(lease, max(end, deadline(lease)))
                recorder.record(lease, start, end)
            if todo.releases:
                await lease.release()

    async def worker(number: int) -> None:
        randomness = random.Random(f"{seed}:{number}")
        while now() < ends_at:
            todo = plan(randomness)
            try:
                async with asyncio.timeout(todo.cancel_after):
                    await attempt(todo)
            except (LockError, TimeoutError):
                await asyncio.sleep(0)

    async with lockfast.aio.connect(url) as locks:
        await asyncio.gather(*(worker(number) for number in range(WORKERS)))


def main(flavour: str, url: str, seconds: str, seed: str, path: str) -> None:
    recorder = Recorder(Path(path))
    if flavour == "threads":
        run_threads(url, float(seconds), int(seed), recorder)
    else:
        asyncio.run(run_tasks(url, float(seconds), int(seed), recorder))


if __name__ == "__main__":
    main(*sys.argv[1:])
