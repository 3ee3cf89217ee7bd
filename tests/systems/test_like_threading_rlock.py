"""`RLock` behaves as `threading.RLock` does in the standard library's tests.

Differences: `acquire` returns a lease instead of True and None instead of False. A `timeout` of −1 is refused; omit it
to wait without a limit.
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
from tests.support.waiting import until

pytestmark = pytest.mark.system("D4")

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
    """Run `work` in `count` threads, join them, and raise the first error."""
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


def test_each_call_makes_a_new_object(locks: Locks) -> None:
    assert locks.rlock("one") is not locks.rlock("one")


def test_repr_shows_the_depth(lock: RLock) -> None:
    assert repr(lock) == "<RLock 'thing', ttl 30 s>"
    for depth in (1, 2):
        lock.acquire()
        assert repr(lock) == f"<RLock 'thing', ttl 30 s, depth {depth}>"
    in_threads(lambda: _equal(repr(lock), "<RLock 'thing', ttl 30 s>"))
    lock.release()
    lock.release()
    assert repr(lock) == "<RLock 'thing', ttl 30 s>"


def _equal(seen: object, wanted: object) -> None:
    assert seen == wanted


def test_can_be_garbage_collected_while_held(locks: Locks) -> None:
    lock = locks.rlock("thing", ttl=0.05, renew=False)
    lock.acquire()
    del lock
    gc.collect()


def test_acquire_and_release(lock: RLock) -> None:
    lock.acquire()
    lock.release()
    lock.acquire()
    lock.acquire()
    lock.release()
    lock.release()
    assert not lock.locked()


def test_non_blocking_acquire(lock: RLock) -> None:
    assert lock.acquire(False)
    assert lock.acquire(blocking=False), "this thread already holds it"
    lock.release()
    lock.release()


def test_non_blocking_acquire_while_another_thread_holds_it(lock: RLock) -> None:
    lock.acquire()
    results: list[object] = []
    in_threads(lambda: results.append(lock.acquire(False)))
    assert results == [None]
    lock.release()


def test_waiting_threads_hold_it_one_at_a_time(lock: RLock) -> None:
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


def test_with_block(lock: RLock) -> None:
    def enter(error: Exception | None = None) -> None:
        with lock:
            if error is not None:
                raise error

    enter()
    with pytest.raises(TypeError):
        enter(TypeError())
    in_threads(enter)
    assert not lock.locked()


def test_ended_threads_leave_no_state(lock: RLock) -> None:
    def work() -> None:
        lock.acquire()
        lock.release()

    in_threads(work, 15)
    assert len(lock._levels) == 0
    assert lock._leases == {}
    assert lock._scopes == []


def test_invalid_timeouts(lock: RLock) -> None:
    for bad in ((False, 1), (True, -100), (True, float("nan")), (True, float("inf"))):
        with pytest.raises(ValueError, match="timeout"):
            lock.acquire(*bad)
    assert not lock.locked()


def test_timeout_is_kept(lock: RLock) -> None:
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


def test_weak_reference(locks: Locks) -> None:
    lock = locks.rlock("thing")
    reference = weakref.ref(lock)
    assert reference() is lock
    with lock:
        pass
    del lock
    gc.collect()
    assert reference() is None


def test_release_without_acquire(lock: RLock) -> None:
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


def test_release_from_another_thread(lock: RLock) -> None:
    lock.acquire()
    try:
        with pytest.raises(RuntimeError):
            in_threads(lambda: _equal(lock.release(), None))
        assert lock.locked()
    finally:
        lock.release()


def test_depth_is_per_thread(lock: RLock) -> None:
    assert lock.depth == 0
    with lock:
        assert lock.depth == 1
        in_threads(lambda: _equal(lock.depth, 0))
    assert lock.depth == 0


def test_a_condition_waits_on_an_rlock_at_any_depth(valkey: Server) -> None:
    """A condition of `threading` asks its lock whether the caller owns it, and releases all levels while it waits."""
    with lockfast.connect(valkey.url) as locks, lockfast.connect(valkey.url) as elsewhere:
        lock = locks.rlock("condition")
        condition = threading.Condition(lock)  # type: ignore[arg-type] # it works with every lock that has these methods
        with pytest.raises(RuntimeError, match="un-acquired"):
            condition.wait(0)
        arrived: list[int] = []

        def wait() -> None:
            with condition, condition:
                condition.wait_for(lambda: arrived, timeout=20)
                arrived.append(lock.depth)

        thread = threading.Thread(target=wait)
        thread.start()
        until(lambda: condition._waiters, "the thread to wait")  # type: ignore[attr-defined]
        other = elsewhere.lock("condition").acquire(timeout=20)
        assert other is not None
        other.release()
        with condition:
            arrived.append(0)
            condition.notify()
        thread.join(20)
        assert arrived == [0, 2]
        assert not lock.locked()
        assert locks.session.keepalive.held() == []


def test_the_longest_timeout_of_threading_is_no_limit() -> None:
    lock = lockfast.connect("memory://").lock("longest")
    lease = lock.acquire(timeout=threading.TIMEOUT_MAX)
    assert lease is not None
    assert lease.release()
