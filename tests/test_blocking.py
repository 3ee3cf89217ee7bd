"""The short way of the blocking colour, in every interleaving of small models; what is broken in it is caught; and what
it asks of a server."""

import sys
import threading
from types import FrameType

import pytest

import lockfast
from tests.support.proxy import FaultProxy
from tests.support.servers import Server
from tests.support.waiting import until
from verify import thread_models as blocking
from verify.explorer import Explorer

MODELS = {model.name: model for model in blocking.full()}
QUICK = [model.name for model in blocking.quick()]


@pytest.mark.parametrize("name", QUICK)
def test_the_short_way_keeps_the_rules_in_every_interleaving(name: str) -> None:
    report = Explorer(MODELS[name]).run(most_seconds=100.0)
    assert report.violation is None, str(report.trace)
    assert report.complete


# What it asks of a server.


def test_only_who_had_to_wait_asks_for_a_place_with_its_first_request(valkey: Server, proxy: FaultProxy) -> None:
    """So a lock that is free costs two requests, and one that is taken no more than it must, but for the first time."""
    counted = []
    with lockfast.connect(proxy.url) as ours, lockfast.connect(valkey.url) as others:
        lock, other = ours.lock("door"), others.lock("door")
        with lock:  # the scripts are loaded
            pass
        for taken in (False, True, True, False, False):
            lease = other.acquire() if taken else None
            before = len(proxy.requests)
            got: list[lockfast.Lease | None] = []
            thread = threading.Thread(target=lambda got=got: got.append(lock.acquire()))
            thread.start()
            if lease is not None:
                until(lambda: valkey.raw("ZCARD", "lockfast:{door}:q") == 1, "a waiter")
                lease.release()
            thread.join()
            counted.append(sum(words[0] == b"EVALSHA" for words in proxy.requests[before:]))
            assert got[0] is not None
            assert got[0].release()
    assert counted == [1, 2, 1, 1, 1]


class Interrupt:
    """Raises KeyboardInterrupt at the n-th point in which a signal may be noticed: where a function begins, and after
    one that is written in C. Not inside the runtime, the connection and the rules of rooms: only on the way there."""

    FILES = tuple(
        f"/{name}.py" for name in ("acquire", "release", "lease_state", "keepalive", "lease", "lock", "scope")
    )

    def __init__(self, number: int) -> None:
        self._left = number

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename.endswith(self.FILES):
            self._left -= 1
            if self._left == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    @property
    def raised(self) -> bool:
        return self._left <= 0


def test_who_is_interrupted_anywhere_in_taking_the_lock_has_taken_nothing(valkey: Server) -> None:
    points = 0
    with lockfast.connect(valkey.url) as locks:
        lock = locks.lock("door")
        with lock:  # connected, and the keeper runs
            pass
        while True:
            points += 1
            interrupt = Interrupt(points)
            try:
                sys.setprofile(interrupt)
                lock.__enter__()
            except KeyboardInterrupt:
                pass
            finally:
                sys.setprofile(None)
            if not interrupt.raised:
                break
            left = (
                valkey.raw("EXISTS", "door"),
                locks.session.local_queues.queue("door").claiming,
                locks.session.keepalive.held(),
                lock._scopes,
            )
            assert left == (0, {}, [], []), f"point {points}"
        lock.__exit__(None, None, None)
    assert points > 15
