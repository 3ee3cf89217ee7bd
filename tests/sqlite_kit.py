"""Helpers for the tests of the embedded store: stores on a virtual clock, waiters, and worker processes."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from lockfast.runtime.asyncio import AsyncioRuntime
from lockfast.runtime.base import run
from lockfast.runtime.threads import ThreadRuntime
from lockfast.stores.sqlite.store import SqliteStore
from lockfast.values import Claim, Enqueue

T = TypeVar("T")

FLAVOURS = ("threads", "asyncio")
LONG = 1e9
"""An `until` that no test reaches."""


class Bed:
    """Stores of one flavour on one file. They read `clock`, `wall_us` and `boot`, unless `real_time`."""

    def __init__(self, flavour: str, folder: Path, *, real_time: bool = False) -> None:
        self.path = folder / "state" / "locks.db"
        self.clock = 1000.0
        self.wall_us = 1_700_000_000_000_000
        self.boot = "this boot"
        self.flavour = flavour
        self._runner = asyncio.Runner() if flavour == "asyncio" else None
        self.runtime = AsyncioRuntime() if flavour == "asyncio" else ThreadRuntime()
        if not real_time:
            self.runtime.now = lambda: self.clock
        self._stores: list[SqliteStore] = []

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return run(work) if self._runner is None else self._runner.run(work)

    def store(self) -> SqliteStore:
        store = SqliteStore(
            self.path,
            self.runtime,
            flavour=self.flavour,
            wall_us=lambda: self.wall_us,
            boot_id=lambda: self.boot,
        )
        self._stores.append(store)
        return store

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for store in self._stores:
            self.run(store.close())
        if self._runner is not None:
            self._runner.close()


def claim(
    holder: str, *, name: str = "report", ttl: float = 10.0, label: str = "", weight: int = 0, limit: int = 0
) -> Claim:
    return Claim(name, holder, ttl, f"host:7:{label}", weight=weight, limit=limit)


class Waiter:
    """One acquisition at the level of the store; each request refreshes its ticket."""

    def __init__(self, bed: Bed, store: SqliteStore, holder: str, **choices: Any) -> None:
        self.bed = bed
        self.store = store
        self.claim = claim(holder, **choices)
        self.attempt = 0
        self.ticket: int | None = None
        self.box = store.mailbox(holder)
        bed.run(self.box.open(LONG))

    def request(self) -> Any:
        self.attempt += 1
        enqueue = Enqueue(self.box.address, self.attempt, self.ticket)
        answer = self.bed.run(self.store.acquire(self.claim, enqueue, LONG))
        self.ticket = getattr(answer, "ticket", None)
        return answer

    def notification(self) -> Any:
        """The next notification that has arrived; None if there is none."""
        return self.bed.run(self.box.wait(self.bed.runtime.now()))


class Worker:
    """Another process, which executes the lines that the test sends."""

    def __init__(self, path: Path, *, prelude: str = "") -> None:
        body = (
            "import os, signal, sys, time, lockfast\n"
            f"locks = lockfast.connect({f'sqlite:///{path}'!r})\n"
            f"{prelude}\n"
            "for line in sys.stdin:\n"
            "    exec(line, globals())\n"
        )
        source = str(Path(__file__).parent.parent / "src")
        self._process = subprocess.Popen(
            [sys.executable, "-c", body],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": source},
        )
        self.pid = self._process.pid

    def send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def do(self, body: str) -> None:
        """Execute several lines."""
        self.send(f"exec({body!r}, globals())")

    def read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def evaluate(self, expression: str) -> str:
        self.send(f"print({expression}, flush=True)")
        return self.read()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def ended(self) -> int:
        """Close its input and wait for its end; return the exit status."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
