"""D4: what users of the standard library's `RLock` rely on, ours does too, on threads.

Otherwise than there: `acquire` gives a lease instead of True, and None instead of False; a `timeout` of −1 is refused,
because leaving it out is how waiting without limit is said here.
"""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest

import lockfast
from lockfast import Locks
from lockfast.client.rlock import RLock
from tests.support.servers import Server

BOUND = 20.0
SHORT = 0.1


@pytest.fixture(params=["memory", "valkey9"])
def locks(request: pytest.FixtureRequest, shared_server: Callable[[str], Server]) -> Iterator[Locks]:
    url = shared_server("valkey9").url if request.param == "valkey9" else f"memory://{id(request)}"
    with lockfast.connect(url) as locks:
        yield locks


@pytest.fixture
def lock(locks: Locks) -> RLock:
    return locks.rlock("thing")


def in_threads(work: Callable[[], None], count: int = 1) -> None:
    """Run `work` in so many threads, to their ends; the first error is raised here."""
    errors: list[BaseException] = []

    def body() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def test_d4_two_of_them_are_two_objects(locks: Locks) -> None:
    assert locks.rlock("one") is not locks.rlock("one")


def test_d4_repr_tells_how_deep(lock: RLock) -> None:
    assert repr(lock) == "<RLock 'thing', ttl 30 s>"
    for depth in (1, 2):
        lock.acquire()
        assert repr(lock) == f"<RLock 'thing', ttl 30 s, {depth} deep here>"
    in_threads(lambda: _equal(repr(lock), "<RLock 'thing', ttl 30 s>"))
    lock.release()
    lock.release()
    assert repr(lock) == "<RLock 'thing', ttl 30 s>"


def _equal(seen: object, wanted: object) -> None:
    assert seen == wanted


def test_d4_may_be_dropped_while_held(locks: Locks) -> None:
    lock = locks.rlock("thing", ttl=0.05, renew=False)
    lock.acquire()
    del lock
    gc.collect()


def test_d4_acquire_and_release(lock: RLock) -> None:
    lock.acquire()
    lock.release()
    lock.acquire()
    lock.acquire()
    lock.release()
    lock.release()
    assert not lock.locked()


def test_d4_try(lock: RLock) -> None:
    assert lock.acquire(False)
    assert lock.acquire(blocking=False), "it is ours already"
    lock.release()
    lock.release()


def test_d4_try_while_another_has_it(lock: RLock) -> None:
    lock.acquire()
    results: list[object] = []
    in_threads(lambda: results.append(lock.acquire(False)))
    assert results == [None]
    lock.release()


def test_d4_many_wait_and_each_gets_it_alone(lock: RLock) -> None:
    inside = most = done = 0

    def work() -> None:
        nonlocal inside, most, done
        lock.acquire()
        lock.acquire()
        inside += 1
        most = max(most, inside)
        done += 1
        lock.release()
        inside -= 1
        lock.release()

    lock.acquire()
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert done == 0
    lock.release()
    for thread in threads:
        thread.join(BOUND)
    assert (done, most, inside) == (8, 1, 0)


def test_d4_with(lock: RLock) -> None:
    def with_it(error: Exception | None = None) -> None:
        with lock:
            if error is not None:
                raise error

    with_it()
    with pytest.raises(TypeError):
        with_it(TypeError())
    in_threads(with_it)
    assert not lock.locked()


def test_d4_the_end_of_a_thread_leaves_nothing_behind(lock: RLock) -> None:
    """Many short-lived threads, each of which takes it and gives it back."""

    def work() -> None:
        lock.acquire()
        lock.release()

    in_threads(work, 15)
    assert len(lock._levels) == 0
    assert lock._taken == {}
    assert lock._blocks == []


def test_d4_timeouts_that_make_no_sense(lock: RLock) -> None:
    for bad in ((False, 1), (True, -100), (True, float("nan")), (True, float("inf"))):
        with pytest.raises(ValueError, match="timeout"):
            lock.acquire(*bad)
    assert not lock.locked()


def test_d4_a_timeout_is_waited_for_and_no_longer(lock: RLock) -> None:
    assert lock.acquire(timeout=lockfast.values.MOST_SECONDS)
    lock.release()
    lock.acquire()
    results: list[object] = []

    def work() -> None:
        started = time.monotonic()
        results.extend((lock.acquire(timeout=SHORT), time.monotonic() - started))

    in_threads(work)
    lock.release()
    refused, waited = results
    assert refused is None
    assert isinstance(waited, float)
    assert SHORT <= waited < BOUND


def test_d4_can_be_referred_to_weakly(locks: Locks) -> None:
    lock = locks.rlock("thing")
    reference = weakref.ref(lock)
    assert reference() is lock
    with lock:
        pass
    del lock
    gc.collect()
    assert reference() is None


def test_d4_releasing_what_was_never_taken(lock: RLock) -> None:
    with pytest.raises(RuntimeError):
        lock.release()
    lock.acquire()
    lock.acquire()
    lock.release()
    lock.acquire()
    lock.release()
    lock.release()
    with pytest.raises(RuntimeError):
        lock.release()


def test_d4_releasing_from_another_thread(lock: RLock) -> None:
    lock.acquire()
    try:
        with pytest.raises(RuntimeError):
            in_threads(lambda: _equal(lock.release(), None))
        assert lock.locked()
    finally:
        lock.release()


def test_d4_whose_it_is(lock: RLock) -> None:
    assert lock.depth == 0
    with lock:
        assert lock.depth == 1
        in_threads(lambda: _equal(lock.depth, 0))
    assert lock.depth == 0
