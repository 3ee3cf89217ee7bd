"""One clock for both colours: monotonic, and running on while the machine is suspended.

A laptop that sleeps past a lease's deadline must find the lease expired when it wakes. Linux' ordinary
monotonic clock stands still meanwhile; the boot-time clock does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial


def _choose() -> Callable[[], float]:
    boot_time = getattr(time, "CLOCK_BOOTTIME", None)
    if boot_time is None:
        return time.monotonic
    return partial(time.clock_gettime, boot_time)


now: Callable[[], float] = _choose()
