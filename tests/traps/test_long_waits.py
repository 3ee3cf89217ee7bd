"""Waits of several seconds; see `long_waits.py`."""

import pytest

from tests.support.lateness import lateness
from tests.traps.long_waits import WAIT, LongWaits
from tests.traps.observation import Stopwatch

pytestmark = pytest.mark.timing


def test_wait_can_exceed_the_socket_timeout_of_the_client(long_waits: LongWaits) -> None:
    for bounded in long_waits.bounded.values():
        lease, seconds = bounded.result(WAIT + 20)
        assert lease is None
        assert WAIT <= seconds < WAIT + 0.5 + lateness()
    assert not any(endless.done() for endless in long_waits.endless.values())
    long_waits.server.raw("DEL", *long_waits.endless)
    watch = Stopwatch()
    assert all(endless.result(20)[0] for endless in long_waits.endless.values())
    assert watch.seconds < watch.most(1.3)
