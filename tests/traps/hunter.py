"""A process that takes and gives back locks as wildly as it can, and writes down when it believed to hold each.

    python -m tests.traps.hunter COLOUR URL SECONDS SEED FILE

One line per lease: name, fence, from when, until when, by the clock that all processes of a machine share. The end is
what the lease itself promised: the moment before it was given back if it was held then, else the last deadline that it
showed. Whoever finds two lines of one name that overlap has found two holders.
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


class Claim(NamedTuple):
    name: str
    fence: int
    start: float
    end: float

    @classmethod
    def read(cls, line: str) -> Self:
        name, fence, start, end = line.split()
        return cls(name, int(fence), float(start), float(end))


class Plan(NamedTuple):
    """What is to be done once: which lock, how long to wait for it, how long to hold, and how it ends."""

    name: str
    options: dict[str, Any]
    timeout: float
    holds: float
    impatience: float | None
    gives_back: bool


def plan(randomness: random.Random) -> Plan:
    ttl, renew = randomness.choice(TTLS), randomness.random() < 0.5
    return Plan(
        name=randomness.choice(NAMES),
        options={"ttl": ttl, "renew": renew},
        timeout=randomness.choice((0.0, 0.02, 0.5, 0.5)),
        holds=randomness.choice((0.0, 0.0, 0.002, 0.01, ttl / 2, ttl * 1.3)),  # some overrun
        impatience=randomness.choice((None, None, randomness.random() * 0.05)),  # for tasks: cancelled after that
        gives_back=renew or randomness.random() < 0.9,
    )


class Witness:
    """Writes claims to the file, each at once and whole."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def note(self, lease: Any, start: float, end: float) -> None:
        if end > start:
            self._file.write(f"{lease.name} {lease.fence} {start:.9f} {end:.9f}\n")


def promised(lease: Any) -> float:
    """Until when the lease says that it is ours, 0 when it does not say so at all (we may have been frozen since it was
    granted); read in this order, the sum is never too late."""
    moment = now()
    remaining = float(lease.remaining)
    return moment + remaining if remaining else 0.0


def last_word(lease: Any, end: float) -> float:
    """The end of the claim when the lease is about to be given back."""
    moment = now()
    try:
        lease.ensure_held()
    except LeaseLost:
        return end
    return moment


def hunt_with_threads(url: str, seconds: float, seed: int, witness: Witness) -> None:
    ends_at = now() + seconds

    def worker(number: int) -> None:
        randomness = random.Random(f"{seed}:{number}")
        while now() < ends_at:
            todo = plan(randomness)
            try:
                lease = locks.lock(todo.name, **todo.options).acquire(timeout=todo.timeout)
                if lease is not None:
                    start, end = now(), promised(lease)
                    time.sleep(todo.holds)
                    end = last_word(lease, max(end, promised(lease)))
                    witness.note(lease, start, end)
                    if todo.gives_back:
                        lease.release()
            except LockError:
                pass

    with lockfast.connect(url) as locks:
        workers = [threading.Thread(target=worker, args=(number,)) for number in range(WORKERS)]
        for thread in workers:
            thread.start()
        for thread in workers:
            thread.join()


async def hunt_with_tasks(url: str, seconds: float, seed: int, witness: Witness) -> None:
    ends_at = now() + seconds

    async def attempt(todo: Plan) -> None:
        lease = await locks.lock(todo.name, **todo.options).acquire(timeout=todo.timeout)
        if lease is not None:
            start, end = now(), promised(lease)
            try:
                await asyncio.sleep(todo.holds)
            finally:
                end = last_word(lease, max(end, promised(lease)))
                witness.note(lease, start, end)
            if todo.gives_back:
                await lease.release()

    async def worker(number: int) -> None:
        randomness = random.Random(f"{seed}:{number}")
        while now() < ends_at:
            todo = plan(randomness)
            try:
                async with asyncio.timeout(todo.impatience):
                    await attempt(todo)
            except (LockError, TimeoutError):
                await asyncio.sleep(0)

    async with lockfast.aio.connect(url) as locks:
        await asyncio.gather(*(worker(number) for number in range(WORKERS)))


def main(flavour: str, url: str, seconds: str, seed: str, path: str) -> None:
    witness = Witness(Path(path))
    if flavour == "threads":
        hunt_with_threads(url, float(seconds), int(seed), witness)
    else:
        asyncio.run(hunt_with_tasks(url, float(seconds), int(seed), witness))


if __name__ == "__main__":
    main(*sys.argv[1:])
