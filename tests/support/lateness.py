"""How late this machine wakes a thread that asked to be woken, as seen in the last seconds.

A bound in milliseconds is a promise about the library, not about the machine: on a host whose cores are taken by others
every timer is late. So whoever checks such a bound adds what a bare thread, with nothing of the library in it, had to
bear at the same time.
"""

import contextlib
import itertools
import threading
import time
from array import array
from pathlib import Path

PERIOD = 0.01
REMEMBERED = 30.0
COUNT = int(REMEMBERED / PERIOD)


class Meter:
    """Samples in a daemon thread for as long as the tests run; made when a test of timing first asks."""

    def __init__(self) -> None:
        # Of a size that never changes, since there are tests that count what memory is used.
        self._moments = array("d", bytes(8 * COUNT))
        self._lates = array("d", bytes(8 * COUNT))
        threading.Thread(target=self._sample, name="lateness", daemon=True).start()

    def _sample(self) -> None:
        for number in itertools.cycle(range(COUNT)):
            sent_at = time.monotonic()
            time.sleep(PERIOD)
            now = time.monotonic()
            self._lates[number] = now - sent_at - PERIOD
            self._moments[number] = now

    def _since(self, moment: float) -> list[float]:
        return [late for at, late in zip(self._moments, self._lates, strict=True) if at >= moment]

    def worst(self, seconds: float) -> float:
        return max(self._since(time.monotonic() - seconds), default=0.0)

    def usual(self, since: float) -> float:
        lates = sorted(self._since(since))
        return lates[len(lates) * 9 // 10] if lates else 0.0

    def total(self, since: float) -> float:
        return sum(self._since(since))


_meter: Meter | None = None


def watch() -> None:
    """See to it that lateness is measured from now on."""
    global _meter
    if _meter is None:
        _meter = Meter()


def lateness(seconds: float = REMEMBERED) -> float:
    """The worst that a thread had to bear within the last seconds; a thread and its peers may meet it twice."""
    watch()
    return 0.0 if _meter is None else 2 * _meter.worst(seconds)


def usual(since: float) -> float:
    """What nine of ten had to bear at most, since a moment of `time.monotonic()`: for a bound on a median."""
    watch()
    return 0.0 if _meter is None else _meter.usual(since)


def kept_waiting() -> dict[str, float]:
    """Seconds for which each thread of this process has been ready to run and did not; empty where the system does not
    tell. What has much to compute on busy cores meets that, though it is woken in time."""
    seconds = {}
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            seconds[path.parent.name] = int(path.read_text("ascii").split()[1]) / 1e9
    return seconds


def kept_waiting_since(before: dict[str, float]) -> float:
    """How much longer by now, of the thread that it hit most."""
    return max((seconds - before.get(thread, 0.0) for thread, seconds in kept_waiting().items()), default=0.0)


def stolen(since: float) -> float:
    """How long threads were kept waiting in all since a moment of `time.monotonic()`: what asks for the processor many
    times may meet all of it."""
    watch()
    time.sleep(PERIOD)  # a halt that has just ended is in the next sample
    return 0.0 if _meter is None else _meter.total(since)
