"""Small programs that run in processes of their own, to be stopped, interrupted and forked.

    python -m tests.keepalive.programs ROLE ARGUMENT…

Each prints a line when it has come to a point that a test waits for, and goes on when it is sent one. What a program
writes to stderr is kept: most of these tests want there to be nothing.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import lockfast
import lockfast.aio
from lockfast.runtime.base import now
from tests.support import guardian

ROOT = Path(__file__).parents[2]
END_SECONDS = 30.0


class Program:
    """A program under way; killed, if it still is, when the block ends."""

    module = "tests.keepalive.programs"

    def __init__(self, role: str, *args: object, options: tuple[str, ...] = ()) -> None:
        command = [sys.executable, *options, "-m", self.module, role, *map(str, args)]
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        guardian.watch(self._process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    def line(self) -> str:
        """The next line it prints; '' when it has ended."""
        if self._process.stdout is None:
            raise RuntimeError("the program has no pipe")
        return self._process.stdout.readline().rstrip("\n")

    def report(self) -> Any:
        """The next line, which is JSON."""
        line = self.line()
        if not line:
            raise RuntimeError(f"the program ended: {self._errors()}")
        return json.loads(line)

    def tell(self, line: str = "go on") -> None:
        if self._process.stdin is None:
            raise RuntimeError("the program has no pipe")
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def thaw(self) -> float:
        """Let it run on; when that was."""
        thawed_at = now()
        self._process.send_signal(signal.SIGCONT)
        return thawed_at

    def kill(self) -> None:
        """Kill −9; its connections are closed when this returns."""
        self._process.kill()
        self._process.wait(END_SECONDS)

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def end(self) -> tuple[int, str]:
        """Wait for it to end by itself; its exit code and what it wrote to stderr."""
        code = self._process.wait(END_SECONDS)
        return code, self._errors()

    def _errors(self) -> str:
        return self._process.stderr.read() if self._process.stderr is not None else ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait(END_SECONDS)
        guardian.unwatch(self._process.pid)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()


def say(*words: object) -> None:
    print(*words, flush=True)


def told() -> str:
    return sys.stdin.readline().rstrip("\n")


class Gap:
    """Tells when more time has passed than can be by chance: we did not run."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last = now()

    def passed(self) -> bool:
        last, self._last = self._last, now()
        return self._last - last > self._seconds


def _held_at_first(lease: Any) -> bool:
    try:
        lease.ensure_held()
    except lockfast.LeaseLost:
        return False
    return True


def frozen_threads(url: str, ttl: str) -> None:
    """Hold a lock, notice that time has passed without us, and tell what we knew in that instant."""
    heard: list[float] = []
    called = threading.Event()

    def on_lost(_: Any) -> None:
        heard.append(now())
        called.set()

    with lockfast.connect(url) as locks:
        lease = locks.lock("report", ttl=float(ttl), on_lost=on_lost).acquire()
        assert lease is not None
        gap = Gap(float(ttl) / 2)
        say("held")
        while not gap.passed():
            time.sleep(0.001)
        held, seen_at = _held_at_first(lease), now()
        called.wait(5)
        woken = lease.lost.wait(20)
        say(json.dumps({"held": held, "seen_at": seen_at, "heard": heard, "woken": woken}))


def frozen_asyncio(url: str, ttl: str) -> None:
    async def main() -> None:
        heard: list[float] = []
        held, seen_at, cancelled_at = True, 0.0, 0.0
        async with lockfast.aio.connect(url) as locks:
            try:
                async with locks.lock("report", ttl=float(ttl), on_lost=lambda _: heard.append(now())) as lease:
                    gap = Gap(float(ttl) / 2)
                    say("held")
                    while not gap.passed():  # noqa: ASYNC110 - the clock tells nobody
                        await asyncio.sleep(0.001)
                    held, seen_at = _held_at_first(lease), now()
                    await asyncio.sleep(5)
            except lockfast.LeaseLost:
                cancelled_at = now()
            say(json.dumps({"held": held, "seen_at": seen_at or cancelled_at, "heard": heard, "woken": cancelled_at}))

    asyncio.run(main())


ROLES: dict[str, Callable[..., None]] = {role.__name__: role for role in (frozen_threads, frozen_asyncio)}

if __name__ == "__main__":
    ROLES[sys.argv[1]](*sys.argv[2:])
