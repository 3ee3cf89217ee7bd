"""Small programs that run in other processes, to be stopped, interrupted and forked.

    python -m tests.keepalive.programs ROLE ARGUMENT…

Each program prints a line at each point that a test waits for, and continues when it receives one. Its stderr is kept:
most tests expect it to be empty.
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
    """A running program; the end of the block kills it."""

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
        """Return the next line that it prints; '' if it has ended."""
        if self._process.stdout is None:
            raise RuntimeError("the program has no pipe")
        return self._process.stdout.readline().rstrip("\n")

    def report(self) -> Any:
        """Return the next line, decoded from JSON."""
        line = self.line()
        if not line:
            raise RuntimeError(f"the program ended: {self._errors()}")
        return json.loads(line)

    def tell(self, line: str = "continue") -> None:
        if self._process.stdin is None:
            raise RuntimeError("the program has no pipe")
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def thaw(self) -> float:
        """Let it continue. Return when that was."""
        thawed_at = now()
        self._process.send_signal(signal.SIGCONT)
        return thawed_at

    def kill(self) -> None:
        """Kill it with SIGKILL; its connections are closed when this returns."""
        self._process.kill()
        self._process.wait(END_SECONDS)

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def end(self) -> tuple[int, str]:
        """Wait until it ends. Return its exit code and its stderr."""
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
    """Detects that the process did not run: more time passed between two checks than `seconds`."""

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
    """Hold a lock, detect that the process was stopped, and report the state of the lease in that instant."""
    reported: list[float] = []
    called = threading.Event()

    def on_lost(_: Any) -> None:
        reported.append(now())
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
        say(json.dumps({"held": held, "seen_at": seen_at, "reported": reported, "woken": woken}))


def frozen_asyncio(url: str, ttl: str) -> None:
    async def main() -> None:
        reported: list[float] = []
        held, seen_at, cancelled_at = True, 0.0, 0.0
        async with lockfast.aio.connect(url) as locks:
            try:
                async with locks.lock("report", ttl=float(ttl), on_lost=lambda _: reported.append(now())) as lease:
                    gap = Gap(float(ttl) / 2)
                    say("held")
                    while not gap.passed():  # noqa: ASYNC110 - a clock has no event
                        await asyncio.sleep(0.001)
                    held, seen_at = _held_at_first(lease), now()
                    await asyncio.sleep(5)
            except lockfast.LeaseLost:
                cancelled_at = now()
            say(
                json.dumps(
                    {"held": held, "seen_at": seen_at or cancelled_at, "reported": reported, "woken": cancelled_at}
                )
            )

    asyncio.run(main())


ROLES: dict[str, Callable[..., None]] = {role.__name__: role for role in (frozen_threads, frozen_asyncio)}

if __name__ == "__main__":
    ROLES[sys.argv[1]](*sys.argv[2:])
