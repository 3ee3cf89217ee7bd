"""The end of a program: leases are released, nothing hangs, and stderr stays empty."""

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import lockfast
from tests.support import guardian
from tests.support.servers import Server

ROOT = Path(__file__).parents[2]
MOST_SECONDS = 20.0
ALL, SHARED = ("memory", "sqlite", "valkey"), ("sqlite", "valkey")
"""All stores, and those that outlive a process: there the test checks which locks are still held."""

IMPORTS = """
import asyncio, os, signal, sys, threading, time
import lockfast, lockfast.aio
url = sys.argv[1]
"""


@pytest.fixture(params=SHARED)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "valkey":
        server: Server = request.getfixturevalue("valkey")
        return server.url
    return f"sqlite:///{tmp_path}/locks.db" if request.param == "sqlite" else "memory://"


class EndedProgram:
    """A program that ran to its end: its stdout, its stderr, and how long the end took."""

    def __init__(self, text: str, url: str, *, interrupt: bool = False, closes: bool = True) -> None:
        # Show every warning, such as that of a coroutine that was never awaited, and that of an open connection if the
        # program should close it.
        hidden = ["DeprecationWarning", *([] if closes else ["ResourceWarning"])]
        command = [sys.executable, "-W", "always", *(f"-Wignore::{kind}" for kind in hidden), "-u", "-c"]
        process = subprocess.Popen(
            [*command, IMPORTS + textwrap.dedent(text), url],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        guardian.watch(process.pid)
        try:
            if interrupt:
                assert process.stdout is not None
                assert process.stdout.readline() == "held\n"
                process.send_signal(signal.SIGINT)
            began = time.monotonic()
            self.stdout, self.stderr = process.communicate(timeout=MOST_SECONDS)
            self.took = time.monotonic() - began
            self.code = process.returncode
        finally:
            process.kill()
            process.wait(MOST_SECONDS)
            guardian.unwatch(process.pid)

    def quiet(self) -> str:
        """Return its stdout, if it ended without an error and with an empty stderr."""
        assert (self.code, self.stderr) == (0, "")
        return self.stdout


def assert_free(url: str, *names: str) -> None:
    """The locks are free now, long before their ttl ends. A memory store ends with its process."""
    if not url.startswith("memory"):
        with lockfast.connect(url) as locks:
            assert [name for name in names if locks.lock(name).locked()] == []


class TestThreads:
    @pytest.mark.parametrize("url", ALL, indirect=True)
    def test_close(self, url: str) -> None:
        EndedProgram(
            """
            locks = lockfast.connect(url)
            leases = [locks.lock(name).acquire() for name in "abc"]
            locks.close()
            locks.close()
            assert {lease.state.value for lease in leases} == {"released"}
            """,
            url,
        ).quiet()
        assert_free(url, *"abc")

    @pytest.mark.parametrize("url", ALL, indirect=True)
    @pytest.mark.parametrize("end", ["", "sys.exit(0)"])
    def test_the_end_of_the_program(self, url: str, end: str) -> None:
        text = "locks = lockfast.connect(url); leases = [locks.lock(name).acquire() for name in 'abc']"
        EndedProgram(f"{text}; {end}", url).quiet()
        assert_free(url, *"abc")

    def test_an_error_in_the_body_is_the_only_output(self, url: str) -> None:
        ended = EndedProgram("with lockfast.connect(url).lock('a'): raise KeyError('the own')", url)
        assert ended.code == 1
        assert ended.stderr.splitlines()[-1] == "KeyError: 'the own'"
        assert ended.stderr.count("Traceback") == 1
        assert_free(url, "a")

    @pytest.mark.parametrize("url", ALL, indirect=True)
    def test_an_interrupt_in_the_body(self, url: str) -> None:
        ended = EndedProgram(
            """
            with lockfast.connect(url).lock("a"):
                print("held")
                time.sleep(60)
            """,
            url,
            interrupt=True,
        )
        assert ended.code == -signal.SIGINT
        assert ended.stderr.splitlines()[-1] == "KeyboardInterrupt"
        assert ended.stderr.count("Traceback") == 1
        assert_free(url, "a")

    def test_an_interrupt_in_the_wait(self, url: str) -> None:
        ended = EndedProgram(
            """
            locks = lockfast.connect(url)
            taken = locks.lock("a").acquire()
            threading.Timer(0.2, lambda: print("held")).start()
            with lockfast.connect(url).lock("a"):
                print("not to be reached")
            """,
            url,
            interrupt=True,
        )
        assert ended.code == -signal.SIGINT
        assert ended.stdout == ""
        assert ended.stderr.splitlines()[-1] == "KeyboardInterrupt"
        assert ended.stderr.count("Traceback") == 1
        assert_free(url, "a")

    def test_daemon_threads_that_hold_and_wait(self, url: str) -> None:
        """They are stopped at any point; the program neither waits for them nor crashes."""
        EndedProgram(
            """
            locks = lockfast.connect(url)
            held = threading.Event()

            def hold():
                with locks.lock("a"):
                    held.set()
                    time.sleep(60)

            def wait():
                with locks.lock("a"):
                    time.sleep(60)

            threading.Thread(target=hold, daemon=True).start()
            held.wait()
            for _ in range(3):
                threading.Thread(target=wait, daemon=True).start()
            time.sleep(0.1)
            """,
            url,
        ).quiet()
        assert_free(url, "a")

    def test_a_server_that_does_not_answer(self, fresh_server: Server) -> None:
        """The end takes no longer than its budget, and the locks expire."""
        ended = EndedProgram(
            f"""
            locks = lockfast.connect(url)
            leases = [locks.lock(f"lock {{number}}").acquire() for number in range(50)]
            os.kill({fresh_server.pid}, signal.SIGSTOP)
            print("held", flush=True)
            """,
            fresh_server.url,
        )
        fresh_server.resume()
        assert ended.code == 0
        assert ended.took < 15
        assert "Traceback" not in ended.stderr


class TestAsyncio:
    @pytest.mark.parametrize("url", ALL, indirect=True)
    def test_close(self, url: str) -> None:
        EndedProgram(
            """
            async def main():
                async with lockfast.aio.connect(url) as locks:
                    leases = [await locks.lock(name).acquire() for name in "abc"]
                assert {lease.state.value for lease in leases} == {"released"}

            asyncio.run(main())
            """,
            url,
        ).quiet()
        assert_free(url, *"abc")

    @pytest.mark.parametrize("url", ALL, indirect=True)
    def test_the_end_of_the_loop(self, url: str) -> None:
        """`asyncio.run` cancels all tasks: the last chance to release."""
        EndedProgram(
            """
            async def main():
                locks = lockfast.aio.connect(url)
                leases = [await locks.lock(name).acquire() for name in "abc"]

            asyncio.run(main())
            """,
            url,
            closes=False,
        ).quiet()
        assert_free(url, *"abc")

    @pytest.mark.parametrize("url", ALL, indirect=True)
    def test_a_loop_that_is_closed_without_clean_up(self, url: str) -> None:
        EndedProgram(
            """
            async def main():
                locks = lockfast.aio.connect(url)
                return locks, [await locks.lock(name).acquire() for name in "abc"]

            loop = asyncio.new_event_loop()
            kept = loop.run_until_complete(main())
            loop.close()
            """,
            url,
            closes=False,
        ).quiet()
        assert_free(url, *"abc")

    def test_a_loop_after_one_that_was_closed_without_clean_up(self, url: str) -> None:
        """The lock of the first loop is free for the second, long before its ttl ends."""
        EndedProgram(
            """
            locks = lockfast.aio.connect(url)

            async def first():
                return await locks.lock("a").acquire()

            async def second():
                async with locks.lock("other"):
                    async with asyncio.timeout(10), locks.lock("a"):
                        print("held")
                await locks.close()

            loop = asyncio.new_event_loop()
            lease = loop.run_until_complete(first())
            loop.close()
            asyncio.run(second())
            assert lease.state.value == "lost", lease.state
            """,
            url,
            closes=False,
        ).quiet()
        assert_free(url, "a")

    def test_closing_in_another_loop_than_the_closed_one(self, url: str) -> None:
        EndedProgram(
            """
            locks = lockfast.aio.connect(url)

            async def first():
                return await locks.lock("a").acquire()

            loop = asyncio.new_event_loop()
            lease = loop.run_until_complete(first())
            loop.close()
            asyncio.run(locks.close())
            with lockfast.connect(url) as others:
                assert not others.lock("a").locked()
            """,
            url,
            closes=False,
        ).quiet()

    @pytest.mark.parametrize("url", ALL, indirect=True)
    def test_an_interrupt_in_the_body(self, url: str) -> None:
        ended = EndedProgram(
            """
            async def main():
                async with lockfast.aio.connect(url).lock("a"):
                    print("held")
                    await asyncio.sleep(60)

            asyncio.run(main())
            """,
            url,
            closes=False,
            interrupt=True,
        )
        assert ended.code == -signal.SIGINT
        assert ended.stderr.splitlines()[-1] == "KeyboardInterrupt"
        assert "never retrieved" not in ended.stderr
        assert "destroyed" not in ended.stderr
        assert_free(url, "a")

    def test_no_lease_is_released_while_its_task_cleans_up(self, url: str) -> None:
        """The end of the loop cancels the tasks and the keepalive together; a task may clean up under its lock."""
        ended = EndedProgram(
            """
            async def worker(locks):
                async with locks.lock("a") as lease:
                    try:
                        await asyncio.sleep(60)
                    finally:
                        for _ in range(10):
                            await asyncio.sleep(0.02)
                            lease.ensure_held()
                            assert (await locks.lock("a").inspect()).holder == lease.holder
                        print("cleaned up")

            async def main():
                locks = lockfast.aio.connect(url)
                task = asyncio.create_task(worker(locks))
                while not await locks.lock("a").locked():
                    await asyncio.sleep(0.01)

            asyncio.run(main())
            """,
            url,
            closes=False,
        )
        assert ended.quiet() == "cleaned up\n"
        assert_free(url, "a")

    @pytest.mark.parametrize("url", ALL, indirect=True)
    def test_a_cancelled_keepalive_is_replaced(self, url: str) -> None:
        """A task cancels all other tasks, and continues."""
        ended = EndedProgram(
            """
            async def main():
                async with lockfast.aio.connect(url) as locks:
                    async with locks.lock("a", ttl=1.5) as lease:
                        others = asyncio.all_tasks() - {asyncio.current_task()}
                        for task in others:
                            task.cancel()
                        await asyncio.wait(others, timeout=5)
                        await asyncio.sleep(2)
                        lease.ensure_held()
                    again = await locks.lock("b", ttl=1.5).acquire()
                    await asyncio.sleep(2)
                    again.ensure_held()
                print("kept")

            asyncio.run(main())
            """,
            url,
        )
        assert ended.quiet() == "kept\n"


class TestProcesses:
    """A forked process and a spawned process both start without leases."""

    @pytest.mark.parametrize("method", ["fork", "spawn"])
    def test_an_executor(self, url: str, method: str, tmp_path: Path) -> None:
        """The parent holds one lock; each worker acquires another one, and does not hold the lock of its parent."""
        (tmp_path / "pool_work.py").write_text(
            textwrap.dedent(
                """
                import os, sys, lockfast

                locks = lockfast.connect(sys.argv[1])

                def work(number):
                    assert locks.lock("the parent's").locked()
                    with locks.lock("shared", ttl=10, timeout=15) as lease:
                        return lease.fence
                """
            )
        )
        ended = EndedProgram(
            f"""
            sys.path.insert(0, {str(tmp_path)!r})
            import multiprocessing
            from concurrent.futures import ProcessPoolExecutor
            from pool_work import locks, work

            if __name__ == "__main__":
                with locks.lock("the parent's", ttl=10) as lease:
                    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context({method!r})) as pool:
                        fences = list(pool.map(work, range(12)))
                    lease.ensure_held()
                    lease.renew()
                print(len(set(fences)))
            """,
            url,
        )
        assert ended.quiet() == "12\n"
        assert_free(url, "shared", "the parent's")

    @pytest.mark.parametrize("leave", ["os._exit(0)", "os.kill(os.getpid(), signal.SIGTERM)"])
    def test_servers_that_fork_their_workers(self, url: str, leave: str) -> None:
        """The master loads the application with its connection, and forks; workers start and end."""
        ended = EndedProgram(
            f"""
            locks = lockfast.connect(url)
            with locks.lock("loading"):
                pass
            master = locks.lock("master").acquire()

            def serve(number):
                signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
                for _ in range(5):
                    with locks.lock("counter", timeout=15):
                        pass
                lease = locks.lock(f"worker {{number}}").acquire(timeout=15)
                lease.release()
                {leave}

            workers = []
            for number in range(4):
                pid = os.fork()
                if pid == 0:
                    serve(number)
                workers.append(pid)
            print(sorted(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in workers))
            master.ensure_held()
            master.renew()
            """,
            url,
        )
        assert ended.quiet() == "[0, 0, 0, 0]\n"
        assert_free(url, "master", "counter", *(f"worker {number}" for number in range(4)))

    def test_a_child_uses_the_connection_in_its_own_event_loop(self, url: str) -> None:
        ended = EndedProgram(
            """
            locks = lockfast.aio.connect(url)

            async def use(name):
                async with locks.lock(name, timeout=10):
                    pass
                assert await locks.lock("the parent's").locked()

            async def main():
                async with locks.lock("the parent's") as lease:
                    pid = os.fork()
                    if pid == 0:
                        thread = threading.Thread(target=lambda: asyncio.run(use("the child's")))
                        thread.start()
                        thread.join()
                        os._exit(3)
                    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                    lease.ensure_held()
                    await lease.renew()
                await locks.close()

            asyncio.run(main())
            """,
            url,
            closes=False,
        )
        assert ended.quiet() == "3\n"
        assert_free(url, "the parent's", "the child's")
