"""How late this machine wakes a thread that asked to be woken, as seen in the last seconds.

A bound in milliseconds is a promise about the library, not about the machine: on a host whose cores are taken by others
every timer is late. So whoever checks such a bound adds what a bare thread, with nothing of the library in it, had to
bear at the same time.
"""

import threading
import time
from collections import deque

PERIOD = 0.01
REMEMBERED = 30.0


class Meter:
    """Samples in a daemon thread for as long as the tests run; made when a test of timing first asks."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=int(REMEMBERED / PERIOD))
        threading.Thread(target=self._sample, name="lateness", daemon=True).start()

    def _sample(self) -> None:
        while True:
            asked_at = time.monotonic()
            time.sleep(PERIOD)
            now = time.monotonic()
            self._samples.append((now, now - asked_at - PERIOD))

    def worst(self, seconds: float) -> float:
        since = time.monotonic() - seconds
        return max((late for at, late in tuple(self._samples) if at >= since), default=0.0)


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
