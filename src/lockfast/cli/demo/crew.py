"""The worker processes, seen from the parent: start, receive, kill, and leave none behind.

Each worker has its own process group: Ctrl-C reaches only the parent, which ends the workers by pid.
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
from typing import IO, Any, Self

from lockfast.cli.demo.worker import FAILED, READY, Order, decode, encode
from lockfast.errors import LockError
from lockfast.values import clean

SILENCE = 40.0
"""Seconds without any message after which the demo gives up."""
EXIT_TIMEOUT = 2.0
"""Seconds that the workers have to exit by themselves."""


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    if stream is None:
        raise RuntimeError("A worker was started without a pipe.")
    return stream


class Worker:
    """One process. `alive` is false once the parent has killed it: then the end of its pipe is no error."""

    def __init__(self, number: int, counter: Path, url: str) -> None:
        self.number = number
        self.alive = True
        self._log = counter.with_name(f"worker-{number}.log")
        self._unread = b""
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "lockfast.cli.demo.worker", str(counter)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                process_group=0,
                # The worker imports the same lockfast as its parent.
                env={**os.environ, "LOCKFAST_URL": url, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        self._input, self._output = _pipe(self.process.stdin), _pipe(self.process.stdout)

    @property
    def fd(self) -> int:
        return self._output.fileno()

    def order(self, order: Order) -> None:
        try:
            self._input.write(encode("order", order))
        except BrokenPipeError:
            raise self._exited() from None

    def messages(self) -> Iterator[tuple[str, Any]]:
        """The new messages. Blocks unless the pipe is readable."""
        new = os.read(self.fd, 65536)
        if not new and self.alive:
            raise self._exited()
        *lines, self._unread = (self._unread + new).split(b"\n")
        for line in lines:
            kind, value = decode(line)
            if kind == FAILED:
                raise LockError(f"Worker {self.number} failed: {value}")
            yield kind, value

    def _exited(self) -> LockError:
        last = self._log.read_text(errors="replace").splitlines()[-1:] or ["it printed no error"]
        return LockError(f"Worker {self.number} exited unexpectedly, so the demo ends: {clean(last[0])}.")

    def kill(self) -> None:
        self.alive = False
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def dismiss(self) -> None:
        """Close its stdin, which makes it exit."""
        self._input.close()

    def close(self) -> None:
        """Wait for its exit, and kill it if that takes too long."""
        try:
            self.process.wait(EXIT_TIMEOUT if self.alive else 0)
        except subprocess.TimeoutExpired:
            pass
        self.kill()
        self.dismiss()
        self._output.close()


class Crew:
    """All workers. Leaving the context ends them: by their stdin, or after an error by SIGKILL."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self._pipes = selectors.DefaultSelector()
        self._last_message_at = time.monotonic()

    def start(self, size: int, counter: Path, url: str) -> None:
        """Start `size` workers; return when all are ready."""
        for number in range(1, size + 1):
            self.workers.append(worker := Worker(number, counter, url))
            self._pipes.register(worker.fd, selectors.EVENT_READ, worker)
        ready = 0
        while ready < size:
            ready += sum(kind == READY for _, kind, _ in self.receive(1.0))

    def order(self, orders: list[Order]) -> None:
        for worker, order in zip(self.workers, orders, strict=True):
            worker.order(order)

    def receive(self, timeout: float) -> list[tuple[int, str, Any]]:
        """Wait up to `timeout` seconds for messages: (index of the worker, kind, value)."""
        received: list[tuple[int, str, Any]] = []
        for key, _ in self._pipes.select(timeout):
            worker: Worker = key.data
            received += [(worker.number - 1, kind, value) for kind, value in worker.messages()]
        now = time.monotonic()
        if received:
            self._last_message_at = now
        elif now - self._last_message_at > SILENCE:
            raise LockError(f"No worker sent a message for {SILENCE:g} s, so the demo ends.")
        return received

    def kill(self, index: int) -> None:
        """End a worker with SIGKILL."""
        worker = self.workers[index]
        self._pipes.unregister(worker.fd)
        worker.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for worker in self.workers:
            if kind is None:
                worker.dismiss()
            else:
                worker.kill()
        for worker in self.workers:
            worker.close()
        self._pipes.close()
