"""Acquisition in the sync flavour: small models in every interleaving, its requests, and interrupts at every point."""

import sys
import threading
from types import FrameType

import pytest

import lockfast
from lockfast.runtime.base import run
from tests.support.proxy import FaultProxy
from tests.support.servers import Server
from tests.support.waiting import until
from verify import thread_models
from verify.explorer import Explorer

MODELS = {model.name: model for model in thread_models.full()}
QUICK = [model.name for model in thread_models.quick()]


@pytest.mark.parametrize("name", QUICK)
def test_the_models_keep_the_rules_in_every_interleaving(name: str) -> None:
    report = Explorer(MODELS[name]).run(most_seconds=100.0)
    assert report.violation is None, str(report.trace)
    assert report.complete


def test_the_first_request_enqueues_only_after_a_contended_acquisition(valkey: Server, proxy: FaultProxy) -> None:
    """So a free lock costs one request, and so does a taken lock, except for the first time."""
    counted = []
    with lockfast.connect(proxy.url) as ours, lockfast.connect(valkey.url) as others:
        lock, other = ours.lock("door"), others.lock("door")
        with lock:  # loads the scripts
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
    """Raises KeyboardInterrupt at the n-th point where CPython handles signals: at the start of a function, and after
    the return of a C function. Only in `FILES`, not in the runtime, the connection and the local queue."""

    FILES = tuple(
        f"/{name}.py"
        for name in ("acquire", "release", "lease_state", "keepalive", "lease", "lock", "rlock", "rwlock", "all_of")
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


def test_an_interrupt_at_any_point_of_an_acquisition_leaves_nothing_behind(valkey: Server) -> None:
    number = 0
    with lockfast.connect(valkey.url) as locks:
        lock = locks.lock("door")
        with lock:  # connects, and starts the keepalive
            pass
        while True:
            number += 1
            interrupt = Interrupt(number)
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
            assert left == (0, {}, [], []), f"point {number}"
        lock.__exit__(None, None, None)
    assert number > 15


def test_an_interrupt_while_a_block_ends_leaves_no_lease_that_is_renewed(valkey: Server) -> None:
    """At every point but the entry of `__exit__` itself, which no Python code can protect."""
    number = 1
    with lockfast.connect(valkey.url) as locks:
        lock = locks.lock("door")
        with lock:
            pass
        while True:
            number += 1
            interrupt = Interrupt(number)
            lock.__enter__()
            try:
                sys.setprofile(interrupt)
                lock.__exit__(None, None, None)
            except KeyboardInterrupt:
                pass
            finally:
                sys.setprofile(None)
            if not interrupt.raised:
                break
            assert (locks.session.keepalive.held(), lock._scopes) == ([], []), f"point {number}"
            until(lambda: valkey.raw("EXISTS", "door") == 0, f"a released lock after point {number}")
    assert number > 10


def test_an_interrupt_at_any_point_of_a_block_of_several_locks_leaves_nothing_behind(valkey: Server) -> None:
    """At the entry, and at the end at every point but the entry of `__exit__` itself."""
    with lockfast.connect(valkey.url) as locks:
        both = locks.all_of("door", locks.rwlock("gate").reader)
        for enters in (True, False):
            with both:  # connects, and starts the keepalive
                pass
            number = 0 if enters else 1
            while True:
                number += 1
                interrupt = Interrupt(number)
                if not enters:
                    both.__enter__()
                try:
                    sys.setprofile(interrupt)
                    both.__enter__() if enters else both.__exit__(None, None, None)
                except KeyboardInterrupt:
                    pass
                finally:
                    sys.setprofile(None)
                if not interrupt.raised:
                    break
                session = locks.session
                left = (session.keepalive.held(), session.acquiring, both._scopes)
                assert left == ([], {}, []), f"point {number}, enters: {enters}"
                until(lambda: valkey.raw("EXISTS", "door", "gate") == 0, f"released locks after point {number}")
            if enters:
                both.__exit__(None, None, None)
            assert number > 30


def test_an_abandoned_lease_leaves_the_scopes_of_other_threads_alone() -> None:
    """Another thread may be adding its scope to the list at that moment."""
    with lockfast.connect("memory://") as locks:
        lock = locks.lock("door")
        scopes = lock._scopes
        lease = lock.__enter__()
        run(lock._abandon(lease))
        assert lock._scopes is scopes
        assert scopes == []
        assert not lock.locked()
