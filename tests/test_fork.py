"""Fork inside the block: the parent keeps the lock and its connections, and the child holds nothing.

Each test runs its own program: the process of pytest has threads, which a fork does not copy.
"""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import lockfast
from tests.support.servers import Server
from tests.traps.observation import traces

ROOT = Path(__file__).parents[1]

# `child` is the code of the child process: it ends the process as the test needs.
THREADS = """
    import os, sys, threading
    import lockfast
    from lockfast import LeaseLost

    def child(lease):
        {child}

    locks = lockfast.connect(sys.argv[1])
    inbox = locks.lock("inbox")
    taken = inbox.acquire()
    assert inbox.acquire(timeout=0.01) is None          # connects the inbox
    pid = 0
    with locks.lock("report", ttl=3) as lease:
        pid = os.fork()
        if pid == 0:
            child(lease)
        else:
            _, status = os.waitpid(pid, 0)
            print("child", os.waitstatus_to_exitcode(status))
            lease.ensure_held()
            lease.renew()
            assert locks.lock("report").inspect().holder == lease.holder
            assert locks.lock("other").acquire(timeout=1).release() is True
            waiter = threading.Thread(target=lambda: print("granted", inbox.acquire(timeout=5) is not None))
            waiter.start()
            while not inbox.inspect().waiting:
                pass
            taken.release()
            waiter.join()
    print("parent released", locks.lock("report").locked())
    locks.close()
"""

ASYNCIO = """
    import asyncio, os, sys
    import lockfast.aio
    from lockfast import LeaseLost

    def child(lease):
        {child}

    async def main():
        async with lockfast.aio.connect(sys.argv[1]) as locks:
            inbox = locks.lock("inbox")
            taken = await inbox.acquire()
            assert await inbox.acquire(timeout=0.01) is None
            async with locks.lock("report", ttl=3) as lease:
                pid = os.fork()
                if pid == 0:
                    child(lease)
                    os._exit(9)          # an event loop cannot continue in a child
                _, status = os.waitpid(pid, 0)
                print("child", os.waitstatus_to_exitcode(status))
                lease.ensure_held()
                await lease.renew()
                assert (await locks.lock("report").inspect()).holder == lease.holder
                assert await (await locks.lock("other").acquire(timeout=1)).release() is True
                waiter = asyncio.create_task(inbox.acquire(timeout=5))
                while not (await inbox.inspect()).waiting:
                    await asyncio.sleep(0)
                await taken.release()
                print("granted", await waiter is not None)
            print("parent released", await locks.lock("report").locked())

    asyncio.run(main())
"""

PARENT = ["granted True", "parent released False"]


def run(program: str, child: str, server: Server) -> list[str]:
    """Return the lines that parent and child printed."""
    text = textwrap.dedent(program).replace("{child}", textwrap.indent(textwrap.dedent(child).strip(), " " * 4).strip())
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-u", "-c", text, server.url],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Bad file descriptor" not in done.stderr
    return done.stdout.splitlines()


PROGRAMS = pytest.mark.parametrize("program", [THREADS, ASYNCIO], ids=["threads", "asyncio"])


@PROGRAMS
class TestTheParentKeepsItsLock:
    """However the child ends."""

    def test_child_that_exits_without_clean_up(self, valkey: Server, program: str) -> None:
        assert run(program, "os._exit(3)", valkey) == ["child 3", *PARENT]
        assert traces(valkey, "report") == []

    def test_child_that_checks_its_lease(self, valkey: Server, program: str) -> None:
        child = """
            try:
                lease.ensure_held()
            except LeaseLost as error:
                print(lease.state.value, lease.remaining, lease.inherited, "forked" in str(error))
            os._exit(4)
        """
        assert run(program, child, valkey) == ["lost 0.0 True True", "child 4", *PARENT]


class TestThreads:
    def test_child_that_runs_its_exit_handlers(self, valkey: Server) -> None:
        assert run(THREADS, "sys.exit(5)", valkey) == ["child 5", *PARENT]
        assert traces(valkey, "report") == []

    def test_child_that_leaves_the_block(self, valkey: Server) -> None:
        """The end of the block raises in the child, which holds nothing; the parent's lock stays held."""
        assert run(THREADS, "return", valkey) == ["child 1", *PARENT]
        assert traces(valkey, "report") == []

    def test_child_that_tries_to_release(self, valkey: Server) -> None:
        assert run(THREADS, "print(lease.release()); os._exit(0)", valkey) == ["False", "child 0", *PARENT]

    def test_child_that_uses_other_locks(self, valkey: Server) -> None:
        """The child uses new connections and waits behind its parent; the parent's connections still work."""
        child = """
            assert locks.lock("report").acquire(timeout=0) is None
            assert locks.lock("report").acquire(timeout=0.05) is None
            own = locks.lock("own").acquire(timeout=1)
            assert own.ensure_held() is None and not own.inherited
            print(locks.lock("own").inspect().owner.pid == os.getpid(), own.release())
            os._exit(0)
        """
        assert run(THREADS, child, valkey) == ["True True", "child 0", *PARENT]

    def test_child_that_closes_its_copy(self, valkey: Server) -> None:
        assert run(THREADS, "locks.close(); os._exit(0)", valkey) == ["child 0", *PARENT]

    def test_child_that_forks_again(self, valkey: Server) -> None:
        child = """
            grandchild = os.fork()
            if grandchild == 0:
                print(lease.state.value, lease.release())
                os._exit(0)
            os.waitpid(grandchild, 0)
            os._exit(0)
        """
        assert run(THREADS, child, valkey) == ["lost False", "child 0", *PARENT]


class TestAsyncio:
    def test_child_that_starts_an_event_loop(self, valkey: Server) -> None:
        """With a new connection, in a thread: the main thread of the child still has the parent's event loop."""
        child = """
            import threading

            async def own():
                async with lockfast.aio.connect(sys.argv[1]) as locks:
                    assert await locks.lock("report").acquire(timeout=0) is None
                    mine = await locks.lock("own").acquire(timeout=1)
                    print(await mine.release())

            thread = threading.Thread(target=lambda: asyncio.run(own()))
            thread.start()
            thread.join()
            os._exit(0)
        """
        assert run(ASYNCIO, child, valkey) == ["True", "child 0", *PARENT]

    def test_child_that_tries_to_release(self, valkey: Server) -> None:
        child = """
            try:
                lease.release().send(None)
            except StopIteration as stop:
                print(stop.value)
            os._exit(0)
        """
        assert run(ASYNCIO, child, valkey) == ["False", "child 0", *PARENT]


def test_fork_while_other_threads_use_the_connection(valkey: Server) -> None:
    """The child works, whatever the threads of the parent were doing and whichever mutexes they held."""
    program = """
        import os, sys, threading
        import lockfast

        locks = lockfast.connect(sys.argv[1])
        done = threading.Event()

        def use(number):
            while not done.is_set():
                with locks.lock(f"busy:{number % 2}"):
                    pass

        threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        codes = []
        for number in range(20):
            pid = os.fork()
            if pid == 0:
                try:
                    with locks.lock(f"own:{number}", timeout=5), locks.lock("shared", timeout=5):
                        code = 7
                    os._exit(code)
                finally:
                    os._exit(8)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        done.set()
        for thread in threads:
            thread.join()
        print(codes.count(7), locks.lock("shared").locked(), locks.lock("busy:0").locked())
        locks.close()
    """
    assert run(program, "", valkey) == ["20 False False"]


def test_multiprocessing_with_fork(valkey: Server) -> None:
    """A pool of workers: the parent holds a lock, and each worker acquires others."""
    program = """
        import multiprocessing, sys
        import lockfast

        locks = lockfast.connect(sys.argv[1])

        def work(number):
            assert locks.lock("report").acquire(timeout=0) is None
            with locks.lock("shared", timeout=10) as lease:
                return lease.fence

        with locks.lock("report", ttl=3) as lease:
            with multiprocessing.get_context("fork").Pool(3) as pool:
                fences = pool.map(work, range(30), chunksize=1)
            lease.ensure_held()
            lease.renew()
        print(len(set(fences)), locks.lock("report").locked(), locks.lock("shared").locked())
        locks.close()
    """
    assert run(program, "", valkey) == ["30 False False"]


def test_child_and_later_event_loop_know_what_they_read(valkey: Server) -> None:
    """Through an object that was made, and used, before the fork or in an earlier loop."""
    program = """
        import asyncio, os, sys
        import lockfast.aio

        config = lockfast.connect(sys.argv[1]).rwlock("config", timeout=0)
        with config.reader:
            pass
        if os.fork() == 0:
            with config.reader:
                try:
                    config.writer.acquire()
                except lockfast.WouldDeadlock:
                    print("child", flush=True)
            os._exit(0)
        os.wait()

        locks = lockfast.aio.connect(sys.argv[1])
        settings = locks.rwlock("settings", timeout=0)

        async def read():
            async with settings.reader:
                try:
                    await settings.writer.acquire()
                except lockfast.WouldDeadlock:
                    print("loop")

        for _ in range(2):
            asyncio.run(read())
        asyncio.run(locks.close())
    """
    assert run(program, "", valkey) == ["child", "loop", "loop"]


def test_two_event_loops_one_after_the_other(valkey: Server) -> None:
    """The second loop drops the dead connections of the first, and closes no descriptor of another file."""
    program = """
        import asyncio, gc, os, sys
        import lockfast.aio

        locks = lockfast.aio.connect(sys.argv[1])

        async def use():
            lease = await locks.lock("report").acquire(timeout=1)
            assert await locks.lock("report").acquire(timeout=0.01) is None
            opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(5)]
            gc.collect()
            await asyncio.sleep(0)
            for descriptor in opened:
                os.close(descriptor)            # raises if it is closed already
            assert await lease.release()

        for _ in range(3):
            asyncio.run(use())
            gc.collect()

        async def end():
            await use()
            await locks.close()

        asyncio.run(end())
        gc.collect()
        print("done")
    """
    assert run(program, "", valkey) == ["done"]
    assert traces(valkey, "report") == []


def test_a_fork_without_python_repeats_no_holder_id() -> None:
    """A program that embeds Python may call fork() directly."""
    program = """
import ctypes, os
from lockfast.runtime.base import new_holder_id
new_holder_id()
for _ in range(2):
    pid = ctypes.CDLL(None).fork()
    if pid == 0:
        os.write(1, new_holder_id().encode() + b"\\n")
        os._exit(0)
    os.waitpid(pid, 0)
print(new_holder_id())
"""
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert len(set(told.stdout.split())) == 3


WAITS_AND_FORKS = """
    import os, signal, sys, threading
    import lockfast

    locks = lockfast.connect(sys.argv[1])
    lock = locks.lock("door", ttl=3)

    def continue_in_a_child(*_):
        if os.fork():
            os._exit(0)

    def fork_during_the_wait():
        other = lockfast.connect(sys.argv[1]).lock("door")
        while not other.inspect().waiting:
            pass
        os.kill(os.getpid(), signal.SIGUSR1)

    signal.signal(signal.SIGUSR1, continue_in_a_child)
    threading.Thread(target=fork_during_the_wait).start()
    lease = lock.acquire(timeout=10)
    print(lease.state.value, lease.inherited, lease.release(), lock.locked())
"""


def test_a_fork_during_a_wait_does_not_affect_the_child_that_continues(valkey: Server) -> None:
    """The grant arrives in the child, which holds it and can release it."""
    with lockfast.connect(valkey.url) as locks:
        taken = locks.lock("door").acquire()
        assert taken is not None
        program = [sys.executable, "-u", "-c", textwrap.dedent(WAITS_AND_FORKS), valkey.url]
        with subprocess.Popen(program, cwd=ROOT, stdout=subprocess.PIPE, text=True) as waits:
            assert waits.wait(20) == 0  # the parent has exited
            taken.release()
            assert waits.stdout is not None
            assert waits.stdout.read() == "held False True False\n"
    assert traces(valkey, "door") == []
