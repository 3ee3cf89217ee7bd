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
from tests.support import lateness
from tests.support.waiting import until
from tests.test_sqlite_kit import Worker
from tests.traps.watching import Stopwatch

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


def test_five_processes_get_the_lock_in_the_order_they_came(path: Path, locks: lockfast.Locks) -> None:
    with ExitStack() as stack:
        lease = locks.lock("report").acquire()
        assert lease is not None
        workers = [stack.enter_context(Worker(path)) for _ in range(5)]
        for number, worker in enumerate(workers):
            worker.tell(ACQUIRE.format(ttl=30))
            waiting(locks, number + 1)
        lease.release()
        fences = [lease.fence]
        for number, worker in enumerate(workers):
            fences.append(int(worker.hear().split()[1]))
            assert locks.lock("report").inspect().waiting == 4 - number
            worker.tell("lease.release()")
        assert fences == sorted(set(fences))


def test_a_killed_holder_is_followed_when_its_ttl_is_over(path: Path, locks: lockfast.Locks) -> None:
    with Worker(path) as holder:
        holder.tell(ACQUIRE.format(ttl=0.5))
        holder.hear()
        holder.kill()
        watch = Stopwatch()
        assert locks.lock("report").acquire(timeout=20) is not None
        assert watch.seconds < watch.most(0.5 + 0.25)


def test_a_killed_waiter_at_the_head_is_passed_over_at_once(path: Path, locks: lockfast.Locks) -> None:
    with Worker(path) as first, Worker(path) as second:
        lease = locks.lock("report").acquire()
        assert lease is not None
        for number, worker in enumerate((first, second)):
            worker.tell(ACQUIRE.format(ttl=30))
            waiting(locks, number + 1)
        inboxes = path.with_name("locks.db-inbox")
        assert len(list(inboxes.iterdir())) == 2
        first.kill()
        watch = Stopwatch()
        lease.release()
        assert second.hear().startswith("held")
        assert watch.seconds < watch.most(0.5)
        assert len(list(inboxes.iterdir())) == 1  # the dead one's pipe went with it


def test_a_process_killed_inside_a_transaction_harms_nobody(path: Path, locks: lockfast.Locks) -> None:
    lease = locks.lock("report").acquire()
    assert lease is not None
    with Worker(path, prelude="import sqlite3") as victim:
        victim.tell(f"file = sqlite3.connect({str(path)!r}, isolation_level=None)")
        victim.tell("file.execute('BEGIN IMMEDIATE')")
        victim.tell("file.execute(\"UPDATE lock SET holder = 'thief', fence = 1\")")
        victim.tell("print('inside', flush=True)")
        assert victim.hear() == "inside"
        with closing(sqlite3.connect(path, timeout=0)) as probe, pytest.raises(sqlite3.Error, match="locked"):
            probe.execute("BEGIN IMMEDIATE")
        victim.tell("os.kill(os.getpid(), signal.SIGKILL)")
        assert victim.ended() == -signal.SIGKILL
    assert locks.lock("report").inspect().fence == lease.fence
    assert lease.release() is True


def test_processes_never_hold_the_lock_together(path: Path, tmp_path: Path) -> None:
    """Each adds to a number in a file that only the lock protects."""
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
            assert worker.request("'done'") == "done"
    assert shared.read_text() == "150"


def test_a_lock_passes_between_two_processes_within_milliseconds(path: Path, locks: lockfast.Locks) -> None:
    """From before the release in one process to the lock held in the other, half of a hundred passes are below."""
    lock = locks.lock("report")
    answer = "with locks.lock('report'): print(time.monotonic(), flush=True)"
    times: list[float] = []
    lateness.watch()
    started = time.monotonic()
    with Worker(path) as other:
        for _ in range(100):
            lease = lock.acquire()
            assert lease is not None
            other.tell(answer)
            waiting(locks, 1)
            released = time.monotonic()
            lease.release()
            times.append(float(other.hear()) - released)
    assert statistics.median(times) < 0.003 + lateness.usual(started)


def test_a_reader_that_dies_cannot_kill_the_one_who_releases(path: Path, locks: lockfast.Locks) -> None:
    """A program may have set SIGPIPE back to its default, which ends the process that writes into a dead pipe."""
    prelude = (
        "signal.signal(signal.SIGPIPE, signal.SIG_DFL)\n"
        "from lockfast.stores.sqlite.inbox import Pipe, open_channel\n"
        "from lockfast.values import GrantNotification\n"
    )
    folder = path.with_name("pipes")
    folder.mkdir(parents=True)
    with Worker(path, prelude=prelude) as worker:
        worker.tell(f"pipe = Pipe({str(folder)!r}); channel = open_channel({str(folder)!r}, pipe.name)")
        assert (
            worker.request("channel.send('two', GrantNotification(1, 2)), pipe.read()")
            == "True [('two', GrantNotification(attempt=1, fence=2))]"
        )
        worker.tell("pipe.close(remove=True)")
        assert worker.request("channel.send('two', GrantNotification(1, 2))") == "False"
        assert worker.request("signal.getsignal(signal.SIGPIPE) is signal.SIG_DFL") == "True"


def in_child(body: str, worker: Worker) -> str:
    """Run `body` in a child that `worker` forks; what it printed."""
    worker.do(f"pid = os.fork()\nif not pid:\n    {body}\n    sys.stdout.flush(); os._exit(0)\nos.waitpid(pid, 0)")
    return worker.hear()


def test_a_forked_child_shares_nothing_and_the_parent_goes_on(path: Path, locks: lockfast.Locks) -> None:
    with Worker(path) as parent:
        parent.tell(ACQUIRE.format(ttl=30))
        fence = parent.hear().split()[1]
        parent.tell("taken = locks.lock('report').acquire(timeout=0.01)")  # it listens from now on
        assert parent.request("locks.store.inbox_open") == "True"
        inboxes = path.with_name("locks.db-inbox")
        parents = list(inboxes.iterdir())
        taken = "print(locks.lock('report').acquire(timeout=0.01), locks.lock('other').acquire() is not None)"
        assert in_child(taken, parent) == "None True"
        assert parent.request("locks.lock('report').inspect().fence") == fence
        assert set(parents) <= set(inboxes.iterdir())
        assert parent.request("lease.release()") == "True"
        assert locks.lock("other").inspect().locked  # nobody gave it back when the child ended


def test_a_forked_child_takes_locks_of_sqlite_of_its_own(path: Path) -> None:
    """A child that only believes to have them could lose the file's log to a process that ends."""
    with Worker(path) as parent:
        parent.tell("lease = locks.lock('report').acquire()")
        body = "locks.lock('other').acquire(); print(open('/proc/locks').read().count(f' {os.getpid()} ') > 0)"
        if not Path("/proc/locks").exists():
            pytest.skip("needs the table of file locks that Linux has")
        assert in_child(body, parent) == "True"


def test_the_parents_death_does_not_hide_the_childs_locks(path: Path, locks: lockfast.Locks) -> None:
    body = (
        "lease = locks.lock('report').acquire(timeout=20); "
        "print('child holds', os.getpid(), flush=True); signal.pause()"
    )
    with Worker(path) as parent:
        parent.tell("locks.lock('other').acquire()")
        parent.tell(f"pid = os.fork(); pid or exec({body!r}, globals())")
        words = parent.hear().split()
        assert words[:2] == ["child", "holds"]
        parent.kill()
        try:
            assert locks.lock("report").acquire(timeout=0.05) is None
        finally:
            os.kill(int(words[2]), signal.SIGKILL)


def test_a_fork_that_python_did_not_see_is_refused(path: Path) -> None:
    """In a process of its own: with other threads at work, such a child could stand still by itself."""
    refused = "except Exception as error: print(type(error).__name__, error, flush=True)"
    body = f"try: locks.lock('other').acquire(timeout=0)\n    {refused}\n    os._exit(0)"
    with Worker(path, prelude="import ctypes") as worker:
        worker.tell("lease = locks.lock('report', renew=False).acquire()")
        worker.do(f"pid = ctypes.PyDLL(None).fork()\nif not pid:\n    {body}\nos.waitpid(pid, 0)")
        said = worker.hear()
        assert said.startswith("ConfigurationError")
        assert "after the fork" in said
        assert worker.request("lease.release()") == "True"
