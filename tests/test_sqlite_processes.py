"""The embedded store between processes that wait, die and fork."""

import os
import signal
import sqlite3
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

import lockfast
from tests.sqlite_kit import Worker
from tests.support import lateness
from tests.support.waiting import until
from tests.traps.observation import Stopwatch

pytestmark = pytest.mark.timing

ACQUIRE = "lease = locks.lock('report', ttl={ttl}).acquire(); print('held', lease.fence, flush=True)"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "locks.db"


@pytest.fixture
def locks(path: Path) -> Iterator[lockfast.Locks]:
    with lockfast.connect(f"sqlite:///{path}") as locks:
        yield locks


def waiting(locks: lockfast.Locks, count: int) -> None:
    lock = locks.lock("report")
    until(lambda: lock.inspect().waiting == count, f"{count} processes to wait")


def test_processes_are_granted_in_order(path: Path, locks: lockfast.Locks) -> None:
    with ExitStack() as stack:
        lease = locks.lock("report").acquire()
        assert lease is not None
        workers = [stack.enter_context(Worker(path)) for _ in range(5)]
        for number, worker in enumerate(workers):
            worker.send(ACQUIRE.format(ttl=30))
            waiting(locks, number + 1)
        lease.release()
        fences = [lease.fence]
        for number, worker in enumerate(workers):
            fences.append(int(worker.read().split()[1]))
            assert locks.lock("report").inspect().waiting == 4 - number
            worker.send("lease.release()")
        assert fences == sorted(set(fences))


def test_lock_of_a_killed_holder_is_granted_after_its_ttl(path: Path, locks: lockfast.Locks) -> None:
    with Worker(path) as holder:
        holder.send(ACQUIRE.format(ttl=0.5))
        holder.read()
        holder.kill()
        watch = Stopwatch()
        assert locks.lock("report").acquire(timeout=20) is not None
        assert watch.seconds < watch.most(0.5 + 0.25)


def test_killed_first_waiter_is_skipped_at_once(path: Path, locks: lockfast.Locks) -> None:
    with Worker(path) as first, Worker(path) as second:
        lease = locks.lock("report").acquire()
        assert lease is not None
        for number, worker in enumerate((first, second)):
            worker.send(ACQUIRE.format(ttl=30))
            waiting(locks, number + 1)
        inboxes = path.with_name("locks.db-inbox")
        assert len(list(inboxes.iterdir())) == 2
        first.kill()
        watch = Stopwatch()
        lease.release()
        assert second.read().startswith("held")
        assert watch.seconds < watch.most(0.5)
        assert len(list(inboxes.iterdir())) == 1  # the pipe of the dead waiter was removed


def test_permits_of_a_killed_holder_are_available_after_its_ttl(path: Path, locks: lockfast.Locks) -> None:
    gpus = locks.semaphore("gpu", 4)
    with Worker(path) as holder:
        holder.send("permit = locks.semaphore('gpu', 4, ttl=0.5).acquire(permits=4); print(permit.slots, flush=True)")
        assert holder.read() == "(0, 1, 2, 3)"
        holder.kill()
        watch = Stopwatch()
        permit = gpus.acquire(permits=4, timeout=20)
        assert watch.seconds < watch.most(0.5 + 0.25)
        assert permit is not None
        assert permit.slots == (0, 1, 2, 3)


def test_killed_writer_at_the_head_of_the_queue_keeps_no_reader_out(path: Path, locks: lockfast.Locks) -> None:
    with Worker(path) as writer, locks.rwlock("report").reader:
        writer.send(ACQUIRE.format(ttl=30))
        waiting(locks, 1)
        writer.kill()
        with Worker(path) as reader:
            reader.send("lease = locks.rwlock('report').reader.acquire(); print('held', flush=True)")
            assert reader.read() == "held"
        assert locks.lock("report").inspect().waiting == 0


def test_process_killed_inside_a_transaction_changes_nothing(path: Path, locks: lockfast.Locks) -> None:
    lease = locks.lock("report").acquire()
    assert lease is not None
    with Worker(path, prelude="import sqlite3") as victim:
        victim.send(f"file = sqlite3.connect({str(path)!r}, isolation_level=None)")
        victim.send("file.execute('BEGIN IMMEDIATE')")
        victim.send("file.execute(\"UPDATE lock SET holder = 'stranger', fence = 1\")")
        victim.send("print('inside', flush=True)")
        assert victim.read() == "inside"
        with closing(sqlite3.connect(path, timeout=0)) as probe, pytest.raises(sqlite3.Error, match="locked"):
            probe.execute("BEGIN IMMEDIATE")
        victim.send("os.kill(os.getpid(), signal.SIGKILL)")
        assert victim.ended() == -signal.SIGKILL
    assert locks.lock("report").inspect().fence == lease.fence
    assert lease.release() is True


def test_processes_exclude_each_other(path: Path, tmp_path: Path) -> None:
    """Each process increments a number in a file that only the lock protects."""
    shared = tmp_path / "number"
    shared.write_text("0")
    work = (
        "for _ in range(50):\n"
        "    with locks.lock('report'):\n"
        f"        with open({str(shared)!r}) as file: number = int(file.read())\n"
        f"        with open({str(shared)!r}, 'w') as file: file.write(str(number + 1))\n"
    )
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(path)) for _ in range(3)]
        for worker in workers:
            worker.do(work)
        for worker in workers:
            assert worker.evaluate("'done'") == "done"
    assert shared.read_text() == "150"


def test_hand_off_between_processes_takes_milliseconds(path: Path, locks: lockfast.Locks) -> None:
    """Median of 100, from before the release in one process until the other one holds the lock."""
    lock = locks.lock("report")
    answer = "with locks.lock('report'): print(time.monotonic(), flush=True)"
    times: list[float] = []
    lateness.watch()
    started = time.monotonic()
    with Worker(path) as other:
        for _ in range(100):
            lease = lock.acquire()
            assert lease is not None
            other.send(answer)
            waiting(locks, 1)
            released = time.monotonic()
            lease.release()
            times.append(float(other.read()) - released)
    assert statistics.median(times) < 0.003 + lateness.usual(started)


def test_dead_reader_does_not_kill_the_releasing_process(path: Path, locks: lockfast.Locks) -> None:
    """A program may have restored the default of SIGPIPE, which kills a process that writes into a dead pipe."""
    prelude = (
        "signal.signal(signal.SIGPIPE, signal.SIG_DFL)\n"
        "from lockfast.stores.sqlite.inbox import Pipe, open_channel\n"
        "from lockfast.values import GrantNotification\n"
    )
    folder = path.with_name("pipes")
    folder.mkdir(parents=True)
    with Worker(path, prelude=prelude) as worker:
        worker.send(f"pipe = Pipe({str(folder)!r}); channel = open_channel({str(folder)!r}, pipe.name)")
        assert (
            worker.evaluate("channel.send('two', GrantNotification(1, 2)), pipe.read()")
            == "True [('two', GrantNotification(attempt=1, fence=2, slots=()))]"
        )
        worker.send("pipe.close(remove=True)")
        assert worker.evaluate("channel.send('two', GrantNotification(1, 2))") == "False"
        assert worker.evaluate("signal.getsignal(signal.SIGPIPE) is signal.SIG_DFL") == "True"


def in_child(body: str, worker: Worker) -> str:
    """Run `body` in a child that `worker` forks; return its output."""
    worker.do(f"pid = os.fork()\nif not pid:\n    {body}\n    sys.stdout.flush(); os._exit(0)\nos.waitpid(pid, 0)")
    return worker.read()


def test_forked_child_shares_nothing_with_its_parent(path: Path, locks: lockfast.Locks) -> None:
    with Worker(path) as parent:
        parent.send(ACQUIRE.format(ttl=30))
        fence = parent.read().split()[1]
        parent.send("taken = locks.lock('report').acquire(timeout=0.01)")  # opens the inbox
        assert parent.evaluate("bool(locks.session.store._inbox.address)") == "True"
        inboxes = path.with_name("locks.db-inbox")
        parents = list(inboxes.iterdir())
        taken = "print(locks.lock('report').acquire(timeout=0.01), locks.lock('other').acquire() is not None)"
        assert in_child(taken, parent) == "None True"
        assert parent.evaluate("locks.lock('report').inspect().fence") == fence
        assert set(parents) <= set(inboxes.iterdir())
        assert parent.evaluate("lease.release()") == "True"
        assert locks.lock("other").inspect().locked  # the end of the child released nothing


def test_forked_child_takes_its_own_sqlite_locks(path: Path) -> None:
    """A child that only inherited the parent's state could lose the log when another process ends."""
    with Worker(path) as parent:
        parent.send("lease = locks.lock('report').acquire()")
        body = "locks.lock('other').acquire(); print(open('/proc/locks').read().count(f' {os.getpid()} ') > 0)"
        if not Path("/proc/locks").exists():
            pytest.skip("needs the table of file locks that Linux has")
        assert in_child(body, parent) == "True"


def test_locks_of_a_forked_child_survive_its_parent(path: Path, locks: lockfast.Locks) -> None:
    body = (
        "lease = locks.lock('report').acquire(timeout=20); "
        "print('child holds', os.getpid(), flush=True); signal.pause()"
    )
    with Worker(path) as parent:
        parent.send("locks.lock('other').acquire()")
        parent.send(f"pid = os.fork(); pid or exec({body!r}, globals())")
        words = parent.read().split()
        assert words[:2] == ["child", "holds"]
        parent.kill()
        try:
            assert locks.lock("report").acquire(timeout=0.05) is None
        finally:
            os.kill(int(words[2]), signal.SIGKILL)


def test_fork_outside_python_is_refused(path: Path) -> None:
    """In a separate process: with other threads running, such a child could hang by itself."""
    refused = "except Exception as error: print(type(error).__name__, error, flush=True)"
    body = f"try: locks.lock('other').acquire(timeout=0)\n    {refused}\n    os._exit(0)"
    with Worker(path, prelude="import ctypes") as worker:
        worker.send("lease = locks.lock('report', renew=False).acquire()")
        worker.do(f"pid = ctypes.PyDLL(None).fork()\nif not pid:\n    {body}\nos.waitpid(pid, 0)")
        message = worker.read()
        assert message.startswith("ConfigurationError")
        assert "after the fork" in message
        assert worker.evaluate("lease.release()") == "True"
