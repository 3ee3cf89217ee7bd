"""Measures how late this machine wakes a sleeping thread.

A bound in milliseconds is a promise of the library, not of the machine: on a busy host every timer is late. So a test
adds to its bound the delay that a plain sleeping thread had at the same time.
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
    """Samples in a daemon thread until the end of the run."""

    def __init__(self) -> None:
        # Fixed size, because some tests measure memory.
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
    """Start to measure, if not started yet."""
    global _meter
    if _meter is None:
        _meter = Meter()


def lateness(seconds: float = REMEMBERED) -> float:
    """Twice the worst delay of the last `seconds`, because a thread and its peer may both be delayed."""
    watch()
    return 0.0 if _meter is None else 2 * _meter.worst(seconds)


def usual(since: float) -> float:
    """The 90th percentile of the delays since a time of `time.monotonic()`, for a bound on a median."""
    watch()
    return 0.0 if _meter is None else _meter.usual(since)


def kept_waiting() -> dict[str, float]:
    """Seconds that each thread of this process was runnable but not running; empty without Linux's schedstat.

    A thread that computes much on busy cores is delayed by this even if it is woken in time.
    """
    seconds = {}
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # the thread has ended
            seconds[path.parent.name] = int(path.read_text("ascii").split()[1]) / 1e9
    return seconds


def kept_waiting_since(before: dict[str, float]) -> float:
    """The increase since `before` of the most delayed thread."""
    return max((seconds - before.get(thread, 0.0) for thread, seconds in kept_waiting().items()), default=0.0)


def stolen(since: float) -> float:
    """The sum of all delays since a time of `time.monotonic()`; a thread that sleeps often may meet all of them."""
    watch()
    time.sleep(PERIOD)  # so that the samples include a stall that has just ended
    return 0.0 if _meter is None else _meter.total(since)
