"""The workers as their parent sees them: started, heard, killed, and none of them left behind.

They are in process groups of their own: a Ctrl-C in the terminal is for the parent, which ends them by their pids.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from lockfast.cli.demo.messages import FAILED, READY, Order, decode, encode
from lockfast.errors import LockError
from lockfast.values import clean

SILENCE = 40.0
"""Seconds without a word from any worker after which something is wrong."""
FAREWELL = 2.0
"""Seconds that the workers get to leave by themselves."""


def _piped(stream: IO[bytes] | None) -> IO[bytes]:
    if stream is None:
        raise RuntimeError("A worker was started without a pipe.")
    return stream


class Worker:
    """One process. `alive` is false once we have killed it: then the end of its pipe is no surprise."""

    def __init__(self, number: int, counter: Path, url: str) -> None:
        self.number = number
        self.alive = True
        self._complaints = counter.with_name(f"worker-{number}.log")
        self._unread = b""
        with self._complaints.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "lockfast.cli.demo.worker", str(counter)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                process_group=0,
                # A worker imports what its parent does, wherever that came from.
                env={**os.environ, "LOCKFAST_URL": url, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        self._input, self._output = _piped(self.process.stdin), _piped(self.process.stdout)

    @property
    def pipe(self) -> int:
        return self._output.fileno()

    def tell(self, order: Order) -> None:
        try:
            self._input.write(encode("order", order))
        except BrokenPipeError:
            raise self.death() from None

    def heard(self) -> Iterator[tuple[str, Any]]:
        """What has come in since; to be called when there is something to read."""
        new = os.read(self.pipe, 65536)
        if not new and self.alive:
            raise self.death()
        *lines, self._unread = (self._unread + new).split(b"\n")
        for line in lines:
            word, what = decode(line)
            if word == FAILED:
                raise LockError(f"Worker {self.number} gave up: {what}")
            yield word, what

    def death(self) -> LockError:
        """Why it is no longer there, as far as it could say so."""
        last = self._complaints.read_text(errors="replace").splitlines()[-1:] or ["it left no word"]
        return LockError(f"Worker {self.number} ended by itself, so the demo cannot go on: {clean(last[0])}.")

    def kill(self) -> None:
        self.alive = False
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def dismiss(self) -> None:
        """Let it know that there is nothing left to do."""
        self._input.close()

    def close(self) -> None:
        """See that it is gone."""
        try:
            self.process.wait(FAREWELL if self.alive else 0)
        except subprocess.TimeoutExpired:
            pass
        self.kill()
        self.dismiss()
        self._output.close()


class Crew:
    """All workers. As a context manager it leaves none behind: on an error they are killed, else asked to leave."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self._pipes = selectors.DefaultSelector()
        self._heard_at = time.monotonic()

    def start(self, size: int, counter: Path, url: str) -> None:
        """Start `size` workers and return when all are ready for an order."""
        for number in range(1, size + 1):
            self.workers.append(worker := Worker(number, counter, url))
            self._pipes.register(worker.pipe, selectors.EVENT_READ, worker)
        ready = 0
        while ready < size:
            ready += sum(word == READY for _, word, _ in self.hear(1.0))

    def order(self, orders: list[Order]) -> None:
        for worker, order in zip(self.workers, orders, strict=True):
            worker.tell(order)

    def hear(self, timeout: float) -> list[tuple[int, str, Any]]:
        """What came in, as (index of the worker, word, what); empty when nothing came for `timeout` seconds."""
        came_in: list[tuple[int, str, Any]] = []
        for key, _ in self._pipes.select(timeout):
            worker: Worker = key.data
            came_in += [(worker.number - 1, word, what) for word, what in worker.heard()]
        now = time.monotonic()
        if came_in:
            self._heard_at = now
        elif now - self._heard_at > SILENCE:
            raise LockError(f"No worker has said a word for {SILENCE:g} s, so the demo cannot go on.")
        return came_in

    def kill(self, index: int) -> None:
        """End a worker with SIGKILL, which it cannot answer."""
        worker = self.workers[index]
        self._pipes.unregister(worker.pipe)
        worker.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self.workers:
            if kind is None:
                worker.dismiss()
            else:
                worker.kill()
        for worker in self.workers:
            worker.close()
        self._pipes.close()
